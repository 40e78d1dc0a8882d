"""Allocation of units to groups: the widths that lose least within budgets.

The loss of a model is taken to be the sum of the losses of its groups, each measured with that group alone pruned, and
its cost the sum of their costs, as in SPDY (Frantar, Alistarh 2022, "SPDY: Accurate pruning with speedup guarantees").
Choosing one width a group is then a multiple-choice knapsack problem with one constraint for each budget,
which a mixed-integer solver solves exactly.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array

from compressor.errors import BudgetError, ErrorCode, InputError

_log = logging.getLogger(__name__)

_TOLERANCE = 1e-9
"""Relative excess over a budget that counts as rounding."""
_SCALE = 1e4
"""Largest coefficient that the solver sees, so that its absolute tolerances of 1e-6 are small."""

Curve = Mapping[int, float]
"""A value by number of units."""


def monotone(curve: Curve) -> dict[int, float]:
    """A loss curve on which more units never lose more: each loss is the least of those with as many units or fewer."""
    counts = sorted(curve)
    losses = np.minimum.accumulate([curve[count] for count in counts]).tolist()
    return dict(zip(counts, losses, strict=True))


def require_finite_losses(name: str, curve: Curve) -> None:
    """Raise InputError if a group has a loss that is NaN or infinite."""
    count = next((count for count, loss in curve.items() if not math.isfinite(loss)), None)
    if count is not None:
        raise InputError(
            f"{name}: the loss with {count} units is {curve[count]:g}; check the weights of the model and the rows"
            " (--data) for NaN and very large values",
            code=ErrorCode.NOT_FINITE,
            group=name,
            count=count,
        )


def interpolate(curve: Curve, widths: Iterable[int]) -> dict[int, float]:
    """A curve at other widths, between those at which it was measured.

    The logarithm is interpolated linearly between two positive values, since losses span orders of magnitude; else the
    value is, e.g. up to all units, which lose nothing.

    Raises:
        ValueError: a width is outside the measured ones.
    """
    counts = np.array(sorted(curve))
    values = np.array([curve[count] for count in counts], np.float64)
    result = {}
    for width in widths:
        if not counts[0] <= width <= counts[-1]:
            raise ValueError(f"width {width} is outside the measured widths {counts[0]} to {counts[-1]}")
        above = int(np.searchsorted(counts, width))
        if counts[above] == width:
            result[width] = float(values[above])
            continue
        share = (width - counts[above - 1]) / (counts[above] - counts[above - 1])
        low, high = values[above - 1], values[above]
        if low > 0 and high > 0:
            result[width] = float(low ** (1 - share) * high**share)
        else:
            result[width] = float((1 - share) * low + share * high)
    return result


def allocate(losses: Sequence[Curve], costs: Sequence[Sequence[Curve]], budgets: Sequence[float]) -> list[int]:
    """The width of each group, for which the sum of losses is least and every budget is met.

    Losses are made monotone first. The result is exact; an excess of 1e-9 of a budget counts as rounding.

    Args:
        losses: by group, the loss at each width.
        costs: by constraint and group, the cost at each width. A width is available if every curve of the group has it.
        budgets: by constraint, the largest sum of costs, without what the groups do not affect.

    Raises:
        BudgetError: no widths meet the budgets.
        InputError: a loss, cost or budget is NaN or infinite.
        ValueError: the numbers of curves, groups and budgets differ, or a group has no width that all its curves have.
    """
    if len(costs) != len(budgets) or any(len(curves) != len(losses) for curves in costs):
        raise ValueError("there must be one cost curve for each budget and group")
    _check_finite(losses, costs, budgets)
    curves = [monotone(curve) for curve in losses]
    groups = [_candidates(curve, [row[group] for row in costs]) for group, curve in enumerate(curves)]
    least = [
        sum(min(curve[width] for width in widths) for widths, curve in zip(groups, row, strict=True)) for row in costs
    ]
    limits = np.array([budget + _TOLERANCE * abs(budget) for budget in budgets])
    if exceeded := np.flatnonzero(np.array(least) > limits).tolist():
        raise _unreachable(budgets, least, exceeded)

    variables = [(group, width) for group, widths in enumerate(groups) for width in widths]
    if not variables:
        return []
    objective = np.array([curves[group][width] for group, width in variables])
    table = np.array([row[group][width] for row in costs for group, width in variables])
    table = table.reshape(len(costs), len(variables))
    membership = csr_array(
        (np.ones(len(variables)), ([group for group, _ in variables], range(len(variables)))),
        shape=(len(groups), len(variables)),
    )
    constraints = [LinearConstraint(membership, 1, 1)]
    if len(budgets):
        # The solver's tolerances are absolute.
        largest = np.abs(np.column_stack([table, limits])).max(1)
        scales = _SCALE / np.where(largest > 0, largest, 1.0)
        constraints.append(LinearConstraint(table * scales[:, None], -np.inf, limits * scales))
    while (chosen := _solve(objective, constraints)) is not None:
        excess = [math.fsum(row[chosen]) - limit for row, limit in zip(table, limits, strict=True)]
        if max(excess, default=0.0) <= 0:
            return [variables[index][1] for index in chosen]
        # The solver's tolerance admits slightly too much: these widths are excluded.
        _log.info("the costs exceed the budgets by %s; solving again", excess)
        constraints.append(LinearConstraint(np.isin(np.arange(len(variables)), chosen), -np.inf, len(groups) - 1))
    raise _unreachable(budgets, least, [])


def _candidates(losses: Curve, costs: Sequence[Curve]) -> list[int]:
    """The available widths that no other width dominates, ascending.

    A width is dominated if another loses no more, costs no more under every constraint, and is better in one of these
    or larger.
    """
    available = sorted(set(losses).intersection(*costs))
    if not available:
        raise ValueError("a group has no width that all its curves have")
    # Larger widths come first, so that the larger of two equal ones remains.
    values = np.array([[losses[width], *(curve[width] for curve in costs)] for width in reversed(available)])
    kept = []
    for index, value in enumerate(values):
        as_good = (values <= value).all(1)
        better = as_good & (values < value).any(1)
        if not better.any() and not as_good[:index].any():
            kept.append(available[-1 - index])
    return kept[::-1]


def _solve(objective: np.ndarray, constraints: Sequence[LinearConstraint]) -> np.ndarray | None:
    """Indices of the binary variables that are one where the objective is least; None if there is no solution."""
    result = milp(
        objective * (_SCALE / (np.abs(objective).max() or 1.0)),
        integrality=np.ones(len(objective)),
        bounds=Bounds(0, 1),
        constraints=constraints,
        options={"mip_rel_gap": 0.0},
    )
    if result.x is None:
        if result.status != 2:
            raise RuntimeError(f"the solver stopped: {result.message}")
        return None
    return np.flatnonzero(result.x > 0.5)


def _check_finite(losses: Sequence[Curve], costs: Sequence[Sequence[Curve]], budgets: Sequence[float]) -> None:
    curves = [*losses, *(curve for row in costs for curve in row)]
    if not all(map(math.isfinite, [*budgets, *(value for curve in curves for value in curve.values())])):
        text = "a loss, a cost or a budget is NaN or infinite; check the weights of the model and the rows"
        raise InputError(text, code=ErrorCode.NOT_FINITE)


def _unreachable(budgets: Sequence[float], least: Sequence[float], exceeded: Sequence[int]) -> BudgetError:
    if exceeded:
        reasons = [f"{least[index]:g} is the least for a budget of {budgets[index]:g}" for index in exceeded]
    else:
        reasons = ["each budget can be met alone, but not all together"]
    text = f"no plan meets the budgets: {', '.join(reasons)}; raise the budget"
    return BudgetError(
        text, code=ErrorCode.BUDGET_UNREACHABLE, budgets=tuple(budgets), least=tuple(least), exceeded=tuple(exceeded)
    )
