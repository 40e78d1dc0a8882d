"""The results of a run as data, `report.json`, from which the page, the command's output and the exit code derive."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import StrEnum, auto
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

from compressor.errors import Code
from graph_passes import Kind, Plan

# JSON has no infinity: an infinite error is written as "Infinity", and read as the number.
STRICT = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="strings")


class Row(BaseModel):
    """A frozen part of the results, which refuses fields that it does not have."""

    model_config = STRICT


class NoteCode(Code):
    """The subject of a note, for programs and tests: codes are stable, texts may change."""

    UNSPECIFIED = auto()

    # Models and rows.
    TENSORS_UNUSED = auto()
    LENGTHS_UNPROVEN = auto(), "No proof covers lengths above a limit that is not served, where the model may differ."
    BLOCKS_AS_MASK = auto(), "Block-sparse attention of the model is exported as dense attention with a mask."
    PREFIX_REMOVED = auto(), "The names of tensors had the prefix of a compiled, parallel or wrapped model."
    ADAPTER_MERGED = auto()
    FILES_COPIED = auto(), "Files for another library, which runs on the outputs, were copied unchanged."
    FILES_UNREAD = auto(), "Files of the model folder are neither read nor copied."
    SPLIT_CHOSEN = auto(), "Evaluation or test rows are a split of the training data that was recognized by its name."
    ROWS_UNLABELLED = auto(), "Training rows without labels, which are enough to choose units under a budget."
    ANSWERS_AS_LABELS = auto(), "Rows without labels are scored by the answers of the whole model."
    ROWS_DRAWN = auto(), "Only some of many training rows were encoded, because a run needs no more."
    SPLIT_UNUSED = auto(), "A split was left out because its labels are withheld."
    ROWS_SET_ASIDE = auto(), "Evaluation or test rows were taken out of other rows."
    ROWS_REPEATED = auto(), "Many test rows are among the training or evaluation rows."
    LABELS_NUMBERED = auto(), "Names of labels that the model lacks are numbered in the order of the alphabet."
    METRIC_CHOSEN = auto(), "The metric follows from the rows, e.g. pairs of one query, or from a graph's outputs."
    OUTPUT_CHOSEN = auto(), "The only output with floats is scored, whose name is not that of the task's output."
    ARRAYS_CONVERTED = auto(), "Arrays of rows are converted to the types of the graph's inputs without loss."
    THRESHOLDS = auto(), "The probabilities from which a model that assigns several classes to a row assigns them."
    LABELS_PERMUTED = auto(), "The dense model is far better with its classes in the order that the note names."
    DENSE_UNINFORMED = auto(), "The dense model scores no better than an answer that is the same for every row."
    ANSWERS_UNCHANGED = auto(), "No test row's result changed, so the interval of the difference has no width."
    ROWS_LEFT_OUT = auto(), "Rows of text, such as empty lines, have no token that is scored."
    FILES_SKIPPED = auto(), "Files in a folder of images are no images, or have an unsupported format."
    TEXTS_EMPTY = auto(), "Some rows have an empty text, which the model reads too."
    ROWS_CUT = auto(), "Some rows are longer than the maximum row length, and their rest is not read."
    ANSWERS_CUT = auto(), "Some answers lie in no window of their text, so no model can give them."
    WORDS_CUT = auto(), "Words beyond the maximum length of a row have tags that are not scored."
    TEST_IS_EVAL = (
        auto(),
        "The metric is of the evaluation rows, which select the result too: no test rows were named.",
    )
    SEGMENT_SHORTENED = auto()
    TEXT_COLUMNS = auto(), "The columns of the texts of a task that reads two, and the way they are truncated."
    METRIC_SETTINGS = auto(), "How the metric is computed, and which metric selects heads and checkpoints instead."

    # The run.
    POSITIONS_DROPPED = auto(), "Matmuls of the last layers compute only the tokens that are read."
    POSITIONS_UNCERTAIN = auto(), "The last layers leave out unread tokens; the runtime miscomputes some such graphs."
    TARGET_MISSING = auto(), "ONNX Runtime on the CPU was measured, because this machine lacks the requested target."
    NO_EFFECT = auto(), "Fields were set that this run does not use."
    DENSE_CHOSEN = auto(), "What a run is compared with that removes more units from the output of an earlier run."
    LOSS_ALLOWED = auto(), "Which loss of the metric a run allows that sets none."
    TIME_LIMITED = auto(), "How long the whole run may take."
    LENGTH_LIMITED = auto(), "Rows are cut at the model's maximum length, below the requested one."
    NOTHING_LEARNED = auto()
    PLAN_FOLLOWED = auto()
    EMBEDDINGS_CHANGED = auto(), "How far the embeddings of the compressed model are from those of the dense one."
    TRAINED_ALONG = auto(), "The compressed model was trained, but not the dense one."
    WEIGHTS_CHANGED = auto(), "The weights of the compressed model were adjusted without training."
    NOT_DISTILLED = auto(), "PyTorch is not installed, so the remaining units were not trained."
    DISTILLED_IN_VAIN = auto(), "No checkpoint is closer to the teacher than the weights before the distillation."
    OUTPUTS_NOT_KEPT = auto(), "The teacher's outputs exceed the disk, lack positions, or are of several processes."
    RUNG_FINISHED = auto()
    RUNG_OUTDATED = auto(), "A finished rung is not used: its recipe, its task or a file that it reads has changed."
    LADDER_ENDED = auto(), "The budget of a rung cannot be met; the rungs before it are finished."
    DISTILLED = auto(), "The compressed model was trained on the outputs of the dense model."
    SEGMENT_MEMORY = auto()
    NO_CACHE = auto()
    CACHED_ENGINE_MISSING = auto(), "The graphs with key/value caches have no engine of their runtime here."
    LIBRARY_LIMITED = auto(), "What the runtime's own library for generation cannot do with the output folder, and why."
    NO_METRIC = auto()
    MASKS_LONGER = auto(), "Masks cover longer rows than some that are measured."
    MASKS_TIMED_ELSEWHERE = auto(), "Whether masks pay was timed with another runtime than the target."
    NORM_OVER_ALL_HEADS = auto(), "Dropped heads are computed up to a norm over the queries or keys of all heads."
    HEADS_EMPTIED = auto(), "Heads were dropped because their masks keep no block."
    MEMORY_UNMEASURED = auto()
    RESUMED = auto(), "Work of an interrupted run was used."
    STARTED_AFRESH = auto(), "Work of an interrupted run was discarded, because its recipe, model or rows differ."
    KERNEL_UNUSED = auto()
    NO_DENSE_GRAPH = auto(), "The folder lacks dense.onnx, the graph of the whole model, to compare with."
    TIMED_ALONE = auto(), "Times of an engine without a dense engine to compare with."
    FILES_KEPT = auto(), "Files of earlier engines are still in the folder; the note names the commands that read them."
    EARLIER_REPORT_KEPT = auto()
    ROWS_MISSING = auto(), "The rows or the model are not on this machine, so the metric was not measured again."

    EVALUATED = auto(), "The metric of an evaluation while a model is trained."
    FILE_WRITTEN = auto()

    # Selection of heads and blocks.
    NOTHING_REMOVED = auto(), "A search found no head that may be removed within the loss allowed."
    LOSS_UNSEEN = auto(), "The evaluation rows are too few to show a loss as small as the one that is allowed."
    NOTHING_HOLDS = auto(), "No attempt to remove units and train the rest keeps the metric: every unit stays."
    MORE_HEADS_KEPT = auto(), "A search could not remove exactly as many heads as requested."
    COSTS_DECREASED = auto(), "Heads cost less than a search assumed, so it may have missed cheaper heads."
    CERTIFIED = auto()
    NOT_CERTIFIED = auto(), "A certificate was requested, and it covers no removed head."
    CERTIFICATION_COST = auto()
    MAPS_DIFFER = auto(), "Masks are derived from attention maps of other rows or weights."
    MAPS_CROPPED = auto(), "Attention maps cover longer rows than there are."
    BLOCKS_UNREACHED = auto(), "Blocks are kept because no row reaches them."
    SITES_UNMASKED = auto(), "Sites keep every block because masking them would not be faster on this machine."

    # Latency checks and serving.
    RANDOM_INPUTS = auto(), "Inputs are random, because no rows provide them."
    BASELINE_NOT_SAVED = auto()
    ENGINE_MISSING = auto(), "A run for TensorRT has no engine, so its graph is served."
    ENGINE_NOT_SERVED = auto(), "The server runs a graph with another runtime than the run was measured with."
    KERNEL_NOT_SERVED = auto(), "A run was measured with a compiled kernel that the server does not load."
    SERVER_REQUIREMENT = auto(), "The server needs a version, a package or a flag."
    NO_BATCHING = auto(), "The server cannot form batches because the graph fixes its batch size."
    STORAGE_URI = auto(), "The storage URI of a KServe service is a placeholder."

    # Budgets.
    COSTS_REUSED = auto(), "The cost table of an earlier run on this machine is used."
    COSTS_REMEASURED = auto(), "Stored cost tables are outdated, or are for another machine, runtime, engine or size."
    COSTS_NOT_STORED = auto(), "The cost table that was measured could not be stored for later runs."
    COSTS_NOT_COUNTED = auto(), "Parameters and multiply-accumulates are not known, because the export failed."
    COSTS_NOT_MEASURED = (auto(), "Times of units are not known: no cost table of the model was measured here.")
    EXPERTS_KEPT = auto(), "Experts keep all neurons, because their weights are one tensor of three axes."
    LOSS_UNBOUNDED = auto(), "An engine of fewer bits was chosen, and nothing bounds how much of the metric it loses."
    BUDGET_MET = auto(), "The plan meets the budget; the note has the requested and the reached cost."
    BUDGET_MISSED = auto(), "No plan that was measured meets the budget."
    TIMES_DRIFTED = auto(), "The dense engine takes another time at the end of the run than when units were allocated."
    HEADS_SELECTED_FIRST = auto(), "A method selects the heads, and the budget then removes neurons only."
    BUDGET_ABOVE_DENSE = auto(), "The budget allows the whole model, so nothing is removed."
    EQUAL_WEIGHTS = auto(), "PyTorch lacks an operator, so units were chosen without weights of tokens by gradients."
    DAMPING_RAISED = auto(), "Some Gram matrices are singular: more than requested was added to their diagonals."
    GROUPS_SKIPPED = auto(), "Groups of units that keep all, because they cannot be removed from the graph."

    # Quantization.
    NO_INT8_INSTRUCTIONS = (auto(), "Sums of int8 products saturate on the processor, so weights use 7 of 8 bits.")
    OUTLIER_RANGES = auto(), "Matmuls stay in floats: outliers of activations leave too few int8 values for the rest."
    FEW_CALIBRATION_ROWS = auto()
    QUANTIZED_FOR_TARGET = auto(), "A quantized graph was written for a target that this machine lacks."
    PRODUCTS_IN_FLOAT = auto(), "Matmuls stay in a finer precision than that of the engine."
    PROVEN_ELSEWHERE = (auto(), "An engine was proven with another instruction set or runtime version than here.")
    GRAPH_WRONG_IN_RUNTIME = auto(), "An installed runtime fails on a graph at a fixed shape, or miscomputes it."
    ENGINE_CHOSEN = auto(), "One of several engines was chosen to be delivered; the note says why."
    ENGINES_COMPARED_WHOLE = auto(), "No engine could be built with a share of the units: whole models were compared."

    # Measurements.
    SPEED_UNCERTAIN = auto(), "A speed cannot be quoted: its interval is wide, or an engine took different times."
    SETTINGS_DIFFER = auto(), "Two engines run with different settings, so their times are not comparable."
    FUSION_DIFFERS = auto(), "Attention is fused in one of two engines only, so their times are not comparable."


class Note(Row):
    """Something that a reader of the results must know, in one line."""

    text: str
    code: NoteCode = NoteCode.UNSPECIFIED

    def __str__(self) -> str:
        return self.text


class CurvePoint(Row):
    """The values logged at a training step or at a step of a search, e.g. `loss`, `temperature`, `eval_accuracy`."""

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
        """The factor from a computed value to the value that is shown."""
        return 100.0 if self is MetricUnit.POINTS else 1.0


_ROUNDING = 1e-12
"""Rounding error of a difference of two metrics."""


def is_within(loss: float, allowed: float) -> bool:
    """Whether a loss of the metric is at most the allowed one, up to the rounding of floats: 0.9 - 0.89 is 0.01."""
    return loss <= allowed + _ROUNDING


def loss_of(difference: float, *, higher_is_better: bool) -> float:
    """The loss of a metric from the difference, compressed minus dense; negative if the metric improves."""
    return -difference if higher_is_better else difference


class Score(Row):
    """The task's metric on the dense and the compressed engine, with a paired bootstrap interval of the difference.

    `difference` is compressed minus dense, as computed and not scaled to `unit`; `low` and `high` are the bounds of its
    interval at `confidence`.
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

    @property
    def split_name(self) -> str:
        """The split for readers: `evaluation` or `test`."""
        return "evaluation" if self.split == "eval" else self.split

    @property
    def loss(self) -> float:
        """The loss of the metric by the compressed engine, as computed; negative if the metric improves."""
        return loss_of(self.difference, higher_is_better=self.higher_is_better)

    @property
    def worst_loss(self) -> float:
        """The upper end of the interval of the loss."""
        return -self.low if self.higher_is_better else self.high


