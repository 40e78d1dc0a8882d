"""Notes on a run, each with a code."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any

from pydantic import BeforeValidator

from compressor.results.rows import Row


class NoteCode(StrEnum):
    """The subject of a note, for programs and tests: codes are stable, texts may change."""

    UNSPECIFIED = "unspecified"

    # Models and rows.
    TENSORS_UNUSED = "tensors-unused"
    BLOCKS_AS_MASK = "blocks-as-mask"
    """Block-sparse attention of the model is exported as full attention with a mask."""
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
    ROWS_REPEATED = "rows-repeated"
    """Many test rows are among the training or evaluation rows."""
    LABELS_NUMBERED = "labels-numbered"
    """Names of labels that the model lacks are numbered in the order of the alphabet."""
    THRESHOLDS = "thresholds"
    """The probabilities from which a model that assigns several classes to a row assigns them."""
    DENSE_UNINFORMED = "dense-uninformed"
    """The dense model scores no better than an answer that is the same for every row."""
    ANSWERS_UNCHANGED = "answers-unchanged"
    """No test row's result changed, so that the interval of the difference has no width."""
    ROWS_LEFT_OUT = "rows-left-out"
    """Rows of text without a token that is scored, such as empty lines."""
    FILES_SKIPPED = "files-skipped"
    """Files of a folder of images that are no images, or of a format that is not read."""
    ROWS_CUT = "rows-cut"
    """Some rows are longer than the maximum row length, and their rest is not read."""
    ANSWERS_CUT = "answers-cut"
    """Some answers lie in no window of their text, so that no model can give them."""
    WORDS_CUT = "words-cut"
    """Words beyond the maximum length of a row have tags that are not scored."""
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
    POSITIONS_UNCERTAIN = "positions-uncertain"
    """The graph lacks the positions that are not read, and the runtime is known to compute some such graphs wrongly."""
    TARGET_MISSING = "target-missing"
    """ONNX Runtime on the CPU was measured, because this machine lacks the requested target."""
    NO_EFFECT = "no-effect"
    """Fields were set that this run does not use."""
    LENGTH_LIMITED = "length-limited"
    """Rows are cut at the model's maximum length, below the requested one."""
    NOTHING_LEARNED = "nothing-learned"
    PLAN_FOLLOWED = "plan-followed"
    EMBEDDINGS_CHANGED = "embeddings-changed"
    """How far the embeddings of the compressed model are from those of the dense one."""
    TRAINED_ALONG = "trained-along"
    """The compressed model was trained, the dense one was not."""
    WEIGHTS_CHANGED = "weights-changed"
    """The weights of the compressed model were adjusted without training."""
    DISTILLED_IN_VAIN = "distilled-in-vain"
    """No checkpoint is closer to the teacher than the weights before the distillation."""
    OUTPUTS_NOT_KEPT = "outputs-not-kept"
    """The teacher's outputs do not fit on the disk, have no rows and positions, or several processes compute them."""
    RUNG_FINISHED = "rung-finished"
    RUNG_OUTDATED = "rung-outdated"
    """A finished rung is not used, because its recipe, its task or a file that it reads has changed."""
    LADDER_ENDED = "ladder-ended"
    """The budget of a rung cannot be met, or a rung of a method to compare with fails; those before it are finished."""
    MACS_FOLLOWED = "macs-followed"
    """A method to compare with meets no budget of time: its rungs keep the multiply-accumulates of those of the ladder.
    """
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
    """An engine was built from a folder without dense.onnx, which `--save-dense` writes, so that neither its speed nor
    its metric was measured."""
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
    """Stored cost tables of the model are of another machine, runtime, engine or size, or hold no longer."""
    COSTS_NOT_STORED = "costs-not-stored"
    """The cost table that was measured could not be stored for later runs."""
    COSTS_NOT_COUNTED = "costs-not-counted"
    """The parameters and multiply-accumulates of units are not known, because the model could not be exported."""
    COSTS_NOT_MEASURED = "costs-not-measured"
    """The times of units are not known, because no cost table of this model was measured on this machine."""
    EXPERTS_KEPT = "experts-kept"
    """Experts keep all neurons, because their weights are one tensor of three axes."""
    LOSS_UNBOUNDED = "loss-unbounded"
    """An engine in 8 bits was chosen, and nothing bounds how much of the metric it may lose."""
    BUDGET_MET = "budget-met"
    """What was requested and what was reached."""
    BUDGET_MISSED = "budget-missed"
    """No plan that was measured meets the budget."""
    TIMES_DRIFTED = "times-drifted"
    """The dense engine takes another time at the end of the run than when units were allocated."""
    HEADS_SELECTED_FIRST = "heads-selected-first"
    """A method selects the heads, and the budget then removes neurons only."""
    BUDGET_ABOVE_DENSE = "budget-above-dense"
    """The budget allows the whole model, so nothing is removed."""
    DAMPING_RAISED = "damping-raised"
    """The Gram matrices of some groups are singular, so that more than requested was added to their diagonals."""
    GROUPS_SKIPPED = "groups-skipped"
    """Groups of units that keep all, because they cannot be removed from the graph."""

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
    ENGINES_COMPARED_WHOLE = "engines-compared-whole"
    """An engine could not be built with half of the units, so that the choice is by the time of the whole model."""

    # Measurements.
    SPEED_UNCERTAIN = "speed-uncertain"
    """The interval of a speed is wide, so that its value cannot be quoted."""
    SETTINGS_DIFFER = "settings-differ"
    """Two engines run with different settings, so their times are not comparable."""
    FUSION_DIFFERS = "fusion-differs"
    """The runtime fused attention in one of two engines only, so their times are not comparable."""


class Note(Row):
    """Something that a reader of the results must know, in one line."""

    text: str
    code: NoteCode = NoteCode.UNSPECIFIED

    def __str__(self) -> str:
        return self.text


def _as_note(value: Any) -> Any:
    """Convert a note that version 0.1 stored as text."""
    return {"text": value} if isinstance(value, str) else value


AnyNote = Annotated[Note, BeforeValidator(_as_note)]
