"""The divergence of a model's outputs from those of the dense model, for the scored outputs of any task."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize
from transformers import PreTrainedModel

from compressor.answers import EMBEDDING, RANKING, SPAN_ENDS, AnswerKind, several_answers
from compressor.models.forwards import forward_arguments, scored_mask

_WITHOUT_KIND = (*SPAN_ENDS, RANKING)  # outputs that are distributions whatever the answers of the model are
_SMALLEST_VARIANCE = 1e-12


def divergence(
    dense: Mapping[str, Any],
    outputs: Mapping[str, Any],
    names: Sequence[str],
    batch: Mapping[str, Tensor],
    variance: Tensor | float | None = None,
    *,
    kind: AnswerKind | None = None,
    temperature: float = 1.0,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """KL(dense || outputs) of each example of a batch, in nats.

    The divergences of several outputs are summed. Axes and name of an output determine its case:

    1. `[batch, position, class]`: a language model or a tagger; the mean over scored positions.
    2. `[batch, class]`.
    3. `[batch, 1]` or `[batch]`, or `[batch, number]` of the kind `NUMBERS`: a regression; the squared difference over
       the variance of the dense outputs, summed over the numbers.
    4. `sentence_embedding` `[batch, width]`: one minus the cosine of both embeddings.
    5. `start_logits` and `end_logits` `[batch, position]`: the ends of a span, without padded positions.
    6. `logits` `[batch, class]` of the kind `CLASSES`: the divergence of independent decisions, summed over classes.
    7. `[batch, ...]` of the kind `VECTOR`: half the squared difference over the squared norm of the dense output,
       without padded positions. For vectors of norm one it is one minus the cosine.

    Args:
        dense: outputs of the dense model.
        outputs: outputs of the changed model on the same batch.
        names: the scored outputs, see `Task.outputs`.
        batch: the inputs, whose masks and labels (-100: not scored) mark padded positions.
        variance: variance of the dense outputs of a regression over all calibration examples, `[numbers]`; None: over
            this batch.
        kind: the kind of the answers (`several_answers`); None: the axes of the outputs determine it.
        temperature: T, by which logits are divided; the divergence is multiplied by its square (Hinton et al. 2015), so
            that its scale depends little on it. Cases 3, 4 and 7 have no temperature.
        dtype: precision of the computation. float64 resolves small divergences; training needs no more than float32.

    Returns:
        `[batch]`, of `dtype`, on the device of the outputs; zero for an example without scored positions.
    """

    def softened(values: Tensor) -> Tensor:
        return values.to(dtype) / temperature

    def of(name: str, p: Tensor, q: Tensor) -> Tensor:
        if name == EMBEDDING:  # case 4: half the squared distance of unit vectors resolves small distances
            return (normalize(p.to(dtype), dim=-1) - normalize(q.to(dtype), dim=-1)).square().sum(-1) / 2
        if kind is AnswerKind.VECTOR:  # case 7
            x, y = (_vectors(values.to(dtype), batch) for values in (p, q))
            return (x - y).square().sum(-1) / (2 * x.square().sum(-1)).clamp(min=_SMALLEST_VARIANCE)
        if are_numbers(p, name, kind):  # case 3
            difference = (p.to(dtype) - q.to(dtype)).reshape(len(p), -1)
            scale = torch.as_tensor(variances(p) if variance is None else variance)
            return (difference.square() / scale.to(difference).clamp(min=_SMALLEST_VARIANCE)).sum(-1)
        if name in SPAN_ENDS:  # case 5
            # Padding is filled last: the lowest finite number divided by a temperature below one is infinite.
            values = _kl(_without_padding(softened(p), batch), _without_padding(softened(q), batch))
        elif are_classes(p, name, kind):  # case 6, with the logits of both outcomes of each decision
            values = _kl(*(torch.stack([torch.zeros_like(x), x], dim=-1) for x in (softened(p), softened(q)))).sum(-1)
        elif p.dim() == 2:  # case 2
            values = _kl(softened(p), softened(q))
        else:  # case 1, for each example, since these outputs are large
            mask = scored_mask(batch, *p.shape[:2]).to(p.device)
            sums = [_kl(softened(a[kept]), softened(b[kept])).sum() for a, b, kept in zip(p, q, mask, strict=True)]
            values = torch.stack(sums) / mask.sum(1).clamp(min=1)
        return temperature**2 * values

    return torch.stack([of(name, dense[name], outputs[name]) for name in names]).sum(0)


def fisher_outputs(
    outputs: Mapping[str, Any],
    names: Sequence[str],
    generator: torch.Generator,
    deviations: Tensor | None = None,
    *,
    kind: AnswerKind | None = None,
    batch: Mapping[str, Tensor] = MappingProxyType({}),
) -> list[Tensor]:
    """The scored outputs whose gradients estimate the Fisher information; an embedding becomes a number.

    One minus the cosine is half the squared distance of unit vectors, so that its second derivative is the sum of the
    squared gradients of their components. The squared gradient of the sum of the components with random signs has the
    same expectation. Numbers of a regression, each divided by its deviation, become a single number in the same way,
    and so do those of a vector, divided by its norm.

    Args:
        outputs: outputs of a forward, `[batch, ...]`.
        generator: draws the signs; on the device of the outputs.
        deviations: see `number_deviations`.
        kind: the kind of the answers (`several_answers`).
        batch: the inputs, whose masks mark padded positions of vectors.
    """

    def of(name: str, value: Tensor) -> Tensor:
        if name == EMBEDDING:
            return _random_component(normalize(value.float(), dim=-1), generator)
        if kind is AnswerKind.VECTOR:
            vectors = _vectors(value.float(), batch)
            norms = vectors.detach().norm(dim=-1, keepdim=True).clamp(min=_SMALLEST_VARIANCE)
            return _random_component(vectors / norms, generator)
        if deviations is not None and name not in _WITHOUT_KIND:
            return _random_component(value.float() / deviations.to(value.device), generator)
        return value

    return [of(name, outputs[name]) for name in names]


def number_deviations(model: PreTrainedModel, batches: Sequence[Mapping[str, Tensor]], name: str) -> Tensor | None:
    """The standard deviation over batches of each of several numbers, `[numbers]`, of a model in evaluation mode.

    None for models other than a regression of several numbers.
    """
    if several_answers(model.config) is not AnswerKind.NUMBERS:
        return None
    with torch.no_grad():
        outputs = [model(**forward_arguments(model, batch))[name] for batch in batches]
    return variances(torch.cat(outputs)).clamp(min=_SMALLEST_VARIANCE).sqrt().float()


def _random_component(values: Tensor, generator: torch.Generator) -> Tensor:
    """The sum of the components `[batch, component]` with random signs, `[batch]`."""
    signs = 2 * torch.randint(2, values.shape, generator=generator, device=values.device) - 1
    return (values * signs).sum(-1)


def are_numbers(output: Tensor, name: str, kind: AnswerKind | None) -> bool:
    """Whether an output of a classifier of this kind is a number, `[batch]`, or several numbers, `[batch, number]`."""
    if name in SPAN_ENDS or are_classes(output, name, kind):
        return False
    is_several = name not in _WITHOUT_KIND and kind is AnswerKind.NUMBERS and output.dim() == 2
    return is_several or output.dim() == 1 or (output.dim() == 2 and output.shape[1] == 1)


def are_classes(output: Tensor, name: str, kind: AnswerKind | None) -> bool:
    """Whether an output of a classifier of this kind is an independent decision on each class, `[batch, class]`."""
    return name not in _WITHOUT_KIND and kind is AnswerKind.CLASSES and output.dim() == 2


def variances(outputs: Tensor) -> Tensor:
    """The variance of each number of a regression, `[numbers]` float64, from `[examples]` or `[examples, numbers]`."""
    return outputs.double().reshape(len(outputs), -1).var(0, correction=0)


def distributions(outputs: Sequence[Tensor], names: Sequence[str], batch: Mapping[str, Tensor]) -> list[Tensor]:
    """Scored outputs as float32 logits; padded positions of span ends have the lowest finite number."""
    return [
        _without_padding(output.float(), batch) if name in SPAN_ENDS else output.float()
        for name, output in zip(names, outputs, strict=True)
    ]


def _vectors(values: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    """Values `[batch, ...]` as `[batch, numbers]`, with zeros at the padded positions of `[batch, position, ...]`."""
    if values.dim() > 2:
        mask = scored_mask(batch, *values.shape[:2]).to(values.device)
        values = values.masked_fill(~mask.reshape(*mask.shape, *(1,) * (values.dim() - 2)), 0)
    return values.flatten(1)


def _without_padding(logits: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    """Logits `[batch, position]` with the lowest finite number at padded positions."""
    mask = scored_mask(batch, *logits.shape).to(logits.device)
    return logits.masked_fill(~mask, torch.finfo(logits.dtype).min)


def _kl(dense: Tensor, logits: Tensor) -> Tensor:
    """KL over the last axis of logits; rounding never makes it negative."""
    p, q = dense.log_softmax(-1), logits.log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1).clamp(min=0)