def headline_scores(scores: Sequence[Score]) -> list[Score]:
    """The scores to quote: those on test rows, which no choice was based on, else those on evaluation rows."""
    return _of_split(scores, "test") or list(scores)


def deciding_scores(scores: Sequence[Score]) -> list[Score]:
    """The scores that choices are based on: those on evaluation rows, else those on test rows."""
    return _of_split(scores, "eval") or list(scores)


def keeps_metric(scores: Sequence[Score], max_drop: float) -> bool:
    """Whether the metric that is quoted falls by at most `max_drop`, in its own unit."""
    return all(is_within(score.loss, max_drop) for score in headline_scores(scores))


def _of_split(scores: Sequence[Score], split: Literal["eval", "test"]) -> list[Score]:
    return [score for score in scores if score.split == split]


Phase = Literal["prompt", "token", "request"]
"""What a model that generates does: it reads the prompt, computes a token after it, or both for a whole request."""


class Size(NamedTuple):
    """The size of a call that is timed or counted.

    Attributes:
        batch: number of rows.
        seq: length in tokens, of a prompt where the model generates; None: the model has one size.
        phase: what a model that generates does; None: the graph is called once.
    """

    batch: int
    seq: int | None = None
    phase: Phase | None = None


def size_label(batch: int, seq: int | None, phase: Phase | None = None) -> str:
    """The size of a batch of inputs: `batch 8, length 128`; `batch 8` for a model of images or sound alone.

    Args:
        batch: number of rows.
        seq: length in tokens, of a prompt where the model generates; None: the model has one size.
        phase: what a model that generates does: `token, batch 8, length 128`; None: it is called once.
    """
    return (f"{phase}, " if phase else "") + f"batch {batch}" + (f", length {seq}" if seq else "")


