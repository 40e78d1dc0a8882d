"""The sections of a recipe: one frozen model for each stage that reads it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from compressor.config.fields import Config, config_field, one_of
from compressor.config.methods import BUDGET_METHODS, METHODS, SEARCH_METHODS
from compressor.config.values import (
    AbsolutePath,
    BlockSize,
    Count,
    GroupBy,
    Keep,
    MapsFile,
    Milliseconds,
    Names,
    Natural,
    NonNegative,
    Options,
    Positive,
    Shapes,
    Share,
    ShareByKind,
    Sizes,
    Workers,
)
from compressor.errors import ErrorCode, UsageError
from compressor.targets import DEFAULT_TARGET, QUANTIZED, TARGETS, Precision
from compressor.targets.base import Shape, parse_shape

MODEL, DATA, HEADS, BUDGET, BLOCKS, DISTILLATION = "Model", "Data", "Heads", "Budget", "Blocks", "Distillation"
AUTO = "auto"
"""Value of a choice that is made by measuring."""
ENGINE, MEASURING, OUTPUT = "Engine", "Measuring", "Output"


def _budget_methods(names: tuple[str, ...]) -> tuple[str, ...]:
    """Check the names of methods that meet a budget."""
    return tuple(map(one_of(BUDGET_METHODS), names))


class SourceConfig(Config):
    """The model to compress."""

    model: Path = config_field(MODEL, "the model folder", required=True, decides_plan=True, is_path=True)
    task: str | None = config_field(
        MODEL, "task of the model, where its class does not determine it: causal-lm, ...", decides_plan=True
    )
    allow_pickle: bool = config_field(
        MODEL, "load pickled weights, which can run code", False, decides_plan=True, runs_code=True
    )
    trust_remote_code: bool = config_field(
        MODEL, "run the Python files in the model folder", False, decides_plan=True, runs_code=True
    )
    example_inputs: Path | None = config_field(
        MODEL,
        "an .npz file with one array [row, ...] per input, for a model whose inputs cannot be made up",
        is_path=True,
    )


class RowsConfig(Config):
    """The training, evaluation and test rows, and how they are read."""

    data: str | None = config_field(
        DATA,
        "training rows: a TSV, CSV, JSONL, text or Parquet file, a folder of such files, or a Hugging Face data set",
        decides_plan=True,
    )
    eval_data: str | None = config_field(DATA, "evaluation rows, on which choices are made", decides_plan=True)
    test_data: str | None = config_field(DATA, "test rows, on which the metric is reported", decides_plan=True)
    text_columns: Names = config_field(
        DATA, "columns of the text, in order; default: recognized by name", (), decides_plan=True
    )
    label_column: str | None = config_field(DATA, "column of the label; default: recognized by name", decides_plan=True)
    metric: str | None = config_field(DATA, "metric of the task; default: the task's main metric", decides_plan=True)
    max_length: Count = config_field(
        DATA, "maximum length of a row in tokens; longer rows are cut", 128, decides_plan=True
    )
    stride: Natural = config_field(
        DATA, "tokens shared by consecutive windows of a long context (question answering)", 128, decides_plan=True
    )

    @property
    def available(self) -> bool:
        """Whether any rows are configured."""
        return any(rows is not None for rows in (self.data, self.eval_data, self.test_data))


class SelectionConfig(Config):
    """How heads are selected, and how the model is trained meanwhile."""

    plan: Path | None = config_field(HEADS, "plan.json to follow; nothing is learned", is_path=True)
    method: Annotated[str, AfterValidator(one_of(tuple(METHODS)))] = config_field(
        HEADS,
        "method that selects the units; with a budget the default is reconstruct",
        "dsp",
        decides_plan=True,
        choices=tuple(METHODS),
    )
    keep: Keep | None = config_field(
        HEADS, "heads to keep over the whole model: a count (36) or a share (50%)", decides_plan=True
    )
    certify: Annotated[float, Field(gt=0, lt=1)] | None = config_field(
        HEADS,
        "confidence (0.95) with which a search, or max_drop without a budget, certifies the drop of the metric on"
        " unseen rows; units that fail stay",
        decides_plan=True,
    )
    ray: Workers | None = config_field(
        HEADS,
        "distribute a search with Ray: local, local:4 for four workers, or HOST:PORT of a cluster",
        runs_code=True,
    )
    options: Options = config_field(
        HEADS, "options of the method: name=value, separated by commas", {}, decides_plan=True
    )
    epochs: Positive | None = config_field(
        HEADS, "passes over the training rows; default: 3, or 1 for dsp-pipelined", decides_plan=True
    )
    steps: Count | None = config_field(HEADS, "optimizer steps, instead of epochs", decides_plan=True)
    batch_size: Count = config_field(HEADS, "rows per step and process", 32, decides_plan=True)
    learning_rate: Positive = config_field(HEADS, "peak learning rate of the model", 5e-5, decides_plan=True)
    seed: Natural = config_field(HEADS, "seed of every random draw", 0, decides_plan=True)
    max_drop: NonNegative | None = config_field(
        MEASURING,
        "maximum loss of the metric, in its own unit (0.01 is one point of accuracy): the run fails if more is lost;"
        " a search without --keep removes as many heads as it allows",
    )

    @property
    def searches(self) -> bool:
        """Whether the method evaluates subsets instead of learning gates."""
        return self.method in SEARCH_METHODS


class BudgetConfig(Config):
    """What the compressed model may cost, and what is pruned to meet it."""

    speedup: Annotated[float, Field(ge=1)] | None = config_field(
        BUDGET,
        "how many times as fast as the runtime's own engine of the whole model the engine has to be",
        decides_plan=True,
    )
    latency: Milliseconds | None = config_field(
        BUDGET, "median time that a call of the engine may take: 5ms", decides_plan=True
    )
    macs: Share | None = config_field(
        BUDGET, "share of the multiply-accumulates of the whole model to keep: 50%", decides_plan=True
    )
    parameters: Share | None = config_field(
        BUDGET, "share of the parameters of the whole model to keep, embeddings included: 60%", decides_plan=True
    )
    budget_at: Shapes = config_field(
        BUDGET,
        "batch sizes and lengths at which speedup, latency and macs hold: 1x128; default: every size that is timed",
        (),
        decides_plan=True,
    )
    prune_units: Literal["all", "heads", "neurons"] = config_field(
        BUDGET, "units that are removed to meet a budget", "all", decides_plan=True
    )
    group_by: GroupBy = config_field(
        BUDGET,
        "how query heads that share key/value heads are removed to meet a budget: all those of a key/value head"
        " together, or as many from every key/value head",
        "kv",
        decides_plan=True,
    )
    prune_rows: Annotated[int, Field(ge=8)] = config_field(
        BUDGET,
        "maximum number of training rows that units are chosen or ordered, and refitted by; labels are not used",
        1024,
        decides_plan=True,
    )
    statistics: Path | None = config_field(
        BUDGET,
        "folder in which statistics and losses are kept, which runs with other budgets on the same model and rows use"
        " again; default: they are removed with the run's own work",
        is_path=True,
    )
    start_from: Path | None = config_field(
        BUDGET,
        "output folder of an earlier run under a budget on MODEL, whose units and weights are pruned further",
        decides_plan=True,
        is_path=True,
    )
    compare_with: Annotated[Names, AfterValidator(_budget_methods)] = config_field(
        BUDGET,
        "further methods whose rungs the page of a ladder shows beside those of the method: fisher,magnitude",
        (),
    )
    skip_refused: bool = config_field(
        BUDGET,
        "keep groups of units whole that cannot be removed from the graph, instead of ending",
        False,
        decides_plan=True,
    )

    @property
    def is_set(self) -> bool:
        """Whether any budget is set."""
        return any(value is not None for value in (self.speedup, self.latency, self.macs, self.parameters))

    @property
    def is_timed(self) -> bool:
        """Whether the budget is one of time."""
        return self.speedup is not None or self.latency is not None

    @property
    def milliseconds(self) -> float | None:
        """The time that a call may take."""
        return None if self.latency is None else float(self.latency.removesuffix("ms"))


class BlocksConfig(Config):
    """Which blocks of the attention maps to drop."""

    drop_blocks: Share | None = config_field(
        BLOCKS, "share of the blocks of every attention map to drop (0.9), least attention first", decides_plan=True
    )
    drop_blocks_by_kind: ShareByKind = config_field(
        BLOCKS,
        "the same by kind of attention, which overrides drop_blocks: bidirectional=0.9,causal=0.9,cross=0",
        {},
        decides_plan=True,
    )
    block_size: BlockSize = config_field(
        BLOCKS, "positions along the side of a block: a multiple of 8, or 1 for single entries", 64, decides_plan=True
    )
    maps: MapsFile | None = config_field(
        BLOCKS,
        "attention maps to derive masks from, or the folder of the run that holds them; default: computed from rows",
        decides_plan=True,
        is_path=True,
    )
    map_rows: Count = config_field(
        BLOCKS, "maximum number of training rows that attention maps are averaged over", 2000, decides_plan=True
    )
    random_blocks: bool = config_field(BLOCKS, "drop random blocks, as a baseline", False, decides_plan=True)
    count_causal_zeros: bool = config_field(
        BLOCKS,
        "count entries that causality or a window hides as dropped ones, as the attention-pruning paper's code does",
        False,
        decides_plan=True,
    )
    weight_by_count: bool = config_field(
        BLOCKS,
        "weight pairs of positions by the number of rows that have them, so that short rows keep more",
        False,
        decides_plan=True,
    )
    allow_empty_rows: bool = config_field(
        BLOCKS,
        "allow a row of blocks to lose every block: its queries then attend to nothing in that head",
        False,
        decides_plan=True,
    )
    mask_all_sites: bool = config_field(
        BLOCKS, "mask every site, even where that is not faster on this machine", False, decides_plan=True
    )
    entmax: bool = config_field(
        BLOCKS,
        "derive masks from the sharper maps of a model trained with entmax instead of softmax",
        False,
        decides_plan=True,
    )
    from_original_weights: bool = config_field(
        BLOCKS,
        "train with the masks from MODEL's weights where heads were selected before; default: continue from there",
        False,
        decides_plan=True,
    )

    @property
    def drops_any(self) -> bool:
        """Whether any block is to be dropped."""
        return bool(self.drop_blocks) or any(self.drop_blocks_by_kind.values())

    @property
    def requested(self) -> bool:
        """Whether a share of blocks to drop is set, even if it is zero."""
        return self.drop_blocks is not None or bool(self.drop_blocks_by_kind)


class DistillationConfig(Config):
    """How the compressed model is trained on the outputs of a whole one."""

    distill: bool = config_field(
        DISTILLATION,
        "train the compressed model on the outputs and hidden states of the whole model; labels are not used",
        False,
        decides_plan=True,
    )
    teacher: Path | None = config_field(
        DISTILLATION,
        "folder of the model whose outputs are learned, of the same layers and widths; default: MODEL itself",
        decides_plan=True,
        is_path=True,
    )
    distill_steps: Count = config_field(DISTILLATION, "optimizer steps of the distillation", 2000, decides_plan=True)
    distill_learning_rate: Positive = config_field(
        DISTILLATION, "peak learning rate of the distillation", 5e-5, decides_plan=True
    )
    minutes: Positive | None = config_field(
        DISTILLATION,
        "minutes that the distillation may take, over all rungs of a ladder: it then makes fewer steps where needed",
        decides_plan=True,
    )
    teacher_outputs: Path | None = config_field(
        DISTILLATION,
        "folder in which the teacher's outputs are kept for further runs on the same rows; default: they are kept for a"
        " run that reads its rows several times, and for the rungs of a ladder, and removed with its own work",
        is_path=True,
    )
    augment: Annotated[float, Field(ge=0, le=1)] = config_field(
        DISTILLATION,
        "share of the training rows of the distillation that are replaced by cuts of them, or joined of parts of two,"
        " with the lengths of the evaluation rows (classification and regression)",
        0.0,
        decides_plan=True,
    )
    quantized_share: Annotated[float, Field(ge=0, le=1)] = config_field(
        DISTILLATION,
        "share of the steps, the last ones, in which linears round to 8 bits as an int8 engine does; needs --precision"
        " int8 or auto",
        0.0,
        decides_plan=True,
    )
    temperature: Positive = config_field(
        DISTILLATION, "temperature by which the logits of both models are divided", 2.0, decides_plan=True
    )
    hidden_weight: NonNegative = config_field(
        DISTILLATION,
        "weight of the relative error of the hidden states, beside the divergence of the outputs",
        1.0,
        decides_plan=True,
    )


class EngineConfig(Config):
    """How engines are built."""

    target: Annotated[str, AfterValidator(one_of((*TARGETS, AUTO)))] = config_field(
        ENGINE,
        "runtime to build for; auto: the fastest of those installed",
        DEFAULT_TARGET,
        choices=(*TARGETS, AUTO),
    )
    precision: Literal[Precision, "auto"] = config_field(
        ENGINE,
        "numeric precision of the engine, fp8 for TensorRT only; auto: fp32, int8, or what else the target has,"
        " whichever is fastest and keeps the metric within max_drop",
        "fp32",
    )
    calibration_rows: Count = config_field(
        ENGINE, "maximum number of training rows from which the ranges of int8 activations are measured", 300
    )
    allow_float_products: bool = config_field(
        ENGINE, "accept an int8 engine that computes some of the quantized products in floats", False
    )
    provider: Literal["cpu", "cuda"] | None = config_field(
        ENGINE, "device of the engine; default: CUDA where available"
    )
    threads: Count | None = config_field(ENGINE, "threads of the engine; default: one per core")
    kernel: AbsolutePath | None = config_field(
        ENGINE,
        "library built by compress kernel, for block-sparse attention in ONNX Runtime on the CPU; default: plain ONNX",
        runs_code=True,
        is_path=True,
    )
    shapes: Shapes = config_field(
        ENGINE,
        "batch sizes and lengths that OpenVINO compiles the graph for, besides free axes: 1x32,1x128; the smallest that"
        " holds a batch runs it, padded",
        (),
    )
    workspace: Count | None = config_field(
        ENGINE, "MiB of GPU memory that TensorRT may use while it builds; default: all free memory"
    )
    timing_cache: Path | None = config_field(
        ENGINE,
        "file of TensorRT's kernel timings, read and updated; default: a file in the user's cache",
        is_path=True,
    )
    hardware_compatible: bool = config_field(
        ENGINE, "build a TensorRT engine for other GPUs too, from Ampere on", False
    )
    version_compatible: bool = config_field(ENGINE, "build a TensorRT engine for later versions too", False)

    @property
    def allows_quantized(self) -> bool:
        """Whether engines that compute products in 8 bits are built."""
        return self.precision in (*QUANTIZED, AUTO)

    @property
    def parsed_shapes(self) -> tuple[Shape, ...]:
        """Batch size and length of each fixed shape."""
        return tuple(map(parse_shape, self.shapes))

    def require_definite(self) -> None:
        """Check that the engine is named, for commands that build without rows to choose by.

        Raises:
            UsageError: the target or the precision is to be chosen.
        """
        for name in ("target", "precision"):
            if getattr(self, name) == AUTO:
                raise UsageError(
                    f"--{name} auto: only compress run chooses an engine, since it needs rows; name the {name}",
                    code=ErrorCode.CONTRADICTION,
                    field=name,
                    value=AUTO,
                )

    @property
    def definite_precision(self) -> Precision:
        """The precision, or fp32 where it is to be chosen."""
        return "fp32" if self.precision == "auto" else self.precision

    @property
    def chooses(self) -> bool:
        """Whether several engines are built, and the fastest that keeps the metric is delivered."""
        return self.allows_quantized or self.target == AUTO

    @property
    def reference(self) -> EngineConfig:
        """The settings of the dense engine: in fp32 where an engine is chosen, else those of the compressed one."""
        if not self.chooses:
            return self
        runtime = DEFAULT_TARGET if self.target == AUTO else self.target
        return self.model_copy(update={"target": runtime, "precision": "fp32"})


class ExportConfig(Config):
    """How the graph is exported."""

    opset: Annotated[
        Literal[18, 23], BeforeValidator(lambda value: int(value) if str(value).isdecimal() else value)
    ] = config_field(ENGINE, "ONNX operator set of the exported graph", 18)
    attention: Literal["eager", "sdpa"] = config_field(ENGINE, "form of attention in the exported graph", "eager")
    keep_unread_positions: bool = config_field(
        ENGINE, "compute every position of the last layers, also those that no output depends on", False
    )


class MeasureConfig(Config):
    """The sizes at which engines are timed, and the time spent on each."""

    batch: Sizes = config_field(MEASURING, "batch sizes to time, separated by commas", (1, 8))
    seq: Sizes | None = config_field(
        MEASURING,
        "lengths to time in tokens, separated by commas; default: 128 or the model's maximum; with masks, the length of"
        " the longest row",
    )
    seconds: Positive = config_field(
        MEASURING, "approximate time spent on each size; at least ten pairs of rounds", 10.0
    )


class OutputConfig(Config):
    """The folder to write."""

    out: Path = config_field(OUTPUT, "folder to write", Path("out"), is_path=True)
    force: bool = config_field(
        OUTPUT, "replace the output folder, and what an interrupted run with another recipe left", False
    )
