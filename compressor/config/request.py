"""Configurations that commands construct from their flags alone: their base class, and those of short commands."""

from __future__ import annotations

import os
import re
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import pydantic
from pydantic import AfterValidator, BeforeValidator, Field

from compressor.config.fields import (
    Config,
    FieldConflictError,
    InvalidValueError,
    Rule,
    config_field,
    flag_of,
    one_of,
    usage_error,
)
from compressor.config.sections import RowsConfig, data_field, engine_field, measuring_field, model_field, output_field
from compressor.config.values import Count, Names, Natural, NonNegative, Positive, Seed, Threads, as_list
from compressor.errors import ErrorCode
from compressor.targets import DEFAULT_TARGET, TARGETS, Provider


class Request(Config):
    """A configuration that raises usage errors, which name the flag and hold a code, the field and the value.

    Raises:
        UsageError: a field is missing, unknown or invalid, or two fields contradict each other.
    """

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**{name: value for name, value in values.items() if value is not None})
        except pydantic.ValidationError as error:
            raise usage_error(error, type(self).model_fields, flag_of) from error


def _check_writable(path: Path) -> Path:
    # Checked before the work whose result is written there.
    if not path.absolute().parent.is_dir():
        raise InvalidValueError(f"the folder {path.parent} does not exist; create it first", ErrorCode.FILE_MISSING)
    if not os.access(path.absolute().parent, os.W_OK):
        raise InvalidValueError(f"the folder {path.parent} cannot be written", ErrorCode.FILE_UNWRITABLE)
    if path.is_dir():
        raise InvalidValueError("this is a folder; give the name of a file", ErrorCode.FILE_UNWRITABLE)
    return path


OutputFile = Annotated[Path, AfterValidator(_check_writable)]
"""A file to write, in a folder that exists."""


class CostsOutput(Config):
    """The page or picture that `compress costs` writes."""

    out: Path | None = output_field("page (.html) or picture (.svg) to write")
    force: bool = output_field("replace the file if it exists", False)


class SitesOptions(Request):
    """What `compress sites` counts of each group.

    Raises:
        UsageError: the length is no positive number.
    """

    count: bool = measuring_field("count parameters and multiply-accumulates, for which the model is exported", True)
    seq: Count | None = measuring_field(
        "length in tokens at which multiply-accumulates are counted; default: 128, at most the model's maximum"
    )


_Target = Annotated[str, AfterValidator(one_of(tuple(TARGETS)))]


class BenchConfig(Config):
    """Which runtimes `compress bench` compares, and by how many callers."""

    target: Annotated[tuple[_Target, ...], Field(min_length=1), BeforeValidator(as_list)] = engine_field(
        "runtime of the engines; for the folder of a run several, separated by commas, by default its own",
        (DEFAULT_TARGET,),
    )
    callers: Count = measuring_field(
        "callers at once, with one thread each, whose throughput is measured too (folder of a run)", 1
    )


NonEmpty = Annotated[str, Field(min_length=1)]
prompts_field, text_field = (partial(config_field, heading) for heading in ("Prompts", "Text"))


class GenerateRequest(Request):
    """What a model generates, and from which prompts.

    Raises:
        UsageError: a value is out of range, or two options contradict each other.
    """

    prompt: str | None = prompts_field("the prompt; default: the text on stdin")
    batch_file: Path | None = prompts_field("file of prompts, one per line; prints a line of JSON for each")
    batch_size: Count = prompts_field("prompts of the file that are completed at once", 8)
    chat: bool = prompts_field("format each prompt as a message by the chat template of the tokenizer", False)

    max_new_tokens: Count | None = text_field(
        "maximum number of new tokens; default: that of generation_config.json, else 64"
    )
    stop: tuple[NonEmpty, ...] = text_field("text at which generation stops; may be repeated", ())
    beams: Count | None = text_field("beams of a beam search; default: that of generation_config.json, else 1")
    temperature: Positive | None = text_field("sample tokens at this temperature")
    top_p: Annotated[float, Field(gt=0, le=1)] | None = text_field(
        "sample from the most probable tokens whose probabilities sum to this"
    )
    top_k: Count | None = text_field("sample from this many of the most probable tokens")
    seed: Seed | None = text_field("seed of the samples; default: another one each time")

    provider: Provider | None = engine_field("device of the engine; default: CUDA where available")
    threads: Threads | None = engine_field("threads of the engine; default: one per core")

    rules = (
        Rule("prompt", "the prompts are in the file; omit one of them", excludes=("batch_file",)),
        Rule("batch_size", "it is for a file of prompts; add <batch_file>, or omit it", needs=("batch_file",)),
        *(
            Rule(name, "a beam search draws no tokens; omit one of them", excludes=("beams",))
            for name in ("temperature", "top_p", "top_k")
        ),
        Rule(
            "seed",
            "no token is drawn; add <temperature>, <top_p> or <top_k>, or omit it",
            needs=("temperature", "top_p", "top_k"),
        ),
    )


