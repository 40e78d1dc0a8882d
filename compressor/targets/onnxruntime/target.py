"""ONNX Runtime as a target: on CUDA where there is a GPU, else on the CPU."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from compressor.targets.base import Feeds, Precision, Provider, Target
from compressor.targets.caches import GeneratingModel
from graph_passes import load


class OnnxRuntimeTarget(Target):
    """Builds fused graphs, which ONNX Runtime loads."""

    name = "ort"
    title = "ONNX Runtime"
    engines = "compressor.targets.onnxruntime.engine"
    caches = "compressor.targets.onnxruntime.sessions"
    session_names = ("encoder.engine.onnx*", "decoder.engine.onnx*")
    library = "onnxruntime-genai"
    library_names = ("genai_config.json",)
    packages = ("onnxruntime",)
    engine_file = "engine.onnx"
    suffixes = (".onnx",)
    providers = ("cpu", "cuda")
    options = frozenset({"kernel", "split_norms", "norm_seconds", "float_widths"})
    quantizes = True

    def check_machine(self, precision: Precision, provider: Provider | None, kernel: Path | None) -> None:
        """Raise where engines cannot be built on this machine; see `Target.check_machine`."""
        from compressor.targets.onnxruntime import ort_session

        ort_session.session_settings(ort_session.choose_provider(provider, precision, kernel), None, kernel)

    def write_library_files(self, folder: Path, model: GeneratingModel) -> str | None:
        """Write `genai_config.json`; see `Target.write_library_files`."""
        from compressor.targets.onnxruntime.genai import write_genai_config

        return write_genai_config(folder, model)

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
