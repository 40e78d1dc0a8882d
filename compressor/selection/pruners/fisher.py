"""The method `fisher`: units by the Fisher information of a mask, and one scale for each unit that remains.

The mask multiplies the inputs of the linear that reads the units. Every row has a copy of it, so that one backward pass
gives the gradients of all rows, `dL/dm` at m = 1.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import load_file, save_file
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from compressor.answers import AnswerKind
from compressor.models.forwards import scored_mask
from compressor.progress import ProgressCallback, ignore_progress, tracked
from compressor.selection.allocation import Curve
from compressor.selection.options import MethodOptions
from compressor.selection.pruners.base import Batch, Pruner, PruningInputs
from compressor.selection.pruners.layerwise.layer_run import DenseSums, calls_in_order, entries_per_row
from compressor.selection.pruners.layerwise.output_sensitivity import scored_forwards
from compressor.selection.pruners.layerwise.refit import CallTokens, RefitSums
from compressor.selection.pruners.unit_importance import by_importance, dropped_importance, scaled_units, units_without
from compressor.store import File, versioned
from compressor.training.divergence import are_classes, are_numbers, distributions
from compressor.units.groups import linear_of
from compressor.units.layers import Linear, linear_sizes, linear_weight
from compressor.units.prunable import PrunableGroup, unit_columns

_FILE = File[dict[str, np.ndarray]]("gradients.safetensors", save_file, load_file)
DAMP = 1.0
"""Weight of the squared distance of the scales from one, against the squared residual of the normal equations."""
LARGEST = 10.0
"""Largest magnitude of a scale; a solution beyond it is unstable."""


class FisherPruner(Pruner[MethodOptions]):
    """Removes units by the Fisher information of a mask, and scales those that remain; used as `ReconstructPruner`.

    Kwon et al. 2022, "A Fast Post-Training Pruning Framework for Transformers":

    1. Mask search (section 4.1): the importance of a unit is the sum over rows of the squared gradient of the loss of
       the row with respect to the mask. The loss of a group is the sum of the importances of its dropped units.
    2. Mask rearrangement (section 4.2): dropped units of a group are exchanged by the full Fisher matrix of the group.
    3. Mask tuning (section 4.3 and the published code): one scale for each kept unit, from the first layer to the last.
       The scales are multiplied into the weights.

    The losses are those on the model's own answers, see `answer_loss`: no labels are used, and nothing is drawn but,
    for embeddings, the signs of `fisher_outputs`. The query heads of one key/value head are one unit, or units that are
    exchanged among themselves alone.
    """

    options_class = MethodOptions

    def __init__(self, inputs: PruningInputs, options: MethodOptions | None = None) -> None:
        super().__init__(inputs, options)
        self._gradients: dict[str, np.ndarray] = {}
        self._kept: dict[tuple[str, int], tuple[int, ...]] = {}

    def rank(self, on_progress: ProgressCallback = ignore_progress) -> None:
        gradients = self.store.memo("mask-gradients", {}, partial(self._measure, on_progress), _FILE)
        self._gradients = {name: gradient.astype(np.float64) for name, gradient in gradients.items()}

    @versioned(1)
    def _measure(self, on_progress: ProgressCallback, _: Path) -> dict[str, np.ndarray]:
        inputs = self.inputs
        batches = inputs.tensors(inputs.statistics)
        return mask_gradients(inputs.network, inputs.groups, batches, inputs.outputs, on_progress)

    def losses(self, on_progress: ProgressCallback = ignore_progress) -> dict[str, Curve]:
        squares = {name: np.square(gradient).sum(0) for name, gradient in self._gradients.items()}
        return {group.name: dropped_importance(group, squares[group.name]) for group in self.inputs.groups}

    def kept(self, group: PrunableGroup, count: int) -> tuple[int, ...]:
        if (group.name, count) not in self._kept:
            dropped = least_costly_bundles(self._gradients[group.name], group.dropped_bundles(count), group.parts)
            self._kept[group.name, count] = units_without(group, dropped)
        return self._kept[group.name, count]

    def finish(self, counts: Mapping[str, int], on_progress: ProgressCallback = ignore_progress) -> None:
        self.require_counts(counts)
        inputs = self.inputs
        linear_sets, batches = [(str(group.linear),) for group in inputs.groups], inputs.tensors(inputs.statistics)
        calls_of_groups = calls_in_order(inputs.network, linear_sets, batches, self._dense_sums, on_progress)
        for group, calls in zip(inputs.groups, calls_of_groups, strict=True):
            linear, kept = linear_of(inputs.network, group), self.kept(group, counts[group.name])
            scales = tuned_scales(linear, group, kept, calls) if kept else np.ones(0)
            access, path = inputs.access, str(group.linear)
            access.set_linear(path, scaled_units(access.linear(path), group, kept, scales))

    @functools.cached_property
    def _dense_sums(self) -> DenseSums:  # computed before the first scales are
        batches = self.inputs.tensors(self.inputs.statistics)
        return DenseSums(self.inputs.network, [str(group.linear) for group in self.inputs.groups], batches)


def least_costly_bundles(gradients: np.ndarray, count: int, parts: int = 1) -> np.ndarray:
    """The bundles of a group that are dropped, ascending, by mask rearrangement.

    With F = sum over rows of g g' the Fisher matrix of the group, dropping a set of bundles costs the sum of F over the
    rows and columns of the set. The search starts from the bundles with the smallest diagonal elements, as many from
    each part. In ascending order of diagonal elements, each remaining bundle is then added to the set, and the bundle
    of the same part whose removal lowers the cost most leaves the set, unless nothing depends on it.

    Args:
        gradients: g of each row, `[examples, bundles]`, float64.
        count: number of bundles that are dropped; a multiple of `parts`.
        parts: number of consecutive parts of equal size, each of which drops equally many bundles.
    """
    fisher = gradients.T @ gradients
    diagonal = np.diagonal(fisher)
    order = by_importance(diagonal, parts)
    part_of = np.arange(len(order)) // (len(order) // parts)
    dropped = np.zeros(len(order), bool)
    dropped[order[:count]] = True
    sums = fisher[:, dropped].sum(1)
    matters = diagonal > 0  # removing another bundle costs nothing, as if it were removed already
    for bundle in order[count:][matters[order[count:]]] if count else ():
        dropped[bundle] = True
        sums += fisher[bundle]
        exchangeable = dropped & matters & (part_of == part_of[bundle])
        removed = np.argmax(np.where(exchangeable, 2 * sums - diagonal, -np.inf))
        dropped[removed] = False
        sums -= fisher[removed]
    return np.flatnonzero(dropped)


def tuned_scales(
    linear: Linear, group: PrunableGroup, kept: tuple[int, ...], calls: Iterable[CallTokens]
) -> np.ndarray:
    """Mask tuning: the scales of the kept units of a group, by which the linear reproduces its targets best.

    With A the contributions of the kept units to the outputs of the linear, `[tokens * outputs, units]`, B the targets
    without the bias, and r = s - 1, they minimise

        ||A'A r - A'(B - A 1)||^2 + ||r||^2

    Units of one bundle have one scale. If a scale is beyond 10 in magnitude, or if the error does not fall, the
    scales of the whole group are one. (The paper's code ends tuning at such a layer; here later groups are tuned.)

    Args:
        linear: the linear that reads the units, with its original weights.
        kept: ids of the kept units, in whole bundles, at least one.

    Raises:
        InputError: an activation is not finite.
    """
    columns = torch.from_numpy(unit_columns(kept, group.width))
    sums = RefitSums(len(columns), linear_sizes(linear)[1], has_ones=False, name=group.name)
    for call in calls:
        assert call.targets is not None
        targets = call.targets if linear.bias is None else call.targets - linear.bias.detach()
        sums.add(call.inputs[:, columns.to(call.inputs.device)], targets)
    weight = linear_weight(linear).detach().double().cpu().numpy()[:, columns]
    starts = np.arange(0, len(columns), group.bundle * group.width)
    contributions = np.add.reduceat((weight.T @ weight) * sums.gram.matrix, starts, 1)
    normal = np.add.reduceat(contributions, starts, 0)
    right = np.add.reduceat((weight.T * sums.cross).sum(1), starts) - normal.sum(1)
    shifts = np.linalg.solve(normal.T @ normal + DAMP**2 * np.eye(len(normal)), normal.T @ right)
    falls = shifts @ normal @ shifts < 2 * shifts @ right
    if not falls or np.abs(1 + shifts).max() > LARGEST:
        shifts = np.zeros(len(starts))
    return (1 + shifts).repeat(group.bundle)


def mask_gradients(
    model: PreTrainedModel,
    groups: Sequence[PrunableGroup],
    batches: Sequence[Batch],
    names: Sequence[str],
    on_progress: ProgressCallback,
) -> dict[str, np.ndarray]:
    """Name of the group -> gradients of `answer_loss` of each row, `[examples, bundles]`, float32.

    A linear that a forward calls several times has one mask.

    Args:
        model: a transformers model; it runs in evaluation mode, and is restored afterwards.
        batches: inputs `[batch, ...]`.
    """
    parts: dict[str, list[np.ndarray]] = {group.name: [] for group in groups}
    with scored_forwards(model, batches, names) as forwards:
        for batch in tracked(batches, on_progress):
            rows = len(next(iter(batch.values())))
            masks = [torch.ones(rows, g.bundles, device=model.device, requires_grad=True) for g in groups]
            scored = forwards.run(batch, _mask_hooks(model, groups, masks))
            loss = answer_loss(scored, names, batch, forwards.kind).sum()
            gradients = torch.autograd.grad(loss, masks, allow_unused=True, materialize_grads=True)
            for group, gradient in zip(groups, gradients, strict=True):
                parts[group.name].append(gradient.cpu().numpy())
    return {name: np.concatenate(arrays) for name, arrays in parts.items()}


def answer_loss(
    outputs: Sequence[Tensor], names: Sequence[str], batch: Batch, kind: AnswerKind | None = None
) -> Tensor:
    """The loss of each row on the model's own answer, `[rows]`; no labels are read.

    The losses of several outputs are summed. That of an output is, by its axes and its name:

    1. An end of a span, `start_logits` or `end_logits`: cross entropy against the largest logit; padded positions are
       left out.
    2. One number (a regression, or an embedding by `fisher_outputs`): the output itself. The squared error against the
       model's own answer has no gradient. With Gaussian noise of variance one on the answer, half the squared error has
       the gradient of the output times the noise, whose expected square is the squared gradient of the output.
    3. One distribution, `[batch, classes]`: cross entropy against the most likely class.
    4. One at each position (language models): the mean of the cross entropies at the positions of the row that count.
    5. Independent decisions on classes, of the kind `CLASSES`: the sum of their cross entropies against the more likely
       outcome of each.

    Args:
        batch: the inputs, of which the masks tell padded positions; see `scored_mask`.
        kind: what the `logits` of the model are (`several_answers`); None: their axes tell.
    """
    pairs = zip(distributions(outputs, names, batch), names, strict=True)
    return torch.stack([_output_loss(logits, name, batch, kind) for logits, name in pairs]).sum(0)


def _output_loss(logits: Tensor, name: str, batch: Batch, kind: AnswerKind | None) -> Tensor:
    if are_numbers(logits, name, kind):  # case 2
        return logits.reshape(len(logits))
    if are_classes(logits, name, kind):  # case 5
        answers = (logits.detach() > 0).to(logits.dtype)
        return binary_cross_entropy_with_logits(logits, answers, reduction="none").sum(-1)
    flat = logits.flatten(0, -2)
    losses = cross_entropy(flat, flat.detach().argmax(-1), reduction="none").reshape(logits.shape[:-1])
    if losses.dim() == 1:  # cases 1 and 3
        return losses
    mask = scored_mask(batch, *losses.shape).to(losses.device)  # case 4
    return (losses * mask).sum(1) / mask.sum(1).clamp(min=1)


def _mask_hooks(
    model: nn.Module, groups: Sequence[PrunableGroup], masks: Sequence[Tensor]
) -> Iterator[RemovableHandle]:
    """Multiply the inputs of the groups' linears by masks `[examples, bundles]`."""

    def multiply(linear: str, columns: int, mask: Tensor, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        x = args[0]
        wide = mask.repeat_interleave(columns, 1).repeat_interleave(entries_per_row(linear, len(x), len(mask)), 0)
        return (x * wide.to(x.dtype).reshape(len(x), *(1,) * (x.dim() - 2), -1), *args[1:])

    for group, mask in zip(groups, masks, strict=True):
        hook = partial(multiply, str(group.linear), group.bundle * group.width, mask)
        yield model.get_submodule(str(group.linear)).register_forward_pre_hook(hook)
