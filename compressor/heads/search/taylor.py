"""Michel, Levy, Neubig 2019: drop the heads to whose gates the loss is least sensitive, a tenth at a time."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from compressor.errors import UsageError
from compressor.heads.search.base import Head, Step, Trials


class TaylorSearch:
    """Greedy removal by importance I_h = E_x |Att_h(x) . dL/dAtt_h(x)| (equation 2 and the one after it).

    Args:
        normalize: divide a head's importance by the l2 norm of its site's.
        rescore: measure importance again before every step, else once.
        share: heads removed a step, as a share of all heads of the model.

    Raises:
        UsageError: an option out of its range.
    """

    def __init__(self, *, normalize: bool = True, rescore: bool = True, share: float = 0.1) -> None:
        if not 0 < share <= 1:
            raise UsageError(f"share {share}: heads removed a step; give a number above 0 and up to 1")
        self.normalize, self.rescore, self.share = normalize, rescore, share

    def choose(self, trials: Trials, keep: int | None, budget: float | None) -> Iterator[Step]:
        if keep is None:
            raise UsageError("taylor removes heads down to a number: none was given; say how many with --keep")
        kept = frozenset(trials.heads)
        yield Step(kept, {"metric": trials.evaluate(kept)})
        at_once = max(1, round(self.share * len(trials.heads)))
        importance: Mapping[Head, float] = {}
        while len(kept) > keep:
            if self.rescore or not importance:
                importance = trials.sensitivity(kept)
            rank = ranked(importance, kept, trials.heads, self.normalize)
            kept = kept - frozenset(rank[: min(at_once, len(kept) - keep)])
            yield Step(kept, {"metric": trials.evaluate(kept)})


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
