"""Plans that keep random units."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from compressor.units import PrunableGroup, Site
from graph_passes import NeuronPlan, Plan, SitePlan


def random_groups(groups: Sequence[PrunableGroup], rng: np.random.Generator) -> Plan:
    """A plan that keeps random heads and neurons at random scales; none, one and all of them in some groups."""
    plans = list(random_plan([group.site for group in groups if group.site is not None], rng).groups)
    feed_forwards = [group for group in groups if group.site is None]
    counts = [int(rng.integers(0, group.units + 1)) for group in feed_forwards]
    for index, count in zip(rng.permutation(len(feed_forwards)), (0, 1, None), strict=False):
        counts[index] = feed_forwards[index].units if count is None else count
    for group, count in zip(feed_forwards, counts, strict=True):
        kept = tuple(sorted(int(unit) for unit in rng.choice(group.units, count, replace=False)))
        scale = tuple(float(value) for value in rng.uniform(0.5, 1.5, count).astype(np.float32))
        plans.append(NeuronPlan(group.name, group.units, kept, scale))
    return Plan(groups=tuple(plans))


def random_plan(sites: Sequence[Site | SitePlan], rng: np.random.Generator) -> Plan:
    """A plan that keeps random heads at random scales: none at one site, one at another, every head at a third."""
    counts = [int(rng.integers(0, site.heads + 1)) for site in sites]
    chosen = rng.permutation(len(sites))
    for index, count in zip(chosen, (0, 1, None), strict=False):
        counts[index] = sites[index].heads if count is None else count
    plans = []
    for site, count in zip(sites, counts, strict=True):
        kept = tuple(sorted(int(head) for head in rng.choice(site.heads, count, replace=False)))
        scale = tuple(float(value) for value in rng.uniform(0.5, 1.5, count).astype(np.float32))
        plans.append(SitePlan(site.name, site.kind, site.heads, site.kv_heads, site.head_dim, kept, scale))
    return Plan(sites=tuple(plans))
