"""Michel, Levy, Neubig 2019: drop the least important heads, a tenth at a time."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Literal

from compressor.errors import UsageError
from compressor.selection.search.base import (
    Head,
    Step,
    SubsetEvaluator,
    metric_drop,
    nothing_removed_note,
    require_end,
    step_values,
)


class TaylorSearch:
    """Greedy removal by importance I_h = E_x |Att_h(x) . dL/dAtt_h(x)| (equation 2 and the one after it).

    By a budget it goes on while the metric stays within it.

    Args:
        by: what importance is: the gradient's (above), or the loss of metric when this head alone is removed (the
            order that the paper compares with, section 4.2).
        normalize: divide a head's importance by the l2 norm of its site's. None as in the paper: gradients alone.
        rescore: measure importance again before every step, with what is left, else once. None: gradients alone.
        share: heads removed a step, as a share of all heads of the model.

    Raises:
        UsageError: an option out of its range.
    """

    def __init__(
        self,
        *,
        by: Literal["gradient", "loss"] = "gradient",
        normalize: bool | None = None,
        rescore: bool | None = None,
        share: float = 0.1,
    ) -> None:
        if not 0 < share <= 1:
            raise UsageError(f"share {share}: heads removed a step; give a number above 0 and up to 1")
        self.by, self.share = by, share
        self.normalize = by == "gradient" if normalize is None else normalize
        self.rescore = by == "gradient" if rescore is None else rescore

    def choose(self, trials: SubsetEvaluator, keep: int | None, budget: float | None) -> Iterator[Step]:
        limit = require_end("taylor", keep, budget)
        kept = frozenset(trials.heads)
        baseline = trials.evaluate(kept)
        yield Step(kept, step_values(trials, kept))
        at_once = max(1, round(self.share * len(trials.heads)))
        importance: Mapping[Head, float] = {}
        while len(kept) > (keep or 0):
            if self.rescore or not importance:
                importance = self._importance(trials, kept)
            rank = ranked(importance, kept, trials.heads, self.normalize)
            gone = rank[: min(at_once, len(kept) - (keep or 0))]
            lost = metric_drop(baseline, trials.evaluate(kept - frozenset(gone)))
            if keep is None and lost > limit:
                if len(kept) == len(trials.heads):
                    what = f"the first step ({len(gone)} of {len(kept)} heads, a smaller --options share takes fewer)"
                    yield Step(kept, step_values(trials, kept), notes=(nothing_removed_note(what, lost, limit),))
                return
            kept = kept - frozenset(gone)
            yield Step(kept, step_values(trials, kept))

    def _importance(self, trials: SubsetEvaluator, kept: frozenset[Head]) -> Mapping[Head, float]:
        if self.by == "gradient":
            return trials.sensitivity(kept)
        left = [head for head in trials.heads if head in kept]
        whole = trials.evaluate(kept)
        return {h: metric_drop(whole, m) for h, m in zip(left, trials.evaluate_without(kept, left), strict=True)}


def ranked(
    importance: Mapping[Head, float], kept: frozenset[Head], heads: tuple[Head, ...], normalize: bool
) -> list[Head]:
    """The heads `kept`, least important first.

    Heads already gone are left out before the site's norm is taken; a site whose norm is zero scores zero. Of equal
    heads the later one in (site, head) order goes first, as the earlier one is kept by every method.
    """
    left = [head for head in heads if head in kept]
    norms: dict[str, float] = {}
    for site, _ in left:
        norms.setdefault(site, math.sqrt(sum(importance[head] ** 2 for head in left if head[0] == site)))

    def score(head: Head) -> float:
        if not normalize:
            return importance[head]
        return importance[head] / norms[head[0]] if norms[head[0]] else 0.0

    left.reverse()
    return sorted(left, key=score)
