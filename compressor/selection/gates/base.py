"""Base of the gates: a weight per unit that ranks the units, noise, and straight-through gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor, nn

from compressor.selection.gates.capacity import Capacity, FixedCount
from compressor.selection.options import MethodOptions
from compressor.units.gate import Gate

GateLearningRate = Annotated[float, Field(gt=0, description="peak learning rate of the gate's weights")]
_SEED_STRIDE = 7_919
"""Distance between the seeds of two pools."""
Keep = int | Capacity
"""The units that a gate keeps: a number of units, or as many as fit into budgets."""


class GateOptions(MethodOptions):
    """Options of every gate. A gate with options of its own derives a class from this one."""

    gate_learning_rate: GateLearningRate = 0.5
    gate_max_grad_norm: float = Field(1.0, gt=0, description="maximum norm of the gradient of the gate's weights")


class RankedGate(Gate):
    """A gate with one weight per unit: the units of largest weight are kept, ties in (group, unit) order.

    A registered gate derives from this class and sets `options_class`.

    Args:
        keep: number of units to keep, from none to all, or budgets of their costs. If only all units or none can be
            kept, there is no choice to learn, and gates are constant. None: a penalty decides.
        seed: seed of the initial weights, and of the noise of every step.

    Raises:
        UsageError: `keep` is out of range.
    """

    options_class: ClassVar[type[GateOptions]]
    options: GateOptions

    def __init__(
        self, layers: Sequence[int], keep: Keep | None, steps: int, seed: int, options: GateOptions | None = None
    ) -> None:
        super().__init__()
        self.options = options or self.options_class()
        self.layers, self.units, self.steps, self.seed = tuple(layers), sum(layers), steps, seed
        self.is_free, keep = keep is None, self.units if keep is None else keep
        self.capacity: Capacity = keep if isinstance(keep, Capacity) else FixedCount(self.units, keep)
        self.learning_rate, self.max_grad_norm = self.options.gate_learning_rate, self.options.gate_max_grad_norm
        # The weights stay float64 when the model around them is moved or saved.
        self.weight = nn.Parameter(self.initial_weights().to(torch.float64))

    def initial_weights(self) -> Tensor:
        """Small seeded noise `[units]`: Xavier-uniform over [layers, heads].

        The released code of differentiable subset pruning does the same.
        """
        bound = math.sqrt(6.0 / (len(self.layers) + max(self.layers)))
        generator = torch.Generator().manual_seed(self.seed % 2**63)
        return (2.0 * torch.rand(self.units, dtype=torch.float64, generator=generator) - 1.0) * bound

    @property
    def has_choice(self) -> bool:
        """Whether there is more than one subset that may be kept."""
        return self.capacity.has_choice

    def harden(self) -> Tensor:
        return self.capacity.select(self.weight)

    def fixed(self) -> Tensor:
        """The gates of `scale` with a zero gradient: distributed training expects every parameter in the graph."""
        return self.scale() + 0.0 * self.weight


def straight_through(hard: Tensor, soft: Tensor) -> Tensor:
    """The values of `hard` with the gradient of `soft`."""
    return hard + (soft - soft.detach())


def noise(units: int, seed: int, step: int) -> Tensor:
    """Uniform noise `[units]` in [0, 1), float64: a function of the run's seed and the step."""
    generator = torch.Generator().manual_seed((seed * 1_000_003 + step + 1) % 2**63)
    return torch.rand(units, dtype=torch.float64, generator=generator)


class PerKindGate(Gate):
    """One gate per pool, which act as one gate over the whole model.

    Pools are numbered in the order of their first site, so seeds do not depend on the pools' names.

    Args:
        make: constructs the gate of a pool from its (layers, keep, seed).
        pools: the pool of each site, e.g. its kind.
        keep: number of heads to keep over all pools that learn, divided among them by `divide_heads`; None: the gate of
            each pool decides.
        seed: seed of the first pool; every further pool has its own seed.
        only: the only pool that learns, while all further pools keep every head; None: all pools learn.
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