class SizedRow(Row):
    """A measurement at one size of the inputs."""

    batch: int
    seq: int | None
    """Length in tokens; None for a model of images or sound alone."""

    @property
    def size_label(self) -> str:
        """The size of the inputs."""
        return size_label(self.batch, self.seq)


class Latency(Row):
    """Times of one engine in an interleaved measurement, in milliseconds per call; throughput in rows per second."""

    p50: float
    p90: float
    p99: float
    throughput: float
    samples: tuple[float, ...]
    """Milliseconds of every timed call, in order; the plot shows them."""
    device: tuple[float, float, float] | None = None
    """p50, p90 and p99 by the device's own clock, without transfers; None: the engine does not report them."""


class Speed(SizedRow):
    """Times of the dense and the compressed engine, measured in turn, in one process, on the same inputs.

    `ratio` is dense p50 over compressed p50 (above one: compressed is faster); `low` and `high` are the bounds of its
    bootstrap interval over pairs of rounds. `void` says why the row must not be read as a result, or is None.
    """

    dense: Latency
    compressed: Latency
    ratio: float
    low: float
    high: float
    confidence: float = 0.95
    void: str | None = None


class RowRates(Row):
    """Rows per second of one engine: with one caller on all of its threads, and with several callers at once."""

    one_caller: float
    all_callers: float


