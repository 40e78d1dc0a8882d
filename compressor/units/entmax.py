"""Attention with entmax-1.5 instead of softmax (Peters et al. 2019), whose maps contain true zeros."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.exporters.utils import patch_attribute

from compressor.errors import ErrorCode, SiteRefusedError, TargetMissingError
from compressor.units.hook import Call, family, intercepted, unwrap

_TOLERANCE = 1e-4
_PROBE_SCORE = 8.0
"""Largest score in the comparison with softmax, at which caps and attention sinks have an effect with any weights."""


def entmax_function() -> Callable[..., Tensor]:
    """The function `entmax15(scores, dim)` of the package `entmax`.

    Raises:
        TargetMissingError: the package is not installed.
    """
    try:
        from entmax import entmax15
    except ImportError as error:
        raise TargetMissingError.of_package("entmax", "entmax", "entmax is not installed") from error
    function: Callable[..., Tensor] = entmax15
    return function


@contextmanager
def with_entmax(model: PreTrainedModel) -> Iterator[PreTrainedModel]:
    """The model with entmax-1.5 instead of softmax in every attention, for training and for collecting maps.

    Enter this context before `gated` and `hooked`. The first call of each site checks that the same computation with
    softmax equals the family's own attention, so no other part of it is lost. On exit the model is restored.

    Raises:
        TargetMissingError: the package `entmax` is not installed.
        SiteRefusedError: on a call, if the family's attention is more than a softmax of scaled products and a mask.
    """
    entmax15 = entmax_function()
    checked: set[str] = set()

    def on_call(call: Call) -> tuple[Tensor, Tensor | None]:
        if call.site not in checked:
            _check_softmax(call, family(unwrap(model)))
            checked.add(call.site)
        scores, value = _scores(call)
        weights = entmax15(scores.float(), dim=-1).to(scores.dtype)
        weights = nn.functional.dropout(weights, call.options.get("dropout") or 0.0, call.module.training)
        return (weights @ value).transpose(1, 2).contiguous(), weights

    with intercepted(model, on_call, "eager"):
        yield model


def _scores(call: Call) -> tuple[Tensor, Tensor]:
    """Scores `[batch, head, query, key]`, and values `[batch, head, key, head_dim]` repeated for grouped heads."""
    groups = call.query.shape[1] // call.key.shape[1]
    key, value = (states.repeat_interleave(groups, dim=1) for states in (call.key, call.value))
    scaling = call.options.get("scaling")
    scores = call.query @ key.transpose(2, 3) * (call.query.shape[-1] ** -0.5 if scaling is None else scaling)
    for bias in (call.mask, call.options.get("position_bias")):
        scores = scores if bias is None else scores + bias[..., : key.shape[2]]
    return scores, value


def _check_softmax(call: Call, name: str) -> None:
    """Check that softmax over `_scores` equals the family's attention, on queries scaled to scores of `_PROBE_SCORE`.

    Raises:
        SiteRefusedError: they differ.
    """
    with torch.no_grad():
        products, _ = _scores(replace(call, mask=None))
        query = call.query * (_PROBE_SCORE / products.abs().max().clamp(min=1e-6))
        probe = replace(call, query=query, options={**call.options, "dropout": 0.0})
        with patch_attribute(call.module, "training", lambda _: False):
            output, _ = probe.run()
        scores, value = _scores(probe)
        expected = (scores.float().softmax(dim=-1).to(value.dtype) @ value).transpose(1, 2)
        if not torch.allclose(output, expected, atol=_TOLERANCE * float(value.abs().max()), rtol=_TOLERANCE):
            raise SiteRefusedError(
                f"{name}: {call.site}: its attention is more than a softmax of scaled products and a mask, so entmax"
                " cannot replace it; derive masks from its softmax maps (without --entmax)",
                code=ErrorCode.SITE_REFUSED,
                site=call.site,
                family=name,
            )