Backend = Literal["onnxruntime", "tensorrt", "python"]
Device = Literal["cpu", "gpu"]
batches_field, placement_field, kserve_field = (
    partial(config_field, heading) for heading in ("Batches and warm-up", "Placement", "KServe")
)

_MODEL_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")


def _as_gpu_ids(value: Any) -> tuple[int, ...]:
    """Ids of GPUs without repeats."""
    ids = [str(gpu) for gpu in as_list(value)]
    if not all(gpu.isdecimal() for gpu in ids):
        raise InvalidValueError("not a list of GPUs; give their ids separated by commas, e.g. 0,1")
    if len({int(gpu) for gpu in ids}) < len(ids):
        raise InvalidValueError("a GPU is repeated; give each id once, e.g. 0,1", ErrorCode.CONTRADICTION)
    return tuple(int(gpu) for gpu in ids)


GpuIds = Annotated[tuple[int, ...], BeforeValidator(_as_gpu_ids)]


class ServeRequest(Request):
    """One model of a Triton repository.

    Raises:
        UsageError: a value is invalid, or two fields contradict each other.
    """

    out: Path = model_field("folder of a finished run", required=True)
    repository: Path = model_field("folder of the model repository, created if missing", required=True)
    name: str | None = model_field("name of the model on the server; default: the name of OUT")
    backend: Backend | None = model_field(
        "backend that runs the model; default: python for a model that generates and for an engine of OpenVINO,"
        " tensorrt where there is an engine, else onnxruntime"
    )
    engine: tuple[Path, ...] = model_field("TensorRT engine built for another GPU; may be repeated", ())
    plain: bool = model_field("serve model.onnx instead of the measured engine.onnx", False)
    force: bool = model_field("replace a model of this name in the repository", False)

    max_batch: Count | None = batches_field("maximum examples per batch; default: the largest measured batch")
    queue_delay: Natural = batches_field(
        "maximum microseconds that a request waits to form a batch with further requests", 100
    )
    data: str | None = batches_field(
        "examples for the warm-up: a file, a folder of images or a data set of Hugging Face; default: one sentence"
    )
    text_columns: Names = batches_field("columns of the text; default: recognized by name", ())
    image_column: str | None = batches_field(
        "column of images, or of paths of image files; default: recognized by name"
    )

    instances: Count | None = placement_field(
        "instances of the model on the CPU or on each GPU; default: one per core, with one thread each, where OUT had"
        " a higher throughput with that many callers, else 1"
    )
    device: Device | None = placement_field("device of the instances; default: where OUT was measured")
    gpus: GpuIds = placement_field("ids of the GPUs, separated by commas; default: every GPU of the server", ())
    threads: Threads | None = placement_field("threads per call on the CPU; default: as the server's runtime decides")

    storage_uri: str | None = kserve_field("URI under which the cluster finds the repository")
    runtime_version: str | None = kserve_field("tag of the Triton image that KServe starts, e.g. 25.06-py3")

    rules = (
        Rule(
            "engine",
            "this backend does not run TensorRT engines; omit one of them",
            excludes=("backend=onnxruntime", "backend=python"),
        ),
        *(
            Rule(name, "there are no rows; add <data>, or omit it", needs=("data",))
            for name in ("text_columns", "image_column")
        ),
        Rule("gpus", "the model is placed on the CPU; omit one of them", excludes=("device=cpu",)),
    )

    @pydantic.model_validator(mode="after")
    def _has_a_name(self) -> Self:
        if not _MODEL_NAME.fullmatch(self.model):
            raise FieldConflictError(
                ErrorCode.INVALID_VALUE,
                f"<name> {self.model!r}: not a model name; use letters, digits, dashes, dots and underscores",
                "name",
            )
        return self

    @property
    def model(self) -> str:
        """The model's name on the server."""
        return self.name if self.name is not None else Path(os.path.abspath(self.out)).name  # noqa: PTH100

    @property
    def model_dir(self) -> Path:
        """The model's folder in the repository."""
        return self.repository / self.model


