"""The units that each group keeps at every number of units, the loss of the network, and the refit of its linears.

The code works on arrays, on any network behind `Network`: modules of PyTorch, or the layers of an ONNX graph in ONNX
Runtime.
"""

from __future__ import annotations

import functools
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np

from compressor.errors import ErrorCode, InputError
from compressor.progress import ProgressCallback
from compressor.selection.allocation import interpolate
from compressor.selection.pruners.layerwise.refit import Array, CallTokens, Gram, RefitSums
from compressor.selection.pruners.reconstruct.second_order import Removal, reconstruct, removal_order
from compressor.units.prunable import LinearWeights, PrunableGroup, unit_columns

logger = logging.getLogger(__name__)

_LOSS_SHARES = (1 / 8, 3 / 8, 3 / 4)
"""Shares of the units of a group at which the loss is measured, besides none, all and one step: most of the loss lies
between none and few units. With more widths, the rows limit the accuracy of the interpolated curve."""

_UNIFORM = 1.0
"""Weight of the identity in the metric of outputs, whose mean eigenvalue is one: the gradients of few rows may miss
directions. The value was chosen by the divergence of MiniLM on SST-2."""

SumsOfLinears = Callable[[], Mapping[str, RefitSums]]
"""Runs the calibration examples; path of a linear -> sums over its inputs and its targets."""
Divergence = Callable[[str, LinearWeights], float]
"""The mean divergence of the answers with new weights of the linear at a path."""


@dataclass(frozen=True, eq=False)
class RefitSet:
    """Linears that are refitted at once: they are called in the same layer, and do not depend on each other.

    Attributes:
        linears: their paths.
        weighted_by: path of the linear whose token weights are used; None: all tokens have equal weights.
        columns: indices of the inputs that are summed up; None: all.
    """

    linears: tuple[str, ...]
    weighted_by: str | None
    columns: np.ndarray | None = None


class Network(ABC):
    """A network with its calibration examples, and with other examples that losses are measured on.

    Tokens that are padding count nowhere. Paths are those of the linears that groups end in, and of their feeders.

    Attributes:
        has_gradients: whether `weigh` computes gradients.
        token_weights: for each batch and path, the weights of the tokens of each call, in the axes of its input without
            the last; empty before `weigh`, or if all are equal.

    Args:
        statistics: the calibration examples: inputs by name, `[batch, ...]` each.
    """

    has_gradients: bool
    token_weights: Sequence[Mapping[str, Sequence[Array]]] = ()

    def __init__(self, statistics: Sequence[Mapping[str, Array]]) -> None:
        self._statistics = statistics

    @property
    def rows(self) -> int:
        """Number of calibration examples."""
        return sum(len(next(iter(batch.values()))) for batch in self._statistics)

    @property
    def calls_once(self) -> bool:
        """Whether a forward calls the linear of each group once; known after `weigh`."""
        return not self.token_weights or all(len(calls) == 1 for calls in self.token_weights[0].values())

    @abstractmethod
    def linear(self, path: str) -> LinearWeights:
        """A copy of the present weights of a linear."""

    @abstractmethod
    def set_linear(self, path: str, weights: LinearWeights) -> None:
        """Set the weights of a linear, and its bias if it has one."""

    @abstractmethod
    def count_tokens(self, linears: Sequence[str]) -> dict[str, int]:
        """About the number of tokens that each linear reads on the calibration examples."""

    @abstractmethod
    def weigh(self, linears: Sequence[str], on_progress: ProgressCallback) -> Mapping[str, np.ndarray]:
        """Weigh tokens and errors of outputs by how much the answers of the network depend on them.

        Later sums have the weights of the tokens. The result is, for the path of each linear, the weights of errors of
        its outputs `[outputs, outputs]`, whose mean eigenvalue is one; zeros where the network knows none.
        """

    @abstractmethod
    def observe_inputs(
        self, linears: Sequence[str], observer: Callable[[CallTokens], None], on_progress: ProgressCallback
    ) -> None:
        """Pass on the inputs of some linears in the whole network on the calibration examples."""

    @abstractmethod
    def targeted_calls(self, sets: Sequence[RefitSet], on_progress: ProgressCallback) -> Iterator[Iterator[CallTokens]]:
        """For each set, its calls with their targets, in the network as it is when they are requested."""

    @abstractmethod
    def divergence(self) -> Divergence:
        """Measures losses of the whole network on the held-out examples, whose activations it holds.

        The network must not change while the returned function is in use.
        """

    @abstractmethod
    def feeders(self, linear: str) -> tuple[str, ...]:
        """Paths of the linears that compute what the units of a linear are made of; possibly none."""

    def grams(self, linears: Sequence[str], on_progress: ProgressCallback) -> dict[str, Gram]:
        """Path of each linear -> Gram matrix of its inputs; InputError if an activation is not finite."""
        sums = {path: self._sums(path) for path in linears}

        def add(call: CallTokens) -> None:
            sums[call.linear].add(call.inputs, weights=self._weights(call.linear, call))

        self.observe_inputs(linears, add, on_progress)
        return {path: sums.pop(path).gram for path in linears}  # the sums are freed one after another

    def sums_in_order(self, sets: Sequence[RefitSet], on_progress: ProgressCallback) -> Iterator[SumsOfLinears]:
        """For each set of linears, in the order of their calls, the sums for its refit (see `refit_in_order`).

        The network is dense when the first set is requested. The linears of one set get their weights before the next
        set is requested; the sums of a set need not be computed. InputError if an activation is not finite.
        """
        for part, calls in zip(sets, self.targeted_calls(sets, on_progress), strict=True):
            yield partial(self._sums_of, part, calls)

    def _sums_of(self, part: RefitSet, calls: Iterable[CallTokens]) -> Mapping[str, RefitSums]:
        sums = {path: self._sums(path, part) for path in part.linears}
        for call in calls:
            inputs = call.inputs if part.columns is None else call.inputs[:, part.columns]
            sums[call.linear].add(inputs, call.targets, self._weights(part.weighted_by, call))
        return sums

    def _sums(self, path: str, part: RefitSet | None = None) -> RefitSums:
        """Sums without tokens for the refit of a linear, or for its Gram matrix alone."""
        linear = self.linear(path)
        outputs, inputs = linear.weight.shape
        count = inputs if part is None or part.columns is None else len(part.columns)
        return RefitSums(count, None if part is None else outputs, has_ones=linear.bias is not None, name=path)

    def _weights(self, path: str | None, call: CallTokens) -> Array | None:
        """The weights of a linear for the tokens of a call; None: all are equal."""
        if path is None or not self.token_weights:
            return None
        return self.token_weights[call.batch][path][call.number][call.mask]


