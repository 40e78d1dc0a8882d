"""An engine in OpenVINO, for `model.py`; copied beside it as `session.py`, together with `batches.py`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import openvino
from batches import EngineRequest, fitting_shape, pad, sizes_of, unpadded

Feeds = dict[str, np.ndarray]


class Session:
    """The engine `engine.xml`, compiled for free axes and for its fixed shapes, on the processor.

    Attributes:
        inputs: names of the inputs.
        outputs: names of the outputs.
    """

    def __init__(self, folder: Path, config: dict[str, Any], args: dict[str, str]) -> None:
        core = openvino.Core()
        model = core.read_model(folder / "engine.xml")
        self._facts: dict[str, Any] = json.loads(str(model.get_rt_info("compressor").value))
        self.inputs: list[str] = self._facts["inputs"]
        self.outputs: list[str] = self._facts["outputs"]
        options = _options(config, self._facts)
        self._free = EngineRequest(core.compile_model(model, "CPU", options).create_infer_request())
        self._fixed = {}
        for batch, seq in self._facts["shapes"]:
            fixed = self._reshaped(model, {"batch": batch, "sequence": seq})
            self._fixed[batch, seq] = EngineRequest(core.compile_model(fixed, "CPU", options).create_infer_request())

    def _reshaped(self, model: openvino.Model, sizes: dict[str, int]) -> openvino.Model:
        """A copy of the graph whose axes have these sizes."""
        fixed, axes = model.clone(), self._facts["input_axes"]
        shapes = ([sizes.get(axis) or int(axis) for axis in axes[name]] for name in self.inputs)
        fixed.reshape({position: openvino.PartialShape(shape) for position, shape in enumerate(shapes)})
        return fixed

    def run(self, feeds: Feeds) -> Feeds:
        """Outputs by name, computed at the smallest fixed shape that holds the batch, else with free axes.

        Raises:
            ValueError: rows are longer than the block masks of the graph, or than the model has positions for.
        """
        for name, positions in self._facts["reach"].items():
            if feeds[name].shape[1] > positions:
                raise ValueError(f"{name}: rows of {feeds[name].shape[1]} tokens; its masks cover {positions}")
        axes, output_axes = self._facts["input_axes"], self._facts["output_axes"]
        shape = fitting_shape(self._fixed, axes, feeds, pads=self._facts["pads"]) if self._fixed else None
        if shape is None:
            return self._infer(self._free, feeds)
        return self._infer(self._fixed[shape], pad(axes, feeds, shape), unpadded(output_axes, sizes_of(axes, feeds)))

    def _infer(self, request: EngineRequest, feeds: Feeds, parts: list[tuple[slice, ...]] | None = None) -> Feeds:
        outputs = request.run([feeds[name] for name in self.inputs], parts)
        return dict(zip(self.outputs, outputs, strict=True))


def _options(config: dict[str, Any], facts: dict[str, Any]) -> dict[str, Any]:
    """The properties that engines are measured with, if this processor has the instructions that they need."""
    if (needed := facts.get("native_instructions")) and not _processor_flags() & set(needed):
        precision = "int8" if "int8_products" in facts else "fp32"
        raise RuntimeError(
            f"engine.xml computes in {facts['inference_precision']}, and this processor has none of"
            f" {', '.join(needed)}; build it on this machine with --precision {precision}"
        )
    threads = config["parameters"].get("intra_op_thread_count")
    instances = sum(group["count"] for group in config["instance_group"])
    return {
        "INFERENCE_PRECISION_HINT": facts.get("inference_precision", "f32"),
        "PERFORMANCE_HINT": "LATENCY",
        # Several instances would be pinned to the same cores.
        "ENABLE_CPU_PINNING": threads is None and instances == 1,
        **({"INFERENCE_NUM_THREADS": int(threads["string_value"])} if threads else {}),
    }


def _processor_flags() -> set[str]:
    """Instruction sets of the processor, by their Linux names."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    return set(next((line.split() for line in lines if line.startswith("flags")), []))
