"""TensorRT 8.6, 10 and 11 as a target: engines for this machine's NVIDIA GPU."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from compressor.errors import TargetMissingError
from compressor.targets.base import Precision, Provider, Target

if TYPE_CHECKING:
    import onnx_ir as ir

    from compressor.targets.cuda import CudaDriver
    from compressor.targets.tensorrt.engine import TrtEngine


class TensorRtTarget(Target):
    """Builds engines ahead of time, for this GPU and version of TensorRT unless `BuildOptions` ask for more."""

    name = "trt"
    title = "TensorRT"
    engines = "compressor.targets.tensorrt.engine"
    engine_file = "engine.plan"
    metadata_file = "engine.plan.json"
    suffixes = (".plan", ".engine")
    providers = ("cuda",)
    symmetric = True
    tried_precisions = ("fp32", "fp16", "int8", "fp8")
    options = frozenset({"workspace", "timing_cache", "hardware_compatible", "version_compatible"})

    def prepare_caches(self, graph: ir.Model) -> None:
        """Scale queries instead of scores, where TensorRT's fused attention expects it; see `Target.prepare_caches`."""
        from graph_passes.passes import ScaleQueries

        ScaleQueries()(graph)

    def missing(self) -> str | None:
        """Why engines can neither be built nor run on this machine, in a few words; None: they can."""
        try:
            self.runtime()
        except TargetMissingError as error:
            return str(error)
        return None

    @property
    def drops_positions(self) -> bool:
        """Whether TensorRT is newer than 8.6, which computes a part of an attention mask wrongly for padded rows."""
        from compressor.targets.tensorrt import bindings

        return self.missing() is not None or bindings.features(self.runtime()[1]).int64

    def check_machine(self, precision: Precision, provider: Provider | None, kernel: Path | None) -> None:
        """Raise where engines cannot be built on this machine; see `Target.check_machine`."""
        from compressor.targets.tensorrt import bindings

        try:
            driver, trt = self.runtime()
        except TargetMissingError as error:
            text = (
                f"trt: {error}; to build on the machine with the GPU, copy the folder of a run there and run compress"
                " build OUT --target trt"
            )
            raise TargetMissingError(text, code=error.code, **error.details) from error
        bindings.features(trt).require(precision, driver.device)

    def load(
        self,
        path: Path,
        *,
        provider: Provider | None = None,
        threads: int | None = None,
        kernel: Path | None = None,
        cached: bool = True,
    ) -> TrtEngine:
        """Load an engine whose metadata match this machine; see `Target.load`.

        TensorRT sees the file only after its metadata and its hash have been checked.
        """
        from compressor.targets.tensorrt.engine import load_engine
        from compressor.targets.tensorrt.metadata import read_metadata

        metadata = read_metadata(path)
        metadata.check_file(path)
        self.check(precision=metadata.precision, provider=provider, kernel=kernel)
        driver, trt = self.runtime()
        return load_engine(path, metadata, driver, trt)

    def runtime(self) -> tuple[CudaDriver, ModuleType]:
        """The driver of the GPU, and TensorRT's module.

        Raises:
            TargetMissingError: there is no GPU, or TensorRT is not installed.
        """
        from compressor.targets.cuda import driver
        from compressor.targets.tensorrt import bindings

        return driver(), bindings.library()  # in this order: TensorRT ends a process that has no GPU


TARGET = TensorRtTarget()
