"""How much the model's output depends on the outputs of a linear: by token, and by direction.

Both are parts of the Fisher information of the linear's output: its trace at each token, and its sum over tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from compressor.answers import SPAN_ENDS, AnswerKind, several_answers
from compressor.errors import ErrorCode, InputError
from compressor.models.forwards import forward_arguments, scored_logits_only, scored_mask
from compressor.progress import ProgressCallback, ignore_progress, tracked
from compressor.selection.pruners.layerwise.layer_run import entries_per_row, token_mask
from compressor.training.divergence import are_classes, are_numbers, distributions, fisher_outputs, number_deviations
from compressor.units.find import evaluation_mode
from compressor.units.layers import gradients_of, removed_afterwards

FLOOR = 0.1
"""Uniform weight added to each token, as a share of the mean."""
_EXACT_CLASSES = 4
_DRAWS = 2
_MARGIN_FLOOR = 0.02
"""Smallest p(1-p) of two classes, so that rows of which the model is certain count."""

_ROWS = 8
"""Rows of a backward pass, which holds the activations of all layers."""

Term = tuple[Tensor, Tensor]
"""A function of the outputs, `[rows]`, and the weight of its squared gradient in the Fisher information, `[rows]`."""


@dataclass(frozen=True, eq=False)
class ScoredForwards:
    """Forwards with gradients, whose scored outputs estimate the Fisher information; see `fisher_outputs`.

    Attributes:
        names: names of the scored outputs.
        generator: draws functions of the outputs, on the device of the model.
        kind: what the model answers, see `several_answers`.
        deviations: see `number_deviations`.
    """

    model: PreTrainedModel
    names: Sequence[str]
    generator: torch.Generator
    kind: AnswerKind | None
    deviations: Tensor | None

    def run(self, batch: Mapping[str, Tensor], hooks: Iterable[RemovableHandle]) -> list[Tensor]:
        """The scored outputs of a batch, with hooks."""
        with removed_afterwards(hooks), scored_logits_only(self.model, batch):
            outputs: Any = self.model(**forward_arguments(self.model, batch))
        return fisher_outputs(outputs, self.names, self.generator, self.deviations, kind=self.kind, batch=batch)


@contextmanager
def scored_forwards(
    model: PreTrainedModel, batches: Sequence[Mapping[str, Tensor]], names: Sequence[str], seed: int = 0
) -> Iterator[ScoredForwards]:
    """Forwards of a model in evaluation mode, whose parameters require no gradients; it is restored afterwards."""
    generator = torch.Generator(model.device).manual_seed(seed)
    with evaluation_mode(model), gradients_of(model.parameters(), required=False), torch.enable_grad():
        deviations = number_deviations(model, batches, names[0])
        yield ScoredForwards(model, names, generator, several_answers(model.config), deviations)


@dataclass(frozen=True, eq=False)
class Sensitivity:
    """The Fisher information of the outputs of linears on calibration batches.

    Attributes:
        weights: for each batch and linear, one tensor for each call of the linear with the weight of each token,
            `[batch, position]`, float32, on the CPU. The mean over all tokens of all batches that are not padding is
            one; padded tokens have weight zero.
        metrics: for each linear, the sum of the Fisher information over all tokens, `[out, out]`, float64; its mean
            eigenvalue is one.
    """

    weights: list[dict[str, list[Tensor]]]
    metrics: dict[str, np.ndarray]


def sensitivity_of(
    model: PreTrainedModel,
    batches: Sequence[Mapping[str, Tensor]],
    linears: Sequence[str],
    names: Sequence[str],
    seed: int = 0,
    on_progress: ProgressCallback = ignore_progress,
) -> Sensitivity:
    """The weight of each token of each call of some linears, and the metric of their outputs.

    With y the output of a linear at a token, p the model's output distribution and g = d log p_c / dy, the Fisher
    information at the token is E[g g'] over c ~ p. The weight of the token is its trace, plus a tenth of the mean over
    tokens. The expectation is computed as follows:

    1. Two classes: exactly, p(1-p) times that of the difference of the logits, p(1-p) at least 0.02.
    2. Up to four classes: exactly.
    3. More classes: from two draws of c.
    4. Classes at each position (language models): from two draws at all positions that count, over their number.
    5. Start and end of a span, or several outputs: from two draws for each of them, and random signs for numbers.
    6. One number (regression): g is the gradient of the output itself; for embeddings and several numbers see
       `fisher_outputs`.
    7. Independent decisions on classes, with probabilities p: exactly for up to four classes, the sum over classes of
       p(1-p) times that of the logit, p(1-p) at least 0.02; else that of two sums over classes with random signs.

    Rows do not depend on each other, so that one backward pass per draw or class serves several rows and all linears.

    Args:
        model: a transformers model; it runs in evaluation mode, and is restored afterwards.
        batches: inputs `[batch, ...]`, with or without `labels`.

    Raises:
        InputError: an output from whose distribution classes or positions are drawn is not finite.
    """
    weights: list[dict[str, list[Tensor]]] = []
    masks: list[dict[str, Tensor]] = []
    metrics: dict[str, Tensor] = {}
    with scored_forwards(model, batches, names, seed) as forwards:
        for batch in tracked(batches, on_progress):
            parts = [_fisher(forwards, part, linears, metrics) for part in _parts(batch)]
            fisher = {
                name: [torch.cat(calls) for calls in zip(*(part[name] for part in parts), strict=True)]
                for name in linears
            }
            masks.append({name: token_mask(model, name, batch, calls[0].shape).cpu() for name, calls in fisher.items()})
            weights.append(fisher)
    for name in linears:
        _normalise([(batch[name], mask[name]) for batch, mask in zip(weights, masks, strict=True)])
    return Sensitivity(weights, {name: _scaled(metric) for name, metric in metrics.items()})


def _parts(batch: Mapping[str, Tensor]) -> Iterator[Mapping[str, Tensor]]:
    """A batch in parts of few rows; the whole batch where its tensors have different numbers of rows."""
    rows = {len(value) for value in batch.values()}
    size = _ROWS if len(rows) == 1 else max(rows)
    for start in range(0, max(rows), size):
        yield {name: value[start : start + size] for name, value in batch.items()}


def _fisher(
    forwards: ScoredForwards, batch: Mapping[str, Tensor], linears: Sequence[str], metrics: dict[str, Tensor]
) -> dict[str, list[Tensor]]:
    """The trace of the Fisher information of the tokens of one batch, with arbitrary values at padded tokens.

    The Fisher information of all tokens that are not padding is added to `metrics`.
    """
    model, offsets = forwards.model, dict[str, list[Tensor]]({name: [] for name in linears})
    scored = forwards.run(batch, _offset_hooks(model, offsets))
    calls = [(name, offset) for name in linears for offset in offsets[name]]
    fisher = [torch.zeros(offset.shape[:-1]) for _, offset in calls]
    for values, row_weights in scored_terms(scored, batch, forwards):
        tensors = [offset for _, offset in calls]
        gradients = torch.autograd.grad(values.sum(), tensors, retain_graph=True, allow_unused=True)
        for (name, _), total, gradient in zip(calls, fisher, gradients, strict=True):
            metric = metrics.setdefault(name, torch.zeros(2 * (offsets[name][0].shape[-1],), dtype=torch.float64))
            if gradient is None:
                continue
            squares = gradient.float().square().sum(-1)
            # The first axis of tokens is rows, windows of rows, or tokens flattened row by row.
            scale = row_weights.repeat_interleave(entries_per_row(name, len(squares), len(row_weights)))
            scale = scale.reshape(-1, *(1,) * (squares.dim() - 1))
            total += (squares * scale).cpu()
            mask = token_mask(model, name, batch, squares.shape)
            rows = (gradient.float() * scale.sqrt()[..., None])[mask]
            metric += (rows.T @ rows).double().cpu()
    flat = iter(fisher)
    return {name: [next(flat) for _ in offsets[name]] for name in linears}


def _offset_hooks(model: nn.Module, offsets: dict[str, list[Tensor]]) -> Iterator[RemovableHandle]:
    """Add zeros to the outputs of linears; the gradients of the zeros are those of the outputs."""

    def add(name: str, module: nn.Module, args: object, output: Tensor) -> Tensor:
        offset = output.new_zeros(()).expand(output.shape).requires_grad_()
        offsets[name].append(offset)
        return output + offset

    for name in offsets:
        yield model.get_submodule(name).register_forward_hook(partial(add, name), prepend=True)


def scored_terms(outputs: Sequence[Tensor], batch: Mapping[str, Tensor], forwards: ScoredForwards) -> Iterator[Term]:
    """The functions whose squared gradients make up the Fisher information; the numbers are those of `sensitivity_of`.

    Independent draws at several positions or of several outputs are summed: the products of different gradients have
    mean zero, since the mean gradient of log p is zero.
    """
    names, kind = forwards.names, forwards.kind
    values = distributions(outputs, names, batch)
    logits, is_single = values[0], len(values) == 1 and names[0] not in SPAN_ENDS
    ones = torch.ones(len(logits), device=logits.device)
    if is_single and are_numbers(logits, names[0], kind):  # case 6
        yield logits.reshape(len(logits)), ones
    elif is_single and are_classes(logits, names[0], kind) and logits.shape[1] <= _EXACT_CLASSES:  # case 7
        yield from zip(logits.unbind(1), _decision_variances(logits).unbind(1), strict=True)
    elif is_single and logits.dim() == 2 and logits.shape[1] == 2:  # case 1
        p = logits.detach().softmax(-1).prod(-1)
        yield logits[:, 1] - logits[:, 0], p.clamp(min=_MARGIN_FLOOR)
    elif is_single and logits.dim() == 2 and logits.shape[1] <= _EXACT_CLASSES:  # case 2
        log = logits.log_softmax(-1)
        yield from zip(log.unbind(1), log.detach().exp().unbind(1), strict=True)
    else:
        for _ in range(_DRAWS):
            terms = [_random_term(value, name, batch, forwards) for value, name in zip(values, names, strict=True)]
            yield torch.stack(terms).sum(0), ones / _DRAWS


def _random_term(logits: Tensor, name: str, batch: Mapping[str, Tensor], forwards: ScoredForwards) -> Tensor:
    """A function of one output, `[rows]`, whose squared gradient is its Fisher information in expectation."""
    generator = forwards.generator
    if are_numbers(logits, name, forwards.kind):
        return logits.reshape(len(logits)) * _signs((len(logits),), generator)
    if are_classes(logits, name, forwards.kind):  # case 7
        return (logits * _signs(logits.shape, generator) * _decision_variances(logits).sqrt()).sum(1)
    drawn = _drawn(logits.log_softmax(-1), generator)
    if drawn.dim() == 1:  # cases 3 and 5
        return drawn
    mask = scored_mask(batch, *drawn.shape).to(drawn.device)  # case 4
    return (drawn * mask).sum(1) / mask.sum(1).clamp(min=1).sqrt()


def _signs(shape: Sequence[int], generator: torch.Generator) -> Tensor:
    return 2 * torch.randint(2, tuple(shape), generator=generator, device=generator.device) - 1


def _decision_variances(logits: Tensor) -> Tensor:
    """p(1-p) of independent decisions, without a gradient."""
    p = logits.detach().sigmoid()
    return (p * (1 - p)).clamp(min=_MARGIN_FLOOR)


def _drawn(log: Tensor, generator: torch.Generator) -> Tensor:
    """log p_c `[...]` for one c drawn from each of the distributions `[..., classes]`."""
    p = log.detach().exp().reshape(-1, log.shape[-1])
    if not torch.isfinite(p).all():
        raise InputError(
            "the outputs of the model on the calibration rows are NaN or infinite; check its weights and the rows"
            " (--data)",
            code=ErrorCode.NOT_FINITE,
        )
    drawn = torch.multinomial(p, 1, generator=generator).reshape(*log.shape[:-1], 1)
    return log.gather(-1, drawn).squeeze(-1)


def _normalise(batches: Sequence[tuple[list[Tensor], Tensor]]) -> None:
    """Add the floor to the weights of one linear in all batches, in place; then their mean over kept tokens is one."""
    kept = torch.cat([call[mask] for calls, mask in batches for call in calls])
    mean = float(kept.double().mean()) if len(kept) else 0.0
    for calls, mask in batches:
        for number, call in enumerate(calls):
            weight = (call / mean + FLOOR) / (1 + FLOOR) if mean > 0 else torch.ones_like(call)
            calls[number] = weight * mask


def _scaled(metric: Tensor) -> np.ndarray:
    """A metric with a mean eigenvalue of one; the identity where the output does not depend on the linear."""
    mean = float(metric.trace()) / len(metric)
    return metric.numpy() / mean if mean > 0 else np.eye(len(metric))
