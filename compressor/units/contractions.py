"""Output projections without a module: `torch.einsum` contracts a weight of the attention with the heads."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode


class HeadContractions(TorchFunctionMode):
    """While entered, passes the heads that weights are contracted with through a function.

    A contraction `[..., head, head_dim]`, `[..., head, head_dim]` -> `[...]` of an activation and a parameter sums over
    the heads and their width, as an output projection does.

    Args:
        modules: name -> the module whose own parameters count.
        change: called with the name and the heads `[..., head * head_dim]`; returns the heads to continue with.
    """

    def __init__(self, modules: Mapping[str, nn.Module], change: Callable[[str, Tensor], Tensor]) -> None:
        super().__init__()
        self._modules, self._change = modules, change

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.einsum and len(args) == 3 and isinstance(args[0], str):
            args = (args[0], *self._changed(args[0], list(args[1:])))
        return func(*args, **(kwargs or {}))

    def _changed(self, equation: str, factors: list[Tensor]) -> list[Tensor]:
        """The factors, the heads among them changed."""
        for position, weight in enumerate(factors):
            name = next((name for name, module in self._modules.items() if _owns(module, weight)), None)
            heads = factors[1 - position]
            if name is not None and _sums_heads(equation, 1 - position) and _mixes(weight, *heads.shape[-2:]):
                factors[1 - position] = self._change(name, heads.flatten(-2)).reshape(heads.shape)
                break
        return factors


def contracting_modules(model: nn.Module) -> dict[str, nn.Module]:
    """The modules with parts that have a weight of three axes of their own, by name."""
    return {
        name: module
        for name, module in model.named_modules()
        if any(module.children()) and any(weight.dim() > 2 for weight in module.parameters(recurse=False))
    }


def contracts_heads(module: nn.Module, heads: int, head_dim: int) -> bool:
    """Whether a module has a weight of its own that can mix heads."""
    return any(_mixes(weight, heads, head_dim) for weight in module.parameters(recurse=False))


def _mixes(weight: Tensor, heads: int, head_dim: int) -> bool:
    """Whether a weight is `[outputs, head, head_dim]`; weights of single heads have heads first."""
    return weight.dim() == 3 and weight.shape[0] != heads and weight.shape[1:] == (heads, head_dim)


def _owns(module: nn.Module, weight: Tensor) -> bool:
    return any(weight is parameter for parameter in module.parameters(recurse=False))


def _sums_heads(equation: str, position: int) -> bool:
    """Whether the last two axes of a factor, and no others, are summed over, in the order of the other factor."""
    factors, _, output = equation.replace(" ", "").partition("->")
    terms = factors.split(",")
    if len(terms) != 2 or not output or "." in equation:
        return False
    heads, weight = terms[position], terms[1 - position]
    summed = "".join(label for label in heads if label not in output)
    return len(summed) == 2 and heads.endswith(summed) and summed in weight
