"""How layouts and meshes are drawn: the text exactly, colours and HTML by what they hold."""

import io
import subprocess
import sys
import types

import pytest
import torch

import dtorch
from dtorch import Partial, Replicate, Shard
from dtorch.debug import format_mesh, format_sharding

SQUARE = dtorch.DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("dp", "tp"))
R = Replicate()


def drawn(shape, placements, mesh=SQUARE):
    return format_sharding(dtorch.ones(shape, device_mesh=mesh, placements=placements))


def lines(text):
    """The lines of an indented literal."""
    return "\n".join(line[4:] for line in text.strip("\n").split("\n")).rstrip()


def test_two_dims_are_a_grid_to_scale():
    assert drawn((5, 8), [Shard(0), Shard(1)]) == lines(
        """
    float32[5, 8] dp=S(0) tp=S(1)
         0:4            4:8
         ┌──────────────┬──────────────┐
    0:3  │    cpu:0     │    cpu:1     │
         │              │              │
         ├──────────────┼──────────────┤
    3:5  │    cpu:2     │    cpu:3     │
         └──────────────┴──────────────┘
    """
    )


def test_replicas_are_listed_together():
    assert drawn((2, 8), [R, Shard(1)]) == lines(
        """
    float32[2, 8] dp=R tp=S(1)
         0:4            4:8
         ┌──────────────┬──────────────┐
    0:2  │   cpu:0,2    │   cpu:1,3    │
         └──────────────┴──────────────┘
    """
    )


def test_partial_values_are_joined_and_noted():
    assert drawn((8,), [Shard(0), Partial()]) == lines(
        """
    float32[8] dp=S(0) tp=P(sum)
    0:4               4:8
    ┌─────────────────┬─────────────────┐
    │  cpu:0 + cpu:1  │  cpu:2 + cpu:3  │
    └─────────────────┴─────────────────┘
    partial over 'tp': the sum of the parts
    """
    )
    assert "│  cpu:0,2 max cpu:1,3  │" in drawn((), [R, Partial("max")])


def test_two_axes_on_one_dim_and_an_empty_shard():
    assert drawn((3,), [Shard(0), Shard(0)]) == lines(
        """
    float32[3] dp=S(0) tp=S(0)
    0:1            1:2            2:3
    ┌──────────────┬──────────────┬──────────────┐
    │    cpu:0     │    cpu:1     │    cpu:2     │
    └──────────────┴──────────────┴──────────────┘
    empty on cpu:3
    """
    )


def test_uneven_shards_have_uneven_widths():
    text = drawn((7,), [Shard(0)], dtorch.DeviceMesh("cpu", [0, 1]))
    first, second = text.split("\n")[2].strip("┌┐").split("┬")
    assert len(first) > len(second)


def test_of_more_dims_the_split_ones_are_drawn():
    assert drawn((4, 6, 8), [Shard(0), Shard(2)]) == lines(
        """
    float32[4, 6, 8] dp=S(0) tp=S(2)
    rows: dim 0, columns: dim 2
         0:4            4:8
         ┌──────────────┬──────────────┐
    0:2  │    cpu:0     │    cpu:1     │
         ├──────────────┼──────────────┤
    2:4  │    cpu:2     │    cpu:3     │
         └──────────────┴──────────────┘
    whole on every device: dim 1
    """
    )
    assert "columns: dim 1" in drawn((4, 6, 8), [R, Shard(1)])
    cube = dtorch.DeviceMesh("cpu", torch.arange(8).reshape(2, 2, 2))
    text = drawn((4, 4, 4), [Shard(0), Shard(1), Shard(2)], cube)
    above, below = text.split("dim 0 2:4\n")
    assert "dim 0 0:2" in above
    assert [f"cpu:{i}" in above for i in range(8)] == [True] * 4 + [False] * 4
    assert [f"cpu:{i}" in below for i in range(8)] == [False] * 4 + [True] * 4


def test_no_dims_and_no_elements():
    assert drawn((), [R, R]) == lines(
        """
    float32[] dp=R tp=R
    ┌───────────────┐
    │  cpu:0,1,2,3  │
    └───────────────┘
    """
    )
    assert drawn((0, 4), [Shard(0), R]).endswith("no elements")


def test_many_replicas_are_broken_into_lines():
    mesh = dtorch.DeviceMesh("cpu", list(range(20)))
    text = drawn((4,), [R], mesh)
    assert max(map(len, text.split("\n"))) < 40
    assert "19" in text


