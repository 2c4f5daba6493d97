"""`debug`: where the parts of a tensor are, and how the devices of a mesh lie, drawn as tables.

Takes layouts, never data, so nothing is waited for. A drawing is made as plain text, as text in a
terminal's colours, or as HTML for a notebook.
"""

from __future__ import annotations

import dataclasses
import html
import importlib
import itertools
import os
import re
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from .mesh import DeviceMesh
from .placement import Partial, Shard
from .spec import Box, Spec

_WIDTH = 64  # of a drawing that is to scale; one whose texts need more is as wide as they need
_CELL_WIDTH = 24  # of a text before it is broken
_HEIGHT = 9  # lines of cells
_ANSI = (41, 42, 44, 45, 46, 43, 100, 47)  # backgrounds
_HTML = ("#e8a0a0", "#a0d8a0", "#a0b8f0", "#d8a8e0", "#98dce0", "#e8d890", "#c0c0c0", "#f0c098")
_JOINED = {"sum": " + ", "avg": " avg ", "max": " max ", "min": " min "}


def visualize_sharding(x: torch.Tensor | Spec) -> None:
    """Prints which device holds which part of a tensor.

    One or two dims are drawn as a grid, about to scale, in which each cell names the devices that
    hold that part: ``cpu:0,2`` hold the same, ``cpu:0 + cpu:1`` hold partial values whose sum it
    is. Of a tensor of more dims those that are split are drawn. In a terminal the cells are
    coloured, unless ``NO_COLOR`` is set; in a notebook the table is HTML.

    Args:
        x: A `dtorch.Tensor`, also one that is being traced, or a spec (from `dtorch.eval_shape`).

    Blocking: never; the values may still be being computed.

    Raises:
        TypeError: It has no layout.

    Source: `jax.debug.visualize_array_sharding`.

    Example:
        >>> import dtorch
        >>> mesh = dtorch.DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("dp", "tp"))
        >>> placements = [dtorch.Shard(0), dtorch.Shard(1)]
        >>> x = dtorch.ones(4, 8, device_mesh=mesh, placements=placements)
        >>> dtorch.debug.visualize_sharding(x)
        float32[4, 8] dp=S(0) tp=S(1)
             0:4            4:8
             ┌──────────────┬──────────────┐
        0:2  │    cpu:0     │    cpu:1     │
             ├──────────────┼──────────────┤
        2:4  │    cpu:2     │    cpu:3     │
             └──────────────┴──────────────┘
    """
    _show(_sharding(_spec_of(x)))


def format_sharding(x: torch.Tensor | Spec) -> str:
    """Returns the plain text that `visualize_sharding` prints.

    Args:
        x: As for `visualize_sharding`.

    Raises:
        TypeError: It has no layout.
    """
    return _text(_sharding(_spec_of(x)))


def mesh(mesh: DeviceMesh | Sequence[DeviceMesh]) -> None:
    """Prints the axes of a mesh and the devices at each place of it.

    The last two axes are drawn as a grid, and one grid for each place on the others. A mesh that
    `DeviceMesh.unbind` made says which stage it is, of which mesh.

    Args:
        mesh: The mesh, or several: all stages of an `unbind`.

    Example:
        >>> import dtorch
        >>> pair = dtorch.DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("dp", "tp"))
        >>> dtorch.debug.mesh(pair)
        4 cpu devices: dp=2 tp=2
              tp 0      tp 1
              ┌─────────┬─────────┐
        dp 0  │  cpu:0  │  cpu:1  │
              ├─────────┼─────────┤
        dp 1  │  cpu:2  │  cpu:3  │
              └─────────┴─────────┘
    """
    _show(_meshes(mesh))


def format_mesh(mesh: DeviceMesh | Sequence[DeviceMesh]) -> str:
    """Returns the plain text that `mesh` prints.

    Args:
        mesh: As for `mesh`.
    """
    return _text(_meshes(mesh))


# -- what is drawn ---------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class _Grid:
    """One table: its cells, what heads its rows and columns, and how large those are."""

    title: str
    cells: tuple[tuple[str, ...], ...]
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    heights: tuple[int, ...]
    widths: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class _Drawing:
    """Lines of text and tables, in order."""

    parts: tuple[str | _Grid, ...]


