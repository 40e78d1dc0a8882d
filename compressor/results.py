"""The results of a run as data: `report.json`. The page, the command's output and the exit code derive from it."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from graph_passes import Kind, Plan
from graph_passes.plan import current_kind

# JSON has no infinity: an error without bound is written as "Infinity" and read back as the number.
_STRICT = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="strings")


class _Row(BaseModel):
    model_config = _STRICT


class NoteCode(StrEnum):
    """The subject of a note, for programs and tests: codes are stable, texts may change."""

    UNSPECIFIED = "unspecified"

    # Models and rows.
    TENSORS_UNUSED = "tensors-unused"
    SPLIT_CHOSEN = "split-chosen"
    """Evaluation or test rows are a split of the training data that was recognized by its name."""
    ROWS_UNLABELLED = "rows-unlabelled"
    """Training rows without labels, which are enough to choose units under a budget."""
    ROWS_DRAWN = "rows-drawn"
    """Only some of many training rows were encoded, because a run needs no more."""
    SPLIT_UNUSED = "split-unused"
    """A split was left out because its labels are withheld."""
    ROWS_SET_ASIDE = "rows-set-aside"
    """Evaluation or test rows were taken out of other rows."""
    TEST_IS_EVAL = "test-is-eval"
    """No test rows were named, so the reported metric is of the evaluation rows, which also select the result."""
    SEGMENT_SHORTENED = "segment-shortened"
    TEXT_COLUMNS = "text-columns"
    """Which columns hold the texts of a task that reads two, and how they are truncated."""
    METRIC_SETTINGS = "metric-settings"
    """How the metric is computed, and which other metric selects heads and checkpoints."""

    # The run.
    POSITIONS_DROPPED = "positions-dropped"
    """Products compute only the positions that are read."""
    TARGET_MISSING = "target-missing"
    """ONNX Runtime on the CPU was measured, because this machine lacks the requested target."""
    NO_EFFECT = "no-effect"
    """Fields were set that this run does not use."""
    LENGTH_LIMITED = "length-limited"
    """Rows are cut at the model's maximum length, below the requested one."""
    NOTHING_LEARNED = "nothing-learned"
    PLAN_FOLLOWED = "plan-followed"
    TRAINED_ALONG = "trained-along"
    """The compressed model was trained, the dense one was not."""
    WEIGHTS_CHANGED = "weights-changed"
    """The weights of the compressed model were adjusted without training."""
    DISTILLED_IN_VAIN = "distilled-in-vain"
    """No checkpoint is closer to the teacher than the weights before the distillation."""
    OUTPUTS_NOT_KEPT = "outputs-not-kept"
    """The teacher's outputs do not fit on the disk, or have another form than rows and positions."""
    RUNG_FINISHED = "rung-finished"
    LADDER_ENDED = "ladder-ended"
    """The budget of a rung cannot be met; the rungs before it are finished."""
    DISTILLED = "distilled"
    """The compressed model was trained on the outputs of a whole one."""
    SEGMENT_MEMORY = "segment-memory"
    NO_CACHE = "no-cache"
    NO_METRIC = "no-metric"
    MASKS_LONGER = "masks-longer"
    """Masks cover longer rows than some that are measured."""
    MASKS_TIMED_ELSEWHERE = "masks-timed-elsewhere"
    """Whether masks pay was timed with another runtime than the target."""
    NORM_OVER_ALL_HEADS = "norm-over-all-heads"
    """Dropped heads are computed up to a norm over the queries or keys of all heads."""
    HEADS_EMPTIED = "heads-emptied"
    """Heads were dropped because their masks keep no block."""
    MEMORY_UNMEASURED = "memory-unmeasured"
    RESUMED = "resumed"
    """Work of an interrupted run was used."""
    STARTED_AFRESH = "started-afresh"
    """Work of an interrupted run was discarded, because its recipe, model or rows differ."""
    KERNEL_UNUSED = "kernel-unused"
    NO_DENSE_GRAPH = "no-dense-graph"
    """An engine was built from a folder without dense.onnx, so there is nothing to compare it with."""
    EARLIER_REPORT_KEPT = "earlier-report-kept"
    ROWS_MISSING = "rows-missing"
    """The rows or the model of a run are not on this machine, so the metric was not measured again."""

    EVALUATED = "evaluated"
    """The metric of an evaluation while a model is trained."""
    FILE_WRITTEN = "file-written"

    # Selection of heads and blocks.
    NOTHING_REMOVED = "nothing-removed"
    """A search found no head that may be removed within the loss allowed."""
    MORE_HEADS_KEPT = "more-heads-kept"
    """A search could not remove exactly as many heads as requested."""
    COSTS_DECREASED = "costs-decreased"
    """Heads cost less than a search assumed, so it may have missed cheaper ones."""
    CERTIFIED = "certified"
    NOT_CERTIFIED = "not-certified"
    """A certificate was requested, and it covers no removed head."""
    CERTIFICATION_COST = "certification-cost"
    MAPS_DIFFER = "maps-differ"
    """Masks are derived from attention maps of other rows or weights."""
    MAPS_CROPPED = "maps-cropped"
    """Attention maps cover longer rows than there are."""
    BLOCKS_UNREACHED = "blocks-unreached"
    """Blocks are kept because no row reaches them."""
    SITES_UNMASKED = "sites-unmasked"
    """Sites keep every block because masking them would not be faster on this machine."""

    # Latency checks and serving.
    RANDOM_INPUTS = "random-inputs"
    """Inputs were drawn at random because no rows provide them."""
    BASELINE_NOT_SAVED = "baseline-not-saved"
    ENGINE_MISSING = "engine-missing"
    """A run for TensorRT has no engine, so its graph is served."""
    ENGINE_NOT_SERVED = "engine-not-served"
    """The server runs a graph with another runtime than the run was measured with."""
    KERNEL_NOT_SERVED = "kernel-not-served"
    """A run was measured with a compiled kernel that the server does not load."""
    SERVER_REQUIREMENT = "server-requirement"
    """The server needs a version, a package or a flag."""
    NO_BATCHING = "no-batching"
    """The server cannot form batches because the graph fixes its batch size."""
    STORAGE_URI = "storage-uri"
    """The storage URI of a KServe service is a placeholder."""

    # Budgets.
    COSTS_REUSED = "costs-reused"
    """The cost table of an earlier run on this machine is used."""
    COSTS_REMEASURED = "costs-remeasured"
    """A stored cost table is of another machine, runtime or size."""
    BUDGET_MET = "budget-met"
    """What was requested and what was reached."""
    BUDGET_MISSED = "budget-missed"
    """No plan that was measured meets the budget."""
    TIMES_DRIFTED = "times-drifted"
    """The dense engine takes another time at the end of the run than when units were allocated."""
    BUDGET_ABOVE_DENSE = "budget-above-dense"
    """The budget allows the whole model, so nothing is removed."""
    GROUPS_SKIPPED = "groups-skipped"
    """Groups of units that keep all, because they cannot be removed from the graph."""
    FEW_PRUNING_ROWS = "few-pruning-rows"

    # Quantization.
    NO_INT8_INSTRUCTIONS = "no-int8-instructions"
    """The processor computes int8 products with sums that can saturate, so that weights use 7 of 8 bits."""
    OUTLIER_RANGES = "outlier-ranges"
    """Matrix products stay in floats, because outliers of their activations leave int8 too few steps."""
    FEW_CALIBRATION_ROWS = "few-calibration-rows"
    QUANTIZED_FOR_TARGET = "quantized-for-target"
    """A quantized graph for a target that this machine lacks."""
    PRODUCTS_IN_FLOAT = "products-in-float"
    """Matrix products that stay in floats in an int8 engine."""
    PROVEN_ELSEWHERE = "proven-elsewhere"
    """An engine was proven with another instruction set or version of its runtime than it is checked with."""
    ENGINE_CHOSEN = "engine-chosen"
    """Which of several engines is delivered, and why."""

    # Measurements.
    SETTINGS_DIFFER = "settings-differ"
    """Two engines run with different settings, so their times are not comparable."""
    FUSION_DIFFERS = "fusion-differs"
    """The runtime fused attention in one of two engines only, so their times are not comparable."""


