"""Which units an output of the exported graph depends on.

A model may compute what nothing reads, such as the pooling of SigLIP in a classifier that averages the positions, or
what only an output reads that no task does, such as the predictor of V-JEPA 2. The exported graph lacks it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_READS_NUMBER = torch.ops.aten._local_scalar_dense.default
"""The operation by which Python reads a number."""
_LEAVES = (Tensor.numpy, Tensor.__array__, Tensor.tolist)
"""Methods by which values leave PyTorch."""


class Reach(TorchDispatchMode):
    """While entered, follows marked tensors through every operation, as an exported graph would record them.

    What happens to values that Python or NumPy reads is unknown, so outputs count as dependent on them.

    Derivatives would not do: a graph also depends on what an index or a comparison is computed from.
    """

    def __init__(self) -> None:
        super().__init__()
        self._bits: dict[str, int] = {}
        self._marks: dict[int, int] = {}  # memory -> bits of the names that it depends on; views share their memory
        self._kept: list[torch.UntypedStorage] = []  # memory that was given back could be another tensor's next
        self._lost = 0  # bits of the names that values outside of PyTorch depend on
        self._exits = _Exits(self)

    def __enter__(self) -> Reach:
        self._exits.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._exits.__exit__(*error)

    def mark(self, name: str, tensor: Tensor) -> None:
        """Follow a tensor, and what is computed from it, under a name; several tensors may have the same."""
        self._add(tensor, self._bits.setdefault(name, 1 << len(self._bits)))

    def names(self, tensors: Iterable[Tensor]) -> set[str]:
        """The names that tensors depend on, or may depend on."""
        bits = self._lost
        for tensor in tensors:
            bits |= self._marks.get(_memory(tensor), 0)
        return {name for name, bit in self._bits.items() if bits & bit}

    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        bits = 0
        for tensor in _tensors((args, kwargs)):
            bits |= self._marks.get(_memory(tensor), 0)
        if bits:
            if func is _READS_NUMBER:
                self._lost |= bits
            for tensor in _tensors((result, _written(func, args, kwargs))):
                self._add(tensor, bits)
        return result

    def lose(self, tensor: Tensor) -> None:
        """Record that a tensor leaves PyTorch."""
        self._lost |= self._marks.get(_memory(tensor), 0)

    def _add(self, tensor: Tensor, bits: int) -> None:
        key = _memory(tensor)
        if key not in self._marks:
            self._kept.append(tensor.untyped_storage())
        self._marks[key] = self._marks.get(key, 0) | bits


class _Exits(TorchFunctionMode):
    """While entered, records which tensors leave PyTorch."""

    def __init__(self, reach: Reach) -> None:
        super().__init__()
        self._reach = reach

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in _LEAVES:
            for tensor in _tensors(args):
                self._reach.lose(tensor)
        return func(*args, **(kwargs or {}))


def _tensors(values: Any) -> Iterator[Tensor]:
    return (leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor) and leaf.layout is torch.strided)


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _written(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
    """The arguments that an operation writes to."""
    parameters = [entry for entry in func._schema.arguments if entry.alias_info is not None]
    written = {entry.name for entry in parameters if entry.alias_info.is_write}
    if not written:
        return []
    by_name = {**dict(zip((entry.name for entry in func._schema.arguments), args, strict=False)), **kwargs}
    return [by_name[name] for name in written if name in by_name]


@contextmanager
def marked_outputs(modules: Mapping[str, nn.Module], reach: Reach) -> Iterator[None]:
    """Inside the context, the outputs of modules are marked by their names."""

    def mark(name: str) -> Callable[..., None]:
        def on_output(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            for tensor in _tensors(output):  # a quantized linear returns its scale too
                reach.mark(name, tensor)

        return on_output

    handles = [module.register_forward_hook(mark(name)) for name, module in modules.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
