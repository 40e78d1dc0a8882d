"""Attention maps of a model's sites, averaged over rows, and masks of any density that follow from them.

Each pair of positions is averaged over the rows that have both, so padding has no influence (attention pruning, section
3.1). Only the sums and the number of rows of each entry are kept in memory, however many rows are read. The share p of
a site's blocks with least attention is dropped (section 3.2).
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.numpy
import torch
from accelerate.utils import reduce
from datasets import Dataset
from safetensors import SafetensorError
from torch import Tensor
from transformers import PreTrainedModel

from compressor.answers import IGNORED
from compressor.config.steps import Blocks
from compressor.errors import ErrorCode, InputError, UsageError
from compressor.model_folder import fingerprint
from compressor.model_folder.text_limits import token_limit
from compressor.models.forwards import tensors_of
from compressor.processes import RunProcesses, process_count, process_state
from compressor.progress import ProgressCallback, ignore_progress
from compressor.results import Note, NoteCode
from compressor.tasks import Data, Task
from compressor.tasks.causal_lm import assign_streams
from compressor.tasks.scoring import batches
from compressor.units import Site, gated, hooked
from compressor.units.find import evaluating
from compressor.units.hook import Call
from compressor.units.projections import require_interface
from graph_passes import BlockMask, Kind, Plan, SitePlan
from graph_passes.files import atomic_replace


@dataclass(frozen=True)
class AttentionMaps:
    """Attention maps, averaged over rows.

    Attributes:
        maps: attention map of each site, float32 `[head, query, key]`, averaged over the rows that have both positions.
        counts: number of these rows for each site, float32 `[query, key]`.
        kinds: kind of each site.
        memory: number of key positions before position 0; column 0 is position `-memory`.
        model: fingerprint of the weights that computed the maps.
        data: hash of the rows.
        hidden: bool `[query, key]` of each site: pairs that the model's own mask (causality, a window) hides in every
            row that has both positions; sites without an entry hide none.
    """

    maps: Mapping[str, np.ndarray]
    counts: Mapping[str, np.ndarray]
    kinds: Mapping[str, Kind]
    memory: int
    model: str | None
    data: str | None
    hidden: Mapping[str, np.ndarray] = field(default_factory=dict)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write one safetensors file, from which masks of any density can be derived later."""
        path = Path(path)
        parts = {"map": self.maps, "count": self.counts, "hidden": self.hidden}
        tensors = {f"{site}.{part}": array for part, arrays in parts.items() for site, array in arrays.items()}
        metadata = {"kinds": json.dumps(dict(self.kinds)), "memory": str(self.memory)}
        metadata |= {name: value for name in ("model", "data") if (value := getattr(self, name))}
        with atomic_replace(path) as partial:
            safetensors.numpy.save_file(tensors, partial, metadata=metadata)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> AttentionMaps:
        """Read a file that `save` wrote.

        Raises:
            InputError: the file is missing, or is not a file of attention maps.
        """
        try:
            with safetensors.safe_open(path, "numpy") as file:
                metadata = file.metadata() or {}
                kinds = dict(json.loads(metadata["kinds"]).items())
                stored = {name: file.get_tensor(name) for name in set(file.keys())}
                maps, counts = ({site: stored[f"{site}.{part}"] for site in kinds} for part in ("map", "count"))
                hidden = {site: stored[f"{site}.hidden"] for site in kinds if f"{site}.hidden" in stored}
                origin = metadata.get("model"), metadata.get("data")
                return cls(maps, counts, kinds, int(metadata["memory"]), *origin, hidden)
        except FileNotFoundError as error:
            text = f"{path}: no such file of attention maps; use the maps.safetensors of an earlier run"
            raise InputError(text, code=ErrorCode.FILE_MISSING, path=Path(path)) from error
        except (OSError, SafetensorError, KeyError, ValueError, AttributeError) as error:
            text = f"{path}: not a file of attention maps ({error}); use the maps.safetensors of a run"
            raise InputError(text, code=ErrorCode.FILE_UNREADABLE, path=Path(path)) from error

    @property
    def length(self) -> int:
        """Number of positions that the maps cover, without the memory."""
        return len(next(iter(self.counts.values())))

    def cropped(self, length: int) -> AttentionMaps:
        """The maps of the first `length` positions, and of the memory before them."""
        maps, counts, hidden = (
            {site: array[..., :length, : length + self.memory] for site, array in arrays.items()}
            for arrays in (self.maps, self.counts, self.hidden)
        )
        return replace(self, maps=maps, counts=counts, hidden=hidden)

    def check(self, sites: Sequence[Site], memory: int) -> None:
        """Check that the maps are of the sites of a model, whose weights may differ, e.g. after further training.

        Args:
            sites: the model's sites.
            memory: number of the model's key positions before position 0.

        Raises:
            InputError: sites, kinds, numbers of heads, shapes or the memory differ.
        """
        if self.memory != memory:
            text = f"the maps have a memory of {self.memory} positions, the model one of {memory}"
            raise _mismatch(text, "memory", self.memory)
        names = {site.name for site in sites}
        for foreign in (name for name in self.maps if name not in names):
            raise _mismatch(f"the model has no site {foreign}", "site", foreign)
        for site in sites:
            array = self.maps.get(site.name)
            if array is None:
                raise _mismatch(f"there is no map of {site.name}", "site", site.name)
            if self.kinds[site.name] != site.kind:
                text = f"the map of {site.name} is {self.kinds[site.name]}, the site {site.kind}"
                raise _mismatch(text, "kind", self.kinds[site.name], site=site.name)
            if len(array) != site.heads:
                text = f"the map of {site.name} has {len(array)} heads, the site {site.heads}"
                raise _mismatch(text, "heads", len(array), site=site.name)
            shape = (self.length, self.length + memory)
            parts = {"map": array[0], "count": self.counts[site.name], "hidden": self.hidden.get(site.name)}
            for part, pairs in parts.items():
                if pairs is not None and pairs.shape != shape:
                    text = f"{site.name}: the {part} covers {list(pairs.shape)} positions, other maps {list(shape)}"
                    raise _mismatch(text, part, pairs.shape, site=site.name)


