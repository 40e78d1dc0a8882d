"""What to serve and how: one field a flag of `compress export-triton`, checked where it is made."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from compressor.errors import UsageError

Backend = Literal["onnxruntime", "tensorrt", "python"]
Device = Literal["cpu", "gpu"]

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")


@dataclass(frozen=True)
class ServeRequest:
    """One model of a Triton repository.

    Attributes:
        out: the folder that a run wrote.
        repository: folder of the models; made where it is missing.
        name: the model's name on the server; else that of `out`.
        backend: what runs it; else `tensorrt` where `out` or `plans` hold a plan, `onnxruntime` elsewhere.
        plans: TensorRT plans built elsewhere, to serve beside that of `out`.
        plain: serve `model.onnx`, in plain ONNX operators, in place of the measured `engine.onnx`.
        max_batch: rows of one batch at most; else the largest that was measured.
        queue_delay: microseconds that a request waits for others to make a batch with.
        instances: of the model, on each GPU or on the CPU.
        device: where they run; else where the run measured.
        gpus: ids of the GPUs; all of the server's where none is named.
        threads: of one call on the CPU; else as many as the server's runtime takes.
        data: rows to warm up with: a file, or a Hugging Face data set.
        text_columns: columns of their text; else found by name.
        storage_uri: where the cluster finds the repository, for KServe.
        runtime_version: tag of the image of Triton that KServe shall start, e.g. `25.06-py3`.
        force: replace the model if the repository has it.

    Raises:
        UsageError: a name, a number or a pair of fields that cannot be.
    """

    out: Path
    repository: Path
    name: str | None = None
    backend: Backend | None = None
    plans: tuple[Path, ...] = ()
    plain: bool = False
    max_batch: int | None = None
    queue_delay: int = 100
    instances: int = 1
    device: Device | None = None
    gpus: tuple[int, ...] = ()
    threads: int | None = None
    data: str | None = None
    text_columns: tuple[str, ...] = ()
    storage_uri: str | None = None
    runtime_version: str | None = None
    force: bool = False

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.model):
            raise UsageError(f"{self.model}: no name for a model; give letters, digits, - . and _ (--name)")
        if self.plans and self.backend not in (None, "tensorrt"):
            raise UsageError(f"--plan: {self.backend} runs no TensorRT plan; leave out --backend, or the plans")
        if self.gpus and self.device == "cpu":
            raise UsageError("--gpus: names GPUs for a model on the CPU; leave out one of --gpus and --device cpu")

    @property
    def model(self) -> str:
        """The model's name on the server."""
        return self.name if self.name is not None else Path(os.path.abspath(self.out)).name  # noqa: PTH100

    @property
    def place(self) -> Path:
        """The folder to write."""
        return self.repository / self.model
