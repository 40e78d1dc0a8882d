"""ONNX Runtime as a target: on CUDA where there is a GPU, else on the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from compressor.targets.base import Feeds, Precision, Provider, Target
from compressor.targets.options import BuildOptions
from graph_passes import load

if TYPE_CHECKING:
    from compressor.targets.onnxruntime.engine import OrtEngine


class OnnxRuntimeTarget(Target):
    """Builds fused graphs, which ONNX Runtime loads."""

    name = "ort"
    title = "ONNX Runtime"
    engine_file = "engine.onnx"
    suffixes = (".onnx",)
    providers = ("cpu", "cuda")
    options = frozenset({"kernel", "split_norms", "norm_seconds", "float_widths"})
    quantizes = True

    def check(
        self, *, precision: Precision = "fp32", provider: Provider | None = None, kernel: Path | None = None
    ) -> None:
        """Raise where engines cannot be built on this machine; see `Target.check`."""
        from compressor.targets.onnxruntime import ort_session

        self.check_request(precision=precision, provider=provider, kernel=kernel)
        ort_session.session_settings(ort_session.choose_provider(provider, precision, kernel), None, kernel)

    def build(
        self,
        onnx: Path,
        out: Path,
        *,
        precision: Precision = "fp32",
        provider: Provider | None = None,
        threads: int | None = None,
        options: BuildOptions | None = None,
    ) -> OrtEngine:
        """Fuse a graph and load it; see `Target.build`."""
        from compressor.targets.onnxruntime.engine import build_engine

        options = options or BuildOptions()
        self.check_request(precision=precision, provider=provider, kernel=options.kernel)
        return build_engine(
            onnx,
            out,
            precision=precision,
            provider=provider,
            threads=threads,
            kernel=options.kernel,
            norms_timed_at=(options.batch[1], options.seq[1]),
            split_norms=options.split_norms,
            norm_seconds=options.norm_seconds,
            float_widths=options.float_widths,
        )

    def load(
        self,
        path: Path,
        *,
        provider: Provider | None = None,
        threads: int | None = None,
        kernel: Path | None = None,
        cached: bool = True,
    ) -> OrtEngine:
        """Load a graph that was fused earlier; see `Target.load`."""
        from compressor.targets.onnxruntime.engine import load_engine

        self.check_request(provider=provider, kernel=kernel)
        return load_engine(Path(path), provider=provider, threads=threads, kernel=kernel)

    def run_fixed(self, onnx: Path, feeds: Feeds, *, precision: Precision = "fp32") -> dict[str, np.ndarray]:
        """Outputs of a graph whose free axes are fixed; see `Target.run_fixed`."""
        from compressor.targets.onnxruntime import ort_session

        sizes = {
            str(axis): size
            for value in load(onnx).graph.inputs
            if value.name in feeds
            for axis, size in zip(value.shape or (), feeds[str(value.name)].shape, strict=True)
            if not isinstance(axis, int)
        }
        settings = ort_session.session_settings(ort_session.choose_provider(None, precision), None)
        return ort_session.run_session(ort_session.open_session(onnx, settings, sizes=sizes), feeds)


TARGET = OnnxRuntimeTarget()