class Note(_Row):
    """Something that a reader of the results must know, in one line."""

    text: str
    code: NoteCode = NoteCode.UNSPECIFIED

    def __str__(self) -> str:
        return self.text


def _as_note(value: Any) -> Any:
    """Convert a note that version 0.1 stored as text."""
    return {"text": value} if isinstance(value, str) else value


AnyNote = Annotated[Note, BeforeValidator(_as_note)]


def _renamed_keys(fields: Any, former_names: Mapping[str, str]) -> Any:
    """The fields of a stored object under their current names."""
    if not isinstance(fields, dict):
        return fields
    return {former_names.get(name, name): value for name, value in fields.items()}


class CurvePoint(_Row):
    """The values logged at one step of learning, e.g. `loss`, `temperature`, `eval_accuracy`."""

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

    @model_validator(mode="before")
    @classmethod
    def _add_unit(cls, fields: Any) -> Any:
        """Derive the unit, which version 0.1 did not store, from the metric's name."""
        if not isinstance(fields, dict) or "unit" in fields:
            return fields
        return {**fields, "unit": MetricUnit.POINTS if fields.get("metric") in _SHARES else MetricUnit.RAW}


class ProofStage(StrEnum):
    """Two consecutive products of a run that must compute the same function."""

    EXPORT = "gated model = reference graph"
    SHRINK = "reference graph = shrunk graph"
    PRODUCTS = "int8 products = products of their dequantized factors"
    """Computed by the runtime in int8, and by ONNX Runtime in floats; each product by itself."""
    BUILD = "shrunk graph = engine"
    BUILD_INT8 = "quantized graph = engine"