def _spec_of(x: Any) -> Spec:
    spec = x if isinstance(x, Spec) else getattr(x, "_spec", None)
    if not isinstance(spec, Spec):
        raise TypeError(
            f"visualize_sharding needs a dtorch.Tensor or a spec, not {type(x).__name__}.\n"
            "  Fix: give a torch tensor a layout with dtorch.Tensor(t, device_mesh=..., "
            "placements=...)."
        )
    return spec


def _sharding(spec: Spec) -> _Drawing:
    holders: dict[Box, list[int]] = {}
    empty = []
    for index, box in enumerate(spec.boxes):
        if any(start == stop for start, stop in box) and spec.numel:
            empty.append(index)
        else:
            holders.setdefault(box, []).append(index)
    ranges = [sorted({box[dim] for box in holders}) for dim in range(spec.ndim)]
    split = [dim for dim in range(spec.ndim) if len(ranges[dim]) > 1]
    drawn = list(range(spec.ndim)) if spec.ndim <= 2 else split
    above, drawn = drawn[:-2], drawn[-2:]
    parts: list[str | _Grid] = [repr(spec)]
    if drawn and spec.ndim > 2:
        names = ("rows", "columns")[-len(drawn) :]
        parts.append(", ".join(f"{n}: dim {d}" for n, d in zip(names, drawn, strict=True)))
    for place in itertools.product(*(ranges[dim] for dim in above)):
        fixed = dict(zip(above, place, strict=True))
        parts.append(_sharding_grid(spec, holders, ranges, fixed, drawn))
    parts += _notes(spec, split, empty)
    return _Drawing(tuple(parts))


def _sharding_grid(
    spec: Spec,
    holders: dict[Box, list[int]],
    ranges: list[list[tuple[int, int]]],
    fixed: dict[int, tuple[int, int]],
    drawn: list[int],
) -> _Grid:
    whole = {dim: ranges[dim][0] for dim in range(spec.ndim)} | fixed
    nothing = [(0, 1)]
    rows = ranges[drawn[0]] if len(drawn) == 2 else nothing
    columns = ranges[drawn[-1]] if drawn else nothing

    def cell(row: tuple[int, int], column: tuple[int, int]) -> str:
        at = whole | dict(zip(drawn, (row, column)[-len(drawn) :], strict=True)) if drawn else whole
        return _holders(spec, holders[tuple(at[dim] for dim in range(spec.ndim))])

    return _Grid(
        ", ".join(f"dim {dim} {_range(place)}" for dim, place in fixed.items()),
        tuple(tuple(cell(row, column) for column in columns) for row in rows),
        tuple(map(_range, rows)) if len(drawn) == 2 else ("",),
        tuple(map(_range, columns)) if drawn else ("",),
        tuple(stop - start for start, stop in rows),
        tuple(stop - start for start, stop in columns),
    )


def _range(bounds: tuple[int, int]) -> str:
    return f"{bounds[0]}:{bounds[1]}"


def _holders(spec: Spec, indices: Iterable[int]) -> str:
    """The devices that hold one part: those that hold the same together, partial values joined."""
    coordinates = spec.mesh.coordinates()
    groups: dict[tuple[int, ...], list[int]] = {}
    for index in indices:
        place = tuple(coordinates[index][axis] for axis in spec.partial_axes)
        groups.setdefault(place, []).append(index)
    first = next((spec.placements[axis] for axis in spec.partial_axes), None)
    joint = _JOINED.get(first.op, f" {first.op} ") if isinstance(first, Partial) else ""
    return joint.join(_devices(spec.mesh, group) for group in groups.values())


def _devices(mesh: DeviceMesh, indices: Sequence[int]) -> str:
    return f"{mesh.device_type}:{','.join(str(mesh.devices[i].id) for i in indices)}"


