"""Statistics of evaluation rows for subsets of heads; each subset runs only the part of the model that it changes.

The outputs of the first layers are recorded and replayed. A layer here is an element of the model's outermost module
lists: a layer of an encoder or a decoder. Two subsets of heads differ first at the first attention call whose gates
differ. All layers that end before that call have the same output, and all attentions up to and including that call have
the same head outputs before their gates.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
import psutil
import torch
from datasets import Dataset
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.exporters.utils import get_leaf_tensors

from compressor.config.values import MixedPrecision
from compressor.models.forwards import tensors_of
from compressor.selection.search import Head, all_heads
from compressor.tasks.base import Task
from compressor.tasks.scoring import batches
from compressor.units import Site
from compressor.units.find import evaluating, unread_sites
from compressor.units.gating import spread_over_rows
from compressor.units.hook import Call, intercepted
from compressor.units.layers import outermost_layers, routed_forwards
from compressor.units.projections import hooked_projections

_SHARED_TOKENS = {"cpu": 1024, "cuda": 65_536}
"""Maximum number of tokens of a forward that several subsets share; larger forwards are not more efficient."""

_Base = tuple[frozenset[Head], "ActivationCache"]
"""A subset and its activations on one batch."""


class Measurement(NamedTuple):
    """`Task.per_example` of every evaluation row for each of some subsets, `[subsets, examples, k]`; and its cost, in
    forwards of the whole model over all evaluation rows."""

    statistics: np.ndarray
    forwards: float


class Measurer(Protocol):
    """Measures subsets of heads, in this process or in others."""

    def measure(self, subsets: Sequence[frozenset[Head]], base: frozenset[Head] | None) -> Measurement:
        """Measure distinct subsets, each from its first difference from `base`, whose activations are recorded first.

        None: from its first difference from the subset that was recorded last.
        """


class _Batch(NamedTuple):
    """Evaluation rows that share a forward."""

    rows: list[int]
    inputs: dict[str, Tensor]
    labels: np.ndarray


class SubsetMeasurer:
    """Measures subsets of one model in this process.

    A subset to be recorded also runs from its first difference from the subset recorded before.

    Args:
        reuse: False: run the whole model for every subset, one at a time, with rows in their order.
        memory_share: share of the free memory that activations may use; those that do not fit are computed again.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        sites: Sequence[Site],
        task: Task,
        rows: Dataset,
        batch_size: int,
        mixed_precision: MixedPrecision = "no",
        *,
        reuse: bool = True,
        memory_share: float = 0.25,
    ) -> None:
        self._model, self._task, self._rows, self._batch_size, self._reuse = model, task, rows, batch_size, reuse
        self._heads = all_heads(sites)
        self._forward = PartialForward(model, sites, mixed_precision)
        self._records: dict[int, _Base] = {}
        self._shared_tokens = _SHARED_TOKENS[model.device.type] if reuse else 1
        self._memory_share = memory_share
        self._forwards = 0.0  # cost of the measurement in progress

    def measure(self, subsets: Sequence[frozenset[Head]], base: frozenset[Head] | None) -> Measurement:
        """See `Measurer`."""
        if not self._reuse:
            base = None
        self._forwards = 0.0
        parts: list[list[np.ndarray]] = [[] for _ in subsets]
        number_of = {subset: number for number, subset in enumerate(subsets)}
        order: list[int] = []
        for number, batch in enumerate(self._batches()):
            record = self._record(base, number, batch) if base is not None else self._records.get(number)
            order += batch.rows
            for call, group in self._groups(subsets, record, batch):
                for subset, logits in zip(group, self._logits(batch, group, record, call), strict=True):
                    parts[number_of[subset]].append(self._task.per_example(logits, batch.labels))
        inverse = np.argsort(order)
        return Measurement(np.stack([np.concatenate(arrays)[inverse] for arrays in parts]), self._forwards)

    def _record(self, base: frozenset[Head], number: int, batch: _Batch) -> _Base:
        """The activations of `base` on batch `number`: the current record, or a new one that starts from it."""
        older = self._records.get(number)
        if older is not None and older[0] == base:
            return older
        cache = ActivationCache()
        self._run(batch, [base], older, self._first_call(base, older), cache)
        self._records.pop(number, None)
        if cache.nbytes + sum(recorded.nbytes for _, recorded in self._records.values()) <= self._room:
            self._records[number] = (base, cache)
        return base, cache

    def _groups(
        self, subsets: Sequence[frozenset[Head]], record: _Base | None, batch: _Batch
    ) -> Iterator[tuple[int, list[frozenset[Head]]]]:
        """Groups of subsets that share a forward, each with the first attention call that its subsets change."""
        by_call: dict[int, list[frozenset[Head]]] = {}
        for subset in subsets:
            by_call.setdefault(self._first_call(subset, record), []).append(subset)
        first = next(iter(batch.inputs.values()))
        size = max(1, self._shared_tokens // (first.numel() if first.dim() == 2 else len(first)))
        for call, group in by_call.items():
            for start in range(0, len(group), size):
                yield call, group[start : start + size]

    def _logits(
        self, batch: _Batch, group: Sequence[frozenset[Head]], record: _Base | None, call: int
    ) -> list[np.ndarray]:
        """Logits of each subset of a group, which runs from attention call `call` on."""
        try:
            outputs = self._run(batch, group, record, call)
        except NotRowsError:
            self._shared_tokens = 1
            return [self._task.logits(self._run(batch, [subset], record, call)) for subset in group]
        return list(np.split(self._task.logits(outputs), len(group)))

    def _run(
        self,
        batch: _Batch,
        group: Sequence[frozenset[Head]],
        record: _Base | None,
        call: int,
        cache: ActivationCache | None = None,
    ) -> Any:
        """The outputs of a group of subsets on a batch, run from attention call `call` on; adds to the cost.

        The calls before replay `record`, and the activations of this run are recorded in `cache`.
        """
        replayed = record[1] if record else None
        share = 1 - replayed.start(call) / len(replayed.layers) if replayed and replayed.layers else 1.0
        kept = [[float(head in subset) for head in self._heads] for subset in group]
        gates = torch.tensor(kept, device=self._model.device)
        outputs = self._forward.run(batch.inputs, gates, base=replayed, call=call, record=cache)
        self._forwards += len(group) * share * len(batch.rows) / len(self._rows)
        return outputs

    def _first_call(self, subset: frozenset[Head], record: _Base | None) -> int:
        """The first attention call at which a subset differs from the recorded one."""
        return record[1].first_call({site for site, _ in subset ^ record[0]}) if record else 0

    def _batches(self) -> Iterator[_Batch]:
        """All batches of the evaluation rows, on the device of the model."""
        rows, size = self._rows, self._batch_size
        in_order = (range(start, min(start + size, len(rows))) for start in range(0, len(rows), size))
        plain = ((list(part), self._task.collate([rows[index] for index in part])) for part in in_order)
        for indices, batch in batches(self._task, rows, size) if self._reuse else plain:
            labels = batch.pop(self._task.label_name)
            yield _Batch(indices, tensors_of(batch, self._model.device), labels)

    @functools.cached_property
    def _room(self) -> float:
        """Bytes that all activations may use: a share of the memory that was free at the first record."""
        cuda = self._model.device.type == "cuda"
        return self._memory_share * (torch.cuda.mem_get_info()[0] if cuda else psutil.virtual_memory().available)


@dataclass
class ActivationCache:
    """The activations of one batch.

    Attributes:
        layers: output of each call of a layer, in order.
        ends: number of attention calls up to the end of each call of a layer.
        heads: output of each attention call before its gates, `[batch, query, head, head_dim]`, in order.
        sites: the site of each attention call.
    """

    layers: list[Any] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    heads: list[Tensor] = field(default_factory=list)
    sites: list[str] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors; shared storage is counted once."""
        sizes: dict[int, int] = {}
        for tensor in (*self.heads, *get_leaf_tensors(self.layers).values()):
            sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return sum(sizes.values())

    def first_call(self, changed: set[str]) -> int:
        """The first attention call of a site in `changed`; the number of calls if there is none."""
        return next((call for call, site in enumerate(self.sites) if site in changed), len(self.sites))

    def start(self, call: int) -> int:
        """The number of layer calls that end before attention call `call`; these need not run again."""
        return sum(end <= call for end in self.ends)


class PartialForward:
    """Runs forwards of one model without dropout, which may start at any layer."""

    def __init__(self, model: PreTrainedModel, sites: Sequence[Site], mixed_precision: MixedPrecision = "no") -> None:
        self._model, self._sites, self._is_half = model, sites, mixed_precision == "bf16"
        self._layers = outermost_layers(model)
        parameters = inspect.signature(model.forward).parameters
        self._fixed_inputs = {"use_cache": False} if "use_cache" in parameters else {}

    def run(
        self,
        batch: Mapping[str, Tensor],
        gates: Tensor,
        *,
        base: ActivationCache | None = None,
        call: int = 0,
        record: ActivationCache | None = None,
    ) -> Any:
        """The output of the model on a batch, for one subset of heads or for several at once.

        Args:
            batch: inputs `[batch, ...]`.
            gates: `[subsets, heads]`; the output has `subsets * rows` rows, all rows of the first subset first.
            base: activations of an earlier run on this batch, replayed up to the attention call `call`.
            call: the first attention call at which `gates` differ from those of `base`.
            record: filled with the activations of this run, which must be of one subset; None: they are not recorded.

        Raises:
            NotRowsError: several subsets cannot share a forward of this model.
        """
        if len(gates) > 1 and any(site.batch_axis for site in self._sites):
            raise NotRowsError("positions before rows")
        rows = len(next(iter(batch.values())))
        calls = _CachedCalls(len(gates), rows, base, call, record)
        parts = torch.split(gates, [site.heads for site in self._sites], dim=1)
        gate_of = {site.name: part for site, part in zip(self._sites, parts, strict=True)}

        def gated_output(site: str, compute: Callable[[], Tensor]) -> Tensor:
            out = calls.attention(site, compute)
            if site in unread_sites(self._model):
                return out
            return out * spread_over_rows(gate_of[site], len(out)).to(out.device, out.dtype)

        def on_call(attention: Call) -> tuple[Tensor, Tensor | None]:
            return gated_output(attention.site, lambda: attention.run()[0]), None

        def on_projection(site: str, heads: Tensor) -> Tensor:
            return gated_output(site, lambda: heads)

        inputs = {name: _repeat(value, len(gates), rows) for name, value in batch.items()}
        autocast = torch.autocast(self._model.device.type, torch.bfloat16, enabled=self._is_half)
        with (
            evaluating(self._model),
            torch.no_grad(),
            autocast,
            routed_forwards(self._layers, calls.layer),
            intercepted(self._model, on_call, None),
            hooked_projections(self._model, self._sites, on_projection),
        ):
            return self._model(**inputs, **self._fixed_inputs)


class _CachedCalls:
    """The calls of layers and attentions in one forward: some replay those of `base`, and all are added to `record`."""

    def __init__(
        self, subsets: int, rows: int, base: ActivationCache | None, call: int, record: ActivationCache | None
    ) -> None:
        self.subsets, self.rows, self.base, self.call, self.record = subsets, rows, base, call, record
        self.start = base.start(call) if base else 0
        self.attention_calls = 0

    def attention(self, site: str, compute: Callable[[], Tensor]) -> Tensor:
        """The heads `[batch, query, head, head_dim]` of an attention call before gates, replayed if `base` has them."""
        number = self.attention_calls
        self.attention_calls += 1
        if self.base is not None and number <= self.call and number < len(self.base.heads):
            output = self.base.heads[number]
            repeated = _repeat(output, self.subsets, self.rows)
        else:
            repeated = output = compute()
        if self.record is not None:
            self.record.heads.append(output)
            self.record.sites.append(site)
        return repeated

    def layer(self, number: int, layer: nn.Module, run: Callable[[], Any]) -> Any:
        """The output of a layer call, replayed if it equals that of `base`; see `routed_forwards`."""
        if self.base is not None and number < self.start:
            first_call, self.attention_calls = self.attention_calls, self.base.ends[number]
            output = self.base.layers[number]
            if self.record is not None:
                self.record.heads += self.base.heads[first_call : self.attention_calls]
                self.record.sites += self.base.sites[first_call : self.attention_calls]
            repeated = _repeat(output, self.subsets, self.rows)
        else:
            repeated = output = run()
        if self.record is not None:
            self.record.layers.append(output)
            self.record.ends.append(self.attention_calls)
        return repeated


class NotRowsError(Exception):
    """Several subsets cannot share a forward, because the output of a layer does not consist of rows."""


def _repeat(value: Any, times: int, rows: int) -> Any:
    """Concatenate `times` copies of every tensor of `rows` rows in `value`; tensors of a single row stay as they are.

    Raises:
        NotRowsError: `value` contains anything else.
    """
    if times == 1 or value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Tensor):
        if value.dim() and len(value) % rows == 0:
            return value.repeat(times, *(1,) * (value.dim() - 1))
        if not value.dim() or len(value) == 1:
            return value
    elif type(value) in (tuple, list):
        return type(value)(_repeat(part, times, rows) for part in value)
    raise NotRowsError(type(value).__name__)
