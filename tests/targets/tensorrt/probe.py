"""A process with the bindings of one TensorRT: it builds a graph on the stand-ins, and prints the outcome as JSON."""

from __future__ import annotations

import importlib
import json
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from compressor.errors import CompressorError
from compressor.targets import BuildOptions, Feeds, Precision
from compressor.targets.onnxruntime import ort_session
from compressor.targets.relative_error import relative_error
from compressor.targets.tensorrt import bindings
from compressor.targets.tensorrt.bindings import Features
from compressor.targets.tensorrt.builder import seal_path
from compressor.targets.tensorrt.engine import TrtEngine
from compressor.targets.tensorrt.metadata import TimingsState
from compressor.targets.tensorrt.target import TARGET
from compressor.targets.trial_inputs import random_feeds
from graph_passes import load, save
from tests.targets.graphs import parsed
from tests.targets.tensorrt import stand_ins
from tests.targets.tensorrt.stand_ins import REQUESTED

OUT_OF_MEMORY = "[E] Error Code 2: OutOfMemory (no further information)"
NO_IMPLEMENTATION = "10: Could not find any implementation for node {ForeignNode[a...b]}."
QUANTIZED = "q = QuantizeLinear(x, s, z)  y = DequantizeLinear(q, s, z)"


def main(graph: Path, quantized: Path, folder: Path) -> dict[str, Any]:
    sys.modules["tensorrt"] = module = importlib.import_module("tensorrt_bindings")
    stand_ins.install(module)
    warnings.filterwarnings("error", "a stand-in is deprecated")
    return Probe(bindings.features(module), graph, quantized, folder).outcomes()


def built(graph: Path, path: Path, **settings: Any) -> TrtEngine:
    """An engine of a graph."""
    engine = TARGET.build(graph, path, **settings)
    assert isinstance(engine, TrtEngine)
    return engine


