"""The limit on the units that a gate keeps: a number of units, or budgets of their costs."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from compressor.selection.options import check_count

_ROUNDING = 1e-11
"""Relative excess over a budget that counts as rounding of the sum of costs."""
_SATURATED = 40.0
"""Argument from which on a sigmoid is one in float64."""
_BISECTIONS = 100


class Capacity(ABC):
    """The subsets of units that may be kept, ranked by a weight for each unit.

    Attributes:
        has_choice: whether there is more than one subset, so that there is something to learn.
        prices: cost of each unit relative to the mean of all units, `[units]`, float64.
    """

    units: int
    has_choice: bool
    prices: Tensor

    @abstractmethod
    def select(self, weights: Tensor) -> Tensor:
        """Mask `[units]` of the kept units, those of largest weight; the lower index wins a tie."""

    @abstractmethod
    def soft_select(self, weights: Tensor, temperature: float) -> Tensor:
        """Gates `[units]` that tend to a hard selection as the temperature falls, differentiable in `weights`."""


class FixedCount(Capacity):
    """Exactly K units, whatever they cost; UsageError if K is not from none to all."""

    def __init__(self, units: int, keep: int) -> None:
        check_count(keep, units, f"keep {keep}", keep)
        self.units, self.keep = units, keep
        self.has_choice = 0 < keep < units
        self.prices = torch.ones(units, dtype=torch.float64)

    def select(self, weights: Tensor) -> Tensor:
        return top(weights, self.keep)

    def soft_select(self, weights: Tensor, temperature: float) -> Tensor:
        return soft_top(weights, self.keep, temperature)


class UnitBudget(Capacity):
    """Units of unequal costs, of which those that are kept stay within one or several budgets: a knapsack.

    - `select` visits the units from the largest weight to the smallest, and keeps each that fits into what is left of
      every budget; afterwards none of the dropped units fits. With equal costs c and a budget of K c, exactly the K
      units of largest weight are kept.
    - `soft_select` is the relaxed knapsack `g_i = sigmoid((r_i - threshold) / temperature)`. At the threshold the sum
      of costs times gates is the budget; of several budgets, the one that is used up first. The threshold has the
      derivative of the implicit function, so that the gradient of a weight is that of its gate, less its cost times
      a price that all units share. A weight rises if its unit is worth more than what it takes from the budget.
      Therefore units are ranked by weight alone, not by weight per cost.

    Differentiable subset pruning draws K units one after the other, and its gates sum to K (Li et al. 2021, equations
    14 to 18). With unequal costs no number of draws meets a budget, so the threshold takes the place of the draws. As
    there, all gates are about equal at a high temperature, the budget is used up at every temperature, and the gates
    become hard as it falls. Here no gate exceeds one, and one may stay between zero and one to the end, because the
    budget is used up exactly.

    Args:
        costs: for each budget, the cost of each unit, zero or more, `[budgets, units]`.
        limits: the budgets, zero or more.

    Raises:
        ValueError: the numbers of budgets differ, or a cost or a budget is negative.
    """

    def __init__(self, costs: Sequence[Sequence[float]], limits: Sequence[float]) -> None:
        self.costs, self.limits = torch.tensor(costs, dtype=torch.float64), torch.tensor(limits, dtype=torch.float64)
        if self.costs.dim() != 2 or len(self.costs) != len(limits) or min(self.costs.min(), self.limits.min()) < 0:
            raise ValueError("costs must be [budgets, units], with one limit for each budget, none of them negative")
        self.units = self.costs.shape[1]
        room = self.limits * (1 + _ROUNDING)
        fits_alone = (self.costs <= room[:, None]).all(0)
        self.has_choice = bool((self.costs.sum(1) > room).any() and fits_alone.any())
        means = self.costs.mean(1, keepdim=True)
        self.prices = (self.costs / torch.where(means > 0, means, 1.0)).mean(0)

    def select(self, weights: Tensor) -> Tensor:
        order = torch.argsort(weights.detach(), descending=True, stable=True).tolist()
        costs, rest = self.costs.T.tolist(), (self.limits * (1 + _ROUNDING)).tolist()
        kept = []
        for unit in order:
            left = [room - cost for room, cost in zip(rest, costs[unit], strict=True)]
            if min(left) >= 0:
                kept.append(unit)
                rest = left
        mask = torch.zeros(self.units, dtype=torch.bool, device=weights.device)
        mask[kept] = True
        return mask

    def soft_select(self, weights: Tensor, temperature: float) -> Tensor:
        fixed, costs = weights.detach(), self.costs.to(weights.device)
        threshold, tightest = self._threshold(fixed, costs, temperature)
        gates = torch.sigmoid((fixed - threshold) / temperature)
        slopes = costs[tightest] * gates * (1 - gates)
        total = slopes.sum()
        shares = slopes / total if total > 0 else torch.zeros_like(slopes)
        # The value of the threshold, with the derivative of the function that the budget defines.
        moving = threshold + (shares * (weights - fixed)).sum()
        return torch.sigmoid((weights - moving) / temperature)

    def _threshold(self, weights: Tensor, costs: Tensor, temperature: float) -> tuple[Tensor, int]:
        """The threshold at which the first budget is used up, by bisection, and the index of that budget."""
        limits = self.limits.to(weights.device)
        low = (weights.min() - _SATURATED * temperature).repeat(len(limits))
        high = (weights.max() + _SATURATED * temperature).repeat(len(limits))
        for _ in range(_BISECTIONS):
            middle = (low + high) / 2
            spent = (costs * torch.sigmoid((weights - middle[:, None]) / temperature)).sum(1)
            low, high = torch.where(spent > limits, middle, low), torch.where(spent > limits, high, middle)
        tightest = int(high.argmax())
        return high[tightest], tightest


def top(weights: Tensor, keep: int) -> Tensor:
    """Mask `[units]` of the `keep` largest of `weights` `[units]`; the lower index wins a tie."""
    order = torch.argsort(weights.detach(), descending=True, stable=True)
    mask = torch.zeros(weights.shape, dtype=torch.bool, device=weights.device)
    mask[order[:keep]] = True
    return mask


def soft_top(weights: Tensor, keep: int, temperature: float) -> Tensor:
    """The relaxed K-hot vector `[units]` of perturbed weights (Li et al. 2021, equations 14 to 18).

    The entries sum to `keep` exactly; a single entry can exceed 1 while the temperature is above zero. The update of
    the weights is not divided by the temperature, as in the released code. A unit whose share is 1 to the last bit is
    out of the following draws, however far apart the weights are; the released code lowers its weight by 708.

    Args:
        weights: weights with Gumbel noise, finite, `[units]`.
        keep: K, at most the number of units.
    """
    gates = torch.zeros_like(weights)
    for _ in range(keep):
        share = torch.softmax(weights / temperature, dim=-1)
        gates = gates + share
        is_drawn = share == 1.0
        # The logarithm of 1 in place of 0 keeps the gradient finite.
        lowered = weights + torch.log(torch.where(is_drawn, 1.0, 1.0 - share))
        weights = torch.where(is_drawn, -math.inf, lowered)
    return gates