Fraction = Annotated[float, Field(ge=0, le=1)]
training_field = partial(config_field, "Training")


class Training(Request):
    """The configuration of a training from scratch.

    The defaults for words are those of Shim et al. 2021 ("Layer-wise Pruning of Transformer Attention Heads for
    Efficient Language Modeling").

    Raises:
        UsageError: a field is missing or out of its range, or two fields contradict each other.
    """

    out: Path = output_field("the model folder to write", required=True)
    force: bool = output_field("replace the folder, and checkpoints of another training", False, is_basic=True)

    data: str = data_field(
        "training text: .txt, or a column of TSV, CSV or JSONL, each also .xz or .gz", required=True, is_basic=True
    )
    eval_data: str | None = data_field(
        "text that selects the best checkpoint; default: the end of the training text", is_basic=True
    )
    test_data: str | None = data_field("text that is reported on; default: that of --eval-data", is_basic=True)
    text_columns: Names = data_field("column of the text; default: recognized by name", ())
    level: Literal["word", "character"] = data_field(
        "unit of a token; characters are a to z and the space", "word", is_basic=True
    )
    vocabulary: Count | None = data_field(
        "maximum number of words, the most frequent first; default: all", is_basic=True
    )

    architecture: Literal["all-attention", "transformer-xl"] = model_field(
        "architecture of the model", "all-attention", is_basic=True
    )
    layers: Count = model_field("layers", 16, is_basic=True)
    hidden: Count = model_field("width of the model", 512, is_basic=True)
    heads: Count = model_field("heads per layer", 8, is_basic=True)
    persistent: Natural = model_field(
        "persistent vectors per head; for transformer-xl the inner width of the feed-forward layer", 2048, is_basic=True
    )
    memory: Natural = model_field("tokens of earlier segments that a layer remembers", 192, is_basic=True)
    attention_dropout: Fraction = model_field("dropout of attention maps", 0.2)
    embedding_dropout: Fraction = model_field("dropout of embeddings", 0.1)
    hidden_dropout: Fraction = model_field("dropout of the output of each sublayer", 0.1)

    steps: Count = training_field("training steps", 160_000, is_basic=True)
    batch_size: Count = training_field("parallel streams of text per process", 96, is_basic=True)
    segment: Count = training_field("tokens per stream and training step", 192, is_basic=True)
    optimizer: Literal["lamb", "adamw"] = training_field("optimizer", "lamb")
    learning_rate: Positive = training_field("peak learning rate", 1e-2, is_basic=True)
    final_learning_rate: NonNegative = training_field("learning rate at the end of the cosine schedule", 1e-4)
    warmup: Fraction = training_field("share of the training steps in which the learning rate rises", 0.025)
    weight_decay: NonNegative = training_field("weight decay of matrices", 0.0)
    max_grad_norm: Positive = training_field("maximum norm of the gradient", 1.0)
    mixed_precision: Literal["auto", "no", "bf16"] = training_field(
        "precision of matmuls; auto: bf16 on a GPU that computes it natively, else float32", "auto", is_basic=True
    )
    evaluations: Count = training_field("evenly spaced evaluations; each writes a checkpoint", 20, is_basic=True)
    seed: Seed = training_field("seed of every random draw", 0, is_basic=True)

    rules = (
        Rule("vocabulary", "the characters are always a to z and the space; omit it", excludes=("level=character",)),
    )

    @pydantic.model_validator(mode="after")
    def _fields_agree(self) -> Self:
        if self.hidden % self.heads or self.hidden % 2:
            raise FieldConflictError(
                ErrorCode.CONTRADICTION,
                f"<hidden> {self.hidden}: must be even and divisible by <heads> {self.heads}; choose another width",
                *("hidden", "heads"),
            )
        if self.final_learning_rate > self.learning_rate:
            raise FieldConflictError(
                ErrorCode.CONTRADICTION,
                f"<final_learning_rate> {self.final_learning_rate:g}: above the peak of the schedule, <learning_rate>"
                f" {self.learning_rate:g}; choose a smaller one",
                *("final_learning_rate", "learning_rate"),
            )
        return self

    @property
    def rows(self) -> RowsConfig:
        """The texts as rows of a language model: a row is a segment."""
        return RowsConfig(
            data=self.data,
            eval_data=self.eval_data,
            test_data=self.test_data,
            text_columns=self.text_columns,
            max_length=self.segment,
            stride=0,
        )
