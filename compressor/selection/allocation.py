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
from highspy import Highs, HighsLp, HighsModelStatus, HighsVarType, MatrixFormat

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

    if not groups:
        return []
    values = [np.array([curve[width] for width in widths]) for widths, curve in zip(groups, curves, strict=True)]
    tables = [
        np.array([[row[group][width] for width in widths] for row in costs]).reshape(len(costs), len(widths))
        for group, widths in enumerate(groups)
    ]
    chosen = least_loss(values, tables, limits)
    if chosen is None:
        raise _unreachable(budgets, least, [])
    return [widths[index] for widths, index in zip(groups, chosen, strict=True)]


def least_loss(losses: Sequence[np.ndarray], costs: Sequence[np.ndarray], limits: np.ndarray) -> list[int] | None:
    """The candidate of each group, for which the sum of losses is least and every sum of costs is within its limit.

    Args:
        losses: by group, the loss of each candidate, `[candidates]`, from the narrowest width to the widest.
        costs: by group, what each candidate costs under each constraint, `[constraints, candidates]`.
        limits: the largest sum of costs, `[constraints]`.

    Returns:
        The index of the candidate of each group; None: no candidates are within all limits.
    """
    objective, table = np.concatenate(losses), np.concatenate(costs, axis=1)
    sizes = [len(values) for values in losses]
    group_of = np.repeat(np.arange(len(losses)), sizes)
    # The solver's tolerances are absolute.
    largest = np.abs(np.column_stack([table, limits])).max(1)
    scales = _SCALE / np.where(largest > 0, largest, 1.0)
    rows = [*(group_of == np.arange(len(losses))[:, None]).astype(float), *(table * scales[:, None])]
    lower, upper = [1.0] * len(losses) + [-np.inf] * len(limits), [1.0] * len(losses) + (limits * scales).tolist()
    while (chosen := _solve(objective, np.array(rows), lower, upper)) is not None:
        excess = [math.fsum(row[chosen]) - limit for row, limit in zip(table, limits, strict=True)]
        if max(excess, default=0.0) <= 0:
            return [int(index) for index in chosen - (np.cumsum(sizes) - sizes)]
        # The solver's tolerance admits slightly too much: these widths are excluded.
        _log.info("the costs exceed the budgets by %s; solving again", excess)
        rows.append(np.isin(np.arange(len(objective)), chosen).astype(float))
        lower.append(-np.inf)
        upper.append(len(losses) - 1.0)
    return None


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


def _solve(
    objective: np.ndarray, rows: np.ndarray, lower: Sequence[float], upper: Sequence[float]
) -> np.ndarray | None:
    """Indices of the binary variables that are one where the objective is least; None if there is no solution.

    Args:
        objective: the coefficient of each variable.
        rows: the coefficients of each constraint, `[constraints, variables]`.
        lower: the least value of each constraint.
        upper: the largest value of each constraint.
    """
    program = HighsLp()
    program.num_row_, program.num_col_ = rows.shape
    program.col_cost_ = objective * (_SCALE / (np.abs(objective).max() or 1.0))
    program.col_lower_, program.col_upper_ = np.zeros_like(objective), np.ones_like(objective)
    program.integrality_ = [HighsVarType.kInteger] * len(objective)
    program.row_lower_, program.row_upper_ = np.array(lower), np.array(upper)
    matrix, (constraints, matrix_columns) = program.a_matrix_, np.nonzero(rows)
    matrix.format_ = MatrixFormat.kRowwise
    matrix.start_ = np.searchsorted(constraints, np.arange(len(rows) + 1))
    matrix.index_, matrix.value_ = matrix_columns, rows[constraints, matrix_columns]
    solver = Highs()
    solver.silent()
    solver.setOptionValue("mip_rel_gap", 0.0)
    solver.passModel(program)
    solver.run()
    status = solver.getModelStatus()
    if status == HighsModelStatus.kInfeasible:
        return None
    if status != HighsModelStatus.kOptimal:
        raise RuntimeError(f"the solver stopped: {solver.modelStatusToString(status)}")
    return np.flatnonzero(np.array(solver.getSolution().col_value) > 0.5)


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
