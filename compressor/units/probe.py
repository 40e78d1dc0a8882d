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

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.nn.attention import SDPBackend, sdpa_kernel

from compressor.units.contractions import HeadContractions, contracting_modules
from compressor.units.derivatives import HALF_TOLERANCE, are_disjoint, count_groups, holds_rows, is_sum, slopes
from compressor.units.gradients import recorded_gradients
from compressor.units.projections import channels_last, is_projection
from compressor.units.reach import unfollowed
from graph_passes import Kind

_PRODUCTS = ("Addmm", "Baddbmm", "Bmm", "Convolution", "Embedding", "Linear", "Mm")
"""Operations that read a weight or multiply two activations, as autograd names them."""
_SOFTMAXES = ("Softmax", "SafeSoftmax")


class HeadsRead(NamedTuple):
    """The heads that a projection reads.

    Attributes:
        kind: the kind of the attention that computes them.
        heads: number of query heads.
        kv_heads: number of value heads; divides `heads`.
        head_dim: width of one head.
        batch_axis: axis of the tensor that holds the rows of a batch: 0, or 1 after positions.
    """

    kind: Kind
    heads: int
    kv_heads: int
    head_dim: int
    batch_axis: int


@contextmanager
def observed_projections(
    model: nn.Module, on_heads: Callable[[str, HeadsRead], None], on_contraction: Callable[[str, Tensor], None]
) -> Iterator[None]:
    """Report the projections that read heads while the model runs, at their first call that does.

    Inside the context gradients are recorded, parameters require them, and fused attention is computed step by step.

    Args:
        model: the model.
        on_heads: called with the module path of a projection and the heads that it reads.
        on_contraction: called with the module path of a weight that `torch.einsum` contracts, and with a copy of what
            it reads, which nothing else does.
    """
    seen: set[str] = set()

    def examine(name: str, x: Tensor) -> None:
        heads = heads_in(x) if name not in seen else None
        if heads is not None:
            seen.add(name)
            on_heads(name, heads)

    def examine_contraction(name: str, x: Tensor) -> Tensor:
        examine(name, x)
        x = x.clone()
        on_contraction(name, x)
        return x

    def on_input(name: str, module: nn.Module, args: tuple[Any, ...]) -> None:
        if args and isinstance(args[0], Tensor):
            examine(name, channels_last(module, args[0]))

    with ExitStack() as undo:
        for name, module in model.named_modules():
            if is_projection(module):
                undo.callback(module.register_forward_pre_hook(partial(on_input, name)).remove)
        undo.enter_context(recorded_gradients(model))
        if contracting := contracting_modules(model):
            undo.enter_context(HeadContractions(contracting, examine_contraction))
        undo.enter_context(sdpa_kernel(SDPBackend.MATH))
        yield


@unfollowed()
def heads_in(x: Tensor) -> HeadsRead | None:
    """The heads that a tensor `[..., head * head_dim]` consists of, or None where that cannot be shown."""
    if x.grad_fn is None:
        return None
    values, products, softmaxes = _origins(x.grad_fn)
    widths = set(map(_width, products))
    width = widths.pop() if len(widths) == 1 else 0
    if not softmaxes or not width or x.shape[-1] % width:
        return None
    chunks = x.split(width, dim=-1)
    derivatives = [slopes(chunk, softmaxes) for chunk in chunks]
    # A model may fill in the probabilities of padding, which are not numbers where a whole row is hidden.
    probabilities = [_saved_probabilities(softmax).detach().nan_to_num() for softmax in softmaxes]
    rows = [axis for axis in range(x.dim() - 1) if holds_rows(x, axis, softmaxes)]
    is_linear = all(is_sum(chunk, probabilities, parts) for chunk, parts in zip(chunks, derivatives, strict=True))
    if not rows or not is_linear or not are_disjoint(derivatives):
        return None
    kv_heads = count_groups([slopes(chunk, values) for chunk in chunks])
    # Every axis depends only on the first row where there is a single one; then its axis has one entry.
    is_single = all(len(part) == 1 for part in probabilities)
    batch_axis = min(rows, key=lambda axis: x.shape[axis]) if is_single else rows[0]
    return HeadsRead(_kind(softmaxes), len(chunks), kv_heads, width, batch_axis)


# -- The graph of autograd ---------------------------------------------------------------------------------------------


def _operation(node: Node) -> str:
    """Name of the operation that a node is the derivative of: `Bmm` for `BmmBackward0`."""
    return type(node).__name__.partition("Backward")[0]


def _inputs(node: Node) -> list[Node]:
    return [source for source, _ in node.next_functions if source is not None]


def _is_softmax(node: Any) -> bool:
    """Whether an operation is a softmax, PyTorch's own or one with a derivative of the model's own."""
    return _operation(node) in _SOFTMAXES or _saved_by_model(node) is not None


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
        if bool((values >= 0).all() and (((sums - 1).abs() <= HALF_TOLERANCE) | (sums == 0)).all() and sums.any()):
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


def _reads_weight(node: Node) -> bool:
    return _operation(node) in _PRODUCTS and any(map(_is_weight, _inputs(node)))


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
        if _is_softmax(node):
            softmaxes.append(node)
            continue
        if _reads_weight(node):
            weights.append(node)
            continue
        is_product = _operation(node) in _PRODUCTS
        if is_product and not is_behind_product:
            products.append(node)
        for source in _inputs(node):
            if source not in visited:
                visited.add(source)
                stack.append((source, is_behind_product or is_product))
    return weights, products, softmaxes


def _width(product: Any) -> int:
    """Width of a product of probabilities and values; 0 where autograd did not keep the values."""
    values = getattr(product, "_saved_mat2", None)
    return 0 if values is None else int(values.shape[-1])


def _kind(softmaxes: Sequence[Any]) -> Kind:
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
    """The node before operations of one input, such as a reshape for a matrix product."""
    while len(node.next_functions) == 1 and (source := node.next_functions[0][0]) is not None:
        node = source
    return node


def _is_causal(probabilities: Tensor) -> bool:
    """Whether no query attends to a later key, in `[..., query, key]`."""
    queries, keys = probabilities.shape[-2:]
    return queries == keys > 1 and not bool(probabilities.triu(1).any())
