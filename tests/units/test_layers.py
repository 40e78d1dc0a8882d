"""Tensors are close if they differ by at most a share of the largest magnitude that is expected."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from compressor.units.layers import is_close

EXPECTED = torch.tensor([0.0, -8.0])


@pytest.mark.parametrize(
    ("actual", "close"),
    [
        (torch.tensor([0.5, -8.0]), True),
        (torch.tensor([0.75, -8.0]), False),
        (torch.tensor([torch.nan, -8.0]), False),
        (torch.tensor([0.0, -8.0, 0.0]), False),
    ],
    ids=["within", "beyond", "not a number", "another shape"],
)
def test_differences_are_relative_to_the_largest_magnitude(actual: Tensor, close: bool) -> None:
    assert is_close(actual, EXPECTED, 1 / 16) == close


def test_tensors_without_elements_are_close() -> None:
    assert is_close(torch.zeros(0), torch.zeros(0), 0.0)
