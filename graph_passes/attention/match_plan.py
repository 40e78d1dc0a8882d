"""Pair the sites of a plan with the attentions of a graph that has no gates yet."""

from __future__ import annotations

from graph_passes.attention.find import GraphSite
from graph_passes.errors import GraphErrorCode, PlanError, listed
from graph_passes.plan import Plan, SitePlan

Pair = tuple[SitePlan, GraphSite]

_RENAME = "use a plan of the exported model, or name its sites as the graph does (compress sites GRAPH)"
_EXPORT = "use a plan of this model, and a graph of compressor.export_reference, which names its sites"


def match_plan(plan: Plan, attentions: list[GraphSite]) -> list[Pair]:
    """Pair each site of a plan with the attentions of a graph that belong to it.

    Cases:
        1. The exporter recorded module paths: the path of each site is the scope of one attention, or of the product
           that mixes its heads, up to prefixes of wrappers. A module that the model calls several times is one site
           with several attentions of one name.
        2. It recorded none: the graph has as many attentions as the plan has sites, in the same order.

    Raises:
        PlanError: neither case applies, the numbers of heads or their widths differ, or the heads are removed already.
    """
    kept = [len(site.kept) for site in plan.sites if site.kept]
    if plan.heads_kept < plan.heads and [attention.heads for attention in attentions] == kept:
        raise PlanError(
            "the graph seems to be shrunk already: its attentions have as many heads as the plan keeps; use the graph"
            " that has every head",
            code=GraphErrorCode.ALREADY_SHRUNK,
            heads=kept,
        )
    by_name = [(site, [attention for attention in attentions if _is_of(attention, site)]) for site in plan.sites]
    has_names = any(matches for _, matches in by_name)
    pairs = _match_by_name(by_name, attentions) if has_names else _match_in_order(plan, attentions)
    for site, attention in pairs:
        if (site.heads, site.head_dim) != (attention.heads, attention.head_dim):
            raise PlanError(
                f"site {site.name}: the plan has {site.heads} heads of width {site.head_dim}, the graph"
                f" {attention.heads} of width {attention.head_dim} ({attention.name or 'nameless'}); use a plan of this"
                " model",
                code=GraphErrorCode.SITE_MISMATCH,
                site=site.name,
                attention=attention.name,
                heads=attention.heads,
                head_dim=attention.head_dim,
            )
    return pairs


def _is_of(attention: GraphSite, site: SitePlan) -> bool:
    """Whether a site is named after an attention, or after the projection that reads its heads."""
    return same_path(site.name, attention.name) or same_path(site.name, attention.projection)


def _match_by_name(by_name: list[tuple[SitePlan, list[GraphSite]]], attentions: list[GraphSite]) -> list[Pair]:
    """Case 1."""
    _require_all_matched(by_name, attentions)
    for site, matches in by_name:
        if len({attention.name for attention in matches}) > 1:
            raise PlanError(
                f"site {site.name} matches several attentions of this graph, {_names(matches)}; {_EXPORT}",
                code=GraphErrorCode.SITE_AMBIGUOUS,
                site=site.name,
                attentions=[attention.name for attention in matches],
            )
    for attention in attentions:
        sites = [site.name for site, matches in by_name if attention in matches]
        if len(sites) > 1:
            raise PlanError(
                f"the graph's attention {attention.name} matches several sites of the plan, {listed(sites)}; use a plan"
                " of this model",
                code=GraphErrorCode.SITE_AMBIGUOUS,
                attention=attention.name,
                sites=sites,
            )
    return [(site, attention) for site, matches in by_name for attention in matches]


def _require_all_matched(by_name: list[tuple[SitePlan, list[GraphSite]]], attentions: list[GraphSite]) -> None:
    matched = [attention for _, matches in by_name for attention in matches]
    missing = [site.name for site, matches in by_name if not matches]
    unlisted = [attention for attention in attentions if attention not in matched]
    if not missing and not unlisted:
        return
    if missing and unlisted:
        problem = (
            f"no attention of the graph matches {listed(missing)} of the plan, and no site of the plan matches"
            f" {_names(unlisted)} of the graph"
        )
    elif missing:
        problem = f"no attention of the graph ({_names(attentions)}) matches {listed(missing)} of the plan"
    else:
        problem = (
            f"no site of the plan ({listed(site.name for site, _ in by_name)}) matches {_names(unlisted)} of the graph"
        )
    remedy = _RENAME if missing else "list every attention in the plan, with all of its heads where none is dropped"
    raise PlanError(
        f"{problem}; {remedy}",
        code=GraphErrorCode.SITE_MISSING,
        sites=missing,
        attentions=[attention.name for attention in unlisted],
    )


def _match_in_order(plan: Plan, attentions: list[GraphSite]) -> list[Pair]:
    """Case 2."""
    if len(attentions) != len(plan.sites):
        has_names = any(attention.name for attention in attentions)
        names = f"under other names ({_names(attentions)})" if has_names else "without names"
        raise PlanError(
            f"the plan has {len(plan.sites)} sites ({listed(site.name for site in plan.sites)}) and the graph"
            f" {len(attentions)} recognized attentions, {names}; {_RENAME if has_names else _EXPORT}",
            code=GraphErrorCode.SITE_MISMATCH,
            sites=len(plan.sites),
            attentions=len(attentions),
        )
    pairs = list(zip(plan.sites, attentions, strict=True))
    for site, attention in pairs:
        if (site.kind == "cross") != (attention.kind == "cross"):
            raise PlanError(
                f"site {site.name}: {site.kind} attention in the plan, but the graph's attention at the same position"
                f" ({attention.name or 'nameless'}) is {attention.kind}; {_EXPORT}",
                code=GraphErrorCode.SITE_MISMATCH,
                site=site.name,
                kind=attention.kind,
            )
    return pairs


def same_path(name: str, scope: str | None) -> bool:
    """Whether a node's scope lies in a group's module, up to a prefix that one of the two has and the other lacks."""
    if scope is None:
        return False
    path, scope_path = name.split("."), scope.split(".")
    starts = range(max(len(path), len(scope_path)))
    inside = any(scope_path[start : start + len(path)] == path for start in starts)
    return inside or any(path[start:] == scope_path for start in starts if path[start:])


def _names(attentions: list[GraphSite]) -> str:
    return listed(attention.name or "a nameless one" for attention in attentions)