class Throughput(SizedRow):
    """Rows per second of both engines at one size.

    Each of the `callers`, one per core, has a separate engine with one thread.
    """

    callers: int
    dense: RowRates
    compressed: RowRates


class ProofStage(StrEnum):
    """Two consecutive artefacts of a run (models, graphs, engines) that must compute the same function."""

    EXPORT = "gated model = reference graph"
    SHRINK = "reference graph = shrunk graph"
    PRODUCTS = "int8 products = products of their dequantized factors"
    """Each matmul is computed separately, by the runtime in int8 and by ONNX Runtime in floats."""
    BUILD = "shrunk graph = engine"
    BUILD_INT8 = "quantized graph = engine"
    FIXED_SHAPE = "graph = graph at a fixed shape"
    """A graph of the output folder, without rewrites, in an installed runtime that compiles it for one batch size."""
    CACHED_EXPORT = "gated model on a whole text = graphs with caches, in steps"
    CACHED_SHRINK = "graphs with caches = shrunk graphs with caches"
    CACHED_BUILD = "shrunk graphs with caches = engines"
    CACHED_WEIGHTS = "shrunk graphs with caches and rounded weights = engines"


CACHED_STAGES = (ProofStage.CACHED_EXPORT, ProofStage.CACHED_SHRINK, ProofStage.CACHED_BUILD, ProofStage.CACHED_WEIGHTS)
"""The proofs of graphs with caches, in order; the last where weights have fewer bits."""


