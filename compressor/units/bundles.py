"""Bundles of the units of a group, each with one gate."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from compressor.units.find import Site
from compressor.units.groups import PrunableGroup
from graph_passes.plan import GroupPlan


@dataclass(frozen=True)
class Bundles:
    """The units of a group in bundles that are kept or dropped together, `group.step` units each.

    Any subset of the bundles keeps a number of units that `group.counts` has. Where the number of units is no multiple
    of the step, those that are left over belong to no bundle, and are kept only together with all others.

    Attributes:
        group: the group; heads have one part.
        order: ids of all units; each bundle is a run of them.
    """

    group: PrunableGroup
    order: tuple[int, ...]

    @classmethod
    def of_site(cls, site: Site) -> Bundles:
        """Every head of an attention alone."""
        return cls(
            PrunableGroup(site.name, "heads", site.heads, site.head_dim, 1, None, site), tuple(range(site.heads))
        )

    @property
    def name(self) -> str:
        """Name of the group."""
        return self.group.name

    @property
    def count(self) -> int:
        """Number of bundles."""
        return self.group.units // self.group.step

    @functools.cached_property
    def _bundle_of(self) -> Tensor:
        """The bundle of each unit, `[units]`; `count` for units that are left over."""
        bundles = torch.empty(self.group.units, dtype=torch.int64)
        bundles[list(self.order)] = torch.arange(self.group.units) // self.group.step
        return bundles

    def spread(self, gates: Tensor) -> Tensor:
        """The gate of each unit, `[units]`, from those of the bundles, `[bundles]`; the least for those left over."""
        if self.count * self.group.step < self.group.units:
            gates = torch.cat([gates, gates.amin(0, keepdim=True)])
        return gates[self._bundle_of.to(gates.device)]

    def plan(self, gates: Tensor) -> GroupPlan:
        """The plan that keeps the bundles whose gate `[bundles]` is not zero, at their gates."""
        units = self.spread(gates).tolist()
        kept = [unit for unit, gate in enumerate(units) if gate != 0]
        return dataclasses.replace(self.group.plan(kept), scale=tuple(units[unit] for unit in kept))