FLOAT_STAGES = (ProofStage.EXPORT, ProofStage.SHRINK, ProofStage.BUILD)
"""The proofs of an engine in floats, in order."""

VariantName = Literal["dense", "rewritten", "compressed"]
"""`dense`: every unit kept; `compressed`: what the plan keeps; `rewritten`: every unit kept, with the rewrites that the
compressed graph has too. All take the same path to an engine."""


class Proof(_Row):
    """A comparison of two products of a run on the same inputs.

    `error` is the largest relative error over all outputs and inputs; `cases` describes the inputs, e.g. `batch 2,
    length 17, padded`. `failing` names the outputs whose error exceeds the tolerance.
    """

    stage: ProofStage
    variant: VariantName
    error: float
    tolerance: float
    cases: tuple[str, ...]
    failing: tuple[str, ...] = ()

    @model_validator(mode="before")
    @classmethod
    def _current_keys(cls, fields: Any) -> Any:
        """Rename the key `side` of version 0.1 to `variant`."""
        return _renamed_keys(fields, {"side": "variant"})

    @property
    def holds(self) -> bool:
        return self.error <= self.tolerance


class Latency(_Row):
    """Times of one engine in an interleaved measurement, in milliseconds per call; throughput in rows per second."""

    p50: float
    p90: float
    p99: float
    throughput: float
    samples: tuple[float, ...]
    """Milliseconds of every timed call, in order; the plot shows them."""
    device: tuple[float, float, float] | None = None
    """p50, p90 and p99 by the device's own clock, without transfers; None: the engine does not report them."""


class Speed(_Row):
    """Times of the dense and the compressed engine, measured in turn, in one process, on the same inputs.

    `ratio` is dense p50 over compressed p50 (above one: compressed is faster); `low` and `high` are the bounds of its
    bootstrap interval over pairs of rounds. `void` says why the row must not be read as a result, or is None.
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


class RowRates(_Row):
    """Rows per second of one engine: with one caller on all of its threads, and with several callers at once."""

    one_caller: float
    all_callers: float


class Throughput(_Row):
    """Rows per second of both engines at one size.

    Each of the `callers`, one per core, has an engine of its own with one thread.
    """

    batch: int
    seq: int | None
    """Length in tokens; None for a model of images or sound alone."""
    callers: int
    dense: RowRates
    compressed: RowRates


class BuiltLayer(_Row):
    """A layer of an engine as the runtime's inspector reports it.

    `nodes` are the graph nodes that it computes, `formats` the element types of its inputs and its weights, with their
    layout, each once.
    """

    name: str
    kind: str = ""
    tactic: str = ""
    nodes: str = ""
    formats: tuple[str, ...] = ()


class EngineBuild(_Row):
    """Facts about an engine that was built ahead of time.

    `seconds` is the time of the build and `engine_bytes` the size of the engine's file. `weight_bytes` and
    `activation_bytes` are device memory, the latter at the largest sizes that the engine takes. `attention` says in one
    line whether attention is fused.
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
        return _renamed_keys(fields, {"plan_bytes": "engine_bytes"})


class QuantizedProducts(_Row):
    """The matrix products with constant weights of an int8 engine.

    `requested` is the number of products that the graph has in int8, `executed` the number that the runtime computes in
    int8. `in_float` names products that it computes in floats although the graph has them in int8; runtimes do not
    report the names of all layers, so it may be incomplete. `float_in_graph` names products that the quantizer left in
    floats.
    """

    requested: int
    executed: int
    in_float: tuple[str, ...] = ()
    float_in_graph: tuple[str, ...] = ()