def _mismatch(text: str, field: str, value: object, **details: Any) -> InputError:
    message = f"attention maps: {text}; use maps of this model"
    return InputError(message, code=ErrorCode.FILE_MISMATCH, field=field, value=value, **details)


def shares_by_kind(step: Blocks, sites: Sequence[Site | SitePlan]) -> dict[Kind, float]:
    """The share of blocks to drop from each kind of attention that the model has.

    Raises:
        UsageError: the step sets a share for a kind that the model lacks.
    """
    kinds = list(dict.fromkeys(site.kind for site in sites))
    for kind in step.share_by_kind:
        if kind not in kinds:
            raise UsageError(
                f"--drop-blocks-by-kind {kind}: the model has no attention of this kind; it has {', '.join(kinds)}",
                code=ErrorCode.UNSUPPORTED_MODEL,
                field="drop_blocks_by_kind",
                value=kind,
                choices=tuple(kinds),
            )
    return {kind: step.share_by_kind.get(kind, step.share) for kind in kinds}


def mask_length(model: PreTrainedModel, data: Data, max_length: int) -> int:
    """Number of positions that masks cover: those of the longest possible row, even if the data has none so long.

    Rows are cut at `max_length` tokens, and the model may have a longest length of its own.
    """
    if data.task.reads_streams:
        return max(1, *(length - 1 for length in data.train["length"][:]))
    limit = token_limit(model)
    return max_length if limit is None else min(max_length, limit)


