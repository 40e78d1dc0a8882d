"""Bisection over the speed of plans, by what each is expected to lose of the metric.

How much the plans of a bisection lose is estimated from all of them together.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Annotated, NamedTuple

import numpy as np
from pydantic import PlainSerializer, PlainValidator

from compressor.errors import ErrorCode, InputError
from compressor.measure.bootstrap import uninformed_text
from compressor.measure.costs import CostTable
from compressor.pruning.allocate import SHARE

_LEAST_SHARE = 0.08
"""Smallest share of the cost of the whole model that the bisection tries."""
_MARGIN_ABOVE_LEAST = 1.02
"""Ratio of the smallest share that is tried to the cost of a plan that keeps nothing; no plan costs less."""
_COMPARABLE = 5.0
"""A plan is compared with those that diverge at most this many times as far. Beyond that losses are not in proportion:
a model that answers by chance loses no more, however far it diverges."""
_CONFIDENCE = 0.95
"""Probability that a plan loses at most its upper loss. The fastest of several attempts is chosen, so that less of a
margin delivers what loses too much."""
MARGIN = 1.96
"""Standard errors above an estimate of zero at which this probability is reached, since a plan does not gain."""
_FARTHEST = 6.0
"""Standard errors below zero from which on the tail of a normal distribution is computed as an exponential one."""
_ERRORS_ALONE = 2.0
"""Standard errors by which the loss that a plan itself shows may exceed what is allowed."""


@dataclass(frozen=True)
class ResampledScore:
    """How a model scores on rows; pydantic writes it as JSON and reads it.

    Attributes:
        draws: the metric on bootstrap draws of the rows, the same draws for every model.
        divergence: mean KL of the outputs of the model from those of the whole model.
        ceiling: the loss of accuracy if an answer that changed is no more often right than the probabilities of the
            whole model say; None: the metric is another one.
        constant: of the whole model, the metric of an answer that is the same for every row; None: there is none.
        order: of the whole model, why the labels seem to have another order than its classes; None: they do not.
    """

    metric: float
    draws: Annotated[np.ndarray, PlainValidator(np.asarray), PlainSerializer(np.ndarray.tolist, list[float])]
    divergence: float
    ceiling: float | None = None
    constant: float | None = None
    order: str | None = None

    @property
    def is_finite(self) -> bool:
        """Whether the metric on all rows and the divergence are finite."""
        return bool(np.isfinite([self.metric, self.divergence]).all())


class LossEstimate(NamedTuple):
    """How much of the metric a plan loses, in its unit, negative where it gains; and the standard error of that."""

    loss: float
    error: float


def next_speed(
    holding: Sequence[float],
    failed: Sequence[float],
    bounds: tuple[float, float],
    close: float,
    ratio: float = math.inf,
) -> float | None:
    """The speed between the fastest that holds and the slowest above it that does not; None if they are close.

    Each plan tells more about the earlier ones, so that both bounds may move either way.

    Args:
        holding: speeds of the plans that keep the metric.
        failed: speeds that the other plans were chosen for.
        bounds: the speed of the whole model, and the highest that is tried.
        close: ratio of two speeds between which no further plan is tried.
        ratio: largest ratio of a speed to the fastest that holds.
    """
    low = max(holding, default=bounds[0])
    high = min((speed for speed in failed if speed > low), default=bounds[1])
    return min(math.sqrt(low * high), ratio * low) if high > close * low else None


def speed_bounds(tables: Sequence[CostTable], groups: Sequence[str]) -> tuple[float, float]:
    """How many times as fast as dense the whole model is at the slowest size, and the highest speed that is tried."""
    whole = speed_of(tables, {})
    least = [(table.dense, table.cost(dict.fromkeys(groups, 0))) for table in tables]
    return whole, min(
        [whole / _LEAST_SHARE, *(dense / (_MARGIN_ABOVE_LEAST * cost) for dense, cost in least if cost > 0)]
    )


def speed_of(tables: Sequence[CostTable], counts: Mapping[str, int]) -> float:
    """How many times as fast as dense a plan is by cost tables, at the size where that is least."""
    return min(table.dense / table.cost(counts) for table in tables)


def mean_table(tables: Sequence[CostTable]) -> CostTable:
    """One table of shares of the whole model's time, averaged over sizes."""
    rows = tuple(
        row.with_savings(
            [
                float(np.mean([table.rows[number].savings[index] / table.whole for table in tables]))
                for index in range(len(row.counts))
            ]
        )
        for number, row in enumerate(tables[0].rows)
    )
    points = [[(total / table.whole, cost / table.whole) for total, cost in table.curve] for table in tables]
    curve = tuple(tuple(point) for point in np.mean(points, axis=0).tolist())
    return tables[0].model_copy(update={"unit": SHARE, "dense": 1.0, "whole": 1.0, "rows": rows, "curve": curve})