def _notes(spec: Spec, split: list[int], empty: list[int]) -> list[str]:
    notes = []
    whole = [str(dim) for dim in range(spec.ndim) if dim not in split]
    if spec.ndim > 2 and whole:
        one = len(whole) == 1
        notes.append(f"whole on every device: dim{'' if one else 's'} {', '.join(whole)}")
    for axis in spec.partial_axes:
        placement = spec.placements[axis]
        assert isinstance(placement, Partial)
        notes.append(f"partial over {spec.mesh.axis_name(axis)}: the {placement.op} of the parts")
    if empty:
        notes.append(f"empty on {_devices(spec.mesh, empty)}")
    if not spec.numel and any(isinstance(p, Shard) for p in spec.placements):
        notes.append("no elements")
    return notes


def _meshes(given: DeviceMesh | Sequence[DeviceMesh]) -> _Drawing:
    several = list(given) if isinstance(given, Sequence) else [given]
    for one in several:
        if not isinstance(one, DeviceMesh):
            raise TypeError(
                f"debug.mesh needs a DeviceMesh or several, not {type(one).__name__}.\n"
                "  Fix: the device_mesh of a dtorch.Tensor is one."
            )
    return _Drawing(tuple(part for one in several for part in _mesh_parts(one)))


def _mesh_parts(mesh: DeviceMesh) -> list[str | _Grid]:
    names = mesh.mesh_dim_names or tuple(f"axis {a}" for a in range(mesh.ndim))
    axes = " ".join(f"{name}={size}" for name, size in zip(names, mesh.shape, strict=True))
    count = len(mesh.devices)
    head = f"{count} {mesh.device_type} device{'s' * (count != 1)}: {axes or 'no axes'}"
    if mesh.stage is not None:
        parent, cut = mesh.stage.parent, mesh.stage.axes
        total = len(parent.devices) // count
        by = ", ".join(parent.axis_name(a).strip("'") for a in cut)
        head += f"; stage {mesh.stage.index} of {total} along {by} of {parent!r}"
    parts: list[str | _Grid] = [head]
    above, drawn = list(range(mesh.ndim))[:-2], list(range(mesh.ndim))[-2:]
    places = dict(zip(mesh.coordinates(), mesh.devices, strict=True))
    rows = mesh.shape[drawn[0]] if len(drawn) == 2 else 1
    columns = mesh.shape[drawn[-1]] if drawn else 1
    for fixed in itertools.product(*(range(mesh.shape[a]) for a in above)):
        cells = tuple(
            tuple(str(places[(*fixed, *(r, c)[2 - len(drawn) :])]) for c in range(columns))
            for r in range(rows)
        )
        parts.append(
            _Grid(
                ", ".join(f"{names[a]} {i}" for a, i in zip(above, fixed, strict=True)),
                cells,
                tuple(f"{names[drawn[0]]} {r}" for r in range(rows)) if len(drawn) == 2 else ("",),
                tuple(f"{names[drawn[-1]]} {c}" for c in range(columns)) if drawn else ("",),
                (1,) * rows,
                (0,) * columns,
            )
        )
    return parts


# -- as text ---------------------------------------------------------------------------------


def _text(drawing: _Drawing, colored: bool = False) -> str:
    lines: list[str] = []
    for part in drawing.parts:
        lines += [part] if isinstance(part, str) else _grid_lines(part, colored)
    return "\n".join(lines)


def _grid_lines(grid: _Grid, colored: bool) -> list[str]:
    texts = [[_broken(cell) for cell in row] for row in grid.cells]
    widths = _widths(grid, texts)
    heights = _heights(grid, texts)
    margin = max(map(len, grid.rows))
    indent = " " * (margin + 2 if margin else 0)
    colors = {cell: i for i, cell in enumerate(dict.fromkeys(itertools.chain(*grid.cells)))}

    def rule(left: str, middle: str, right: str) -> str:
        return indent + left + middle.join("─" * w for w in widths) + right

    lines = [grid.title] if grid.title else []
    if any(grid.columns):
        heads = (name.ljust(w) for name, w in zip(grid.columns, widths, strict=True))
        lines.append((indent + " ".join(heads)).rstrip())
    lines.append(rule("┌", "┬", "┐"))
    for number, row in enumerate(texts):
        if number:
            lines.append(rule("├", "┼", "┤"))
        for line in range(heights[number]):
            label = grid.rows[number] if line == (heights[number] - 1) // 2 else ""
            inside = []
            for text, width, cell in zip(row, widths, grid.cells[number], strict=True):
                at = line - (heights[number] - len(text)) // 2
                shown = (text[at] if 0 <= at < len(text) else "").center(width)
                color = _ANSI[colors[cell] % len(_ANSI)]
                inside.append(f"\x1b[30;{color}m{shown}\x1b[0m" if colored else shown)
            start = label.ljust(margin) + "  " if margin else ""
            lines.append(start + "│" + "│".join(inside) + "│")
    lines.append(rule("└", "┴", "┘"))
    return lines