def build_masks(
    maps: AttentionMaps,
    plan: Plan,
    shares: Mapping[Kind, float],
    block: int,
    *,
    seed: int | None = None,
    count_causal_zeros: bool = False,
    weight_by_count: bool = False,
    allow_empty_rows: bool = False,
) -> dict[str, BlockMask]:
    """Masks of all sites whose kind of attention loses a share p of its blocks.

    Of the n counted blocks of a site, over all its kept heads together, exactly `round(p n)` are dropped: those with
    least mean attention, ties by index. Every row of blocks keeps its strongest block unless `allow_empty_rows` is set,
    so fewer are dropped if p leaves less than one per row. Blocks that no row of the data reaches are kept and not
    counted. Blocks that causality, or the model's own mask in every row (a sliding window), hides are never computed
    and not counted. The score of a block is the mean over its counted entries.

    Args:
        maps: average maps of this model.
        plan: the heads that are kept.
        shares: share p, from 0 to 1, for each kind of attention; missing kinds lose nothing.
        block: number of positions along the side of a block; 1 drops single entries.
        seed: drop blocks in a random order drawn with this seed (the paper's baseline); None: by attention.
        count_causal_zeros: count hidden blocks too, as the paper's own code does.
        weight_by_count: weight the attention of a pair of positions by the number of rows that have it. Then the blocks
            with least total attention over all rows are dropped, so rows shorter than the maps keep more of the blocks
            that they use.
        allow_empty_rows: allow a row to lose all blocks: its queries attend to nothing in that head, and their output
            is zero. Otherwise another head may have to lose a stronger block in place of the row's strongest one.
    """
    masks = {}
    for number, site in enumerate(plan.sites):
        if not shares.get(site.kind, 0.0) > 0.0 or not site.kept:
            continue
        attention, counted = maps.maps[site.name], _counted(maps, site.name, causal_zeros=count_causal_zeros)
        if weight_by_count:  # as shares of the rows that have the most frequent pair
            counts = maps.counts[site.name]
            attention = attention * (counts / max(1.0, float(counts.max(initial=0.0))))
        entries = _blocks(counted.astype(np.float64), block)
        scores = np.stack([_blocks(attention[head] * counted, block) for head in site.kept]) / np.maximum(entries, 1.0)
        order = scores if seed is None else np.random.default_rng([seed, number]).random(scores.shape)
        population = np.broadcast_to(entries > 0, scores.shape)
        computed = _any(_usable(maps, site.name), block)
        protected = np.zeros_like(population) if allow_empty_rows else _strongest(order, population & computed)
        kept = _without_weakest(order, population & ~protected, round(shares[site.kind] * population.sum()))
        mask = np.zeros((len(attention), *kept.shape[1:]), dtype=np.bool_)
        mask[list(site.kept)] = kept & computed
        masks[site.name] = BlockMask(mask, block, maps.memory)
    return masks


def density(mask: BlockMask, maps: AttentionMaps, site: str, kept: tuple[int, ...]) -> np.ndarray:
    """Share of the counted blocks that a mask of all heads of a site keeps, `[kept head]`, by the average maps."""
    counted = _any(_counted(maps, site), mask.block)
    shares: np.ndarray = (mask.kept[list(kept)] & counted).sum((1, 2)) / max(1, counted.sum())
    return shares


def unreached_share(maps: AttentionMaps, sites: Iterable[str], block: int) -> float:
    """Share of the blocks of some sites that attention can use but no row reaches; these are kept and not counted."""
    sites = list(sites)
    usable = sum(int(_any(_usable(maps, site), block).sum()) for site in sites)
    reached = sum(int(_any(_counted(maps, site), block).sum()) for site in sites)
    return 1.0 - reached / usable if usable else 0.0


def unreached_notes(share: float) -> list[Note]:
    """A note where a share of blocks is kept because no row reaches them, see `unreached_share`."""
    text = (
        f"{share:.1%} of the blocks are kept because no row that was read reaches them; if no row is longer, a lower"
        " --max-length leaves them out"
    )
    return [Note(code=NoteCode.BLOCKS_UNREACHED, text=text)] if share else []


def _counted(maps: AttentionMaps, site: str, *, causal_zeros: bool = False) -> np.ndarray:
    """Bool `[query, key]`: pairs of positions that attention can use and at least one row has."""
    reached = maps.counts[site] > 0
    return reached if causal_zeros else reached & _usable(maps, site)


def _usable(maps: AttentionMaps, site: str) -> np.ndarray:
    """Bool `[query, key]`: pairs that neither causality nor the model's own mask hides.

    Causality is known for pairs that no row has, other masks are not: such pairs may be visible.
    """
    queries, keys = maps.counts[site].shape
    usable = ~maps.hidden.get(site, np.zeros((queries, keys), dtype=np.bool_))
    if maps.kinds[site] == "causal":
        usable &= np.arange(keys)[None, :] - maps.memory <= np.arange(queries)[:, None]
    return usable