def require_informed(dense: ResampledScore, metric: str) -> None:
    """Raise InputError if the metric of the whole model on the evaluation rows can show no loss."""
    text = uninformed_text(metric, dense.metric, dense.constant, "evaluation")
    if text is not None and dense.order is not None:
        raise InputError(
            f"{dense.order}; --max-drop cannot bound a loss that does not show",
            code=ErrorCode.LABEL_MISMATCH,
            metric=metric,
            value=dense.metric,
        )
    if text is not None:
        raise InputError(
            f"{text} (--data, --eval-data); --max-drop cannot bound a loss that does not show: name other rows, or"
            " another metric (--metric)",
            code=ErrorCode.LABEL_MISMATCH,
            metric=metric,
            value=dense.metric,
            constant=dense.constant,
        )


def estimate_losses(
    whole: ResampledScore, scores: Sequence[ResampledScore], *, higher_is_better: bool
) -> list[LossEstimate]:
    """How much of the metric each of several plans loses.

    Every answer that changes moves the metric of a small set, so that the loss of one plan is known only to about a
    point. The divergence of the outputs is known far better, and small losses are about in proportion to it. A plan is
    therefore expected to lose its divergence times the sum of the losses over the sum of the divergences of all plans
    that diverge at most `_COMPARABLE` times as far. The standard error is that of the draws, for the divergences as
    they are.

    A plan without finite outputs loses everything, and nothing is learned from it.
    """
    sign = 1.0 if higher_is_better else -1.0
    finite = [score for score in scores if score.is_finite]
    estimates = []
    for score in scores:
        if not score.is_finite:
            estimates.append(LossEstimate(np.inf, 0.0))
            continue
        compared = [near for near in finite if near.divergence <= _COMPARABLE * score.divergence]
        total = sum(near.divergence for near in compared)
        share = sign * (score.divergence / total if total > 0 else 1 / len(compared))
        draws = share * np.sum([whole.draws - near.draws for near in compared], axis=0)
        # A draw may leave the metric undefined (one class only); it is ignored.
        defined = draws[np.isfinite(draws)]
        error = float(np.std(defined)) if len(defined) else np.inf
        estimates.append(LossEstimate(share * sum(whole.metric - near.metric for near in compared), error))
    return estimates


def upper_losses(whole: ResampledScore, scores: Sequence[ResampledScore], *, higher_is_better: bool) -> list[float]:
    """The loss up to which each of several plans is taken to go, in the unit of the metric.

    Labels of few rows tell a loss only to about a point, and in a plan that seems to gain they happen to agree with its
    errors. What is known without them narrows that: a plan whose weights approximate those of the whole model does not
    gain, and it does not lose more than its `ceiling`. The bound is the quantile of the estimate from all plans between
    these two, or what the plan itself certainly shows, whichever is more.
    """
    upper = []
    for score, estimate in zip(scores, estimate_losses(whole, scores, higher_is_better=higher_is_better), strict=True):
        (alone,) = estimate_losses(whole, [score], higher_is_better=higher_is_better)
        highest = math.inf if score.ceiling is None else score.ceiling
        upper.append(max(_quantile_between(estimate, highest), alone.loss - _ERRORS_ALONE * alone.error))
    return upper


def unseen_share(rows: int) -> float:
    """The share of the answers that may change where those to some rows do not, at most with `_CONFIDENCE`."""
    return 1 - (1 - _CONFIDENCE) ** (1 / rows)


def rows_that_show(share: float) -> int:
    """The number of rows of which one shows with `_CONFIDENCE` that a share of the answers changes."""
    return math.ceil(math.log(1 - _CONFIDENCE) / math.log1p(-share))


def _quantile_between(estimate: LossEstimate, highest: float) -> float:
    """The quantile `_CONFIDENCE` of a loss that is known by an estimate and lies between zero and a highest loss."""
    if math.isinf(estimate.error):  # nothing is known of it
        return highest
    if not estimate.error:
        return min(max(estimate.loss, 0.0), highest)
    if estimate.loss < -_FARTHEST * estimate.error:
        return min(-math.log(1 - _CONFIDENCE) * estimate.error**2 / -estimate.loss, highest)
    normal = NormalDist(estimate.loss, estimate.error)
    # Of the upper tail, which keeps its digits where the estimate is far below zero.
    above_none, above_highest = normal.cdf(2 * estimate.loss), normal.cdf(2 * estimate.loss - highest)
    tail = above_none - _CONFIDENCE * (above_none - above_highest)
    if not 0 < tail < 1:  # the estimate is far above the highest loss
        return highest
    return min(max(2 * estimate.loss - normal.inv_cdf(tail), 0.0), highest)
