"""TensorRT: not built here; says so, and how to go on from the verified graph."""

from __future__ import annotations

from pathlib import Path

from compressor.errors import TargetMissingError
from compressor.targets.base import Engine, Precision, Provider


def build(
    onnx: Path,
    out: Path,
    *,
    precision: Precision = "fp32",
    provider: Provider | None = None,
    threads: int | None = None,
) -> Engine:
    """Raises:
    TargetMissingError: always; the verified graph is there for TensorRT's own tools.
    """
    half = " --fp16" if precision == "fp16" else ""
    raise TargetMissingError(
        f"trt: this version builds no TensorRT engines; the verified graph is {onnx}, build it on a machine with an "
        f"NVIDIA GPU by `trtexec --onnx={onnx}{half} --saveEngine={out}`, or use --target ort"
    )