class EngineFacts(_Row):
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
    machine_limit: float | None = None
    """Operations per second of a matrix product of 2048 x 2048 x 2048 in the engine's precision, on its runtime and
    number of threads; None: not measured.
    """
    attentions: int
    fused: int
    optimization: str
    """How the graph was optimized for this runtime, in one line."""
    quantized: QuantizedProducts | None = None
    """The products in int8; None: the engine has another precision."""
    built: EngineBuild | None = None
    """Facts about the build; None: the runtime does not build engines ahead of time."""

    def share_of_limit(self, batch: int, milliseconds: float) -> float | None:
        """The share of the machine's limit that a call at the first length reaches: `2 macs batch / seconds / limit`.

        Args:
            batch: rows of the call.
            milliseconds: its time.
        """
        if not self.machine_limit or self.macs is None:
            return None
        return 2 * self.macs * batch / (1e-3 * milliseconds) / self.machine_limit


class Candidate(_Row):
    """An engine that was tried for the compressed model.

    `form` says how its graph was quantized; it is empty for an engine in floats. `milliseconds` holds the median time
    of a call by size, e.g. `batch 1, 128 tokens`; `speed` is the geometric mean over the sizes of the time of the dense
    engine over that of this one. `metric` is computed on the evaluation rows, `difference` is that minus the metric of
    the dense engine, both as computed and not scaled to `unit`, and `agreement` the share of its answers that equal
    those of the dense engine. `holds` says whether the metric fell by no more than `--max-drop`. Memory is measured for
    engines that hold. `in_float` names products of the quantized graph that were returned to floats, because a proof or
    the metric does not hold with them in int8. `failure` says why there is no such engine.
    """

    target: str
    precision: str
    form: str = ""
    in_float: tuple[str, ...] = ()
    milliseconds: dict[str, float] = Field(default_factory=dict)
    speed: float | None = None
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
    def label(self) -> str:
        """The settings of the engine, e.g. `openvino int8 portable`."""
        return " ".join(filter(None, (self.target, self.precision, self.form)))


class Refusal(_Row):
    """Sites whose heads cannot be removed (`what`), and the operator that prevents it (`why`)."""

    what: str
    why: str


CostUnit = Literal["ms", "macs", "parameters", "heads"]
"""Milliseconds of a call, or counts of multiply-accumulates, parameters or heads."""


class BudgetRow(_Row):
    """One bound on the cost of the plan, and the cost of the plan.

    `label` is the size at which it holds, e.g. `batch 1, 128 tokens`, or `whole model`. `predicted` is the cost of the
    plan by the cost table, and `dense` that of the dense engine. `reached` is the cost of the engine: for times,
    `dense` over the speed of the delivered engine that was timed in turn with dense, with the interval from `low` to
    `high`; where the machine has no such engine, the time of one that was built while units were allocated.
    """

    label: str
    unit: CostUnit
    requested: float
    predicted: float
    reached: float
    dense: float
    met: bool = True
    low: float | None = None
    high: float | None = None


class CostShare(_Row):
    """What one type of layer costs before and after pruning, by the cost table.

    `label` is the size, `type` the type of layer: `rest` is what no group of units accounts for, such as embeddings,
    normalizations and the output. The rows of one label and unit add up to the cost of the whole model.
    """

    label: str
    unit: CostUnit
    type: Literal["attention", "feed-forward", "rest"]
    before: float
    after: float


class CertificateScope(_Row):
    """What a certificate holds for.

    It bounds the loss of the model as `engine` computes it in `precision`, on rows drawn like the evaluation rows with
    the hash `rows`, which `seed` divided into those of the search and those of the test. It assumes that the model was
    not tuned on these rows, which its folder does not say, and that it is the only certificate that they are used for:
    `earlier` certificates on this machine used some of them.
    """

    rows: str
    seed: int
    engine: Literal["pytorch"] = "pytorch"
    precision: Literal["fp32", "bf16"] = "fp32"
    tuned_on_rows: Literal["unknown"] = "unknown"
    earlier: int = 0

    def __str__(self) -> str:
        text = (
            f"it holds for the model in PyTorch ({self.precision}), for rows drawn like these evaluation rows"
            f" ({self.rows[:19]}), if the model was not tuned on them and this is their only certificate"
        )
        if self.earlier:
            text += f"; {self.earlier} others on this machine used some of them, which lowers the confidence"
        return text


