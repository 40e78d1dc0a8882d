"""What a run found out, as data: `report.json`. The page, the command's output and the exit code are read off it."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from graph_passes import Plan

# JSON has no infinity: an error without bound is written as "Infinity" and read back as the number.
_STRICT = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="strings")


class _Row(BaseModel):
    model_config = _STRICT


class NoteCode(StrEnum):
    """What a note is about, as programs and tests read it: codes stay while texts may change."""

    UNSPECIFIED = "unspecified"

    # What was loaded and read.
    TENSORS_UNUSED = "tensors-unused"
    SPLIT_CHOSEN = "split-chosen"
    """Rows for a purpose were taken from a split of the training data by its name."""
    SPLIT_UNUSED = "split-unused"
    """A split was left out because its labels are withheld."""
    ROWS_SET_ASIDE = "rows-set-aside"
    """Evaluation or test rows were taken out of other rows."""
    SEGMENT_SHORTENED = "segment-shortened"
    TEXT_COLUMNS = "text-columns"
    """Which columns hold the texts of a task that reads two, and how they are cut."""
    METRIC_SETTINGS = "metric-settings"
    """How the metric is computed, and what heads and checkpoints are chosen by instead."""

    # What is checked and served.
    RANDOM_INPUTS = "random-inputs"
    """Inputs were drawn at random because no rows provide them."""
    BASELINE_NOT_SAVED = "baseline-not-saved"
    ENGINE_MISSING = "engine-missing"
    """A run for TensorRT has no engine, so that its graph is served."""
    KERNEL_NOT_SERVED = "kernel-not-served"
    """A run was measured with a compiled kernel that the server does not load."""
    SERVER_REQUIREMENT = "server-requirement"
    """The server needs a version, a package or a flag."""
    NO_BATCHING = "no-batching"
    """The server cannot form batches because the graph fixes its batch size."""
    STORAGE_URI = "storage-uri"
    """The storage URI of a KServe service is a placeholder."""


class Note(_Row):
    """Something that a reader of the results must know, in one line."""

    text: str
    code: NoteCode = NoteCode.UNSPECIFIED

    def __str__(self) -> str:
        return self.text


def _as_note(value: Any) -> Any:
    """Reports of version 0.1 hold their notes as texts."""
    return {"text": value} if isinstance(value, str) else value


AnyNote = Annotated[Note, BeforeValidator(_as_note)]


class CurvePoint(_Row):
    """One step of learning: everything logged there, e.g. `loss`, `temperature`, `eval_accuracy`."""

    step: int
    values: dict[str, float]


class MetricUnit(StrEnum):
    """The unit in which a metric's values are shown."""

    POINTS = "points"
    """A share of one, shown in hundredths: 0.861 as 86.1, differences in points."""
    RAW = "raw"
    """Shown as computed: a correlation, a loss, BLEU."""

    @property
    def scale(self) -> float:
        """The factor from a computed value to the one shown."""
        return 100.0 if self is MetricUnit.POINTS else 1.0


_SHARES = frozenset({"accuracy", "balanced_accuracy", "exact-match", "f1", "macro_f1", "precision", "recall"})
"""Metrics in points in reports that do not hold the unit."""


class Score(_Row):
    """The task's metric on the built engines, dense against compressed, with a paired bootstrap interval.

    `difference` is compressed minus dense as computed, whatever `unit` it is shown in; `low` and `high` bound it at
    `confidence`.
    """

    metric: str
    split: Literal["eval", "test"]
    rows: int
    dense: float
    compressed: float
    difference: float
    low: float
    high: float
    confidence: float = 0.95
    higher_is_better: bool = True
    unit: MetricUnit = MetricUnit.RAW

    @model_validator(mode="before")
    @classmethod
    def _add_unit(cls, fields: Any) -> Any:
        """Reports of version 0.1 do not hold the unit; it follows from the metric's name."""
        if not isinstance(fields, dict) or "unit" in fields:
            return fields
        return {**fields, "unit": MetricUnit.POINTS if fields.get("metric") in _SHARES else MetricUnit.RAW}


class Proof(_Row):
    """One comparison of two stages. `error` is the largest relative error over every output and input tried."""

    stage: Literal["gated model = reference graph", "reference graph = shrunk graph", "shrunk graph = engine"]
    side: Literal["dense", "compressed"]
    error: float
    tolerance: float
    cases: tuple[str, ...]
    """The inputs tried, in words: `batch 2, length 17, padded`."""

    @property
    def holds(self) -> bool:
        return self.error <= self.tolerance