VariantName = Literal["dense", "rewritten", "compressed"]
"""`dense` keeps every unit; `compressed` keeps the units of the plan; `rewritten` keeps every unit and has the rewrites
of the compressed graph. All of them become engines in the same way."""


class Proof(Row):
    """A comparison of two artefacts of a run on the same inputs.

    `error` is the largest relative error over all outputs and inputs; `cases` describes the inputs, e.g. `batch 2,
    length 17, padded`. `failing` names the outputs whose error exceeds the tolerance.
    """

    stage: ProofStage
    variant: VariantName
    error: float
    tolerance: float
    cases: tuple[str, ...]
    failing: tuple[str, ...] = ()

    @property
    def holds(self) -> bool:
        return self.error <= self.tolerance


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


class QuantizedProducts(Row):
    """The matmuls with constant weights of an engine in 8 bits, int8 or fp8 (`type`).

    `requested` is the number of matmuls that the graph has in 8 bits, `executed` the number that the runtime computes
    in 8 bits. `in_float` names matmuls that it computes in floats although the graph has them in 8 bits; runtimes do
    not report the names of all layers, so it may be incomplete. `float_in_graph` names matmuls that the quantizer left
    in floats. `float_widths` has the numbers of inputs and outputs of the matmuls that are in floats because they were
    slower in int8 on the machine that built the engine.
    """

    type: Literal["int8", "fp8"] = "int8"
    requested: int
    executed: int
    in_float: tuple[str, ...] = ()
    float_in_graph: tuple[str, ...] = ()
    float_widths: tuple[tuple[int, int], ...] = ()

    @property
    def by_precision(self) -> dict[str, int]:
        """Number of matmuls with constant weights that are computed in 8 bits and in floats."""
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
    """Multiply-accumulates of a forward pass of batch 1 at the first length that was measured."""
    macs_by_length: dict[int, int] = Field(default_factory=dict)
    """Multiply-accumulates of batch 1 by length, for the lengths that were timed; 1 for a model of images or sound."""
    machine_limit: float | None = None
    """Operations per second of a matmul of 2048 x 2048 x 2048 in the engine's precision, on its runtime and number of
    threads; None: not measured."""
    attentions: int
    fused: int
    optimization: str
    """How the graph was optimized for this runtime, in one line."""
    quantized: QuantizedProducts | None = None
    """The matmuls in 8 bits; None: the engine has another precision."""
    products: dict[str, int] = Field(default_factory=dict)
    """Number of matmuls with constant weights by the precision that they are computed in; empty: unknown."""
    built: EngineBuild | None = None
    """Facts about the build; None: the runtime does not build engines ahead of time."""

    @property
    def reduced_products(self) -> dict[str, str]:
        """Precision -> how many of the matmuls with constant weights are computed in it; empty if all are in fp32."""
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
            The share; None where a part of it is unknown, or where the call is faster than the limit, which was
            measured while the machine was slower.
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
    metric fell by no more than `--max-drop`. Memory is measured for engines that hold. `in_float` names matmuls of the
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

    @property
    def pruned_text(self) -> str:
        """The share of the units that it was timed with before units were removed; empty: all of them."""
        return "" if self.share is None else f"with {100 * self.share:.2g}% of the units"

    @property
    def label(self) -> str:
        """The settings of the engine, e.g. `openvino int8 portable`."""
        return " ".join(filter(None, (self.target, self.precision, self.form)))


