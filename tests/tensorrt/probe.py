"""One process with the bindings of one TensorRT: builds a graph with stand-ins, and prints what came of it as JSON."""

from __future__ import annotations

import importlib
import json
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np

from compressor.errors import CompressorError
from compressor.targets import BuildOptions
from compressor.targets.onnxruntime import ort_session
from compressor.targets.random_inputs import random_feeds
from compressor.targets.relative_error import relative_error
from compressor.targets.tensorrt import bindings, timing_cache
from compressor.targets.tensorrt import target as trt
from graph_passes import load, save
from tests.engines import parsed
from tests.tensorrt import stand_ins

QUANTIZED = "q = QuantizeLinear(x, s, z)  y = DequantizeLinear(q, s, z)"


def main(graph: Path, folder: Path) -> dict[str, Any]:
    sys.modules["tensorrt"] = module = importlib.import_module("tensorrt_bindings")
    api = bindings.api(module)
    found: dict[str, Any] = {"version": api.version, "precisions": api.precisions, "tactics": api.tactics}
    stand_ins.install(module)
    plan, cache = folder / "engine.plan", folder / "timings"
    tuning = BuildOptions(batch=(1, 2, 4), seq=(1, 8, 16), workspace=64 << 20, timing_cache=cache)

    def built(precision: Any, **more: Any) -> Any:
        try:
            return trt.build(graph, plan, precision=precision, tuning=BuildOptions(**{**vars(tuning), **more}))
        except CompressorError as error:
            return f"{type(error).__name__}: {error}"

    warnings.filterwarnings("error", "a stand-in is deprecated")
    found["missing"] = trt.missing()
    feeds = random_feeds(load(graph), 2, 8, padded=True)
    expected = ort_session.run(ort_session.open_session(graph, ort_session.describe("cpu", 1)), feeds)
    for precision in ("fp32", "fp16"):
        engine = built(precision)
        asked = {name: stand_ins.ASKED[name] for name in ("network", "pools", "profile", "cache", "tactics")}
        got = engine.run(feeds)
        found[precision] = {
            **asked,
            "flags": sorted(stand_ins.ASKED["flags"]),
            "layers": [None if kind is None else kind.name for kind in stand_ins.ASKED["layers"]],
            "error": max(relative_error(expected[name], got[name], feeds) for name in expected),
            "types": sorted({str(array.dtype) for array in got.values()}),
            "inputs": engine.metadata.inputs,
            "optimization": engine.optimization,
            "device_seconds": engine.device_seconds,
            "memory": engine.memory(feeds),
        }
    times = stand_ins.ASKED["set"]
    engine.run(feeds)
    found["set_again"] = stand_ins.ASKED["set"] - times
    stand_ins.REFUSED[:] = ["3: IExecutionContext::setInputShape: odd"]
    try:
        engine.run(random_feeds(load(graph), 3, 9))
    except CompressorError as error:
        found["refused"] = str(error)
    stand_ins.REFUSED.clear()
    stand_ins.FAILURES[:] = ["[E] Error Code 2: OutOfMemory"]
    found["no_room"] = engine.memory(feeds)
    found["loaded"] = float(np.abs(trt.load(plan).run(feeds)["logits"] - got["logits"]).max())
    found["bf16"] = built("bf16") if "bf16" not in api.precisions else ""
    cache.write_bytes(b"torn")
    found["torn"] = [built("fp32").optimization, stand_ins.ASKED["cache"], built("fp32").optimization]
    cache.write_bytes(b"of another tool, torn")
    timing_cache._seal_of(cache).unlink()
    found["foreign"] = built("fp32").optimization
    for name, body in (("wide", "y = ArgMax <axis = 1, keepdims = 0> (x)"), ("quantized", QUANTIZED)):
        small = folder / f"{name}.onnx"
        kind = "int64[B]" if name == "wide" else "float[B, S]"
        save(parsed(body, "float[B, S] x", f"{kind} y", "float s = {0.5}, int8 z = {0}"), small)
        engine = trt.build(small, folder / f"{name}.plan", tuning=tuning)
        found[name] = [sorted(stand_ins.ASKED["flags"]), stand_ins.ASKED["layers"], engine.metadata.outputs]
    found["compatible"] = built("fp32", hardware_compatible=True, version_compatible=True).session
    found["compatible_flags"] = sorted(stand_ins.ASKED["flags"])
    memory = "[E] Error Code 2: OutOfMemory (no further information)"
    stand_ins.FAILURES[:] = [memory]
    found["smaller"] = built("fp32").session["workspace"]
    stand_ins.FAILURES[:] = [memory, memory]
    found["too_large"] = built("fp32")
    none = "10: Could not find any implementation for node {ForeignNode[a...b]}."
    stand_ins.FAILURES[:] = [none]
    stand_ins.WARNINGS[:] = [stand_ins.SHORT]
    engine = built("fp32")
    found["short"] = [engine.session["workspace"]]
    found["nvtx"] = str(engine._context.nvtx_verbosity)
    stand_ins.FAILURES[:] = [none] * 4
    stand_ins.WARNINGS[:] = [stand_ins.SHORT] * 4
    found["still_short"] = built("fp32")
    stand_ins.WARNINGS.clear()
    stand_ins.FAILURES[:] = [none]
    engine = built("fp32")
    types = engine if isinstance(engine, str) else engine.session["types"]
    found["preferred"] = [sorted(stand_ins.ASKED["flags"]), types]
    stand_ins.FAILURES[:] = ["4: [graph.cpp] no importer registered\nfor op: Odd"]
    found["unreadable"] = built("fp32")
    plan.write_bytes(plan.read_bytes()[:-1])
    try:
        trt.load(plan)
    except CompressorError as error:
        found["damaged"] = str(error)
    return found


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]), Path(sys.argv[2])), default=list))
