"""The layer x head map as a table: one for each kind of attention, rows in the order in which the model calls them."""

from __future__ import annotations

import os.path
from dataclasses import dataclass

from graph_passes import Kind, Plan, SitePlan

_TITLES: dict[Kind, str] = {
    "encoder": "Encoder self-attention",
    "decoder": "Decoder self-attention",
    "cross": "Cross-attention",
}


@dataclass(frozen=True)
class Cell:
    """One head. `state` is `kept`, `dropped` or `absent` (the layer has no head of this number)."""

    state: str
    told: str = ""
    """What the tooltip says: site, head, scale."""
    group: bool = False
    """The first query head of its key/value head, where several share one: a gap is drawn before it."""


@dataclass(frozen=True)
class Row:
    """One site: `label` is what tells its name from its neighbours', `name` all of it."""

    label: str
    name: str
    kept: int
    heads: int
    cells: tuple[Cell, ...]


@dataclass(frozen=True)
class HeadMap:
    """The map of one kind. `pattern` is what the rows' names share, with `*` for the label."""

    title: str
    pattern: str
    kept: int
    heads: int
    columns: tuple[int, ...]
    rows: tuple[Row, ...]


def head_maps(plan: Plan) -> list[HeadMap]:
    """One map a kind, kinds in order of first call."""
    kinds = dict.fromkeys(site.kind for site in plan.sites)
    return [_head_map(_TITLES[kind], [site for site in plan.sites if site.kind == kind]) for kind in kinds]


def _head_map(title: str, sites: list[SitePlan]) -> HeadMap:
    names = [site.name for site in sites]
    before, after = _shared(names)
    width = max(site.heads for site in sites)
    rows = tuple(
        Row(site.name[before : len(site.name) - after], site.name, len(site.kept), site.heads, _cells(site, width))
        for site in sites
    )
    pattern = f"{names[0][:before]}*{names[0][len(names[0]) - after :]}" if before or after else ""
    kept, heads = sum(row.kept for row in rows), sum(row.heads for row in rows)
    return HeadMap(title, pattern, kept, heads, tuple(range(width)), rows)


def _shared(names: list[str]) -> tuple[int, int]:
    """Lengths of the leading and the trailing part that all names share, cut at dots so that no label loses digits."""
    if len(names) < 2:
        return 0, 0
    before = os.path.commonprefix(names).rfind(".") + 1
    backwards = [name[before:][::-1] for name in names]
    after = os.path.commonprefix(backwards).rfind(".") + 1
    return before, after


def _cells(site: SitePlan, width: int) -> tuple[Cell, ...]:
    served = site.heads // site.kv_heads
    cells = []
    for head, gate in enumerate(site.gate):
        kept = head in site.kept
        told = f"{site.name}, head {head}: " + (f"kept, scale {gate:.4g}" if kept else "dropped")
        if served > 1:
            told += f"; key/value head {head // served}"
        cells.append(Cell("kept" if kept else "dropped", told, served > 1 and head > 0 and head % served == 0))
    return (*cells, *[Cell("absent")] * (width - site.heads))
