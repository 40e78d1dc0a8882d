"""Units that can be pruned: the heads of an attention, and groups of interchangeable units; and plans of a model.

Nothing here needs PyTorch: the groups of a graph are those of a model too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, Self, runtime_checkable

import numpy as np

from compressor.config.values import GroupBy
from compressor.errors import ErrorCode, InputError
from graph_passes import Kind, Plan, Refusal
from graph_passes.errors import listed
from graph_passes.plan import GroupPlan, GroupType, NeuronPlan, SitePlan

Attention = Literal["eager", "sdpa"]
"""Implementation of attention in transformers."""
_MULTIPLES = ((1024, 32), (256, 16), (64, 8))
"""(Minimum number of neurons, multiple): the numbers of neurons that matmuls run well with."""
_SIZES = ("kind", "heads", "kv_heads", "head_dim")
"""Fields in which a plan and a model must agree on a site."""


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
            projection of a feed-forward. None: no output projection was recognized.
        site: the attention; None for neurons.
        bundle: consecutive units that are kept or dropped together.
        parts: number of consecutive parts of equal size, each of which keeps equally many units.
        limit: largest number of units that can be kept after earlier removals; None: all units.
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

    @classmethod
    def of_heads(cls, site: Site, linear: str | None, group_by: GroupBy) -> Self:
        """The query heads of an attention, whose output projection is at a path; see `find_groups` for `group_by`."""
        shared = site.heads // site.kv_heads
        bundle, parts = (1, site.kv_heads) if group_by == "query" and shared > 1 else (shared, 1)
        return cls(site.name, "heads", site.heads, site.head_dim, bundle * parts, linear, site, bundle, parts)

    @classmethod
    def of_neurons(cls, linear: str, units: int) -> Self:
        """The neurons that the linear at a path reads."""
        multiple = next((multiple for minimum, multiple in _MULTIPLES if units >= minimum), 1)
        return cls(linear, "neurons", units, 1, multiple, linear)

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


@dataclass(frozen=True, eq=False)
class LinearWeights:
    """The weights of a linear y = W x + b.

    Attributes:
        weight: W `[outputs, inputs]`, float32 or float64; fitted weights are float64, and zero in columns not kept.
        bias: b `[outputs]`, float64; None for a linear without bias.
        damp: of fitted weights: share of the mean diagonal that was added to the diagonal of the Gram matrix; more than
            requested if the matrix has no Cholesky factor with that.
    """

    weight: np.ndarray
    bias: np.ndarray | None
    damp: float = 0.0

    @property
    def extended(self) -> np.ndarray:
        """The weight with the bias, if there is one, as its last column, float64."""
        columns = self.weight if self.bias is None else np.column_stack([self.weight, self.bias])
        return np.array(columns, np.float64)

    @classmethod
    def of(cls, extended: np.ndarray, damp: float, *, has_ones: bool) -> LinearWeights:
        """The weights whose `extended` this is."""
        weight, bias = (extended[:, :-1].copy(), extended[:, -1].copy()) if has_ones else (extended, None)
        return cls(weight, bias, damp)


@runtime_checkable
class KnowsGroups(Protocol):
    """A model that knows its groups of units, such as a graph: they are not searched.

    Attributes:
        sites: the attentions, named by the linears that mix their heads.
        feed_forwards: path of each linear that reads neurons -> their number.
        group_names: names of all groups, in the order in which the model calls them.
        obstacles: operators that look like an attention or a feed-forward but are no group, with the reason.
        search_outcome: the result of the search for groups, for messages.
        file: the file that holds them.
    """

    @property
    def sites(self) -> Sequence[Site]: ...
    @property
    def feed_forwards(self) -> Mapping[str, int]: ...
    @property
    def group_names(self) -> Sequence[str]: ...
    @property
    def obstacles(self) -> Sequence[Refusal]: ...
    @property
    def search_outcome(self) -> str: ...
    @property
    def file(self) -> Path: ...


def known_groups(model: KnowsGroups, group_by: GroupBy) -> list[PrunableGroup]:
    """The groups of a model that knows them, in the order in which it calls them; see `find_groups` for `group_by`.

    Raises:
        InputError: the model has no groups.
    """
    if not model.group_names:
        raise nothing_to_remove(model)
    groups = {site.name: PrunableGroup.of_heads(site, site.name, group_by) for site in model.sites}
    groups |= {name: PrunableGroup.of_neurons(name, units) for name, units in model.feed_forwards.items()}
    return [groups[name] for name in model.group_names]


def nothing_to_remove(model: KnowsGroups) -> InputError:
    """The error for a graph without units that can be removed."""
    text = f"nothing can be removed. {model.search_outcome}"
    return InputError.of_file(
        model.file, text, ErrorCode.UNSUPPORTED_MODEL, obstacles=tuple(str(obstacle) for obstacle in model.obstacles)
    )


def unit_columns(units: Iterable[int], width: int) -> np.ndarray:
    """Indices of the inputs of a linear that belong to units of `width` consecutive inputs each."""
    starts = np.fromiter(units, np.intp) * width
    return (starts[:, None] + np.arange(width)).reshape(-1)


def keep_only(sites: Iterable[Site], scales: Mapping[tuple[str, int], float]) -> Plan:
    """The plan that keeps the heads in `scales`, by site name and head index, each at its scale.

    Raises:
        ValueError: a head in `scales` is of none of the sites.
    """
    sites = list(sites)
    if unknown := scales.keys() - {(site.name, head) for site in sites for head in range(site.heads)}:
        raise ValueError(f"{min(unknown)}: no such head")
    kept = [(site, [head for head in range(site.heads) if (site.name, head) in scales]) for site in sites]
    return Plan(sites=tuple(site.plan(heads, [scales[site.name, head] for head in heads]) for site, heads in kept))


def keep_all(groups: Sequence[Site | PrunableGroup]) -> Plan:
    """The plan of these sites or groups that keeps every unit at scale one."""
    units = ((group, group.units if isinstance(group, PrunableGroup) else group.heads) for group in groups)
    return Plan(groups=tuple(group.plan(range(count)) for group, count in units))


def check_plan(plan: Plan, sites: Sequence[Site], *, source: str = "plan") -> None:
    """Check that a plan has an entry for every site of a model and for nothing else, with equal kinds and sizes.

    `source` is the origin of the plan, for the error message.

    Raises:
        InputError: an entry is missing, superfluous or different.
    """
    in_model = {site.name: site for site in sites}
    in_plan = {site.name: site for site in plan.sites}
    if foreign := [name for name in in_plan if name not in in_model]:
        named = f", its sites are {listed(in_model, 3)}" if in_model else ", and has none"
        raise plan_mismatch(f"the model has no attention site {foreign[0]}{named}", foreign[0], source)
    check_no_site_is_missing(plan, sites, source=source)
    for name, site in in_model.items():
        for field in _SIZES:
            actual, planned = getattr(site, field), getattr(in_plan[name], field)
            if actual != planned:
                text = f"{name}: {field} is {planned} in the plan, {actual} in the model"
                raise plan_mismatch(text, name, source, field=field, planned=planned, actual=actual)


def check_no_site_is_missing(plan: Plan, sites: Iterable[Site], *, source: str = "plan") -> None:
    """Check that a plan, from some source, has an entry for every site of a model.

    Raises:
        InputError: an entry is missing.
    """
    planned = {site.name for site in plan.sites}
    for site in sites:
        if site.name not in planned:
            raise missing_site(site.name, source)


def plan_mismatch(text: str, site: str, source: str = "plan", **details: Any) -> InputError:
    """The error for a plan that does not fit the model at a site, or at the linear of a feed-forward."""
    text = f"{source}: {text}; use a plan that was learned on this model"
    return InputError(text, code=ErrorCode.PLAN_MISMATCH, site=site, **details)


def missing_site(name: str, source: str) -> InputError:
    text = f"{source}: site {name} of the model is missing; add an entry for every site"
    return InputError(text, code=ErrorCode.PLAN_MISMATCH, site=name)
