"""Maps of layers and heads: a table for each kind of attention, with rows in call order."""

from __future__ import annotations

from dataclasses import dataclass

from graph_passes import Kind, Plan, SitePlan

_TITLES: dict[Kind, str] = {
    "bidirectional": "Bidirectional self-attention",
    "causal": "Causal self-attention",
    "cross": "Cross-attention",
}


@dataclass(frozen=True)
class Cell:
    """One head. `state` is `kept`, `dropped` or `absent` (the layer has no head of this number)."""

    state: str
    tooltip: str = ""
    """Site, head and scale."""
    group: bool = False
    """Whether it is the first query head of a shared key/value head; a gap is drawn before it."""


@dataclass(frozen=True)
class Row:
    """One site: `label` is the part of its name that differs from the other rows, `name` the whole name."""

    label: str
    name: str
    kept: int
    heads: int
    cells: tuple[Cell, ...]


@dataclass(frozen=True)
class HeadMap:
    """The map of one kind. `pattern` is the common part of the rows' names, with `*` for the label."""

    title: str
    pattern: str
    kept: int
    heads: int
    columns: tuple[int, ...]
    rows: tuple[Row, ...]


def head_maps(plan: Plan) -> list[HeadMap]:
    """One map per kind, in the order of the first call."""
    kinds = dict.fromkeys(site.kind for site in plan.sites)
    return [_head_map(_TITLES[kind], [site for site in plan.sites if site.kind == kind]) for kind in kinds]


def _head_map(title: str, sites: list[SitePlan]) -> HeadMap:
    parts = [site.name.split(".") for site in sites]
    before, after = _shared(parts)
    width = max(site.heads for site in sites)
    rows = tuple(
        Row(".".join(part[before : len(part) - after]), site.name, len(site.kept), site.heads, _cells(site, width))
        for part, site in zip(parts, sites, strict=True)
    )
    pattern = ".".join([*parts[0][:before], "*", *parts[0][len(parts[0]) - after :]]) if before or after else ""
    kept, heads = sum(row.kept for row in rows), sum(row.heads for row in rows)
    return HeadMap(title, pattern, kept, heads, tuple(range(width)), rows)


def _shared(names: list[list[str]]) -> tuple[int, int]:
    """Numbers of leading and of trailing parts that all names share; at least one part of each name remains."""
    most = min(map(len, names)) - 1 if len(names) > 1 else 0
    before = next((part for part in range(most) if len({name[part] for name in names}) > 1), most)
    rest = most - before
    after = next((part for part in range(rest) if len({name[-1 - part] for name in names}) > 1), rest)
    return before, after


def _cells(site: SitePlan, width: int) -> tuple[Cell, ...]:
    served = site.heads // site.kv_heads
    cells = []
    for head, gate in enumerate(site.gate):
        kept = head in site.kept
        tooltip = f"{site.name}, head {head}: " + (f"kept, scale {gate:.4g}" if kept else "dropped")
        if served > 1:
            tooltip += f"; key/value head {head // served}"
        cells.append(Cell("kept" if kept else "dropped", tooltip, served > 1 and head > 0 and head % served == 0))
    return (*cells, *[Cell("absent")] * (width - site.heads))
