"""Pruning by importance (Michel, Levy, Neubig 2019): remove the least important heads, a tenth at a time."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Literal

from pydantic import Field

from compressor.selection.options import MethodOptions
from compressor.selection.search import base
from compressor.selection.search.base import Decision, Head, SubsetEvaluator


class TaylorOptions(MethodOptions):
    """Options of `taylor`.

    `by="loss"` ranks heads by the drop of the metric when only that head is removed, the comparison of section 4.2.
    """

    by: Literal["gradient", "loss"] = Field("gradient", description="measure of importance")
    normalize: bool | None = Field(
        None, description="divide importance by the l2 norm over its site; default: true for gradient, as in the paper"
    )
    rescore: bool | None = Field(
        None, description="measure importance anew before every step; default: true for gradient, as in the paper"
    )
    rows: int = Field(
        10_000, gt=0, description="maximum number of training rows that the gradient's importance is averaged over"
    )
    share: float = Field(0.1, gt=0, le=1, description="heads removed per step, as a share of all heads")


class TaylorSearch(base.Search):
    """Greedy removal by importance I_h = E_x |Att_h(x) . dL/dAtt_h(x)| (equation 2 and the one after it).

    With a budget, it continues while the metric stays within the budget.
    """

    options_class = TaylorOptions
    options: TaylorOptions

    def choose(self, evaluator: SubsetEvaluator, keep: int | None, budget: float) -> Iterator[Decision]:
        kept = frozenset(evaluator.heads)
        baseline = evaluator.evaluate(kept)
        yield base.decide(evaluator, kept)
        by_gradient = self.options.by == "gradient"
        normalizes = by_gradient if self.options.normalize is None else self.options.normalize
        rescores = by_gradient if self.options.rescore is None else self.options.rescore
        per_step = max(1, round(self.options.share * len(evaluator.heads)))
        importance: Mapping[Head, float] = {}
        while len(kept) > (keep or 0):
            if rescores or not importance:
                importance = self._importance(evaluator, kept)
            ranking = rank_heads(importance, kept, evaluator.heads, normalize=normalizes)
            removed = ranking[: min(per_step, len(kept) - (keep or 0))]
            cost = base.metric_drop(baseline, evaluator.evaluate(kept - frozenset(removed)))
            if keep is None and cost > budget:
                first = f"the first step ({len(removed)} of {len(kept)} heads; fewer with a smaller --options share)"
                if notes := base.nothing_removed_notes(evaluator, kept, first, cost, budget):
                    yield base.decide(evaluator, kept, notes=notes)
                return
            kept = kept - frozenset(removed)
            yield base.decide(evaluator, kept)

    def _importance(self, evaluator: SubsetEvaluator, kept: frozenset[Head]) -> Mapping[Head, float]:
        """The importance of each head of `kept`, by the configured measure."""
        if self.options.by == "gradient":
            return evaluator.sensitivity(kept, self.options.rows)
        heads = [head for head in evaluator.heads if head in kept]
        baseline = evaluator.evaluate(kept)
        metrics = evaluator.evaluate_without(kept, heads)
        return {head: base.metric_drop(baseline, metric) for head, metric in zip(heads, metrics, strict=True)}


def rank_heads(
    importance: Mapping[Head, float], kept: frozenset[Head], heads: tuple[Head, ...], *, normalize: bool
) -> list[Head]:
    """The heads `kept`, least important first; of equal heads, the later one in (site, head) order comes first.

    Args:
        kept: the heads to rank; the norm of a site covers only these.
        normalize: divide by the l2 norm of the site; the heads of a site whose norm is zero score zero.
    """
    ranking = [head for head in heads if head in kept]
    norms: dict[str, float] = {}
    for site, _ in ranking:
        norms.setdefault(site, math.sqrt(sum(importance[head] ** 2 for head in ranking if head[0] == site)))

    def score(head: Head) -> float:
        if not normalize:
            return importance[head]
        return importance[head] / norms[head[0]] if norms[head[0]] else 0.0

    ranking.reverse()
    return sorted(ranking, key=score)
