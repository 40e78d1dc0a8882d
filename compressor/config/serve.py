"""The configuration of `compress export-triton`. Each field is a flag."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import pydantic
from pydantic import BeforeValidator

from compressor.config.fields import FieldConflictError, InvalidValueError, Rule, as_list, config_field
from compressor.config.request import Request
from compressor.config.values import Count, Names, Natural
from compressor.errors import ErrorCode

Backend = Literal["onnxruntime", "tensorrt", "python"]
Device = Literal["cpu", "gpu"]
MODEL, BATCHES, PLACEMENT, KSERVE = "Model", "Batches and warm-up", "Placement", "KServe"

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

    out: Path = config_field(MODEL, "folder of a finished run", required=True)
    repository: Path = config_field(MODEL, "folder of the model repository, created if missing", required=True)
    name: str | None = config_field(MODEL, "name of the model on the server; default: the name of OUT")
    backend: Backend | None = config_field(
        MODEL,
        "backend that runs the model; default: python for a model that generates and for an engine of OpenVINO,"
        " tensorrt where there is an engine, else onnxruntime",
    )
    engine: tuple[Path, ...] = config_field(MODEL, "TensorRT engine built for another GPU; may be repeated", ())
    plain: bool = config_field(MODEL, "serve model.onnx instead of the measured engine.onnx", False)
    force: bool = config_field(MODEL, "replace a model of this name in the repository", False)

    max_batch: Count | None = config_field(BATCHES, "maximum examples per batch; default: the largest measured batch")
    queue_delay: Natural = config_field(
        BATCHES, "maximum microseconds that a request waits to form a batch with further requests", 100
    )
    data: str | None = config_field(
        BATCHES,
        "examples for the warm-up: a file, a folder of images or a data set of Hugging Face; default: one sentence",
    )
    text_columns: Names = config_field(BATCHES, "columns of the text; default: recognized by name", ())
    image_column: str | None = config_field(
        BATCHES, "column of images, or of paths of image files; default: recognized by name"
    )

    instances: Count | None = config_field(
        PLACEMENT,
        "instances of the model on the CPU or on each GPU; default: one per core, with one thread each, where OUT"
        " had a higher throughput with that many callers, else 1",
    )
    device: Device | None = config_field(PLACEMENT, "device of the instances; default: where OUT was measured")
    gpus: GpuIds = config_field(PLACEMENT, "ids of the GPUs, separated by commas; default: every GPU of the server", ())
    threads: Count | None = config_field(
        PLACEMENT, "threads per call on the CPU; default: as the server's runtime decides"
    )

    storage_uri: str | None = config_field(KSERVE, "URI under which the cluster finds the repository")
    runtime_version: str | None = config_field(KSERVE, "tag of the Triton image that KServe starts, e.g. 25.06-py3")

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
