"""TensorRT: not built here; says so, and how to go on from the verified graph."""

from __future__ import annotations

from pathlib import Path
from typing import NoReturn

from compressor.errors import TargetMissingError
from compressor.targets.base import Engine, Precision, Provider


def check(provider: Provider | None, precision: Precision) -> NoReturn:
    """Raises:
    TargetMissingError: always; the verified graph is there for TensorRT's own tools.
    """
    half = " --fp16" if precision == "fp16" else ""
    raise TargetMissingError(
        "trt: this version builds no TensorRT engines; write the verified graph by --target ort, then build its"
        f" model.onnx on a machine with an NVIDIA GPU: trtexec --onnx=model.onnx{half} --saveEngine=model.plan"
    )


def build(
    onnx: Path,
    out: Path,
    *,
    precision: Precision = "fp32",
    provider: Provider | None = None,
    threads: int | None = None,
) -> Engine:
    """See `check`.

    Raises:
        TargetMissingError: always.
    """
    check(provider, precision)
