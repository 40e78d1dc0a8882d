"""Several pools of heads instead of one: bidirectional, causal and cross attention each keep a number of their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from compressor.selection.gates.base import Gate


class PooledGate(Gate):
    """One gate a pool, acting as one gate over the whole model.

    Args:
        make: called with (layers, keep, seed) for each pool.
        layers: heads of each site, in site order.
        pools: the pool of each site, e.g. its kind.
        keep: heads to keep over all pools that learn, shared out by `shares`; None: as many as each leaves open.
        seed: each pool draws from a seed of its own.
        only: the one pool that learns, the others keep every head; None: all learn.
    """

    def __init__(
        self,
        make: Callable[..., Gate],
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
        keeps: Sequence[int | None] = [None] * len(sizes) if keep is None else shares(keep, sizes)
        # The first pool's seed is the run's own: a model of one pool gives the plan of the gate alone.
        self.parts = nn.ModuleList(
            make([layers[site] for site in member], count, seed + 7_919 * number)
            for number, (member, count) in enumerate(zip(members, keeps, strict=True))
        )
        rest = [site for site, pool in enumerate(pools) if pool not in names]
        self.whole = sum(layers[site] for site in rest)
        heads = torch.arange(sum(layers)).split(list(layers))
        order = torch.cat([heads[site] for member in (*members, rest) for site in member])
        # Where each head of the model lies in the pools laid end to end.
        self.register_buffer("where", torch.argsort(order), persistent=False)
        first = self._gates[0]
        self.heads, self.steps = sum(layers), first.steps
        self.learning_rate, self.max_grad_norm = first.learning_rate, first.max_grad_norm

    @property
    def _gates(self) -> list[Gate]:
        return [part for part in self.parts if isinstance(part, Gate)]

    def _laid_out(self, parts: list[Tensor]) -> Tensor:
        where = self.where
        assert isinstance(where, Tensor)
        return torch.cat([*parts, parts[0].new_ones(self.whole)])[where]

    def sample(self, step: int) -> Tensor:
        return self._laid_out([gate.sample(step) for gate in self._gates])

    def harden(self) -> Tensor:
        return self._laid_out([gate.harden() for gate in self._gates])

    def scale(self) -> Tensor:
        return self._laid_out([gate.scale() for gate in self._gates])

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
        return {name: sum(part[name] for part in parts) + self.whole for name in parts[0]}


def shares(keep: int, sizes: Sequence[int]) -> list[int]:
    """`keep` shared out over pools in proportion to their `sizes`, by largest remainder; ties go to the first."""
    total = sum(sizes)
    exact = [keep * size / total for size in sizes]
    counts = [int(share) for share in exact]
    by_rest = sorted(range(len(sizes)), key=lambda pool: counts[pool] - exact[pool])
    for pool in by_rest[: keep - sum(counts)]:
        counts[pool] += 1
    return counts
