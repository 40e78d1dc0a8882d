"""How the graph is exported, and engines are built."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator

from compressor.config.fields import Config, config_field, one_of
from compressor.config.sections.headings import AUTO, ENGINE
from compressor.config.values import AbsolutePath, Count, Shapes
from compressor.errors import ErrorCode, UsageError
from compressor.targets import DEFAULT_TARGET, QUANTIZED, TARGETS, Precision, target
from compressor.targets.base import Shape, parse_shape


class EngineConfig(Config):
    """How engines are built."""

    target: Annotated[str, AfterValidator(one_of((*TARGETS, AUTO)))] = config_field(
        ENGINE,
        "runtime of the engine; auto (compress run only): the fastest of those installed",
        DEFAULT_TARGET,
        choices=(*TARGETS, AUTO),
        is_basic=True,
    )
    precision: Literal[Precision, "auto"] = config_field(
        ENGINE,
        "numeric precision of the engine; bf16: TensorRT, and OpenVINO on processors that have it; fp8: TensorRT;"
        " auto (compress run only): the fastest of the target that keeps the metric within --max-drop, and"
        " without data the fastest in floats",
        "fp32",
        is_basic=True,
    )
    calibration_rows: Count = config_field(
        ENGINE, "maximum number of training examples that calibrate the ranges of int8 activations", 300
    )
    allow_float_products: bool = config_field(
        ENGINE, "accept an int8 engine that computes some of the quantized matmuls in floats", False
    )
    provider: Literal["cpu", "cuda"] | None = config_field(
        ENGINE, "device of the engine; default: CUDA where available"
    )
    threads: Count | None = config_field(ENGINE, "threads of the engine; default: one per core", is_basic=True)
    kernel: AbsolutePath | None = config_field(
        ENGINE,
        "library that compress kernel built, for block-sparse attention in ONNX Runtime on the CPU; default:"
        " plain ONNX",
        runs_code=True,
        is_path=True,
    )
    shapes: Shapes = config_field(
        ENGINE,
        "batch sizes and lengths that OpenVINO compiles the graph for, besides free axes: 1x32,1x128; a batch"
        " runs padded in the smallest that holds it",
        (),
    )
    workspace: Count | None = config_field(
        ENGINE, "MiB of GPU memory that TensorRT may use in a build; default: all free memory"
    )
    timing_cache: Path | None = config_field(
        ENGINE, "file of TensorRT's kernel timings, read and updated; default: a file in the user's cache", is_path=True
    )
    hardware_compatible: bool = config_field(
        ENGINE, "build a TensorRT engine for other GPUs too, Ampere or newer", False
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
        """Whether engines are compared with one in fp32, and the fastest that keeps the metric is delivered."""
        if AUTO in (self.target, self.precision):
            return True
        return target(self.target).reference_precision(self.definite_precision) != self.precision

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
    ] = config_field(ENGINE, "ONNX operator set of the exported graph", 18)
    attention: Literal["eager", "sdpa"] = config_field(ENGINE, "form of attention in the exported graph", "eager")
    pool_in_graph: bool = config_field(
        ENGINE, "pool and normalize inside the graph of a sentence encoder, rather than outside", True
    )
    keep_unread_positions: bool = config_field(
        ENGINE, "compute the last layers at every position, even where no output depends on it", False
    )
