"""The graph of autograd: what a tensor is computed from, and the kind of an attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.autograd.graph import Node

from compressor.units.derivatives import HALF_TOLERANCE
from graph_passes import Kind

_PRODUCTS = ("Addmm", "Baddbmm", "Bmm", "Convolution", "Embedding", "Linear", "Mm")
"""Operations that read a weight or multiply two activations, as autograd names them."""
_SOFTMAXES = ("Softmax", "SafeSoftmax")


def _operation(node: Node) -> str:
    """Name of the operation that a node is the derivative of: `Bmm` for `BmmBackward0`."""
    return type(node).__name__.partition("Backward")[0]


def _inputs(node: Node) -> list[Node]:
    return [source for source, _ in node.next_functions if source is not None]


def _is_softmax(node: Any) -> bool:
    """Whether an operation is a softmax, PyTorch's own or one with a derivative of the model's own."""
    return _operation(node) in _SOFTMAXES or _saved_by_model(node) is not None


def saved_probabilities(softmax: Any) -> Tensor:
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


def origins(start: Node) -> tuple[list[Node], list[Node], list[Any]]:
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


def product_width(product: Any) -> int:
    """Width of a product of probabilities and values; 0 where autograd did not keep the values."""
    values = getattr(product, "_saved_mat2", None)
    return 0 if values is None else int(values.shape[-1])


def attention_kind(softmaxes: Sequence[Any]) -> Kind:
    if not any(map(_is_self_attention, softmaxes)):
        return "cross"
    return "causal" if all(_is_causal(saved_probabilities(softmax)) for softmax in softmaxes) else "bidirectional"


def _is_self_attention(softmax: Node) -> bool:
    """Whether queries and keys are projected from the same activation."""
    _, products, _ = origins(_inputs(softmax)[0])
    pairs = [_inputs(product)[-2:] for product in products]  # the factors are the last inputs of each operation
    return any(len(pair) == 2 and not _sources(pair[0]).isdisjoint(_sources(pair[1])) for pair in pairs)


def _sources(node: Node) -> set[Node]:
    """The activations that a tensor is projected from."""
    weights, _, _ = origins(node)
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
