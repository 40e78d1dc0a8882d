"""Plans of a model: those that keep some units or all, and whether a plan belongs to a model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from compressor.errors import ErrorCode, InputError
from compressor.units.prunable import PrunableGroup, Site
from graph_passes import Plan
from graph_passes.errors import listed

_SIZES = ("kind", "heads", "kv_heads", "head_dim")
"""Fields in which a plan and a model must agree on a site."""


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
