"""Facts about engines, built or tried."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

from pydantic import Field, model_validator

from compressor.results.metrics import MetricUnit
from compressor.results.proofs import Proof
from compressor.results.rows import Row, renamed_keys


class BuiltLayer(Row):
    """A layer of an engine as the runtime's inspector reports it.

    `nodes` are the graph nodes that it computes, `formats` the element types of its inputs and its weights, with their
    layout, each once.
    """

    name: str
    kind: str = ""
    tactic: str = ""
    nodes: str = ""
    formats: tuple[str, ...] = ()


class EngineBuild(Row):
    """Facts about an engine that was built ahead of time.

    `seconds` is the time of the build and `engine_bytes` the size of the engine's file. `weight_bytes` and
    `activation_bytes` are device memory, for activations at the largest sizes that the engine takes. `attention` says
    in one line whether attention is fused.
    """

    seconds: float
    engine_bytes: int
    weight_bytes: int | None
    activation_bytes: int
    attention: str
    layers: tuple[BuiltLayer, ...] = ()

    @model_validator(mode="before")
    @classmethod
    def _current_keys(cls, fields: Any) -> Any:
        """Rename the key `plan_bytes` of version 0.1 to `engine_bytes`."""
        return renamed_keys(fields, {"plan_bytes": "engine_bytes"})


class QuantizedProducts(Row):
    """The matrix products with constant weights of an engine in 8 bits, int8 or fp8 (`type`).

    `requested` is the number of products that the graph has in 8 bits, `executed` the number that the runtime computes
    in 8 bits. `in_float` names products that it computes in floats although the graph has them in 8 bits; runtimes do
    not report the names of all layers, so it may be incomplete. `float_in_graph` names products that the quantizer left
    in floats. `float_widths` holds the numbers of inputs and outputs of the products that are in floats because int8
    was slower there on the machine that built the engine.
    """

    type: Literal["int8", "fp8"] = "int8"
    requested: int
    executed: int
    in_float: tuple[str, ...] = ()
    float_in_graph: tuple[str, ...] = ()
    float_widths: tuple[tuple[int, int], ...] = ()

    @property
    def by_precision(self) -> dict[str, int]:
        """Number of products with constant weights that are computed in 8 bits and in floats."""
        return {self.type: self.executed, "fp32": self.requested - self.executed + len(self.float_in_graph)}


class EngineFacts(Row):
    """Facts about one engine.

    Sizes are in bytes. `attentions` is the number of attentions in the graph that the runtime runs, `fused` the number
    of those that it fused.
    """

    file: str | None
    parameters: int
    file_bytes: int
    peak_memory_bytes: int | None
    macs: int | None
    """Multiply-accumulates of one forward of batch 1 at the first sequence length measured."""
    macs_by_length: dict[int, int] = Field(default_factory=dict)
    """The same at each length that was timed; length 1 is that of a model that has one size."""
    machine_limit: float | None = None
    """Operations per second of a matrix product of 2048 x 2048 x 2048 in the engine's precision, on its runtime and
    number of threads; None: not measured.
    """
    attentions: int
    fused: int
    optimization: str
    """How the graph was optimized for this runtime, in one line."""
    quantized: QuantizedProducts | None = None
    """The products in 8 bits; None: the engine has another precision."""
    products: dict[str, int] = Field(default_factory=dict)
    """Number of matrix products with constant weights by the precision that they are computed in; empty: unknown."""
    built: EngineBuild | None = None
    """Facts about the build; None: the runtime does not build engines ahead of time."""

    @model_validator(mode="after")
    def _count_products(self) -> EngineFacts:
        """Count the products of a report that knows those in 8 bits alone."""
        if not self.products and self.quantized is not None:
            self.products.update(self.quantized.by_precision)
        return self

    @property
    def reduced_products(self) -> dict[str, str]:
        """Precision -> how many of the products with constant weights are computed in it; empty if all are in fp32."""
        counts = {name: count for name, count in self.products.items() if count}
        total = sum(counts.values())
        return {} if counts.keys() <= {"fp32"} else {name: f"{count} of {total}" for name, count in counts.items()}

    def share_of_limit(self, batch: int, seq: int | None, milliseconds: float) -> float | None:
        """The share of the machine's limit that a call reaches: `2 macs batch / seconds / limit`.

        Args:
            batch: rows of the call.
            seq: their length in tokens; None: the model has one size.
            milliseconds: its time.

        Returns:
            The share; None where a part of it is not known, or where the call is faster than the limit: the machine was
            slower while the limit was measured.
        """
        macs = self.macs_by_length.get(seq or 1)
        if not self.machine_limit or macs is None:
            return None
        share = 2 * macs * batch / (1e-3 * milliseconds) / self.machine_limit
        return share if share <= 1 else None


class Candidate(Row):
    """An engine that was tried for the compressed model.

    `has_all_units` says that it was tried before units were removed, with the units of the whole model. `form` says how
    its graph was quantized; it is empty for an engine in floats. `milliseconds` holds the median time of a call by
    size, e.g. `batch 1, length 128`; `speed` is the geometric mean over the sizes of the time of the dense engine over
    that of this one. Where units are removed afterwards, `speed_pruned` is the same with a `share` of the units of
    every group, for engines that may be the fastest then. `metric` is computed on the evaluation rows, `difference` is
    that minus the metric of the dense engine, both as computed and not scaled to `unit`; without labels both are None.
    `agreement` is the share of its answers to these rows that equal those of the dense engine. `holds` says whether the
    metric fell by no more than `--max-drop`. Memory is measured for engines that hold. `in_float` names products of the
    quantized graph that were returned to floats, because a proof or the metric does not hold with them in int8.
    `failure` says why there is no such engine.
    """

    target: str
    precision: str
    form: str = ""
    has_all_units: bool = False
    in_float: tuple[str, ...] = ()
    milliseconds: dict[str, float] = Field(default_factory=dict)
    speed: float | None = None
    speed_pruned: float | None = None
    share: float | None = None
    metric: float | None = None
    difference: float | None = None
    unit: MetricUnit = MetricUnit.RAW
    agreement: float | None = None
    file_bytes: int | None = None
    peak_memory_bytes: int | None = None
    quantized: QuantizedProducts | None = None
    proofs: tuple[Proof, ...] = ()
    holds: bool = True
    chosen: bool = False
    failure: str = ""

    @model_validator(mode="before")
    @classmethod
    def _current_keys(cls, fields: Any) -> Any:
        """Rename the key `speed_of_half` of version 0.1, when all engines were timed with half of the units."""
        if isinstance(fields, dict) and fields.get("speed_of_half") is not None:
            fields = {**fields, "share": 0.5}
        return renamed_keys(fields, {"speed_of_half": "speed_pruned"})

    @property
    def pruned_text(self) -> str:
        """The part of the model that it was timed with before units were removed; empty: all of it."""
        return "" if self.share is None else f"with {100 * self.share:.2g}% of the units"

    @property
    def label(self) -> str:
        """The settings of the engine, e.g. `openvino int8 portable`."""
        return " ".join(filter(None, (self.target, self.precision, self.form)))


def labels_by_failure(candidates: Iterable[Candidate]) -> dict[str, list[str]]:
    """Reason why an engine cannot be delivered -> the labels of the engines that have it."""
    labels: dict[str, list[str]] = {}
    for candidate in candidates:
        if candidate.failure:
            labels.setdefault(candidate.failure, []).append(candidate.label)
    return labels