@dataclass(frozen=True, eq=False)
class GroupChoice:
    """The units that a group keeps at every number of units.

    Attributes:
        dense: the weights of the linear of the group.
        grams: module path of a linear -> Gram matrix of its inputs, which may be read from a file.
        damp: share of the mean diagonal that is added to the diagonal.
        metric: weights of errors of the outputs in the choice of units, `[outputs, outputs]`; see `removal_order`.
    """

    group: PrunableGroup
    dense: LinearWeights
    grams: Mapping[str, Gram]
    damp: float
    metric: np.ndarray

    @functools.cached_property
    def removal(self) -> Removal:
        """The order in which the bundles of the group are removed: single units, or all queries of a key/value head."""
        group = self.group
        return removal_order(
            self.dense.weight,
            self.grams[str(group.linear)],
            group.bundles,
            together=group.multiple // group.bundle,
            parts=group.parts,
            damp=self.damp,
            metric=self.metric,
        )

    def kept(self, count: int) -> tuple[int, ...]:
        """Ids of the units that are kept if `count` are, ascending."""
        bundles = self.removal.kept(count // self.group.bundle)
        return tuple(unit_columns(bundles, self.group.bundle).tolist())

    def columns(self, count: int) -> np.ndarray:
        """The inputs of the linear that belong to the kept units."""
        return unit_columns(self.kept(count), self.group.width)

    def reconstruction(self, count: int) -> LinearWeights:
        """The weights of the kept inputs that reproduce the linear's outputs best."""
        return reconstruct(self.dense, self.grams[str(self.group.linear)], self.columns(count), damp=self.damp)


def require_tokens(network: Network, groups: Sequence[PrunableGroup]) -> None:
    """Raise InputError if the calibration examples have fewer tokens than the linear of a group has inputs."""
    tokens = network.count_tokens(list({str(group.linear): None for group in groups}))
    for group in groups:
        count, inputs = tokens[str(group.linear)], group.units * group.width
        if count >= inputs:
            continue
        needed = int(np.ceil(network.rows * inputs / max(count, 1)))
        raise InputError(
            f"{group.name}: the {network.rows} rows that choose units have {count} tokens, fewer than its {inputs} "
            f"inputs; allow at least {needed} rows (--prune-rows), and give a third more than that (--data), because "
            f"up to a quarter is held out",
            code=ErrorCode.TOO_FEW_ROWS,
            group=group.name,
            rows=network.rows,
            needed=needed,
        )


def choices_of(
    network: Network,
    groups: Sequence[PrunableGroup],
    grams: Mapping[str, Gram],
    metrics: Mapping[str, np.ndarray],
    damp: float,
) -> dict[str, GroupChoice]:
    """Name of the group -> its choice, from the linear's present weights; see `Network.weigh` for `metrics`."""
    choices = {}
    for group in groups:
        dense = network.linear(str(group.linear))
        metric = metrics[str(group.linear)] + _UNIFORM * np.eye(len(dense.weight))
        choices[group.name] = GroupChoice(group, dense, grams, damp, metric)
    return choices


def loss_curve(choice: GroupChoice, divergence: Divergence) -> dict[int, float]:
    """The loss of the model if one group alone keeps fewer units: number of units -> loss, at every number.

    The loss is the mean divergence of the model's outputs from those of the whole model, with the linear of the group
    reconstructed. It is measured at some numbers, and interpolated between them.
    """
    counts = choice.group.counts
    shares = {counts[round(share * (len(counts) - 1))] for share in _LOSS_SHARES}
    curve = {counts[-1]: 0.0}
    for count in sorted({*counts[:2], *shares} - curve.keys()):
        curve[count] = divergence(str(choice.group.linear), choice.reconstruction(count))
    logger.debug("%s: loss %s", choice.group.name, curve)
    return interpolate(curve, counts)


class Damping(NamedTuple):
    """Numbers that are added to the diagonals of Gram matrices, as shares of their means: `damp` in the choice of units
    and the reconstruction of weights, `ridge` in refits."""

    damp: float
    ridge: float


def refit_in_order(
    network: Network,
    choices: Sequence[GroupChoice],
    counts: Mapping[str, int],
    on_progress: ProgressCallback,
    *,
    ridge: float,
) -> dict[str, Damping]:
    """Give the linears of each group, in order, the weights that restore the dense network's activations best.

    With x the inputs of the linear that a group ends in, in the network as it is pruned so far, and R the residual
    stream that its output is added to, and with y' and R' those of the dense network, the weights minimise

        sum over tokens of w ||W x + b + R - (y' + R')||^2 + lambda ||W - W_0||^2

    where W_0 are the weights reconstructed for the kept units; without such a sum, the target of y is y'. Each linear
    therefore repairs what all linears before it lost. Before it, the feeders of the group, whose inputs are no longer
    those of the dense network, are refitted to their outputs y' in the same way; their W_0 are their own weights.
    Columns of dropped units become zero, so that the network computes the same with and without its gates.

    The neurons of a token have the weight of the feed-forward's output at this token. Keys and values of a token serve
    the queries of all tokens, so that all tokens of heads have equal weights in the refit of feeders.

    Args:
        choices: the units of each group, in the order in which the network calls them.
        ridge: lambda, as a share of the mean diagonal of the sums over x x'.

    Returns:
        Name of the group -> the largest damping used for it; more than requested where a matrix has no Cholesky factor.

    Raises:
        InputError: an activation is not finite.
    """
    refits: list[tuple[RefitSet, GroupChoice]] = []
    # In a layer that is called several times, inputs differ from the dense network's even before the first group.
    inputs_are_dense = network.calls_once
    for choice in choices:
        linear, count = str(choice.group.linear), counts[choice.group.name]
        feeders = network.feeders(linear)
        if count and feeders and not inputs_are_dense:
            refits.append((RefitSet(feeders, None if choice.group.type == "heads" else linear), choice))
        refits.append((RefitSet((linear,), linear, choice.columns(count)), choice))
        inputs_are_dense = inputs_are_dense and count == choice.group.counts[-1]
    used: dict[str, Damping] = {}
    sums_of_sets = network.sums_in_order([part for part, _ in refits], on_progress)
    for (part, choice), sums in zip(refits, sums_of_sets, strict=True):
        name = choice.group.name
        if part.columns is None:
            damping = Damping(choice.damp, _refit_feeders(network, sums(), ridge))
        else:
            damping = _refit(network, part.columns, choice, counts[name], sums, ridge)
        used[name] = Damping(*map(max, used.get(name, damping), damping))
    return used


def _refit(
    network: Network, columns: np.ndarray, choice: GroupChoice, count: int, sums: SumsOfLinears, ridge: float
) -> Damping:
    """Refit the linear of one group; only the kept inputs are summed up.

    Where there are none, and no bias, the weights are zero and no example runs.
    """
    linear, dense = str(choice.group.linear), choice.dense
    if not len(columns) and dense.bias is None:
        network.set_linear(linear, LinearWeights(np.zeros(dense.weight.shape), None))
        return Damping(choice.removal.damp, ridge)
    gathered = sums()[linear]
    start = choice.reconstruction(count)
    kept = LinearWeights(start.weight[:, columns], start.bias)
    refit = gathered.solve(kept, ridge=ridge)
    weight = np.zeros_like(start.weight)
    weight[:, columns] = refit.weight
    network.set_linear(linear, LinearWeights(weight, refit.bias))
    return Damping(max(choice.removal.damp, start.damp), refit.damp)


def _refit_feeders(network: Network, gathered: Mapping[str, RefitSums], ridge: float) -> float:
    """Refit the feeders of one group; the largest ridge that was used."""
    used = [ridge]
    for name, sums in gathered.items():
        refit = sums.solve(network.linear(name), ridge=ridge)
        network.set_linear(name, refit)
        used.append(refit.damp)
    return max(used)
