"""Several pools of heads instead of one: bidirectional, causal and cross attention each keep their own number."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from compressor.selection.gates.base import Gate

_SEED_STRIDE = 7_919
"""Distance between the seeds of two pools."""


class PerKindGate(Gate):
    """One gate per pool, which act as one gate over the whole model.

    Pools are numbered in the order of their first site, so seeds do not depend on the pools' names.

    Args:
        make: constructs the gate of a pool from its (layers, keep, seed).
        layers: heads of each site, in site order.
        pools: the pool of each site, e.g. its kind.
        keep: number of heads to keep over all pools that learn, divided among them by `divide_heads`; None: as many as
            each leaves open.
        seed: seed of the first pool; every further pool has its own.
        only: the only pool that learns, while the others keep every head; None: all learn.
    """

    def __init__(
        self,
        make: Callable[[Sequence[int], int | None, int], Gate],
        layers: Sequence[int],
        pools: Sequence[str],
        keep: int | None,
        seed: int,
        only: str | None = None,
    ) -> None:
        super().__init__()
        names = list(dict.fromkeys(pools)) if only is None else [only]
        members = [[site for site, pool in enumerate(pools) if pool == name] for name in names]
        sizes = [sum(layers[site] for site in member) for member in members]
        keeps: Sequence[int | None] = [None] * len(sizes) if keep is None else divide_heads(keep, sizes)
        # The first pool has the seed of the run, so a model with a single pool gets the same plan as without pools.
        self.parts = nn.ModuleList(
            make([layers[site] for site in member], count, seed + _SEED_STRIDE * number)
            for number, (member, count) in enumerate(zip(members, keeps, strict=True))
        )
        fixed = [site for site, pool in enumerate(pools) if pool not in names]
        self.fixed_heads = sum(layers[site] for site in fixed)
        heads = torch.arange(sum(layers)).split(list(layers))
        order = torch.cat([heads[site] for member in (*members, fixed) for site in member])
        # Index of each head of the model in the concatenated pools.
        self.register_buffer("index", torch.argsort(order), persistent=False)
        first = self._gates[0]
        self.units, self.steps = sum(layers), first.steps
        self.learning_rate, self.max_grad_norm = first.learning_rate, first.max_grad_norm

    @property
    def _gates(self) -> list[Gate]:
        """The gates of the pools."""
        return [part for part in self.parts if isinstance(part, Gate)]

    def _in_site_order(self, parts: list[Tensor]) -> Tensor:
        """Values `[heads]` in (site, head) order from those of each pool; ones for the heads that do not learn."""
        index = self.index
        assert isinstance(index, Tensor)
        return torch.cat([*parts, parts[0].new_ones(self.fixed_heads)])[index]

    def sample(self, step: int) -> Tensor:
        return self._in_site_order([gate.sample(step) for gate in self._gates])

    def harden(self) -> Tensor:
        return self._in_site_order([gate.harden() for gate in self._gates])

    def scale(self) -> Tensor:
        return self._in_site_order([gate.scale() for gate in self._gates])

    def penalty(self, step: int) -> Tensor:
        return torch.stack([gate.penalty(step) for gate in self._gates]).sum()

    def learning_rate_at(self, step: int) -> float:
        return self._gates[0].learning_rate_at(step)

    def is_settled(self, step: int) -> bool:
        return all(gate.is_settled(step) for gate in self._gates)

    def readings(self, step: int) -> dict[str, float]:
        return self._gates[0].readings(step)

    def counts(self) -> dict[str, float]:
        parts = [gate.counts() for gate in self._gates]
        return {name: sum(part[name] for part in parts) + self.fixed_heads for name in parts[0]}


def divide_heads(keep: int, sizes: Sequence[int]) -> list[int]:
    """Divide `keep` among pools in proportion to their `sizes`, by largest remainder; the first pool wins a tie."""
    total = sum(sizes)
    exact = [keep * size / total for size in sizes]
    counts = [int(share) for share in exact]
    by_remainder = sorted(range(len(sizes)), key=lambda pool: counts[pool] - exact[pool])
    for pool in by_remainder[: keep - sum(counts)]:
        counts[pool] += 1
    return counts
