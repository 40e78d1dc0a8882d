"""Find heads outside transformers' attention interface by the derivatives of what projections read.

No names of families or modules are used. One forward with gradients records how every tensor is computed. A projection
(a linear, a convolution, or a weight that `torch.einsum` contracts) reads heads if its input

1. comes from a product with the probabilities of a softmax, without another weight between them;
2. consists of consecutive chunks of the width of that product, each computed from probabilities of its own: no
   probability has a derivative in two chunks;
3. is linear in the probabilities: the sum of probabilities times their derivatives is the sum of the chunk (Euler's
   theorem on homogeneous functions), so nothing else is added to the heads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node
from torch.nn.attention import SDPBackend, sdpa_kernel

from compressor.units.dependencies import hidden_from_modes
from compressor.units.layers import gradients_of, removed_afterwards
from compressor.units.projections import HeadContractions, channels_last, contracting_modules, is_projection
from compressor.units.prunable import Site
from graph_passes import Kind

_PRODUCTS = ("Addmm", "Baddbmm", "Bmm", "Convolution", "Embedding", "Linear", "Mm")
"""Operations that read a weight or multiply two activations, as autograd names them."""
_SOFTMAXES = ("Softmax", "SafeSoftmax")
_TOLERANCE, _HALF_TOLERANCE = 1e-4, 1e-2
"""Largest difference, relative to the sum of magnitudes, at which two sums count as equal, and in half precision."""


@contextmanager
def observed_projections(
    model: nn.Module, on_heads: Callable[[Site], None], on_contraction: Callable[[str, Tensor], None]
) -> Iterator[None]:
    """Report the projections that read heads while the model runs, at their first call that does.

    Inside the context gradients are recorded, parameters require them, and fused attention is computed step by step.

    Args:
        model: the model.
        on_heads: called with the heads that a projection reads; their key/value heads are those of its values.
        on_contraction: called with the module path of a weight that `torch.einsum` contracts, and with a copy of what
            it reads, which nothing else does.
    """
    seen: set[str] = set()

    def examine(name: str, x: Tensor) -> None:
        site = heads_in(name, x) if name not in seen else None
        if site is not None:
            seen.add(name)
            on_heads(site)

    def examine_contraction(name: str, x: Tensor) -> Tensor:
        examine(name, x)
        x = x.clone()
        on_contraction(name, x)
        return x

    def on_input(name: str, module: nn.Module, args: tuple[Any, ...]) -> None:
        if args and isinstance(args[0], Tensor):
            examine(name, channels_last(module, args[0]))

    projections = ((name, module) for name, module in model.named_modules() if is_projection(module))
    contracting = contracting_modules(model)
    with (
        removed_afterwards(module.register_forward_pre_hook(partial(on_input, name)) for name, module in projections),
        gradients_of((weight for weight in model.parameters() if weight.is_floating_point()), required=True),
        torch.enable_grad(),
        HeadContractions(contracting, examine_contraction) if contracting else nullcontext(),
        sdpa_kernel(SDPBackend.MATH),
    ):
        yield


@hidden_from_modes()
def heads_in(name: str, x: Tensor) -> Site | None:
    """The heads that a tensor `[..., head * head_dim]` consists of, which is read at a module path; None: not shown."""
    if x.grad_fn is None:
        return None
    values, products, softmaxes = _origins(x.grad_fn)
    widths = set(map(_product_width, products))
    width = widths.pop() if len(widths) == 1 else 0
    if not softmaxes or not width or x.shape[-1] % width:
        return None
    chunks = x.split(width, dim=-1)
    derivatives = [_slopes(chunk, softmaxes) for chunk in chunks]
    # A model may fill in the probabilities of padding, which are not numbers where a whole row is hidden.
    probabilities = [_saved_probabilities(softmax).detach().nan_to_num() for softmax in softmaxes]
    rows = [axis for axis in range(x.dim() - 1) if _holds_rows(x, axis, softmaxes)]
    is_linear = all(_is_sum(chunk, probabilities, parts) for chunk, parts in zip(chunks, derivatives, strict=True))
    if not rows or not is_linear or not _are_disjoint(derivatives):
        return None
    kv_heads = _count_groups([_slopes(chunk, values) for chunk in chunks])
    # Every axis depends only on the first row where there is a single one; then its axis has one entry.
    is_single = all(len(part) == 1 for part in probabilities)
    batch_axis = min(rows, key=lambda axis: x.shape[axis]) if is_single else rows[0]
    return Site(name, _attention_kind(softmaxes), len(chunks), kv_heads, width, batch_axis)


def _operation(node: Node) -> str:
    """Name of the operation that a node is the derivative of: `Bmm` for `BmmBackward0`."""
    return type(node).__name__.partition("Backward")[0]


def _inputs(node: Node) -> list[Node]:
    return [source for source, _ in node.next_functions if source is not None]


def _saved_probabilities(softmax: Any) -> Tensor:
    """The probabilities `[..., query, key]`, which the derivative of a softmax needs."""
    saved = _saved_by_model(softmax)
    probabilities: Tensor = softmax._saved_result if saved is None else saved
    return probabilities


def _saved_by_model(node: Any) -> Tensor | None:
    """The output of a `torch.autograd.Function` that saved it, if it consists of probabilities.

    Their rows sum to one, or to zero where all is hidden.
    """
    for tensor in _saved_tensors(node):
        if not (isinstance(tensor, Tensor) and tensor.grad_fn is node and tensor.output_nr == 0 and tensor.dim() > 2):
            continue
        values = tensor.detach().double().nan_to_num()
        sums = values.sum(-1)
        if bool((values >= 0).all() and (((sums - 1).abs() <= _HALF_TOLERANCE) | (sums == 0)).all() and sums.any()):
            return tensor
    return None


def _saved_tensors(node: Any) -> Sequence[Tensor | None]:
    try:
        saved: Sequence[Tensor | None] = getattr(node, "saved_tensors", ())
    except RuntimeError:  # they were released, or changed in place
        return ()
    return saved


def _is_weight(node: Node) -> bool:
    """Whether a node is a parameter of two axes or more, or a tensor computed from nothing else but by a lookup."""
    while len(node.next_functions) == 1 and (source := node.next_functions[0][0]) is not None:
        if _operation(node) == "Embedding":
            return False
        node = source
    variable = getattr(node, "variable", None)
    return variable is not None and variable.dim() > 1


def _origins(start: Node) -> tuple[list[Node], list[Node], list[Any]]:
    """What a tensor is computed from, up to the nearest weights and softmaxes.

    Returns:
        The operations that read a weight, the products of two activations that no other such product follows, and the
        softmaxes.
    """
    weights: list[Node] = []
    products: list[Node] = []
    softmaxes: list[Any] = []  # their saved tensors have no types
    stack, visited = [(start, False)], {start}
    while stack:
        node, is_behind_product = stack.pop()
        # PyTorch's own softmax, or one with a derivative of the model's own.
        if _operation(node) in _SOFTMAXES or _saved_by_model(node) is not None:
            softmaxes.append(node)
            continue
        is_product = _operation(node) in _PRODUCTS
        if is_product and any(map(_is_weight, _inputs(node))):
            weights.append(node)
            continue
        if is_product and not is_behind_product:
            products.append(node)
        for source in _inputs(node):
            if source not in visited:
                visited.add(source)
                stack.append((source, is_behind_product or is_product))
    return weights, products, softmaxes


def _product_width(product: Any) -> int:
    """Width of a product of probabilities and values; 0 where autograd did not keep the values."""
    values = getattr(product, "_saved_mat2", None)
    return 0 if values is None else int(values.shape[-1])


def _attention_kind(softmaxes: Sequence[Any]) -> Kind:
    if not any(map(_is_self_attention, softmaxes)):
        return "cross"
    return "causal" if all(_is_causal(_saved_probabilities(softmax)) for softmax in softmaxes) else "bidirectional"


def _is_self_attention(softmax: Node) -> bool:
    """Whether queries and keys are projected from the same activation."""
    _, products, _ = _origins(_inputs(softmax)[0])
    pairs = [_inputs(product)[-2:] for product in products]  # the factors are the last inputs of each operation
    return any(len(pair) == 2 and not _sources(pair[0]).isdisjoint(_sources(pair[1])) for pair in pairs)


def _sources(node: Node) -> set[Node]:
    """The activations that a tensor is projected from."""
    weights, _, _ = _origins(node)
    activations = [source for weight in weights for source in _inputs(weight) if not _is_weight(source)]
    return set(map(_before_layout, activations))


def _before_layout(node: Node) -> Node:
    """The node before operations of one input, such as a reshape for a matmul."""
    while len(node.next_functions) == 1 and (source := node.next_functions[0][0]) is not None:
        node = source
    return node


def _is_causal(probabilities: Tensor) -> bool:
    """Whether no query attends to a later key, in `[..., query, key]`."""
    queries, keys = probabilities.shape[-2:]
    return queries == keys > 1 and not bool(probabilities.triu(1).any())


def _slopes(chunk: Tensor, nodes: Sequence[Node]) -> list[Tensor | None]:
    """The derivatives of the sum of a chunk by the outputs of nodes; None: the chunk does not depend on one."""
    if not nodes:
        return []
    edges = [GradientEdge(node, 0) for node in nodes]
    return list(torch.autograd.grad(chunk.sum(), edges, retain_graph=True, allow_unused=True))


def _is_sum(chunk: Tensor, probabilities: Sequence[Tensor], derivatives: Sequence[Tensor | None]) -> bool:
    """Whether a chunk is linear in probabilities, of which it has these derivatives."""
    pairs = zip(probabilities, derivatives, strict=True)
    terms = [part.double() * slope.double() for part, slope in pairs if slope is not None]
    magnitude = sum(float(term.abs().sum()) for term in terms)
    difference = float(chunk.detach().double().sum()) - sum(float(term.sum()) for term in terms)
    tolerance = _HALF_TOLERANCE if chunk.element_size() < 4 else _TOLERANCE
    return magnitude > 0 and abs(difference) <= tolerance * magnitude


def _holds_rows(x: Tensor, axis: int, softmaxes: Sequence[Node]) -> bool:
    """Whether the first entry of an axis depends only on the first probabilities, which belong to the first row.

    The first axis of probabilities holds rows, or rows times heads or windows.
    """
    for slope in _slopes(x.select(axis, 0), softmaxes):
        if slope is not None and bool((slope[max(1, len(slope) // x.shape[axis]) :] != 0).any()):
            return False
    return True


def _are_disjoint(derivatives: Sequence[Sequence[Tensor | None]]) -> bool:
    """Whether no entry of a tensor has a derivative in two chunks."""
    for of_tensor in zip(*derivatives, strict=True):
        used = [(slope != 0).int() for slope in of_tensor if slope is not None]
        if used and int(torch.stack(used).sum(0).max()) > 1:
            return False
    return True


def _count_groups(derivatives: Sequence[Sequence[Tensor | None]]) -> int:
    """Number of value heads: consecutive chunks that depend on the same outputs of a value projection share one."""
    heads = len(derivatives)
    first = [
        next(earlier for earlier in range(head + 1) if earlier == head or _overlap(derivatives[earlier], of_head))
        for head, of_head in enumerate(derivatives)
    ]
    groups = len(set(first))
    shared = heads // groups
    return groups if first == [head // shared * shared for head in range(heads)] else heads


def _overlap(left: Iterable[Tensor | None], right: Iterable[Tensor | None]) -> bool:
    pairs = zip(left, right, strict=True)
    return any(bool(((a != 0) & (b != 0)).any()) for a, b in pairs if a is not None and b is not None)