def test_a_number_of_a_device_is_not_broken():
    mesh = dtorch.DeviceMesh("cpu", [[84, 203], [77, 196], [147, 140]])
    shown = drawn((), [R, R], mesh)
    assert "84,203,77,196,147,  │" in shown and " 140 " in shown


@pytest.mark.parametrize("wrong", [None, 3, [None]])
def test_what_is_no_mesh_is_refused(wrong):
    with pytest.raises(TypeError, match=r"debug.mesh needs a DeviceMesh or several.*\n  Fix:"):
        dtorch.debug.mesh(wrong)


def test_a_spec_and_a_traced_tensor_have_a_layout(capsys):
    x = dtorch.ones(4, 8, device_mesh=SQUARE, placements=[R, Shard(1)])
    assert format_sharding(dtorch.eval_shape(torch.relu, x)) == format_sharding(x)

    def seen(x):
        dtorch.debug.visualize_sharding(x)
        return x + 1

    dtorch.jit(seen)(x)
    assert capsys.readouterr().out == format_sharding(x) + "\n"


def test_what_has_no_layout_is_refused():
    with pytest.raises(TypeError, match=r"needs a dtorch.Tensor or a spec, not Tensor"):
        dtorch.debug.visualize_sharding(torch.ones(2))
    with pytest.raises(TypeError, match=r"needs a DeviceMesh or several, not int"):
        dtorch.debug.mesh([1])


def test_a_mesh_is_a_grid_of_its_last_axes(capsys):
    dtorch.debug.mesh(SQUARE)
    assert capsys.readouterr().out.rstrip("\n") == lines(
        """
    4 cpu devices: dp=2 tp=2
          tp 0      tp 1
          ┌─────────┬─────────┐
    dp 0  │  cpu:0  │  cpu:1  │
          ├─────────┼─────────┤
    dp 1  │  cpu:2  │  cpu:3  │
          └─────────┴─────────┘
    """
    )
    cube = dtorch.DeviceMesh("cpu", torch.arange(8).reshape(2, 2, 2))
    assert "axis 0 1\n" in format_mesh(cube)
    assert format_mesh(dtorch.DeviceMesh("cpu", 5)) == lines(
        """
    1 cpu device: no axes
    ┌─────────┐
    │  cpu:5  │
    └─────────┘
    """
    )


def test_stages_say_where_they_are_from():
    assert format_mesh(SQUARE.unbind("dp")) == lines(
        f"""
    2 cpu devices: tp=2; stage 0 of 2 along dp of {SQUARE!r}
    tp 0      tp 1
    ┌─────────┬─────────┐
    │  cpu:0  │  cpu:1  │
    └─────────┴─────────┘
    2 cpu devices: tp=2; stage 1 of 2 along dp of {SQUARE!r}
    tp 0      tp 1
    ┌─────────┬─────────┐
    │  cpu:2  │  cpu:3  │
    └─────────┴─────────┘
    """
    )


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_only_a_terminal_has_colours(monkeypatch):
    x = dtorch.ones(4, device_mesh=SQUARE, placements=[Shard(0), R])
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr(sys, "stdout", Terminal())
    dtorch.debug.visualize_sharding(x)
    colored = sys.stdout.getvalue()
    assert "\x1b[30;41m" in colored
    assert "\x1b[30;42m" in colored
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setattr(sys, "stdout", Terminal())
    dtorch.debug.visualize_sharding(x)
    assert sys.stdout.getvalue() == format_sharding(x) + "\n"


def test_a_notebook_gets_html(monkeypatch, capsys):
    shown = []
    display = types.ModuleType("IPython.display")
    display.display, display.HTML = shown.append, str
    ipython = types.ModuleType("IPython")
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    x = dtorch.ones(4, 4, device_mesh=SQUARE, placements=[Shard(0), Partial()])
    ipython.get_ipython = lambda: None  # imported, but not running: a script
    dtorch.debug.visualize_sharding(x)
    assert capsys.readouterr().out == format_sharding(x) + "\n"
    ipython.get_ipython = lambda: types.SimpleNamespace(kernel=object())
    dtorch.debug.visualize_sharding(x)
    dtorch.debug.mesh(SQUARE)
    assert capsys.readouterr().out == ""
    assert shown[0].count("<td") == 2
    assert "cpu:2 + cpu:3" in shown[0]
    assert shown[1].count("<td") == 4


def test_nothing_is_waited_for_and_nothing_imported():
    script = "import sys, dtorch; dtorch.debug.mesh(dtorch.DeviceMesh('cpu')); "
    script += "assert 'IPython' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