class Probe:
    """Builds with one TensorRT.

    Args:
        supported: features of its version.
        graph: the graph to build.
        quantized: the symmetric quantized graph to build in int8.
        folder: an empty folder.
    """

    def __init__(self, supported: Features, graph: Path, quantized: Path, folder: Path) -> None:
        self.supported, self.graph, self.quantized, self.folder = supported, graph, quantized, folder
        self.path, self.cache = folder / "engine.plan", folder / "timings"
        self.options = BuildOptions(batch=(1, 2, 4), seq=(1, 8, 16), workspace=64 << 20, timing_cache=self.cache)
        self.feeds = random_feeds(load(graph), 2, 8, padded=True)

    def outcomes(self) -> dict[str, Any]:
        """The outcome of every build, by name. Their order matters: they share a timing cache."""
        return {
            "version": self.supported.version,
            "precisions": self.supported.precisions,
            "tactics": self.supported.tactics,
            "missing": TARGET.missing(),
            **{precision: self.precision(precision) for precision in ("fp32", "fp16")},
            "int8": self.int8(),
            "fp8": failure(lambda: self.build("fp8")),
            **self.runs(),
            "bf16": failure(lambda: self.build("bf16")) if "bf16" not in self.supported.precisions else None,
            **self.timings(),
            **self.types(),
            **self.compatible(),
            **self.failures(),
        }

    def build(self, precision: Precision = "fp32", **changes: Any) -> TrtEngine:
        options = BuildOptions(**{**vars(self.options), **changes})
        return built(self.graph, self.path, precision=precision, options=options)

    def precision(self, precision: Any) -> dict[str, Any]:
        """An engine of a precision: the requests to TensorRT, and the outcome of a run."""
        settings = ort_session.session_settings("cpu", 1)
        expected = ort_session.run_session(ort_session.open_session(self.graph, settings), self.feeds)
        engine = self.build(precision)
        requested = {name: REQUESTED[name] for name in ("network", "pools", "profile", "cache", "tactics")}
        outputs = engine.run(self.feeds)
        return {
            **requested,
            "flags": sorted(REQUESTED["flags"]),
            "layers": [None if kind is None else kind.name for kind in REQUESTED["layers"]],
            "error": max(relative_error(expected[name], outputs[name], self.feeds) for name in expected),
            "types": sorted({str(array.dtype) for array in outputs.values()}),
            "inputs": engine.metadata.inputs,
            "attentions": [engine.fused, engine.attentions],
            "device_seconds": engine.device_seconds,
            "memory": engine.memory(self.feeds),
        }

    def int8(self) -> dict[str, Any]:
        """An engine in int8, and a refused one of a graph in floats."""
        settings = {**ort_session.session_settings("cpu", 1), "graph_optimization": "none"}
        expected = ort_session.run_session(ort_session.open_session(self.quantized, settings), self.feeds)
        engine = built(self.quantized, self.path, precision="int8", options=self.options)
        outputs = engine.run(self.feeds)
        return {
            "network": REQUESTED["network"],
            "flags": sorted(REQUESTED["flags"]),
            "layers": REQUESTED["layers"],
            "error": max(relative_error(expected[name], outputs[name], self.feeds) for name in expected),
            "inputs": engine.metadata.inputs,
            "attentions": engine.attentions,
            "loaded": TARGET.load(self.path).precision,
            "quantized": engine.quantized,
            "floats": failure(lambda: self.build("int8")),
        }

    def runs(self) -> dict[str, Any]:
        """How a built engine runs."""
        engine = self.build("fp16")
        outputs = engine.run(self.feeds)["logits"]
        before = REQUESTED["set"]
        engine.run(self.feeds)
        set_again = REQUESTED["set"] - before
        stand_ins.REFUSED[:] = ["3: IExecutionContext::setInputShape: odd"]
        refused = failure(lambda: engine.run(random_feeds(load(self.graph), 3, 9)))
        stand_ins.REFUSED.clear()
        stand_ins.FAILURES[:] = ["[E] Error Code 2: OutOfMemory"]
        without_memory = engine.memory(self.feeds)
        loaded: Feeds = TARGET.load(self.path).run(self.feeds)
        return {
            "set_again": set_again,
            "refused": refused,
            "without_memory": without_memory,
            "loaded": float(np.abs(loaded["logits"] - outputs).max()),
            "nvtx": str(engine.context.nvtx_verbosity),
        }

    def timings(self) -> dict[str, Any]:
        """How the timing cache is used when it is damaged, and when another tool wrote it."""
        self.cache.write_bytes(b"damaged")
        damaged, requested, reused = self._timings(), REQUESTED["cache"], self._timings()
        self.cache.write_bytes(b"of another tool")
        seal_path(self.cache).unlink()
        return {"damaged_cache": [damaged, requested, reused], "foreign_cache": self._timings()}

    def _timings(self) -> TimingsState | None:
        use = self.build().metadata.timings
        return None if use is None else use.state

    def types(self) -> dict[str, Any]:
        """Engines of graphs with other types than floats."""
        outcomes = {}
        for name, body in (("int64", "y = ArgMax <axis = 1, keepdims = 0> (x)"), ("quantized", QUANTIZED)):
            graph, output = self.folder / f"{name}.onnx", "int64[B] y" if name == "int64" else "float[B, S] y"
            save(parsed(body, "float[B, S] x", output, "float s = {0.5}, int8 z = {0}"), graph)
            engine = built(graph, self.folder / f"{name}.plan", options=self.options)
            outcomes[name] = [sorted(REQUESTED["flags"]), REQUESTED["layers"], engine.metadata.outputs]
        return outcomes

    def compatible(self) -> dict[str, Any]:
        """An engine for other GPUs and versions."""
        session = self.build(hardware_compatible=True, version_compatible=True).session
        return {"compatible": session, "compatible_flags": sorted(REQUESTED["flags"])}

    def failures(self) -> dict[str, Any]:
        """Builds that TensorRT refuses once or always, and a damaged engine."""
        outcomes: dict[str, Any] = {}
        stand_ins.FAILURES[:] = [OUT_OF_MEMORY]
        outcomes["smaller"] = self.build().session["workspace"]
        stand_ins.FAILURES[:] = [OUT_OF_MEMORY, OUT_OF_MEMORY]
        outcomes["too_large"] = failure(self.build)
        stand_ins.FAILURES[:], stand_ins.WARNINGS[:] = [NO_IMPLEMENTATION], [stand_ins.SHORT]
        outcomes["short"] = self.build().session["workspace"]
        stand_ins.FAILURES[:], stand_ins.WARNINGS[:] = [NO_IMPLEMENTATION] * 4, [stand_ins.SHORT] * 4
        outcomes["still_short"] = failure(self.build)
        stand_ins.WARNINGS.clear()
        stand_ins.FAILURES[:] = [NO_IMPLEMENTATION]
        outcomes["preferred"] = failure(self._preferred_types)
        stand_ins.FAILURES[:] = ["4: [graph.cpp] no importer registered\nfor op: Odd"]
        outcomes["unreadable"] = failure(self.build)
        self.path.write_bytes(self.path.read_bytes()[:-1])
        outcomes["damaged"] = failure(lambda: TARGET.load(self.path))
        return outcomes

    def _preferred_types(self) -> list[Any]:
        engine = self.build()
        return [sorted(REQUESTED["flags"]), engine.session["types"]]


def failure(call: Callable[[], Any]) -> Any:
    """What a call returns, or the error that it raises: class, code, details and message."""
    try:
        return call()
    except CompressorError as error:
        return {
            "class": type(error).__name__,
            "code": error.code,
            "details": {name: str(value) for name, value in error.details.items()},
            "message": str(error),
        }


if __name__ == "__main__":
    print(json.dumps(main(*map(Path, sys.argv[1:])), default=list))
