"""Attention by entmax-1.5 in place of softmax (Peters et al. 2019): maps with true zeros, to cut masks from."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from compressor.errors import SiteRefusedError, TargetMissingError
from compressor.units.hook import Call, family, intercepted, unwrap

_TOLERANCE = 1e-4
_LARGE = 8.0


def entmax_function() -> Callable[..., Tensor]:
    """`entmax15(scores, dim)`.

    Raises:
        TargetMissingError: the package `entmax` is not installed.
    """
    try:
        from entmax import entmax15
    except ImportError as error:
        raise TargetMissingError("entmax: not installed; pip install 'compressor[entmax]'") from error
    found: Callable[..., Tensor] = entmax15
    return found


@contextmanager
def with_entmax(model: PreTrainedModel) -> Iterator[PreTrainedModel]:
    """The model with every attention map made by entmax-1.5, for training and for watching; softmax again afterwards.

    Enter it before `gated` and `hooked`. At each site's first call the same computation with softmax must equal the
    family's own, so that nothing else that a family does is lost.

    Raises:
        TargetMissingError: the package `entmax` is not installed.
        SiteRefusedError: on a call: the family's attention is not a softmax of scaled products and a mask.
    """
    entmax15 = entmax_function()
    checked: set[str] = set()

    def on_call(call: Call) -> tuple[Tensor, Tensor | None]:
        if call.site not in checked:
            _check(call, family(unwrap(model)))
            checked.add(call.site)
        scores, value = _scores(call)
        weights = entmax15(scores.float(), dim=-1).to(scores.dtype)
        weights = nn.functional.dropout(weights, call.options.get("dropout") or 0.0, call.module.training)
        return (weights @ value).transpose(1, 2).contiguous(), weights

    with intercepted(model, on_call, "eager"):
        yield model


def _scores(call: Call) -> tuple[Tensor, Tensor]:
    """Scores `[batch, head, query, key]` and values with a row a query head."""
    groups = call.query.shape[1] // call.key.shape[1]
    key, value = (states.repeat_interleave(groups, dim=1) for states in (call.key, call.value))
    scaling = call.options.get("scaling")
    scores = call.query @ key.transpose(2, 3) * (call.query.shape[-1] ** -0.5 if scaling is None else scaling)
    for added in (call.mask, call.options.get("position_bias")):
        scores = scores if added is None else scores + added[..., : key.shape[2]]
    return scores, value


def _check(call: Call, name: str) -> None:
    """Compare on scores of several units: caps and sinks show there, whatever the weights are."""
    training = call.module.training
    with torch.no_grad():
        products, _ = _scores(replace(call, mask=None))
        query = call.query * (_LARGE / products.abs().max().clamp(min=1e-6))
        tried = replace(call, query=query, options={**call.options, "dropout": 0.0})
        call.module.training = False
        out, _ = tried.run()
        call.module.training = training
        scores, value = _scores(tried)
        plain = (scores.float().softmax(dim=-1).to(value.dtype) @ value).transpose(1, 2)
        if not torch.allclose(out, plain, atol=_TOLERANCE * float(value.abs().max()), rtol=_TOLERANCE):
            raise SiteRefusedError(
                f"{name}: {call.site}: its attention is more than a softmax of scaled products and a mask, so entmax"
                " cannot stand in for it; watch its own maps (without --entmax)"
            )
