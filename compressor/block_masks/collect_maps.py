"""Average the attention maps of a model over its rows (attention pruning, section 3.1).

Each pair of positions is averaged over the rows that have both, so padding has no influence. Only the sums and the
number of rows of each entry are kept in memory, however many rows are read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import PartialState
from accelerate.utils import reduce
from datasets import Dataset
from torch import Tensor
from transformers import PreTrainedModel

from compressor.block_masks.attention_maps import AttentionMaps
from compressor.errors import ErrorCode, InputError
from compressor.model_folder import fingerprint
from compressor.progress import ProgressCallback, ignore_progress
from compressor.results import Note, NoteCode
from compressor.tasks import Data, Task
from compressor.tasks.causal_lm import assign_streams, reader
from compressor.tasks.forwards import IGNORED
from compressor.tasks.scoring import batches
from compressor.training.processes import process_count, process_state
from compressor.units import Site, gated, hooked
from compressor.units.find import evaluating
from compressor.units.hook import Call
from compressor.units.projections import require_interface
from graph_passes import Plan


def collect_attention_maps(
    model: PreTrainedModel,
    sites: Sequence[Site],
    data: Data,
    plan: Plan,
    *,
    length: int,
    batch_size: int = 32,
    rows: int | None = None,
    seed: int = 0,
    on_progress: ProgressCallback = ignore_progress,
) -> AttentionMaps:
    """The average maps of a model over its training rows. Under `accelerate launch` every process reads its share.

    Args:
        model: the model, which is not changed; it runs without dropout, with eager attention and gated by `plan`.
        sites: its sites.
        data: the training rows; text for a model with memory is read in order.
        plan: the heads that are kept.
        length: number of positions that the maps cover.
        batch_size: rows per batch.
        rows: maximum number of rows, drawn with `seed`; None: all.
        seed: seed of that draw.
        on_progress: called with (rows finished, rows in total).

    Raises:
        InputError: a row is longer than `length`, or no row reaches a site.
        SiteRefusedError: a site is outside transformers' attention interface.
    """
    require_interface(model, sites, "block masks")
    sums = _MapSums(model, sites, length)
    with (
        evaluating(model),
        torch.no_grad(),
        gated(model, plan, attention="eager"),
        hooked(model, lambda name, out: out, attention="eager", on_weights=sums.add),
    ):
        for finished, total in _run(model, data, sums, batch_size, rows, seed):
            on_progress(finished, total)
    maps, counts, hidden = sums.averages()
    for name, count in counts.items():
        if not count.any():
            raise InputError(
                f"{name}: no row reaches this attention; add rows (--data)", code=ErrorCode.TOO_FEW_ROWS, site=name
            )
    kinds = {site.name: site.kind for site in sites}
    return AttentionMaps(maps, counts, kinds, sums.memory, fingerprint(model), data.train_hash, hidden)


def memory_length(model: PreTrainedModel) -> int:
    """Number of key positions before position 0 for which the maps of a model have columns."""
    return int(getattr(model.config, "memory_length", 0))


class _MapSums:
    """Sums of the maps of each site over rows, numbers of rows that have each pair of positions, and visible pairs."""

    def __init__(self, model: PreTrainedModel, sites: Sequence[Site], length: int) -> None:
        modules = dict(model.named_modules())
        self.length, self.memory = length, memory_length(model)
        self._sites = {site.name: site for site in sites}
        self._persistent = {site.name: int(getattr(modules[site.name], "persistent", 0)) for site in sites}
        shape = (length, length + self.memory)
        self._maps = {site.name: torch.zeros(site.heads, *shape, device=model.device) for site in sites}
        self._counts = {site.name: torch.zeros(shape, device=model.device) for site in sites}
        self._visible = {site.name: torch.zeros(shape, dtype=torch.bool, device=model.device) for site in sites}
        self._inputs: Tensor | None = None
        self._decoder_inputs: Tensor | None = None

    def start_batch(self, inputs: Tensor | None, decoder_inputs: Tensor | None) -> None:
        """Set the positions that the rows of the next batch have: nonzero in `[batch, position]`; None: all positions.

        Raises:
            InputError: a row is longer than the maps.
        """
        if inputs is not None:
            longest = max(tensor.shape[1] for tensor in (inputs, decoder_inputs) if tensor is not None)
            if longest > self.length:
                raise InputError(
                    f"a row has {longest} positions, the maps cover {self.length}; raise --max-length",
                    code=ErrorCode.TOO_LONG,
                    length=longest,
                    maximum=self.length,
                )
        self._inputs, self._decoder_inputs = inputs, decoder_inputs

    def add(self, call: Call, weights: Tensor) -> None:
        """Add the maps `weights` `[batch, head, query, key]` of a call."""
        name, queries = call.site, weights.shape[2]
        site = self._sites[name]
        keys = weights.shape[3] - self._persistent[name]
        remembered = keys - queries if self.memory else 0
        of_decoder = site.kind == "cross" or (site.kind == "causal" and self._decoder_inputs is not None)
        query_positions = self._decoder_inputs if of_decoder else self._inputs
        key_positions = self._inputs if site.kind == "cross" else query_positions
        query = _validity(query_positions, weights, queries)
        key = _validity(key_positions, weights, keys - remembered)
        key = torch.cat([key.new_ones(len(key), remembered), key], dim=1)
        first = self.memory - remembered
        region = (..., slice(queries), slice(first, first + keys))
        visible = _visible_to_any_head(call, keys)
        for row_weights, row_query, row_key, row_visible in zip(weights[..., :keys], query, key, visible, strict=True):
            # Row by row and in place, because a sum over the batch would need memory for another map of the site.
            pairs = torch.outer(row_query, row_key)
            self._maps[name][region].addcmul_(row_weights.float(), pairs)
            self._counts[name][region] += pairs
            self._visible[name][region] |= row_visible & (pairs > 0)

    def averages(self) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray], dict[str, np.ndarray]]:
        """Average maps, counts and hidden pairs of each site over the rows of all processes; frees the sums."""
        maps, counts, hidden = {}, {}, {}
        for name in self._sites:
            total, count, visible = self._maps.pop(name), self._counts.pop(name), self._visible.pop(name)
            if process_count() > 1:
                total, count = reduce(total, "sum"), reduce(count, "sum")
                visible = reduce(visible.int(), "sum") > 0
            maps[name] = total.div_(count.clamp(min=1.0)).cpu().numpy()
            counts[name] = count.cpu().numpy()
            hidden[name] = ((count > 0) & ~visible).cpu().numpy()
        return maps, counts, hidden


def _visible_to_any_head(call: Call, keys: int) -> Tensor:
    """Bool `[batch, query or 1, key]`: pairs that the mask of a call permits in at least one head; all without a mask.

    The first `keys` have a position.
    """
    batch, visible = len(call.query), call.visible
    if visible is None or visible.dim() != 4:
        return torch.ones(batch, 1, keys, dtype=torch.bool, device=call.query.device)
    return visible.any(dim=1)[..., :keys].expand(batch, -1, -1)


def _validity(positions: Tensor | None, like: Tensor, length: int) -> Tensor:
    """`[batch, position]`, on the device of `like`: one where a row has a position, or where all are unknown."""
    if positions is None or positions.shape[1] != length:
        return torch.ones(len(like), length, device=like.device)
    return positions.to(like.device, torch.float32)


def _run(
    model: PreTrainedModel, data: Data, sums: _MapSums, batch_size: int, rows: int | None, seed: int
) -> Iterator[tuple[int, int]]:
    """Run the model on the rows of this process; yields (rows finished, rows in total) after each batch."""
    state = process_state()
    task, train = data.task, data.train
    if task.reads_streams:
        segments = _share(train.select(range(len(train) if rows is None else min(rows, len(train)))), state)
        yield from _run_streams(model, task, segments, sums, batch_size)
        return
    if rows is not None and rows < len(train):
        train = train.select(sorted(np.random.default_rng(seed).permutation(len(train))[:rows].tolist()))
    share, finished = _share(train, state), 0
    for indices, batch in batches(task, share, batch_size):
        sums.start_batch(*_positions(batch, encoder_decoder=model.config.is_encoder_decoder))
        model(**{name: tensor.to(model.device) for name, tensor in task.loss_inputs(batch).items()})
        finished += len(indices)
        yield finished, len(share)


def _run_streams(
    model: PreTrainedModel, task: Task, segments: Dataset, sums: _MapSums, batch_size: int
) -> Iterator[tuple[int, int]]:
    """Run the model on a text in order, in parallel streams, each with the memory of its earlier segments."""
    if not len(segments):  # there are more processes than segments
        return
    forward, finished = reader(model), 0
    for numbers in assign_streams(len(segments), min(batch_size, len(segments)), whole=False):
        batch = task.collate([segments[int(number)] for number in numbers])
        sums.start_batch(batch["shift_labels"] != IGNORED, None)
        forward(batch["input_ids"])
        finished += len(numbers)
        yield finished, len(segments)


def _share(rows: Dataset, state: PartialState) -> Dataset:
    """The consecutive rows that this process reads; none if there are fewer rows than processes."""
    first, end = (len(rows) * (state.process_index + offset) // state.num_processes for offset in (0, 1))
    return rows.select(list(range(first, end)))


def _positions(batch: Mapping[str, Any], *, encoder_decoder: bool) -> tuple[Tensor | None, Tensor | None]:
    """Positions `[batch, position]` that rows have in the input and in the decoder's input; None: unknown."""
    inputs = batch.get("attention_mask")
    if inputs is None and "input_ids" in batch:
        inputs = torch.ones_like(batch["input_ids"])
    if not encoder_decoder:
        return inputs, None
    labels = batch.get("labels")
    if "decoder_attention_mask" in batch:
        return inputs, batch["decoder_attention_mask"]
    # Without a target text, the decoder reads the input again.
    return inputs, inputs if labels is None or labels.dim() < 2 else labels != IGNORED


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
