"""Recipes and runs that train a tiny model with masks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from compressor.block_masks.attention_maps import mask_length
from compressor.block_masks.mask_selector import MaskSelector
from compressor.block_masks.train_masked import learn_blocks
from compressor.config.run import Recipe
from compressor.config.step_list import step_of_flags
from compressor.config.steps import Blocks
from compressor.progress import ProgressCallback, ignore_progress
from compressor.results import Note
from compressor.store import Store
from compressor.training.checkpoints import digest
from compressor.units import keep_all
from graph_passes import Plan
from tests.selection import tiny


@dataclass(frozen=True)
class Trained:
    """Result of training with masks: the plan, a hash of the weights, and the notes."""

    plan: Plan
    weights: str
    notes: tuple[Note, ...]


def masked_recipe(**fields: Any) -> Recipe:
    """Drop half of the entries of every map of up to nine positions, and mask every site."""
    defaults = {
        "model": "model",
        "data": "rows",
        "drop_blocks": 0.5,
        "block_size": 1,
        "map_rows": 20,
        "max_length": 9,
        "training_steps": 2,
        "batch_size": 4,
        "learning_rate": 1e-3,
        "mask_all_sites": True,
    }
    return Recipe(**{**defaults, **fields})


def train(
    store: Path,
    recipe: Recipe,
    seed: int = 0,
    start: Mapping[str, Tensor] | None = None,
    selector: MaskSelector | None = None,
    on_progress: ProgressCallback = ignore_progress,
) -> Trained:
    """Train a classifier with every head.

    Args:
        store: folder of maps and checkpoints.
        recipe: settings of the masks and of the training.
        seed: seed of the weights that maps are computed with.
        start: weights to train from; None: the same.
        selector: selects masks; None: all of them.
        on_progress: called with (step, steps).
    """
    model = tiny.classifier(seed)
    sites = tiny.sites_of(model)
    share = recipe.blocks.drop_blocks or 0.0  # a run has no step without a share, which trains all the same
    step = step_of_flags(recipe.updated(drop_blocks=1.0), Blocks).model_copy(update={"share": share})
    length = mask_length(model, tiny.data(), recipe.rows.max_length)
    selector = selector or MaskSelector(recipe, (), recipe.rows.max_length, blocks=step)
    kept, work = Store(store, version=1), store / "work"
    masked = learn_blocks(
        model, sites, tiny.data(), step, keep_all(sites), length, kept, work, selector, on_progress, start=start
    )
    return Trained(masked.plan, digest(model), masked.notes)
