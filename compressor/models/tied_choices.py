"""Choices among equal scores, which PyTorch and ONNX break differently.

The indexer of sparse attention chooses the keys with the largest scores. These are sums of rectified products, so that
several keys may score exactly zero. Which of them PyTorch chooses depends on its kernel; ONNX's TopK chooses the first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_TOPK: tuple[Callable[..., Any], ...] = (torch.topk, torch.Tensor.topk)


class FirstOfEqual(TorchFunctionMode):
    """While inside, `topk` chooses the first of equal values, as ONNX's TopK does.

    Args:
        watches: whether ties are noticed alone, and PyTorch chooses.

    Attributes:
        tied: the smallest number of chosen values where the last of them equals one that is not chosen; None: in no
            choice. Values of masked positions, infinite or the lowest of their type, do not count.
    """

    tied: int | None = None

    def __init__(self, *, watches: bool = False) -> None:
        super().__init__()
        self._watches = watches

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func not in _TOPK:
            return func(*args, **(kwargs or {}))
        first = self._first(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {})) if self._watches else first

    def _first(self, input: Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:
        values, indices = torch.sort(input, dim=dim, descending=largest, stable=True)
        if 0 < k < values.shape[dim] and values.is_floating_point():
            last, following = values.select(dim, k - 1), values.select(dim, k)
            is_score = last.isfinite() & (last.abs() < torch.finfo(last.dtype).max / 2)
            if bool(((last == following) & is_score).any()):
                self.tied = min(k, self.tied or k)
        return torch.return_types.topk((values.narrow(dim, 0, k), indices.narrow(dim, 0, k)))