class GenerationSpeed(Row):
    """Times of one kind of call of a model that generates, dense and compressed in turn.

    A call of the `prompt` reads `seq` tokens of each text, by the encoder where there is one; a call of the `token`
    computes one token of each text, in the middle of those that are generated after the prompt. A `request` is a prompt
    and all tokens that are generated, and its time the sum of theirs.
    """

    phase: Phase
    speed: Speed

    @property
    def label(self) -> str:
        """The call in words: `token, batch 8, length 128`."""
        return size_label(self.speed.batch, self.speed.seq, self.phase)


class Generation(Row):
    """The graphs with key/value caches that generate text.

    `files` are their names in the folder, in the order in which they run. `precision` is that of the decoder's engine,
    or of its weights alone: `int4w`. `candidates` are the precisions that were tried for it, scored on the evaluation
    rows; empty where the weights stay in floats without a trial. `new_tokens` is the number of tokens that a request
    generates. `dense_cache` and `compressed_cache` are bytes of keys and values that each token of a text adds to the
    cache. `is_scored` says whether the metric of the report is that of their engines; else it is that of the engines
    that read whole texts.
    """

    files: tuple[str, ...]
    new_tokens: int
    precision: str = "fp32"
    is_scored: bool = False
    candidates: tuple[Candidate, ...] = ()
    speeds: tuple[GenerationSpeed, ...] = ()
    dense_cache: int
    compressed_cache: int

    @property
    def labelled(self) -> list[tuple[str, Speed]]:
        """The kind of each call in words, and its times."""
        return [(row.label, row.speed) for row in self.speeds]


def labels_by_failure(candidates: Iterable[Candidate]) -> dict[str, list[str]]:
    """Reason why an engine cannot be delivered -> the labels of the engines that have it."""
    labels: dict[str, list[str]] = {}
    for candidate in candidates:
        if candidate.failure:
            labels.setdefault(candidate.failure, []).append(candidate.label)
    return labels


CostUnit = Literal["ms", "macs", "parameters", "heads", "cache"]
"""Milliseconds of a call; counts of multiply-accumulates, parameters, heads, or bytes that a token adds to caches."""
WHOLE_MODEL = "whole model"
"""Label of a cost that depends on no size."""


class BudgetRow(Row):
    """One bound on the cost of the plan, and the cost of the plan.

    `requested` is the bound; None where the metric bounds the plan. `batch` and `seq` are the size at which the bound
    holds; both are None for a count of the whole model. `phase` is what a model that generates does at this size; None:
    it is called once. `label` is the size in words, or `whole model`. `predicted` is
    the cost of the plan by the cost table, and `dense` the cost of the dense engine. `reached` is the cost of the
    delivered engine. A time is `dense` divided by the measured speed over dense, with the interval from `low` to
    `high`; on a machine that lacks the engine it is the time of an engine that was built while units were allocated.
    """

    label: str
    batch: int | None = None
    seq: int | None = None
    phase: Phase | None = None
    unit: CostUnit
    requested: float | None
    predicted: float
    reached: float
    dense: float
    met: bool = True
    low: float | None = None
    high: float | None = None


