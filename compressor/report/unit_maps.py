"""Maps of units: heads in a table for each kind of attention, neurons as one bar a layer, in call order."""

from __future__ import annotations

from collections.abc import Sequence
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


@dataclass(frozen=True)
class Bar:
    """The neurons of one feed-forward: `label` is the part of its name that differs from the other rows."""

    label: str
    name: str
    kept: int
    neurons: int

    @property
    def percent(self) -> float:
        """Kept neurons as a percentage of all."""
        return 100 * self.kept / self.neurons


@dataclass(frozen=True)
class NeuronMap:
    """The bars of all feed-forwards. `pattern` is the common part of the rows' names, with `*` for the label."""

    pattern: str
    kept: int
    neurons: int
    rows: tuple[Bar, ...]


def neuron_map(plan: Plan) -> NeuronMap | None:
    """The bars of the feed-forwards of a plan; None where it lists none."""
    if not plan.feed_forwards:
        return None
    labels, pattern = _labels([group.name for group in plan.feed_forwards])
    rows = tuple(
        Bar(label, group.name, len(group.kept), group.units)
        for label, group in zip(labels, plan.feed_forwards, strict=True)
    )
    return NeuronMap(pattern, plan.neurons_kept, plan.neurons, rows)


def head_maps(plan: Plan) -> list[HeadMap]:
    """One map per kind, in the order of the first call."""
    kinds = dict.fromkeys(site.kind for site in plan.sites)
    return [_head_map(_TITLES[kind], [site for site in plan.sites if site.kind == kind]) for kind in kinds]


def _head_map(title: str, sites: list[SitePlan]) -> HeadMap:
    labels, pattern = _labels([site.name for site in sites])
    width = max(site.heads for site in sites)
    rows = tuple(
        Row(label, site.name, len(site.kept), site.heads, _cells(site, width))
        for label, site in zip(labels, sites, strict=True)
    )
    kept, heads = sum(row.kept for row in rows), sum(row.heads for row in rows)
    return HeadMap(title, pattern, kept, heads, tuple(range(width)), rows)


def common_pattern(names: Sequence[str]) -> str:
    """What module paths share, with `*` for the part that differs; a single name is its own pattern."""
    return _labels(list(names))[1] or names[0]


def _labels(names: list[str]) -> tuple[list[str], str]:
    """The part of each name that differs from the others, and what they share, with `*` for that part."""
    parts = [name.split(".") for name in names]
    before, after = _shared(parts)
    first = parts[0]
    pattern = ".".join([*first[:before], "*", *first[len(first) - after :]]) if before or after else ""
    return [".".join(part[before : len(part) - after]) for part in parts], pattern


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
