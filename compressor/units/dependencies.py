"""The units that outputs of the exported graph depend on.

A model may compute values that nothing reads, such as the pooling of SigLIP in a classifier that averages the
positions, or outputs that no task reads, such as the predictor of V-JEPA 2. The exported graph lacks both.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils import dlpack
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves
from transformers.exporters.utils import patch_attributes

from compressor.units.layers import removed_afterwards

_READERS = frozenset(
    {
        Tensor.__array__,
        Tensor.__cuda_array_interface__.__get__,
        Tensor.__dlpack__,
        Tensor.__format__,
        Tensor.__repr__,
        Tensor.data_ptr,
        Tensor.numpy,
        Tensor.tensor_split,
        Tensor.tolist,
        torch._VF._pack_padded_sequence,
        torch.tensor_split,
    }
)
"""Functions that read values, or let others read them, without an operation that shows it."""
_BY_PRODUCTS = tuple(
    "past_key_values memories mems hidden_states attentions encoder_ decoder_ cross_attentions".split()
)
"""Prefixes of outputs that no task reads: caches, outputs of `output_*` flags, and encoder states of a decoder model.

A model that receives memories by name returns the new ones as `new_memory_...`; these outputs remain.
"""


class DependencyTracker(TorchDispatchMode):
    """While entered, follows marked tensors through every operation, as an exported graph would record them.

    Outputs count as dependent on all values that cannot be followed: values that Python, NumPy or a size reads, values
    in layouts other than strided, whose memory has no single address, and all values before an operator with functions
    for arguments, such as `torch.cond`, since these may capture any tensor.

    Derivatives do not suffice: a graph also depends on what an index or a comparison is computed from.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self._bits: dict[str, int] = {}
        # Memory -> bits of the names that it depends on; views share their memory.
        self._marks: dict[int | None, int] = {}
        # They keep addresses, not memory: another tensor could be given the address of one that is freed.
        self._weak_storages: list[StorageWeakRef] = []
        self._untracked = 0  # bits of the names that what cannot be followed depends on
        self._contexts = ExitStack()

    def __enter__(self) -> DependencyTracker:
        self._contexts.enter_context(_Functions(self))
        modules = (torch, dlpack)
        self._contexts.enter_context(patch_attributes([(m, "to_dlpack", _visible_to_dlpack) for m in modules]))
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._contexts.close()

    def mark(self, name: str, tensor: Tensor) -> None:
        """Follow a tensor, and what is computed from it, under a name; several tensors may have the same name."""
        self._add([tensor], self._bits.setdefault(name, 1 << len(self._bits)))

    def names_of(self, tensors: Iterable[Tensor]) -> set[str]:
        """The names that tensors depend on, or may depend on."""
        bits = self._untracked | self._marked(tensors)
        return {name for name, bit in self._bits.items() if bits & bit}

    def propagate(self, sources: Any, results: Any) -> None:
        """Let results depend on the tensors in sources, except for those that are sources, or views of them."""
        sources = _tensors(sources)
        if bits := self._marked(sources):
            memories = {_memory(tensor) for tensor in sources} - {None}
            self._add((tensor for tensor in _tensors(results) if _memory(tensor) not in memories), bits)

    def mark_untracked(self, values: Any) -> None:
        """Record that what the tensors in values are used for cannot be followed."""
        self._untracked |= self._marked(_tensors(values))

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if not isinstance(func, torch._ops.OpOverload):
            self._untracked = (1 << len(self._bits)) - 1
        elif bits := self._marked(_tensors((args, kwargs))):
            self._add(_tensors((result, _written(func, args, kwargs))), bits)
            has_numbers = not all(isinstance(leaf, Tensor | None) for leaf in tree_leaves(result))
            if has_numbers or _has_dynamic_shape(func, args):
                self._untracked |= bits
        return result

    def _marked(self, tensors: Iterable[Tensor]) -> int:
        """The bits of the names that tensors depend on."""
        memories = (_memory(tensor) for tensor in tensors)
        return functools.reduce(operator.or_, (self._marks.get(memory, 0) for memory in memories), 0)

    def _add(self, tensors: Iterable[Tensor], bits: int) -> None:
        for tensor in tensors:
            memory = _memory(tensor)
            if memory is None:
                self._untracked |= bits
                continue
            if memory not in self._marks:
                self._weak_storages.append(StorageWeakRef(tensor.untyped_storage()))
            self._marks[memory] = self._marks.get(memory, 0) | bits


class _Functions(TorchFunctionMode):
    """While entered, passes marks on through functions of PyTorch, some of which consist of no operations."""

    def __init__(self, tracker: DependencyTracker) -> None:
        super().__init__()
        self._tracker = tracker

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func in _READERS:
            self._tracker.mark_untracked((args, kwargs))
        self._tracker.propagate((args, kwargs), result)
        return result


@contextmanager
def hidden_from_modes() -> Iterator[None]:
    """Inside the context, or the decorated function, modes see no operation, because it is no part of the model."""
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        yield


def _visible_to_dlpack(_: Any) -> Callable[[Tensor], Any]:
    """A form of `to_dlpack` that modes see, as they do the method of tensors."""
    return lambda tensor: tensor.detach().__dlpack__()


def _tensors(values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def _memory(tensor: Tensor) -> int | None:
    """The address that a tensor shares with its views; None: there is no single address."""
    if tensor.layout is not torch.strided:
        return None
    try:
        return tensor.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):  # e.g. a tensor that a function transform wraps
        return None


def _has_dynamic_shape(func: torch._ops.OpOverload[..., Any], args: tuple[Any, ...]) -> bool:
    """Whether the shape of the results of an operator depends on values."""
    if func is torch.ops.aten.index.Tensor:
        return any(index.dtype in (torch.bool, torch.uint8) for index in _tensors(args[1]))
    return torch.Tag.dynamic_output_shape in func.tags


def _written(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
    """The arguments that an operation writes to."""
    parameters = func._schema.arguments
    if not (written := [p.name for p in parameters if p.alias_info is not None and p.alias_info.is_write]):
        return []
    by_name = {**dict(zip((p.name for p in parameters), args, strict=False)), **kwargs}
    return [by_name[name] for name in written if name in by_name]


@contextmanager
def tracked_modules(model: nn.Module, marked: Collection[str], tracker: DependencyTracker) -> Iterator[None]:
    """Inside the context, outputs of modules depend on their inputs, and are marked by the names of some modules.

    `marked` are module paths. A kernel that PyTorch does not know writes into memory without an operation.
    """

    def on_output(name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        tracker.propagate((args, kwargs), output)
        if name in marked:
            for tensor in _tensors(output):  # a quantized linear returns its scale too
                tracker.mark(name, tensor)

    with removed_afterwards(
        module.register_forward_hook(partial(on_output, name), with_kwargs=True)
        for name, module in model.named_modules()
    ):
        yield


def kept_outputs(model: nn.Module, outputs: Iterable[str]) -> list[str]:
    """The names among `outputs` that the graph of a model keeps: those that the model lists, or that a task may read.

    All of them if no task reads any. `outputs` are those of a forward, as the exporter of transformers names them. A
    model of this project may list the outputs of its graph as `graph_outputs`.
    """
    names: tuple[str, ...] | None = getattr(model, "graph_outputs", None)
    outputs = list(outputs)
    if names is not None:
        return [name for name in outputs if name in names] or outputs
    # CLIP returns the outputs of its towers too, whose parts the exporter names `text_model_output.pooler_output`.
    return [name for name in outputs if not name.startswith(_BY_PRODUCTS) and "." not in name] or outputs
