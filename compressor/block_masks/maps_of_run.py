"""Load the attention maps of an earlier run, copy them into a run, and note how they differ from it."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from transformers import PreTrainedModel

from compressor.block_masks.attention_maps import AttentionMaps
from compressor.block_masks.collect_maps import memory_length
from compressor.errors import ErrorCode, InputError
from compressor.model_folder import fingerprint
from compressor.results import Note, NoteCode
from compressor.tasks import Data
from compressor.units import Site
from graph_passes.files import atomic_replace


def load_maps(path: Path, model: PreTrainedModel, sites: Sequence[Site], length: int) -> AttentionMaps:
    """Load the maps of an earlier run.

    Args:
        path: file of the maps.
        model: the model for which masks are derived.
        sites: its sites.
        length: number of positions that the masks must cover.

    Raises:
        InputError: the file cannot be read, or its maps are of another model or too short.
    """
    maps = AttentionMaps.load(path)
    maps.check(sites, memory_length(model))
    if maps.length < length:
        raise InputError(
            f"{path}: the maps cover {maps.length} positions, rows have up to {length}; lower --max-length, or use maps"
            " of longer rows",
            code=ErrorCode.TOO_LONG,
            path=path,
            length=length,
            maximum=maps.length,
        )
    return maps


def store_copy(source: Path, path: Path) -> None:
    """Copy the maps of an earlier run to `path`, unless this run already has maps there."""
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_replace(path) as temporary:
            shutil.copyfile(source, temporary)


def notes_on_maps(
    maps: AttentionMaps, model: PreTrainedModel, data: Data, length: int, source: Path | None
) -> tuple[Note, ...]:
    """Notes on the maps from which masks are derived.

    Args:
        maps: the maps.
        model: the model for which masks are derived.
        data: its rows.
        length: number of positions that the masks cover.
        source: the file of an earlier run; None: the maps were computed in this run.
    """
    notes = []
    if source is not None:
        origins = (("rows", maps.data, data.train_hash), ("weights", maps.model, fingerprint(model)))
        differing = [name for name, of_maps, of_run in origins if of_maps != of_run]
        if differing:
            text = f"masks are derived from the maps of other {' and '.join(differing)} ({source})"
            notes.append(Note(code=NoteCode.MAPS_DIFFER, text=text))
    if maps.length > length:
        text = f"the maps cover {maps.length} positions, rows have at most {length}: only the first {length} are used"
        notes.append(Note(code=NoteCode.MAPS_CROPPED, text=text))
    return tuple(notes)