def _broken(text: str) -> list[str]:
    """A cell's text as lines, which end after a comma or a space."""
    lines = [""]
    for part in re.findall(r"[^, ]+[, ]?", text):
        if lines[-1] and len(lines[-1]) + len(part.rstrip()) > _CELL_WIDTH:
            lines.append("")
        lines[-1] += part
    return [line.rstrip() for line in lines]


def _widths(grid: _Grid, texts: list[list[list[str]]]) -> list[int]:
    """The widths of the columns: to scale, but each wide enough for its texts."""
    total = sum(grid.widths) or 1
    scale = min(_WIDTH / total, 14 / max(1, min(grid.widths)))
    widths = []
    for column, (size, name) in enumerate(zip(grid.widths, grid.columns, strict=True)):
        longest = max(len(line) for row in texts for line in row[column])
        widths.append(max(round(size * scale), longest + 4, len(name)))
    return widths


def _heights(grid: _Grid, texts: list[list[list[str]]]) -> list[int]:
    """The lines of the rows: to scale, but each high enough for its texts."""
    scale = min(1 / max(1, min(grid.heights)), _HEIGHT / (sum(grid.heights) or 1))
    pairs = zip(grid.heights, texts, strict=True)
    return [max(round(size * scale), max(map(len, row))) for size, row in pairs]


# -- where it is shown -------------------------------------------------------------------------


def _show(drawing: _Drawing) -> None:
    if _in_notebook():
        display = importlib.import_module("IPython.display")
        display.display(display.HTML(_html(drawing)))
        return
    print(_text(drawing, colored=sys.stdout.isatty() and not os.environ.get("NO_COLOR")))


def _in_notebook() -> bool:
    """Whether a notebook's kernel runs this: a terminal's IPython has none."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return hasattr(shell, "kernel")


def _html(drawing: _Drawing) -> str:
    parts = []
    for part in drawing.parts:
        parts.append(f"<div>{html.escape(part)}</div>" if isinstance(part, str) else _table(part))
    return f'<div style="font-family: monospace">{"".join(parts)}</div>'


def _table(grid: _Grid) -> str:
    colors = {cell: i for i, cell in enumerate(dict.fromkeys(itertools.chain(*grid.cells)))}
    total = sum(grid.widths) or 1
    rows = []
    if any(grid.columns):
        heads = "".join(f"<th>{html.escape(name)}</th>" for name in ("", *grid.columns))
        rows.append(f"<tr>{heads}</tr>")
    for name, cells, height in zip(
        grid.rows, grid.cells, _heights(grid, [[[""]]] * len(grid.rows)), strict=True
    ):
        made = [f"<th>{html.escape(name)}</th>"] if any(grid.columns) else []
        for cell, width in zip(cells, grid.widths, strict=True):
            style = (
                f"background: {_HTML[colors[cell] % len(_HTML)]}; color: black; "
                f"border: 1px solid; text-align: center; padding: 0 1em; "
                f"height: {2 * height}em; min-width: {round(24 * width / total)}em"
            )
            made.append(f'<td style="{style}">{html.escape(cell)}</td>')
        rows.append(f"<tr>{''.join(made)}</tr>")
    title = f"<div>{html.escape(grid.title)}</div>" if grid.title else ""
    return f'{title}<table style="border-collapse: collapse">{"".join(rows)}</table>'
