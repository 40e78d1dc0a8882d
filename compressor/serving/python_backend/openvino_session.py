"""An engine in OpenVINO, for `model.py`; copied beside it as `session.py`, together with `batches.py`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import openvino
from batches import CompiledGraph, EngineRequest, at_shape

Feeds = dict[str, np.ndarray]


class Session:
    """The engine `engine.xml`, compiled for free axes and for its fixed shapes, on the processor."""

    def __init__(self, folder: Path, config: dict[str, Any], args: dict[str, str]) -> None:
        core = openvino.Core()
        model = core.read_model(folder / "engine.xml")
        facts: dict[str, Any] = json.loads(str(model.get_rt_info("compressor").value))
        options = _options(config, facts)

        def open_request(graph: openvino.Model) -> EngineRequest:
            return EngineRequest(core.compile_model(graph, "CPU", options).create_infer_request())

        self.inputs: list[str] = facts["inputs"]
        self.outputs: list[str] = facts["outputs"]
        self._reach: dict[str, int] = facts["reach"]
        free = open_request(model)
        fixed = {
            (batch, seq): open_request(at_shape(model, self.inputs, facts["input_axes"], (batch, seq)))
            for batch, seq in facts["shapes"]
        }
        self._graph = CompiledGraph(tuple(self.inputs), tuple(self.outputs), facts, lambda: free, fixed)

    def run(self, feeds: Feeds) -> Feeds:
        """Outputs by name, computed at the smallest fixed shape that holds the batch, else with free axes.

        Raises:
            ValueError: rows are longer than the block masks of the graph, or than the model has positions for.
        """
        for name, positions in self._reach.items():
            if feeds[name].shape[1] > positions:
                raise ValueError(f"{name}: rows of {feeds[name].shape[1]} tokens; its masks cover {positions}")
        return self._graph.run(feeds)


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