class CertifiedLoss(_Row):
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


class SiteBlocks(_Row):
    """The blocks of one attention site.

    `share` is the share of the blocks of its kept heads that the mask keeps over the longest row; for causal attention
    future blocks are not counted. Blocks that the model's own window hides are not kept. `form` is the form in which
    the engine computes the attention, `why` the reason.
    `unprojected` is the number of key blocks that no query attends to, whose keys and values are not projected.
    `milliseconds` holds the time of each form of the attention alone at the first batch size, by length and form, where
    it was measured.
    """

    site: str
    kind: Annotated[Kind, BeforeValidator(current_kind)]
    block: int
    share: float
    form: Literal["whole", "masked", "block-sparse"]
    why: str
    unprojected: int = 0
    milliseconds: dict[int, dict[str, float]] = Field(default_factory=dict)


class DropStatus(StrEnum):
    """Whether the metric fell by more than `--max-drop` allows."""

    PASSED = "passed"
    FAILED = "failed"
    NOT_CHECKED = "not checked"


class MissingTarget(_Row):
    """The requested target, which this machine lacks: ONNX Runtime on the CPU was measured instead.

    `reason` is what the machine lacks; `command` builds the engine on a machine that has it.
    """

    target: str
    reason: str
    command: str = ""


class Report(BaseModel):
    """Everything that a run selected, measured and refused."""

    model_config = _STRICT

    version: Literal[1] = 1
    verdict: str
    """One sentence: the gain in speed and the change of the metric, or that nothing was gained."""
    model: str
    """Name of the model folder."""
    family: str
    """transformers' model type, e.g. `bert`."""
    task: str | None
    plan: Plan
    notes: tuple[AnyNote, ...] = ()
    """Facts for the reader, e.g. that test rows were set aside from the evaluation rows."""
    curves: tuple[CurvePoint, ...] = ()
    scores: tuple[Score, ...] = ()
    proofs: tuple[Proof, ...] = ()
    speeds: tuple[Speed, ...] = ()
    speeds_over_rewritten: tuple[Speed, ...] = ()
    """The same, with the rewritten dense engine in the role of the dense one: what was gained beyond the rewrites.
    Empty where nothing was rewritten, or nothing else was done."""
    throughputs: tuple[Throughput, ...] = ()
    """Rows per second with one caller and with several; empty for engines on a GPU, and where there is one core."""
    dense: EngineFacts
    compressed: EngineFacts
    refused: tuple[Refusal, ...] = ()
    blocks: tuple[SiteBlocks, ...] = ()
    """Sites from which blocks were to be dropped; empty where none were."""
    candidates: tuple[Candidate, ...] = ()
    """The engines that were tried; empty where the recipe names one."""
    budget: tuple[BudgetRow, ...] = ()
    """The budgets that units were removed to meet; empty without one."""
    costs: tuple[CostShare, ...] = ()
    """Where the cost goes, before and after; empty without a budget."""
    certificate: CertifiedLoss | None = None
    """The loss that is certified; None where no certificate was requested."""
    drop_status: DropStatus = DropStatus.NOT_CHECKED
    target: str
    """The target that was measured."""
    missing: MissingTarget | None = None
    """The requested target, if `target` was measured instead of it."""
    graphs: dict[str, str] = Field(default_factory=dict)
    """Hashes of the proven graphs in the folder, with their external data, by file name."""
    precision: str
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

    @model_validator(mode="before")
    @classmethod
    def _current_keys(cls, fields: Any) -> Any:
        """Rename the key `gate` of version 0.1 to `drop_status`, and divide its text `missing` into fields."""
        if not isinstance(fields, dict):
            return fields
        fields = _renamed_keys(fields, {"gate": "drop_status"})
        if fields.get("drop_status") == "not asked":
            fields["drop_status"] = DropStatus.NOT_CHECKED
        if isinstance(missing := fields.get("missing"), str):
            target, _, text = missing.partition(": ")
            reason, _, command = text.partition("; on the machine to deploy on, say ")
            fields["missing"] = {"target": target, "reason": reason, "command": command}
            fields["notes"] = [
                {"text": note, "code": NoteCode.TARGET_MISSING}
                if isinstance(note, str) and note.startswith(f"{target}: ")
                else note
                for note in fields.get("notes", ())
            ]
        return fields
