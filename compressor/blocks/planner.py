"""Which sites are worth a mask where the model will run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from compressor.recipe import Recipe
from graph_passes import BlockMask, Plan


class Planner:
    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe

    def __call__(self, plan: Plan, masks: Mapping[str, BlockMask]) -> tuple[Mapping[str, BlockMask], Sequence[str]]:
        return masks, ()
