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

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from compressor.units.autograd_graph import attention_kind, origins, product_width, saved_probabilities
from compressor.units.contractions import HeadContractions, contracting_modules
from compressor.units.dependencies import hidden_from_modes
from compressor.units.derivatives import are_disjoint, count_groups, holds_rows, is_sum, slopes
from compressor.units.gradients import recorded_gradients
from compressor.units.projections import channels_last, is_projection
from graph_passes import Kind


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
                undo.enter_context(module.register_forward_pre_hook(partial(on_input, name)))
        undo.enter_context(recorded_gradients(model))
        if contracting := contracting_modules(model):
            undo.enter_context(HeadContractions(contracting, examine_contraction))
        undo.enter_context(sdpa_kernel(SDPBackend.MATH))
        yield


@hidden_from_modes()
def heads_in(x: Tensor) -> HeadsRead | None:
    """The heads that a tensor `[..., head * head_dim]` consists of, or None where that cannot be shown."""
    if x.grad_fn is None:
        return None
    values, products, softmaxes = origins(x.grad_fn)
    widths = set(map(product_width, products))
    width = widths.pop() if len(widths) == 1 else 0
    if not softmaxes or not width or x.shape[-1] % width:
        return None
    chunks = x.split(width, dim=-1)
    derivatives = [slopes(chunk, softmaxes) for chunk in chunks]
    # A model may fill in the probabilities of padding, which are not numbers where a whole row is hidden.
    probabilities = [saved_probabilities(softmax).detach().nan_to_num() for softmax in softmaxes]
    rows = [axis for axis in range(x.dim() - 1) if holds_rows(x, axis, softmaxes)]
    is_linear = all(is_sum(chunk, probabilities, parts) for chunk, parts in zip(chunks, derivatives, strict=True))
    if not rows or not is_linear or not are_disjoint(derivatives):
        return None
    kv_heads = count_groups([slopes(chunk, values) for chunk in chunks])
    # Every axis depends only on the first row where there is a single one; then its axis has one entry.
    is_single = all(len(part) == 1 for part in probabilities)
    batch_axis = min(rows, key=lambda axis: x.shape[axis]) if is_single else rows[0]
    return HeadsRead(attention_kind(softmaxes), len(chunks), kv_heads, width, batch_axis)
