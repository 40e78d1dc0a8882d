"""Observe or change the outputs of heads, wherever a family computes its attention."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import Tensor, nn

from compressor.errors import ErrorCode, SiteRefusedError
from compressor.units.find import unread_sites
from compressor.units.hook import Attention, Call, OutputHook, WeightsHook, intercepted, unwrap
from compressor.units.projections import Heads, hooked_projections


@contextmanager
def hooked(
    model: nn.Module,
    on_output: OutputHook,
    *,
    sites: Iterable[Heads] = (),
    attention: Attention | None = None,
    on_weights: WeightsHook | None = None,
) -> Iterator[None]:
    """Pass the heads of every attention through `on_output`, before the output projection.

    Works in training and in evaluation. The model itself is not modified. Heads on which no output of a graph depends,
    by the last `find_sites` of the model, are left alone.

    Args:
        model: a transformers model, bare or wrapped for training (DistributedDataParallel).
        on_output: replaces the output of a site.
        sites: the sites of the model or of a plan. Those outside the attention interface are hooked if they are among
            them; those of the interface always are.
        attention: run every attention as `eager` or `sdpa`; None: as configured.
        on_weights: receives every call with its attention map; needs eager attention.

    Raises:
        SiteRefusedError: the family does not support SDPA, or, on a call, returns no attention map for `on_weights`.
    """

    unread = unread_sites(unwrap(model))

    def on_call(call: Call) -> tuple[Tensor, Tensor | None]:
        output, weights = call.run()
        if call.site in unread:
            return output, weights
        if on_weights is not None:
            if weights is None:
                raise SiteRefusedError(
                    f"{call.site}: {call.implementation} attention returns no map; use attention='eager'",
                    code=ErrorCode.SITE_REFUSED,
                    site=call.site,
                    attention=call.implementation,
                )
            on_weights(call, weights)
        return on_output(call.site, output), weights

    with intercepted(model, on_call, attention), hooked_projections(model, sites, on_output):
        yield


def spread_over_rows(gates: Tensor, rows: int) -> Tensor:
    """Gates `[row, head]` in the layout of the outputs of heads: `[rows, 1, head, 1]`.

    Args:
        gates: one gate for each row of a batch and each head.
        rows: rows of the outputs, a multiple of those of the batch: chunked attention splits a row into several, which
            are consecutive.
    """
    return gates.repeat_interleave(rows // len(gates), dim=0)[:, None, :, None]