def _without_weakest(order: np.ndarray, removable: np.ndarray, count: int) -> np.ndarray:
    """Bool in the shape of `order`: false at the `count` smallest of those that can be removed; ties go by index."""
    candidates = np.flatnonzero(removable)
    weakest_first = candidates[np.argsort(order.ravel()[candidates], kind="stable")]
    kept = np.ones(order.size, dtype=np.bool_)
    kept[weakest_first[:count]] = False
    return kept.reshape(order.shape)


def _strongest(order: np.ndarray, counted: np.ndarray) -> np.ndarray:
    """Bool `[head, query block, key block]`: the strongest counted block of each row.

    Of equal blocks it is the last, because the first is dropped first.
    """
    last = counted.shape[2] - 1
    columns = last - np.where(counted, order, -1.0)[..., ::-1].argmax(axis=2)
    head, row = np.nonzero(counted.any(axis=2))
    strongest = np.zeros(counted.shape, dtype=np.bool_)
    strongest[head, row, columns[head, row]] = True
    return strongest


def _any(pairs: np.ndarray, block: int) -> np.ndarray:
    """Whether blocks have any of the pairs `[query, key]`."""
    blocks: np.ndarray = _blocks(pairs.astype(np.float64), block) > 0
    return blocks


def _blocks(entries: np.ndarray, block: int) -> np.ndarray:
    """Sums of `entries` `[query, key]` over blocks; the last blocks may be smaller."""
    queries, keys = entries.shape
    rows, columns = np.arange(0, queries, block), np.arange(0, keys, block)
    sums: np.ndarray = np.add.reduceat(np.add.reduceat(entries, rows, axis=0), columns, axis=1)
    return sums


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

    The model is not changed; it runs without dropout, with eager attention and gated by `plan`. Text for a model with
    memory is read in order.

    Args:
        length: number of positions that the maps cover.
        rows: maximum number of rows, drawn with `seed`; None: all.
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
        visible = call.visible  # by any head
        if visible is None or visible.dim() != 4:
            visible = torch.ones(len(call.query), 1, 1, keys, dtype=torch.bool, device=call.query.device)
        visible = visible.any(dim=1)[..., :keys].expand(len(call.query), -1, -1)
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
    for indices, arrays in batches(task, share, batch_size):
        batch = tensors_of(task.loss_inputs(arrays), model.device)
        sums.start_batch(*_positions(batch, encoder_decoder=model.config.is_encoder_decoder))
        model(**batch)
        finished += len(indices)
        yield finished, len(share)


def _run_streams(
    model: PreTrainedModel, task: Task, segments: Dataset, sums: _MapSums, batch_size: int
) -> Iterator[tuple[int, int]]:
    """Run the model on a text in order, in parallel streams, each with the memory of its earlier segments."""
    if not len(segments):  # there are more processes than segments
        return
    memories, finished = None, 0
    for numbers in assign_streams(len(segments), min(batch_size, len(segments)), whole=False):
        batch = tensors_of(task.collate([segments[int(number)] for number in numbers]), model.device)
        sums.start_batch(batch["shift_labels"] != IGNORED, None)
        memories = model(input_ids=batch["input_ids"], memories=memories).memories
        finished += len(numbers)
        yield finished, len(segments)


def _share(rows: Dataset, state: RunProcesses) -> Dataset:
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
    """Load the maps of an earlier run for a model with these sites, and masks that cover `length` positions.

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
    """Notes on the maps from which masks of `length` positions are derived for a model and its rows.

    Args:
        source: the file of an earlier run; None: the maps were computed in this run.
    """
    notes = []
    if source is not None:
        origins = (("rows", maps.data, data.train_hash), ("weights", maps.model, fingerprint(model)))
        if differing := [name for name, of_maps, of_run in origins if of_maps != of_run]:
            text = f"masks are derived from the maps of other {' and '.join(differing)} ({source})"
            notes.append(Note(code=NoteCode.MAPS_DIFFER, text=text))
    if maps.length > length:
        text = f"the maps cover {maps.length} positions, rows have at most {length}: only the first {length} are used"
        notes.append(Note(code=NoteCode.MAPS_CROPPED, text=text))
    return tuple(notes)