class Latency(_Row):
    """Times of one engine in one interleaved run, in milliseconds a call; throughput in examples per second."""

    p50: float
    p90: float
    p99: float
    throughput: float
    samples: tuple[float, ...]
    """Every timed call in order, milliseconds: the picture is drawn from it."""
    device: tuple[float, float, float] | None = None
    """p50, p90 and p99 on the device by its own clock, transfers left out, where the engine tells."""


class Speed(_Row):
    """Dense and compressed timed in turn, in one process, on the same inputs.

    `ratio` is dense p50 over compressed p50 (above one: compressed is faster); `low` and `high` bound it by a
    bootstrap over interleaved blocks. `void` says why the row must not be read as a result, or is None.
    """

    batch: int
    seq: int | None
    """Length in tokens; None for a model of images or sound alone."""
    dense: Latency
    compressed: Latency
    ratio: float
    low: float
    high: float
    confidence: float = 0.95
    void: str | None = None


class BuiltLayer(_Row):
    """A layer of an engine as the runtime's inspector tells it; `nodes` are those of the graph that it computes."""

    name: str
    kind: str = ""
    tactic: str = ""
    nodes: str = ""


class EngineBuild(_Row):
    """What came of building an engine ahead of time. Bytes are of the device's memory, but for the file's.

    `activation_bytes` is what it needs beside its weights at the largest sizes that it takes; `attention` says in one
    line whether attention stayed fused.
    """

    seconds: float
    plan_bytes: int
    weight_bytes: int | None
    activation_bytes: int
    attention: str
    layers: tuple[BuiltLayer, ...] = ()


class EngineFacts(_Row):
    """One built engine: sizes in bytes, `fused` and `attentions` counted in the graph that the runtime runs."""

    file: str | None
    parameters: int
    file_bytes: int
    peak_memory_bytes: int | None
    macs: int | None
    """Multiply-accumulates of one forward of batch 1 at the first sequence length measured."""
    attentions: int
    fused: int
    optimization: str
    """What was done to the graph for this runtime, in one line."""
    built: EngineBuild | None = None
    """What came of building it ahead of time, where the runtime does."""


class Refusal(_Row):
    """A site, or several, whose heads have to stay as they are, and the operator in the way."""

    what: str
    why: str


class SiteBlocks(_Row):
    """What became of one site's blocks.

    `share` is that of its kept heads' blocks which the mask keeps over the longest row, of causal attention without
    those of the future. `form` is how the engine computes them; `unprojected` how many key blocks no query looks at, so
    that their keys and values are not projected; `milliseconds` what each form took alone, by length and form, at the
    first batch size, where they were timed.
    """

    site: str
    kind: str
    block: int
    share: float
    form: Literal["whole", "masked", "block-sparse"]
    why: str
    unprojected: int = 0
    milliseconds: dict[int, dict[str, float]] = Field(default_factory=dict)


class Report(BaseModel):
    """Everything a run did, measured and refused."""

    model_config = _STRICT

    version: Literal[1] = 1
    verdict: str
    """One sentence: what was won, or that nothing was."""
    model: str
    """Name of the model folder."""
    family: str
    """transformers' model type, e.g. `bert`."""
    task: str | None
    plan: Plan
    notes: tuple[AnyNote, ...] = ()
    """What a reader must know: test rows set aside from the evaluation data, no key/value cache, nothing learned."""
    curves: tuple[CurvePoint, ...] = ()
    scores: tuple[Score, ...] = ()
    proofs: tuple[Proof, ...] = ()
    speeds: tuple[Speed, ...] = ()
    dense: EngineFacts
    compressed: EngineFacts
    refused: tuple[Refusal, ...] = ()
    blocks: tuple[SiteBlocks, ...] = ()
    """Sites whose blocks were asked for; empty where none were."""
    gate: Literal["passed", "failed", "not asked"] = "not asked"
    target: str
    """The runtime that was measured."""
    missing: str | None = None
    """What the runtime that was asked for lacks here, and how to go on; `target` stood in for it. None: nothing."""
    graphs: dict[str, str] = Field(default_factory=dict)
    """Hashes of the graphs in the folder, with their data, by file: what was proven."""
    precision: str
    session: dict[str, Any] = Field(default_factory=dict)
    """Runtime, provider, session options."""
    machine: dict[str, str] = Field(default_factory=dict)
    """Processor, cores, memory, versions of what was used."""
    recipe: dict[str, Any] = Field(default_factory=dict)
    command: str = ""
    """The command line that reproduces the run."""
    seconds: dict[str, float] = Field(default_factory=dict)
    """Wall time of each stage."""
