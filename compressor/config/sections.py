"""The sections of a recipe, a frozen model for each stage that reads it, and their fields by name."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

from pydantic import AfterValidator, BeforeValidator, Field
from pydantic.fields import FieldInfo

from compressor.config.fields import Config, config_field, extra_of, one_of
from compressor.config.methods import METHODS
from compressor.config.tasks import ARRAYS, TASK_NAMES
from compressor.config.values import (
    PER_TOKEN,
    AbsolutePath,
    BlockSize,
    BudgetShare,
    CallTime,
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
    Rows,
    Seed,
    Shapes,
    Share,
    ShareByKind,
    Sizes,
    Threads,
    Workers,
    milliseconds_of,
)
from compressor.errors import ErrorCode, InputError, UsageError
from compressor.targets import DEFAULT_TARGET, QUANTIZED, TARGETS, WEIGHT_BITS, Precision, WeightPrecision, target
from compressor.targets.base import Shape, parse_shape

if TYPE_CHECKING:
    from compressor.results import Report

MODEL, DATA, HEADS, BUDGET, BLOCKS, DISTILLATION = "Model", "Data", "Heads", "Budget", "Blocks", "Distillation"
ENGINE, MEASURING, OUTPUT = "Engine", "Measuring", "Output"
HEADINGS = (MODEL, DATA, HEADS, BLOCKS, BUDGET, DISTILLATION, ENGINE, MEASURING, OUTPUT)
"""The headings in the order in which `--help` lists them: that of the steps of a run."""
model_field, data_field, heads_field = (partial(config_field, heading) for heading in (MODEL, DATA, HEADS))
blocks_field, budget_field = (partial(config_field, heading) for heading in (BLOCKS, BUDGET))
distillation_field, engine_field = (partial(config_field, heading) for heading in (DISTILLATION, ENGINE))
measuring_field, output_field = (partial(config_field, heading) for heading in (MEASURING, OUTPUT))
"""Fields under these headings; see `config_field`."""
AUTO = "auto"
"""Value of a field whose choice is measured on this machine."""


class SourceConfig(Config):
    """The model to compress."""

    model: Path = model_field("the model folder", required=True)
    task: str | None = model_field(
        "task, where the class of the model does not determine it; one of"
        f" {', '.join(name for name in TASK_NAMES if name != ARRAYS)}, or a custom task (package.module:Class, or an"
        " entry point)",
        is_basic=True,
    )
    tokenizer: Path | None = model_field("folder of the tokenizer, for an ONNX file without one in its folder")
    allow_pickle: bool = model_field("load pickled weights, which can run code", False, runs_code=True)
    trust_remote_code: bool = model_field("run the Python files of the model folder", False, runs_code=True)
    inputs: Path | None = model_field(
        ".npz file with one array [example, ...] per input, for a model whose inputs cannot be generated"
    )


_GRAPH = ".onnx"
_LAYOUTS = ("model.onnx", "onnx/model.onnx", "onnx/encoder_model.onnx")
"""Graphs of a folder of optimum, and of one of sentence-transformers or transformers.js."""
_DECODER, _ENCODER = "decoder.onnx", "encoder.onnx"
"""Graphs of an output folder of a model that generates, which `model.onnx` there reads whole texts without."""
_WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "pytorch_model*.bin", "adapter_config.json")


def graph_of(path: Path) -> Path | None:
    """The graph that a path stands for: a file, or that of a folder without weights of PyTorch; None: it has none.

    Raises:
        InputError: a folder has several graphs and none under the name of a layout.
    """
    if path.suffix == _GRAPH and not path.is_dir():
        return path
    if not path.is_dir() or any(any(path.glob(pattern)) for pattern in _WEIGHTS):
        return None
    if (path / _DECODER).is_file() and not (path / _ENCODER).is_file():
        return path / _DECODER
    named = [path / name for name in _LAYOUTS if (path / name).is_file()]
    graphs = named[:1] or sorted(path.glob(f"*{_GRAPH}")) or sorted(path.glob(f"onnx/*{_GRAPH}"))
    if len(graphs) > 1:
        names = ", ".join(str(graph.relative_to(path)) for graph in graphs)
        text = f"the folder has several graphs and no model.onnx ({names}); name the file"
        raise InputError.of_file(path, text, ErrorCode.FILE_MISSING, value=names)
    return graphs[0] if graphs else None


ROW_SOURCES = ("data", "unlabelled_data", "eval_data", "test_data")
"""Fields that name rows: a file, a folder, or a data set of a hub, which is no path."""


class RowsConfig(Config):
    """The training, evaluation and test rows, and how they are read."""

    data: Rows = data_field(
        "training examples: a file, folder or Hugging Face data set; a file is TSV, CSV, JSONL, text, CoNLL or"
        " Parquet, a folder has such files or images, or save_to_disk of datasets wrote it",
        is_basic=True,
    )
    unlabelled_data: Rows = data_field(
        "further training examples, whose labels are not read, to choose units, refit weights and distill: a source as"
        " in --data, e.g. a text file"
    )
    eval_data: Rows = data_field("evaluation examples, by which the run makes its choices", is_basic=True)
    test_data: Rows = data_field("test examples, for the reported metric", is_basic=True)
    text_columns: Names = data_field("columns of the text, in order; default: recognized by name", ())
    label_column: str | None = data_field("column of the label; default: recognized by name")
    image_column: str | None = data_field("column of images, or of paths of image files; default: recognized by name")
    metric: str | None = data_field("metric of the task; default: its main metric")
    max_length: Count = data_field("maximum length of an example in tokens; longer ones are cut", 128, is_basic=True)
    stride: Natural = data_field("tokens shared by consecutive windows of a long context (question answering)", 128)

    @property
    def sources(self) -> tuple[str, ...]:
        """The files, folders and data sets that are configured."""
        every = (getattr(self, name) for name in ROW_SOURCES)
        return tuple(source for source in every if source is not None)


class TrainingOptions(Config):
    """How steps that learn from labels train; also options of their steps."""

    options: Options = heads_field("options of the method: name=value, separated by commas", {})
    epochs: Positive | None = heads_field("passes over the training examples; default: 3, or 1 for dsp-pipelined")
    training_steps: Count | None = heads_field("training steps, instead of epochs")
    batch_size: Count = heads_field("examples per training step and process", 32)
    learning_rate: Positive = heads_field("peak learning rate of the model", 5e-5)
    seed: Seed = heads_field("seed of every random draw", 0)


class SelectionConfig(TrainingOptions):
    """How heads are selected, and how the model is trained meanwhile."""

    plan: Path | None = heads_field("plan.json to follow instead of selecting units")
    method: Annotated[str, AfterValidator(one_of(tuple(METHODS)))] = heads_field(
        "method that selects units; default with a budget or a maximum drop alone: reconstruct",
        "dsp",
        choices=tuple(METHODS),
        is_basic=True,
    )
    keep: Keep | None = heads_field("heads to keep in the whole model: 36 or 50%", is_basic=True)
    certify: Annotated[float, Field(gt=0, lt=1)] | None = heads_field(
        "confidence (0.95) at which a search, or --max-drop without a budget, certifies the drop of the metric on"
        " unseen examples; units that fail stay"
    )
    ray: Workers | None = heads_field(
        "Ray workers of a search: local, local:4 for four workers, or HOST:PORT of a cluster", runs_code=True
    )
    max_drop: NonNegative | None = budget_field(
        "maximum drop of the metric in its unit (0.01: a point of accuracy); a larger drop fails the run; without a"
        " budget the run removes as many units as it permits (a search without --keep: as many heads)",
        is_basic=True,
    )


class UnitOptions(Config):
    """What the compressed model may cost, and what is pruned to meet it; also options of the step `units`."""

    speedup: Annotated[float, Field(ge=1)] | None = budget_field(
        "speed to reach, as a multiple of the runtime's own engine of the whole model: 2, or 2,4,8 for a ladder",
        is_basic=True,
    )
    latency: CallTime | None = budget_field(
        "maximum median time of a call: 5ms; of a request to a model that generates, or of each token: 20ms/token",
        is_basic=True,
    )
    ttft: Milliseconds | None = budget_field(
        "maximum median time until the first token of a model that generates: 300ms"
    )
    macs: BudgetShare | None = budget_field("share of the multiply-accumulates to keep: 50%", is_basic=True)
    parameters: BudgetShare | None = budget_field("share of the parameters to keep, embeddings included: 60%")
    cache: BudgetShare | None = budget_field(
        "share of the bytes to keep that a token adds to the key/value caches: 50%"
    )
    budget_at: Shapes = budget_field(
        "batch sizes and lengths, of prompts where the model generates, at which --speedup, --latency and --macs hold:"
        " 1x128; default: every size that is timed",
        (),
    )
    prune_units: Literal["all", "heads", "neurons"] = budget_field("units that a budget removes", "all")
    group_by: GroupBy = budget_field(
        "how a budget removes query heads that share key/value heads: all query heads of a key/value head (kv), or as"
        " many from every key/value head (query)",
        "kv",
    )
    prune_rows: Annotated[int, Field(ge=8)] = budget_field(
        "maximum number of training examples by which units are chosen and refitted; fewer where they exceed 131,072"
        " tokens, or 64 times this number if that is more; labels are not used",
        2048,
    )
    statistics: Path | None = budget_field(
        "folder that keeps Gram matrices and losses for runs with other budgets on the same model and examples;"
        " default: they are deleted after the run"
    )
    start_from: Path | None = budget_field("output folder of an earlier run under a budget on MODEL, to prune further")
    skip_refused: bool = budget_field(
        "keep groups of units that cannot be removed from the graph, instead of failing", False
    )

    @property
    def is_timed(self) -> bool:
        """Whether the budget is one of time."""
        return any(value is not None for value in (self.speedup, self.latency, self.ttft))

    @property
    def milliseconds(self) -> float | None:
        """The time that a call may take, or a request to a model that generates."""
        return None if self.token_milliseconds is not None else milliseconds_of(self.latency)

    @property
    def token_milliseconds(self) -> float | None:
        """The time that each token of a model that generates may take."""
        return milliseconds_of(self.latency) if self.latency is not None and PER_TOKEN in self.latency else None

    @property
    def prompt_milliseconds(self) -> float | None:
        """The time that the first token of a model that generates may take."""
        return milliseconds_of(self.ttft)


class BudgetConfig(UnitOptions):
    """The budgets of a run, and how it is compared."""

    match_dense: bool = budget_field(
        "choose and train the units of a sentence encoder by its rankings of documents that the dense model embedded,"
        " to keep an existing index",
        False,
    )
    compare_points: Path | None = budget_field(
        "JSON file of engines of other tools, with their metrics and speeds, which the page of a ladder shows"
    )

    @property
    def is_set(self) -> bool:
        """Whether any budget is set."""
        return any(getattr(self, name) is not None for name in BUDGETS)


class BlockOptions(Config):
    """How blocks of attention maps are dropped; also options of the step `blocks`."""

    block_size: BlockSize = blocks_field(
        "tokens along the side of a block: a multiple of 8, or 1 for single entries", 64
    )
    maps: MapsFile | None = blocks_field(
        "attention maps to derive masks from, or the folder of a run that has them; default: computed from training"
        " examples"
    )
    map_rows: Count = blocks_field("maximum number of training examples that attention maps are averaged over", 2000)
    random_blocks: bool = blocks_field("drop random blocks, as a baseline", False)
    count_causal_zeros: bool = blocks_field(
        "count entries that causality or a window hides as dropped, as the code of the attention-pruning paper does",
        False,
    )
    weight_by_count: bool = blocks_field(
        "weight pairs of positions by the number of examples that have them, so that short examples keep more", False
    )
    allow_empty_rows: bool = blocks_field(
        "allow a row of blocks to lose every block, so that its queries attend to nothing in that head", False
    )
    mask_all_sites: bool = blocks_field("mask every site, even where this is not faster on this machine", False)
    entmax: bool = blocks_field(
        "derive masks from the sharper maps of a model trained with entmax instead of softmax", False
    )
    from_original_weights: bool = blocks_field(
        "train with masks from the weights of MODEL, even where heads were selected first; default: from the weights"
        " of the selection",
        False,
    )


class BlocksConfig(BlockOptions):
    """Which blocks of the attention maps to drop."""

    drop_blocks: Share | None = blocks_field(
        "share of the blocks of every attention layer to drop (0.9), least attention first, over all heads",
        is_basic=True,
    )
    drop_blocks_by_kind: ShareByKind = blocks_field(
        "share by kind of attention, which overrides --drop-blocks: bidirectional=0.9,causal=0.9,cross=0", {}
    )

    @property
    def drops_any(self) -> bool:
        """Whether any block is to be dropped."""
        return bool(self.drop_blocks) or any(self.drop_blocks_by_kind.values())


class DistillOptions(Config):
    """How the compressed model learns the outputs of a whole one; also options of the step `distill`."""

    teacher: Path | None = distillation_field(
        "folder of the model whose outputs are learned, with the layers and widths of MODEL; default: MODEL"
    )
    minutes: Positive | None = distillation_field(
        "maximum minutes of the whole run in the plain command and with --max-drop and --distill, else of the"
        " distillation, in all rungs of a ladder together; with fewer training steps where needed",
        is_basic=True,
    )
    teacher_outputs: Path | None = distillation_field(
        "folder that keeps the outputs of the teacher for runs on the same examples; default: kept only within a run"
        " that reads its examples several times, or within a ladder"
    )
    quantized_share: Annotated[float, Field(ge=0, le=1)] = distillation_field(
        "share of the training steps, at their end, in which linears round as the engine does, to 8 bits or to"
        " bfloat16; needs --precision int8, bf16 or auto",
        0.0,
    )
    temperature: Positive = distillation_field("temperature that divides the logits of both models", 2.0)
    hidden_weight: NonNegative = distillation_field(
        "weight of the relative error of the hidden states in the loss; the divergence of the outputs has weight 1", 1.0
    )


class DistillationConfig(DistillOptions):
    """Whether and how long the compressed model is trained on the outputs of a whole one."""

    distill: bool = distillation_field(
        "train the compressed model on the outputs and hidden states of the whole model, without labels",
        False,
        is_basic=True,
    )
    distill_steps: Count = distillation_field("training steps of the distillation; in a ladder, of each rung", 2000)
    distill_learning_rate: Positive | None = distillation_field(
        "peak learning rate of the distillation; by default 2e-4, and 1e-4 with --max-drop alone", None
    )


class EngineConfig(Config):
    """How engines are built."""

    target: Annotated[str, AfterValidator(one_of((*TARGETS, AUTO)))] = engine_field(
        "runtime of the engine; auto (compress run only): the fastest of those installed",
        DEFAULT_TARGET,
        choices=(*TARGETS, AUTO),
        is_basic=True,
    )
    precision: Literal[Precision, WeightPrecision, "auto"] = engine_field(
        "numeric precision of the engine; bf16: TensorRT, and OpenVINO on processors that have it; fp8: TensorRT;"
        " int8w, int4w: weights of 8 or 4 bits in engines with caches, of models that generate; auto (compress run"
        " only): the fastest of the target that keeps the metric within --max-drop, and without data the fastest in"
        " floats",
        "fp32",
        is_basic=True,
    )
    calibration_rows: Count = engine_field(
        "maximum number of training examples that calibrate the ranges of int8 activations", 300
    )
    allow_float_products: bool = engine_field(
        "accept an int8 engine that computes some of the quantized matmuls in floats", False
    )
    provider: Literal["cpu", "cuda"] | None = engine_field("device of the engine; default: CUDA where available")
    threads: Threads | None = engine_field("threads of the engine; default: one per core", is_basic=True)
    kernel: AbsolutePath | None = engine_field(
        "library that compress kernel built, for block-sparse attention in ONNX Runtime on the CPU; default: plain"
        " ONNX",
        runs_code=True,
    )
    shapes: Shapes = engine_field(
        "batch sizes and lengths that OpenVINO compiles the graph for, besides free axes: 1x32,1x128; a batch runs"
        " padded in the smallest of which it fills 80%; default with --target auto: the sizes that are timed, for small"
        " encoders of texts",
        (),
    )
    workspace: Count | None = engine_field(
        "MiB of GPU memory that TensorRT may use in a build; default: all free memory"
    )
    timing_cache: Path | None = engine_field(
        "file of TensorRT's kernel timings, read and updated; default: a file in the user's cache"
    )
    hardware_compatible: bool = engine_field("build a TensorRT engine for other GPUs too, Ampere or newer", False)
    version_compatible: bool = engine_field("build a TensorRT engine for later versions too", False)

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
        if self.weight_precision is not None:
            raise UsageError(
                f"--precision {self.precision}: only compress run rounds weights, for the engine with caches of a model"
                " that generates; use int8",
                code=ErrorCode.CONTRADICTION,
                field="precision",
                value=self.precision,
            )

    @property
    def definite_precision(self) -> Precision:
        """The precision of engines that read whole texts; fp32 where it is to be chosen, or concerns weights alone."""
        precision = self.precision
        return "fp32" if precision == "auto" or precision == "int8w" or precision == "int4w" else precision

    @property
    def weight_precision(self) -> WeightPrecision | None:
        """The precision of the weights of engines with caches; None: that of the engine, or one that is chosen."""
        return self.precision if self.precision in ("int8w", "int4w") else None

    @property
    def chooses(self) -> bool:
        """Whether engines are compared with one in fp32, and the fastest that keeps the metric is delivered."""
        if AUTO in (self.target, self.precision):
            return True
        precision = self.definite_precision
        return target(self.target).reference_precision(precision) != precision

    @property
    def rounds(self) -> bool:
        """Whether an engine may round weights or activations."""
        return self.allows_quantized or self.precision == "bf16" or self.weight_precision is not None

    @property
    def compares(self) -> bool:
        """Whether engines are compared with one in fp32 by the metric: those that are chosen, or of rounded weights."""
        return self.chooses or self.weight_precision is not None

    @property
    def reference(self) -> EngineConfig:
        """The settings of the dense engine: in fp32 where engines are compared, else those of the compressed one."""
        if not self.chooses:
            return self
        runtime = DEFAULT_TARGET if self.target == AUTO else self.target
        return self.model_copy(update={"target": runtime, "precision": "fp32"})


class ExportConfig(Config):
    """How the graph is exported."""

    opset: Annotated[
        Literal[18, 23], BeforeValidator(lambda value: int(value) if str(value).isdecimal() else value)
    ] = engine_field("ONNX operator set of the exported graph", 18)
    attention: Literal["eager", "sdpa"] = engine_field("form of attention in the exported graph", "eager")
    pool_in_graph: bool = engine_field(
        "pool and normalize inside the graph of a sentence encoder, rather than outside", True
    )
    keep_unread_positions: bool = engine_field(
        "compute the last layers at every position, even where no output depends on it", False
    )
    no_cache: bool = engine_field("leave out the graphs with key/value caches of a model that generates", False)


class MeasureConfig(Config):
    """The sizes at which engines are timed, and the time spent on each."""

    batch: Sizes = measuring_field("batch sizes to time, separated by commas", (1, 8), is_basic=True)
    seq: Sizes | None = measuring_field(
        "lengths to time in tokens, separated by commas; default: 128 or the model's maximum; with masks, the length"
        " of the longest example",
        is_basic=True,
    )
    prompt_tokens: Sizes | None = measuring_field(
        "lengths of the prompts of a model that generates, separated by commas; default: the median of the sources of"
        " the training examples, or of their first halves"
    )
    new_tokens: Count | None = measuring_field(
        "tokens that a model generates after a prompt; default: the median of the targets of the training examples, or"
        " of their second halves"
    )
    seconds: Positive = measuring_field("approximate seconds per size, for at least ten pairs of rounds", 10.0)


class OutputConfig(Config):
    """The folder to write, and what its report shows of the rows."""

    out: Path = output_field("folder to write", Path("out"), is_basic=True)
    force: bool = output_field(
        "replace the output folder, and what an interrupted run with another recipe left", False, is_basic=True
    )
    save_dense: bool = output_field(
        "write the graph of the whole model as dense.onnx too, for comparisons on another machine", False
    )
    report_rows: Natural = output_field(
        "test examples that the report shows with the answers of both engines, their texts cut; 0: none", 8
    )


class Sections(Config):
    """The sections of a recipe."""

    source: SourceConfig
    rows: RowsConfig = Field(default_factory=RowsConfig)
    selection: SelectionConfig = Field(default_factory=SelectionConfig)
    budget: BudgetConfig = Field(default_factory=BudgetConfig)
    blocks: BlocksConfig = Field(default_factory=BlocksConfig)
    distillation: DistillationConfig = Field(default_factory=DistillationConfig)
    engine: EngineConfig = Field(default_factory=EngineConfig)
    export: ExportConfig = Field(default_factory=ExportConfig)
    measure: MeasureConfig = Field(default_factory=MeasureConfig)
    output: OutputConfig = Field(default_factory=OutputConfig)


SECTIONS: Mapping[str, type[Config]] = {
    name: cast(type[Config], section.annotation) for name, section in Sections.model_fields.items()
}
"""Section -> its model."""
FIELDS: Mapping[str, FieldInfo] = {
    name: field
    for section in SECTIONS.values()
    for name, field in sorted(
        section.model_fields.items(), key=lambda item: not (item[1].is_required() or extra_of(item[1], "is_basic"))
    )
}
"""Every field of a recipe by name, in the order of sections; the basic ones of each section first."""
SECTION_OF: Mapping[str, str] = {name: key for key, section in SECTIONS.items() for name in section.model_fields}
"""Field name -> section."""
BUILD_FIELDS = (*EngineConfig.model_fields, *MeasureConfig.model_fields)
"""Fields that decide how a graph is built and timed; `compress build` takes these."""
BUDGETS = ("speedup", "latency", "ttft", "macs", "parameters", "cache")
"""Fields that each set a budget."""


def definite_fields(report: Report) -> dict[str, Any]:
    """Fields of the recipe of a report, with target and precision of the delivered engine that reads whole texts.

    The recipe may have left them to the run, or name a precision of the weights of the engine with caches.
    """
    delivered = {"target": report.target, "precision": report.precision}
    undecided = (AUTO, *WEIGHT_BITS)
    return report.recipe | {name: value for name, value in delivered.items() if report.recipe.get(name) in undecided}
