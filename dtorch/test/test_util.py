"""Assertions that compare distributed tensors with torch tensors."""

from __future__ import annotations

import unittest
from typing import Any

import torch

from ..tensor import Tensor


def assert_tensor_allclose(
    test_case: unittest.TestCase | None,
    expected: Any,
    actual: Any,
    rtol: float | None = None,
    atol: float | None = None,
    equal_nan: bool = True,
) -> None:
    """Asserts that two tensors have the same global value, shape and dtype.

    Args:
        test_case: The running test, or None.
        expected: A torch or dtorch tensor.
        actual: A torch or dtorch tensor.
        rtol: Relative tolerance; with `atol` None too, that of `torch.testing.assert_close`.
        atol: Absolute tolerance.
        equal_nan: Whether nan equals nan.

    Raises:
        AssertionError: They differ; the message is that of `torch.testing.assert_close`.
    """
    a, b = (t.detach().to_torch() if isinstance(t, Tensor) else t for t in (expected, actual))
    try:
        torch.testing.assert_close(b, a, rtol=rtol, atol=atol, equal_nan=equal_nan)
    except AssertionError as error:
        if test_case is None:
            raise
        test_case.fail(str(error))
