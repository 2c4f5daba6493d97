"""What PyTorch refuses is refused with its type and its words; what it takes is taken."""

import math
import re

import pytest
import torch
import torch.nn.functional as F
from layouts import PAIR, R, S, spread

import dtorch

X = torch.arange(12.0).reshape(3, 4)
CLASSES = torch.tensor([0, 1, 2])
REFUSED = {
    "index_select": lambda c: torch.index_select(c(X), 0, c(torch.zeros(2, 2).long())),
    "float_index": lambda c: c(X)[c(torch.ones(2))],
    "unlike_indices": lambda c: c(X)[c(torch.zeros(2).long()), c(torch.zeros(3).long())],
    "argmax_of_none": lambda c: c(torch.zeros(3, 0)).argmax(1),
    "wrong_weight": lambda c: F.cross_entropy(c(X), c(CLASSES), c(torch.ones(5))),
    "layer_norm": lambda c: F.layer_norm(c(X.long()), (4,)),
    "cat": lambda c: torch.cat([c(X), c(torch.ones(2, 2))]),
    "matmul": lambda c: c(X) @ c(X),
    "conv": lambda c: F.conv1d(c(torch.ones(1, 2, 5)), c(torch.ones(1, 3, 2))),
}
TAKEN = {
    "classes_of_bytes": lambda c: F.cross_entropy(c(X), c(CLASSES.to(torch.uint8))),
    "no_norms": lambda c: torch.linalg.vector_norm(c(torch.zeros(0, 3)), -math.inf, -1),
    "no_norms_of_1": lambda c: torch.linalg.vector_norm(c(torch.zeros(0, 3)), -1, -1),
}


def _layouts(tensor):
    return (R, S(tensor.ndim - 1)) if tensor.ndim else (R,)


@pytest.mark.parametrize("last", [0, -1], ids=["whole", "split"])
@pytest.mark.parametrize("name", REFUSED)
def test_an_error_is_pytorchs(name, last):
    with pytest.raises(Exception) as expected:  # noqa: PT011 (whatever PyTorch raises)
        REFUSED[name](lambda t: t)
    with pytest.raises(expected.type, match=re.escape(str(expected.value))) as found:
        REFUSED[name](lambda t: spread(t, PAIR, [_layouts(t)[last]]))
    assert found.type is expected.type


@pytest.mark.parametrize("last", [0, -1], ids=["whole", "split"])
@pytest.mark.parametrize("name", TAKEN)
def test_a_value_is_pytorchs(name, last):
    got = TAKEN[name](lambda t: spread(t, PAIR, [_layouts(t)[last]]))
    torch.testing.assert_close(got.to_torch(), TAKEN[name](lambda t: t))


@pytest.mark.parametrize("layout", [R, S(0)])
def test_a_fused_optimizer_steps_in_a_jitted_function(layout):
    def step(*parameters):
        trained = [p.detach().clone().requires_grad_() for p in parameters]
        optimizer = torch.optim.AdamW(trained, lr=0.1, amsgrad=True, foreach=True)
        sum((p * p).sum() for p in trained).backward()
        optimizer.step()
        return [p.detach() for p in trained]

    given = torch.ones(3), torch.full((2,), 2.0)
    got = dtorch.jit(step)(*(spread(t, PAIR, [layout]) for t in given))
    for a, b in zip(got, step(*given), strict=True):
        torch.testing.assert_close(a.to_torch(), b, rtol=2e-6, atol=0)
