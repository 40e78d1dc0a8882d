"""What can be pruned: the heads of an attention, and groups of interchangeable units, whose numbers a plan chooses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from graph_passes import Kind
from graph_passes.plan import GroupPlan, GroupType, NeuronPlan, SitePlan


@dataclass(frozen=True)
class Site:
    """The heads of one attention.

    Attributes:
        name: module path of the attention, e.g. `bert.encoder.layer.0.attention.self`, or, outside transformers'
            attention interface, of the projection that reads the heads, e.g. `mpnet.encoder.layer.0.attention.attn.o`.
        kind: `bidirectional`, `causal` (both self-attention) or `cross`.
        heads: query heads.
        kv_heads: key/value heads; divides `heads`.
        head_dim: width of the value vector of one head.
        batch_axis: axis that holds the rows of a batch where the heads are read: 0, or 1 in families whose tensors have
            positions first.
    """

    name: str
    kind: Kind
    heads: int
    kv_heads: int
    head_dim: int
    batch_axis: int = 0

    def plan(self, kept: Iterable[int], scale: Iterable[float] = ()) -> SitePlan:
        """The plan that keeps these heads, each at its scale, or all at scale one."""
        return SitePlan(self.name, self.kind, self.heads, self.kv_heads, self.head_dim, tuple(kept), tuple(scale))


@dataclass(frozen=True)
class PrunableGroup:
    """Interchangeable units at one point of a model, of which a plan keeps some number that `counts` has.

    Query heads that share a key/value head are removed together, as one bundle; or one by one, as many from every part,
    where a part is the query heads of one key/value head.

    Attributes:
        name: name of the group in plans: module path of the attention, or of the linear that reads the neurons.
        type: `heads` or `neurons`.
        units: number of units.
        width: consecutive inputs of `linear` that belong to one unit.
        multiple: a kept count is a multiple of it, or all units.
        linear: module path of the linear that the group ends in: the output projection of an attention, or the down
            projection of a feed-forward. None: the attention has none that could be recognized.
        site: the attention; None for neurons.
        bundle: consecutive units that are kept or dropped together.
        parts: number of consecutive parts of equal size, each of which keeps equally many units.
        limit: largest number of units that can be kept, where others were removed before; None: all.
    """

    name: str
    type: GroupType
    units: int
    width: int
    multiple: int
    linear: str | None
    site: Site | None = None
    bundle: int = 1
    parts: int = 1
    limit: int | None = None

    @property
    def counts(self) -> tuple[int, ...]:
        """Every number of units that can be kept, ascending, from none to all, or to the limit."""
        most = self.units if self.limit is None else self.limit
        return (*range(0, most, self.multiple), most)

    @property
    def bundles(self) -> int:
        """Number of bundles."""
        return self.units // self.bundle

    def require_count(self, count: int) -> None:
        """Raise ValueError unless `count` units can be kept, as whole bundles and equally many in each part."""
        if not 0 <= count <= self.units or count % (self.bundle * self.parts):
            raise ValueError(
                f"{self.name}: {count} of {self.units} units cannot be kept; give a multiple of"
                f" {self.bundle * self.parts}"
            )

    def dropped_bundles(self, count: int) -> int:
        """Number of bundles that are dropped if `count` units are kept; see `require_count`."""
        self.require_count(count)
        return self.bundles - count // self.bundle

    def first(self, count: int) -> tuple[int, ...]:
        """Ids of the first units of each part, `count` in all, ascending.

        Where parts cannot keep equally many, as in plans of methods that choose single heads, the first keep one more.
        """
        size = self.units // self.parts
        each, more = divmod(count, self.parts)
        return tuple(part * size + unit for part in range(self.parts) for unit in range(each + (part < more)))

    def can_keep(self, kept: Sequence[int]) -> bool:
        """Whether these units are whole bundles, and equally many in each part."""
        bundles, parts = (Counter(unit // size for unit in kept) for size in (self.bundle, self.units // self.parts))
        return all(number == self.bundle for number in bundles.values()) and (
            len({parts[part] for part in range(self.parts)}) == 1
        )

    def plan(self, kept: Sequence[int]) -> GroupPlan:
        """The plan that keeps these units at scale one."""
        return NeuronPlan(self.name, self.units, tuple(kept)) if self.site is None else self.site.plan(kept)


def unit_columns(units: Iterable[int], width: int) -> np.ndarray:
    """Indices of the inputs of a linear that belong to units of `width` consecutive inputs each."""
    starts = np.fromiter(units, np.intp) * width
    return (starts[:, None] + np.arange(width)).reshape(-1)
