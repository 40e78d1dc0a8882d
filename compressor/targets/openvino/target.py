"""OpenVINO as a target: graphs in its own format, compiled for this machine's processor when they are loaded."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np

from compressor.targets.base import TOLERANCE, Feeds, Precision, Provider, Target
from compressor.targets.caches import GeneratingModel


class OpenVinoTarget(Target):
    """Builds graphs in OpenVINO's format, which any processor that OpenVINO supports loads.

    An int8 engine is built from a graph that is quantized, and a bf16 engine from the graph in fp32.
    """

    name = "openvino"
    title = "OpenVINO"
    engines = "compressor.targets.openvino.engine"
    caches = "compressor.targets.openvino.stateful"
    session_names = tuple(
        f"{name}.{kind}" for name in ("openvino_model", "encoder", "decoder") for kind in ("xml", "bin")
    )
    library = "openvino-genai"
    library_names = ("openvino_tokenizer.*", "openvino_detokenizer.*")
    packages = ("openvino",)
    engine_file = "engine.xml"
    metadata_file = "engine.bin"
    suffixes = (".xml",)
    providers = ("cpu",)
    options = frozenset({"shapes", "float_widths", "float_precision"})
    tried_precisions = ("fp32", "bf16", "int8")
    # Processors sum products of bfloat16 in fp32.
    tolerance: ClassVar[Mapping[Precision, float]] = {**TOLERANCE, "bf16": 3e-2}

    def reference_precision(self, precision: Precision) -> Precision:
        """fp32 for every engine, since every processor computes the same in fp32."""
        return "fp32"

    @property
    def float_precision(self) -> Literal["fp32", "bf16"]:
        """bf16 on a processor with native bfloat16 matmuls, else fp32."""
        from compressor.targets.openvino.session import native_bfloat16

        return "bf16" if native_bfloat16() else "fp32"

    def check_machine(self, precision: Precision, provider: Provider | None, kernel: Path | None) -> None:
        """Raise where engines cannot be built on this machine; see `Target.check_machine`."""
        from compressor.targets.openvino import session

        session.check_precision(precision)

    def write_library_files(self, folder: Path, model: GeneratingModel) -> str | None:
        """Write the tokenizer as graphs; see `Target.write_library_files`."""
        from compressor.targets.openvino.stateful import write_tokenizer

        return write_tokenizer(folder, model)

    def run_fixed(self, onnx: Path, feeds: Feeds, *, precision: Precision = "fp32") -> dict[str, np.ndarray]:
        """Outputs of a graph that OpenVINO reads itself; see `Target.run_fixed`."""
        self.check(precision=precision)
        from compressor.targets.openvino.engine import run_fixed

        return run_fixed(onnx, feeds)


TARGET = OpenVinoTarget()