class CostShare(Row):
    """The cost of one type of layer before and after pruning, by the cost table.

    `batch`, `seq` and `phase` are the size, as in `BudgetRow`, and `label` is the size in words. `type` is the type of
    layer; `rest` is the cost that belongs to no group of units, such as that of embeddings, normalizations and the
    output. The rows of one label and unit add up to the cost of the whole model.
    """

    label: str
    batch: int | None = None
    seq: int | None = None
    phase: Phase | None = None
    unit: CostUnit
    type: Literal["attention", "feed-forward", "rest"]
    before: float
    after: float


class CertificateScope(Row):
    """The conditions under which a certificate holds.

    It bounds the loss of the model as `engine` computes it in `precision`, on rows drawn like the evaluation rows with
    the hash `rows`, which `seed` divided into rows for the search and rows for the test. It assumes that the model was
    not tuned on these rows, which its folder does not tell, and that these rows are used for no further certificate:
    `earlier` certificates on this machine used some of them.
    """

    rows: str
    seed: int
    engine: Literal["pytorch"] = "pytorch"
    precision: Literal["fp32", "bf16"] = "fp32"
    earlier: int = 0

    def __str__(self) -> str:
        text = (
            f"it holds for the model in PyTorch ({self.precision}), for rows drawn like these evaluation rows"
            f" ({self.rows[:19]}), if the model was not tuned on them and this is their only certificate"
        )
        if self.earlier:
            text += f"; {self.earlier} others on this machine used some of them, which lowers the confidence"
        return text


class CertifiedLoss(Row):
    """The loss of accuracy that is certified.

    With the `confidence`, the accuracy falls by at most `max_drop` where `removed` of `total` units (`heads`, or `heads
    and neurons`) are gone; with none removed, nothing is certified. It fell by `drop` on the `unseen_rows` of the test,
    with the p-value `p_value`; the search saw `searched_rows` others.
    """

    max_drop: float
    confidence: float
    units: str
    removed: int
    total: int
    drop: float
    p_value: float
    searched_rows: int
    unseen_rows: int
    scope: CertificateScope


class EmbeddingAgreement(Row):
    """The embeddings of both engines on the texts of the test rows.

    `cosine` is the mean cosine of both embeddings of a text. The others are recall@10 of queries among documents:
    `dense` with both embedded by the dense engine, `own` by the compressed one, and `mixed` with queries embedded by
    the compressed engine and documents by the dense one, as in an index that is not built again. With `labelled` the
    relevant documents are those of the rows; else they are the ten that the dense engine returns, so `dense` is 1.
    """

    texts: int
    queries: int
    documents: int
    cosine: float
    dense: float
    own: float
    mixed: float
    labelled: bool


class AnsweredRow(Row):
    """A test row with the answers of both engines, as text.

    `number` counts the test rows that are scored, from 1. `texts` are the texts of the row, as far as the model reads
    them, and `expected` is its label; empty where the task has none. All are shortened; `changed` compares the whole
    answers. Where answers are embeddings, `cosine` is the lowest cosine, over the texts of the row, of both engines'
    embeddings of a text, and `dense` and `compressed` are cosines between both texts.
    """

    number: int
    texts: tuple[str, ...]
    dense: str
    compressed: str
    expected: str = ""
    changed: bool = False
    cosine: float | None = None


class Refusal(Row):
    """Sites whose heads cannot be removed (`what`), and the operator that prevents it (`why`)."""

    what: str
    why: str


class SiteBlocks(Row):
    """The blocks of one attention site.

    `share` is the share of the blocks of its kept heads that the mask keeps over the longest row; for causal attention
    future blocks are not counted. Blocks that the model's own window hides are not kept. `form` is the form in which
    the engine computes the attention, `why` the reason.
    `unprojected` is the number of key blocks that no query attends to, whose keys and values are not projected.
    `milliseconds` holds the time of each form of the attention alone at the first batch size, by length and form, where
    it was measured.
    """

    site: str
    kind: Kind
    block: int
    share: float
    form: Literal["whole", "masked", "block-sparse"]
    why: str
    unprojected: int = 0
    milliseconds: dict[int, dict[str, float]] = Field(default_factory=dict)


