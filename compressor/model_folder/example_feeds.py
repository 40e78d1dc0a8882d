"""Example inputs as engines take them."""

from __future__ import annotations

from collections.abc import Iterable

from compressor.model_folder.example_inputs import example_inputs
from compressor.model_folder.folder import ModelFolder
from compressor.targets.base import Feeds


def example_feeds(folder: ModelFolder, batch: int, seq: int | None) -> Feeds:
    """Inputs of one size for an engine; see `example_inputs`.

    Args:
        folder: a loaded folder.
        batch: rows.
        seq: tokens per row; None: the model has one size.
    """
    return {name: tensor.numpy() for name, tensor in example_inputs(folder, batch, seq or 1).items()}


def example_feeds_by_size(
    folder: ModelFolder, sizes: Iterable[tuple[int, int | None]]
) -> dict[tuple[int, int | None], Feeds]:
    """Inputs for an engine by batch size and length, in the order of `sizes`; see `example_feeds`."""
    return {(batch, seq): example_feeds(folder, batch, seq) for batch, seq in sizes}
