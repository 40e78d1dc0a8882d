"""The divergence of a model's outputs from those of the dense model, for any task by the outputs that it scores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

from compressor.models.sentence_encoder import EMBEDDING
from compressor.tasks.forwards import SPAN_ENDS, scored_mask

_SMALLEST_VARIANCE = 1e-12


def divergence(
    dense: Mapping[str, Any],
    outputs: Mapping[str, Any],
    names: Sequence[str],
    batch: Mapping[str, Tensor],
    variance: float | None = None,
    *,
    temperature: float = 1.0,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """KL(dense || outputs) of each row, in nats.

    The divergences of several outputs are summed. An output is one of these, by its axes and its name:

    1. `[rows, positions, classes]`: a language model or a tagger; the mean over the positions of the row that count.
    2. `[rows, classes]`.
    3. `[rows, 1]` or `[rows]`: a regression; the squared difference over the variance of the dense outputs.
    4. `sentence_embedding` `[rows, width]`: one minus the cosine of both embeddings.
    5. `start_logits` and `end_logits` `[rows, positions]`: the ends of a span; padded positions are left out.

    Args:
        dense: outputs of the dense model.
        outputs: outputs of the changed model on the same batch.
        names: the outputs that the task scores, see `Task.outputs`.
        batch: the inputs, of which the masks and the labels (-100: not scored) tell padded positions.
        variance: variance of the dense outputs of a regression over all calibration rows; None: over these rows.
        temperature: T, by which logits are divided; the divergence is multiplied by its square (Hinton et al. 2015), so
            that its scale depends little on it. Cases 3 and 4 have no temperature.
        dtype: precision of the computation. float64 resolves small divergences; training needs no more than float32.

    Returns:
        `[rows]`, of `dtype`, on the device of the outputs. A row without positions that count has zero.
    """
    return torch.stack(
        [
            _cosine_distance(dense[name].to(dtype), outputs[name].to(dtype))
            if name == EMBEDDING
            else _output_divergence(dense[name], outputs[name], name, batch, variance, temperature, dtype)
            for name in names
        ]
    ).sum(0)


def fisher_outputs(outputs: Mapping[str, Any], names: Sequence[str], generator: torch.Generator) -> list[Tensor]:
    """The scored outputs, by whose gradients the Fisher information is computed: an embedding as one number per row.

    One minus the cosine is half the squared distance of unit vectors, so that its second derivative is the sum of the
    squared gradients of their components. The squared gradient of the sum of the components with random signs has the
    same expectation.

    Args:
        outputs: outputs of a forward, `[rows, ...]`.
        names: the outputs that the task scores.
        generator: draws the signs of each row; on the device of the outputs.
    """
    values: list[Tensor] = [outputs[name] for name in names]
    return [
        _random_component(value.float(), generator) if name == EMBEDDING else value
        for name, value in zip(names, values, strict=True)
    ]


def _random_component(embedding: Tensor, generator: torch.Generator) -> Tensor:
    """The sum of the components of each embedding, divided by its norm, with random signs, `[rows]`."""
    signs = 2 * torch.randint(2, embedding.shape, generator=generator, device=embedding.device) - 1
    return (normalize(embedding, dim=-1) * signs).sum(-1)


def is_regression(logits: Tensor) -> bool:
    """Whether an output is one number per row, `[rows]` or `[rows, 1]`."""
    return logits.dim() == 1 or (logits.dim() == 2 and logits.shape[1] == 1)


def distributions(outputs: Sequence[Tensor], names: Sequence[str], batch: Mapping[str, Tensor]) -> list[Tensor]:
    """The logits of outputs, float32: those of the ends of a span without padded positions.

    Args:
        outputs: the outputs that the task scores.
        names: their names.
        batch: the inputs, of which the masks tell padded positions.
    """
    return [
        _without_padding(output.float(), batch) if name in SPAN_ENDS else output.float()
        for name, output in zip(names, outputs, strict=True)
    ]


def _without_padding(logits: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    """Logits over positions, `[rows, positions]`, with those of padded positions at the lowest finite number."""
    mask = scored_mask(batch, *logits.shape).to(logits.device)
    return logits.masked_fill(~mask, torch.finfo(logits.dtype).min)


def _output_divergence(
    dense: Tensor,
    logits: Tensor,
    name: str,
    batch: Mapping[str, Tensor],
    variance: float | None,
    temperature: float,
    dtype: torch.dtype,
) -> Tensor:
    if name not in SPAN_ENDS and is_regression(dense):  # case 3
        difference = (dense.to(dtype) - logits.to(dtype)).reshape(len(dense))
        scale = float(dense.double().var(correction=0)) if variance is None else variance
        return difference.square() / max(scale, _SMALLEST_VARIANCE)

    def softened(values: Tensor) -> Tensor:
        return values.to(dtype) / temperature

    if name in SPAN_ENDS:  # case 5
        # Padding is filled last: the lowest finite number divided by a temperature below one is infinite.
        rows = _kl(_without_padding(softened(dense), batch), _without_padding(softened(logits), batch))
    elif dense.dim() == 2:  # case 2
        rows = _kl(softened(dense), softened(logits))
    else:  # case 1, row by row, since these outputs are large
        mask = scored_mask(batch, *dense.shape[:2]).to(dense.device)
        pairs = zip(dense, logits, mask, strict=True)
        sums = [_kl(softened(p[kept]), softened(q[kept])).sum() for p, q, kept in pairs]
        rows = torch.stack(sums) / mask.sum(1).clamp(min=1)
    return temperature**2 * rows


def _cosine_distance(dense: Tensor, embeddings: Tensor) -> Tensor:  # case 4
    """Half the squared distance of the embeddings of norm one: unlike 1 - cosine, it resolves small distances."""
    return (normalize(dense, dim=-1) - normalize(embeddings, dim=-1)).square().sum(-1) / 2


def _kl(dense: Tensor, logits: Tensor) -> Tensor:
    """KL over the last axis of logits; rounding never makes it negative."""
    p, q = dense.log_softmax(-1), logits.log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1).clamp(min=0)