class TaskCode(Row):
    """The code of a custom task: `path` is `module:class`, `source` the hash `sha256:...` of its files."""

    path: str
    source: str


class DropStatus(StrEnum):
    """Whether the metric fell by more than `--max-drop` allows."""

    PASSED = "passed"
    FAILED = "failed"
    NOT_CHECKED = "not checked"


class MissingTarget(Row):
    """The requested target, which this machine lacks: ONNX Runtime on the CPU was measured instead.

    `reason` is what the machine lacks; `command` builds the engine on a machine that has it.
    """

    target: str
    reason: str
    command: str = ""


class Report(Row):
    """Everything that a run selected, measured and refused."""

    version: Literal[1] = 1
    verdict: str
    """One sentence with the gain in speed and the change of the metric, or with what went wrong."""
    model: str
    """Name of the model folder."""
    family: str
    """transformers' model type, e.g. `bert`."""
    task: str | None
    task_code: TaskCode | None = None
    """The code of the task; None for a task of this package."""
    plan: Plan
    notes: tuple[Note, ...] = ()
    """Facts for the reader, e.g. that test rows were set aside from the evaluation rows."""
    curves: tuple[CurvePoint, ...] = ()
    scores: tuple[Score, ...] = ()
    proofs: tuple[Proof, ...] = ()
    speeds: tuple[Speed, ...] = ()
    speeds_over_rewritten: tuple[Speed, ...] = ()
    """Times with the rewritten engine in place of the dense engine, which show the gain beyond the rewrites.
    Empty where nothing was rewritten, or nothing but that was done."""
    throughputs: tuple[Throughput, ...] = ()
    """Rows per second with one caller and with several; empty for engines on a GPU, and where there is one core."""
    generation: Generation | None = None
    """The graphs that generate text; None for a model that does not."""
    dense: EngineFacts
    compressed: EngineFacts
    refused: tuple[Refusal, ...] = ()
    blocks: tuple[SiteBlocks, ...] = ()
    """Sites from which blocks were to be dropped; empty where none were."""
    candidates: tuple[Candidate, ...] = ()
    """The engines that were tried; empty where the recipe names an engine."""
    budget: tuple[BudgetRow, ...] = ()
    """The budgets that units were removed to meet; empty without one."""
    costs: tuple[CostShare, ...] = ()
    """The costs of each type of layer before and after; empty without a budget."""
    embeddings: EmbeddingAgreement | None = None
    """How close the embeddings are to those of the dense engine; None for tasks other than sentence similarity."""
    answers: tuple[AnsweredRow, ...] = ()
    """The test rows whose score changed most, with the answers of both engines, changed answers first; for embeddings
    the rows with the lowest cosine. Empty without rows, and where answers have no text."""
    certificate: CertifiedLoss | None = None
    """The loss that is certified; None where no certificate was requested."""
    drop_status: DropStatus = DropStatus.NOT_CHECKED
    target: str
    """The target that was measured."""
    missing: MissingTarget | None = None
    """The requested target, if `target` was measured instead."""
    graphs: dict[str, str] = Field(default_factory=dict)
    """Hashes of the proven graphs in the folder, with their external data, by file name."""
    precision: str
    delivered: str = ""
    """The engine that the run itself delivered, with its form: `ort int8 portable`; builds leave it."""
    session: dict[str, Any] = Field(default_factory=dict)
    """Runtime, provider, session options."""
    machine: dict[str, str] = Field(default_factory=dict)
    """Processor, cores, memory, versions of the libraries."""
    recipe: dict[str, Any] = Field(default_factory=dict)
    """Every field of the recipe by name, without sections."""
    command: str = ""
    """The command line that reproduces the run."""
    seconds: dict[str, float] = Field(default_factory=dict)
    """Wall time of each stage."""
