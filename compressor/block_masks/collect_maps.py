"""Stream rows through a model and average its attention maps (attention pruning, section 3.1).

Of every pair of positions only the examples count in which both are there: padding neither adds nor dilutes. What is
kept in memory is the maps and how many examples each entry stands for, whatever the number of rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from accelerate import PartialState
from accelerate.utils import reduce
from datasets import Dataset
from torch import Tensor
from transformers import PreTrainedModel

from compressor.block_masks.attention_maps import AttentionMaps
from compressor.errors import InputError
from compressor.model_folder import fingerprint
from compressor.progress import ProgressCallback
from compressor.tasks import Data
from compressor.tasks.scoring import batches
from compressor.tasks.segment_streams import Streams, assign_streams, reader
from compressor.training.fit import processes
from compressor.units import Site, gated, hooked
from graph_passes import Plan

_IGNORED = -100


@dataclass
class _Sums:
    """What is added up on the way, and the validity of the batch under way."""

    sites: Mapping[str, Site]
    length: int
    memory: int
    device: torch.device
    maps: dict[str, Tensor] = field(init=False)
    counts: dict[str, Tensor] = field(init=False)
    own: Tensor | None = None
    decoder: Tensor | None = None
    persistent: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        reach = (self.length, self.length + self.memory)
        self.maps = {name: torch.zeros(site.heads, *reach, device=self.device) for name, site in self.sites.items()}
        self.counts = {name: torch.zeros(reach, device=self.device) for name in self.sites}

    def add(self, name: str, weights: Tensor) -> None:
        """A batch's maps `[batch, head, query, key]` of one site."""
        site, queries = self.sites[name], weights.shape[2]
        keys = weights.shape[3] - self.persistent.get(name, 0)
        remembered = keys - queries if self.memory else 0
        asks = (
            self.decoder if site.kind == "cross" or (site.kind == "causal" and self.decoder is not None) else self.own
        )
        seen = self.own if site.kind == "cross" else asks
        query, key = _valid(asks, weights, queries), _valid(seen, weights, keys - remembered)
        key = torch.cat([key.new_ones(len(key), remembered), key], dim=1)
        first = self.memory - remembered
        reach = (..., slice(queries), slice(first, first + keys))
        for found, asks_here, seen_here in zip(weights[..., :keys], query, key, strict=True):
            # Row by row and in place: a sum over the batch would be one more map of the site.
            pairs = torch.outer(asks_here, seen_here)
            self.maps[name][reach].addcmul_(found.float(), pairs)
            self.counts[name][reach] += pairs


def _valid(known: Tensor | None, like: Tensor, length: int) -> Tensor:
    """`[batch, position]`, one where a position is there; all are where the rows do not say (images, sound)."""
    if known is None or known.shape[1] != length:
        return torch.ones(len(like), length, device=like.device)
    return known.to(like.device, torch.float32)


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
    tell: ProgressCallback = lambda done, total: None,
) -> AttentionMaps:
    """The average maps of a model over its training rows. Under `accelerate launch` each process reads its share.

    Args:
        model: left as it was; run without dropout, with eager attention, its heads gated as `plan` says.
        sites: its sites.
        data: whose training rows; a text for a model with memory is read in order.
        plan: the heads that are there.
        length: positions that the maps reach over; longer rows are refused.
        batch_size: rows a batch.
        rows: how many, at most, drawn by `seed`; None: all.
        seed: draws them.
        tell: called with (rows, of rows).

    Raises:
        InputError: a row is longer than `length`.
    """
    modules = dict(model.named_modules())
    persistent = {site.name: int(getattr(modules[site.name], "persistent", 0)) for site in sites}
    named = {site.name: site for site in sites}
    sums = _Sums(named, length, remembered(model), model.device, persistent=persistent)
    training = model.training
    try:
        model.eval()
        with (
            torch.no_grad(),
            gated(model, plan, attention="eager"),
            hooked(model, lambda name, out: out, attention="eager", on_weights=sums.add),
        ):
            for done, of in _run(model, data, sums, batch_size, rows, seed):
                tell(done, of)
    finally:
        model.train(training)
    maps, counts = {}, {}
    for name in named:
        # Reduced before anything is judged: a process that stopped here alone would leave the others waiting.
        total, count = sums.maps.pop(name), sums.counts.pop(name)
        if processes() > 1:
            total, count = reduce(total, "sum"), reduce(count, "sum")
        maps[name] = total.div_(count.clamp(min=1.0)).cpu().numpy()
        counts[name] = count.cpu().numpy()
    for name, found in counts.items():
        if not found.any():
            raise InputError(f"{name}: no row reached it; give more rows (--data)")
    kinds = {name: site.kind for name, site in named.items()}
    return AttentionMaps(maps, counts, kinds, sums.memory, fingerprint(model), data.train_hash)


def remembered(model: PreTrainedModel) -> int:
    """Key positions before position 0 that a model's maps have columns for."""
    return int(getattr(model.config, "memory_length", 0))


def _run(
    model: PreTrainedModel, data: Data, sums: _Sums, batch_size: int, rows: int | None, seed: int
) -> Iterator[tuple[int, int]]:
    state = PartialState(cpu=not torch.cuda.is_available())
    task, train = data.task, data.train
    if isinstance(task, Streams):
        most = len(train) if rows is None else min(rows, len(train))
        mine = _share(train.select(range(most)), state)
        forward, done = reader(model), 0
        if not len(mine):  # there are more processes than segments
            return
        for numbers in assign_streams(len(mine), min(batch_size, len(mine)), whole=False):
            batch = task.collate([mine[int(number)] for number in numbers])
            sums.own, sums.decoder = batch["shift_labels"] != _IGNORED, None
            forward(batch["input_ids"])
            done += len(numbers)
            yield done, len(mine)
        return
    if rows is not None and rows < len(train):
        train = train.select(sorted(np.random.default_rng(seed).permutation(len(train))[:rows].tolist()))
    mine, done = _share(train, state), 0
    for indices, batch in batches(task, mine, batch_size):
        own, decoder = _there(batch, encoder_decoder=model.config.is_encoder_decoder)
        longest = max(tensor.shape[1] for tensor in (own, decoder) if tensor is not None) if own is not None else 0
        if longest > sums.length:
            raise InputError(f"a row of {longest} positions, the maps reach over {sums.length}; raise --max-length")
        sums.own, sums.decoder = own, decoder
        model(**{name: tensor.to(model.device) for name, tensor in task.loss_inputs(batch).items()})
        done += len(indices)
        yield done, len(mine)


def _share(rows: Dataset, state: PartialState) -> Dataset:
    """The stretch of rows that this process reads; none where there are fewer rows than processes."""
    first, end = (len(rows) * (state.process_index + more) // state.num_processes for more in (0, 1))
    return rows.select(list(range(first, end)))


def _there(batch: Mapping[str, Any], *, encoder_decoder: bool) -> tuple[Tensor | None, Tensor | None]:
    """Which positions of the input, and of the decoder's input, are there, `[batch, position]` each."""
    own = batch.get("attention_mask")
    if own is None and "input_ids" in batch:
        own = torch.ones_like(batch["input_ids"])
    if not encoder_decoder:
        return own, None
    labels = batch.get("labels")
    if "decoder_attention_mask" in batch:
        return own, batch["decoder_attention_mask"]
    # Where rows have no second text, the decoder reads the input again.
    return own, own if labels is None or labels.dim() < 2 else labels != _IGNORED
