"""The limit of a machine: operations per second of a large matrix product on one engine."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx
from onnx import helper, numpy_helper

from compressor.config.sections import EngineConfig
from compressor.engines.build import build_engine
from compressor.errors import CompressorError
from compressor.results import EngineFacts, VariantName
from compressor.targets import BuildOptions

SIDE = 2048
"""Rows and columns of both factors: large enough that a runtime reaches its highest rate."""
_SECONDS = 1.0
"""Time spent on timing the product."""
LEAST_SECONDS = 1.0
"""Time for each pair of engines below which the limit is not measured either."""
_STEP = 1 / 64
"""Step of the quantized factors, whose values lie between -1 and 1."""


def machine_limit(config: EngineConfig, folder: Path) -> float | None:
    """Operations per second of a matrix product of 2048 x 2048 x 2048, in the precision of an engine.

    The limit is `2 * 2048^3 / seconds of the fastest call`, with the threads of the engine.

    Args:
        config: target, precision and threads.
        folder: an empty folder for graph and engine.

    Returns:
        The limit; None where the target cannot build such an engine.
    """
    path = folder / "product.onnx"
    onnx.save(product_graph(is_quantized=config.precision == "int8"), path)
    try:
        engine = build_engine(path, folder, config, BuildOptions())
    except CompressorError:
        return None
    factor = np.random.default_rng(0).uniform(-1, 1, (SIDE, SIDE)).astype(np.float32)
    engine.run({"x": factor})
    times: list[float] = []
    while sum(times) < _SECONDS:
        start = time.perf_counter()
        engine.run({"x": factor})
        times.append(time.perf_counter() - start)
    return 2 * SIDE**3 / min(times)


def with_limits(
    facts: Mapping[VariantName, EngineFacts], configs: Mapping[VariantName, EngineConfig], scratch: Path
) -> dict[VariantName, EngineFacts]:
    """Facts about engines with the limit of the machine for each.

    Args:
        facts: facts by variant.
        configs: target, precision and threads by variant.
        scratch: folder for graphs and engines.
    """
    limits: dict[EngineConfig, float | None] = {}
    result: dict[VariantName, EngineFacts] = {}
    for name, config in configs.items():
        if config not in limits:
            folder = scratch / f"limit-{name}"
            folder.mkdir(exist_ok=True)
            limits[config] = machine_limit(config, folder)
        result[name] = facts[name].model_copy(update={"machine_limit": limits[config]})
    return result


def product_graph(*, is_quantized: bool) -> onnx.ModelProto:
    """The graph `y = x w`, all of them `[2048, 2048]`.

    Args:
        is_quantized: whether both factors are dequantized from int8, as in the portable quantized graph.
    """
    weight = np.random.default_rng(1).uniform(-1, 1, (SIDE, SIDE)).astype(np.float32)
    tensors: dict[str, np.ndarray | np.generic] = {"w": weight}
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"])]
    if is_quantized:
        step = np.float32(_STEP)
        tensors = {
            "step": step,
            "zero": np.uint8(128),
            "q": np.round(weight / step).astype(np.int8),
            "steps": np.full(SIDE, step),
            "zeros": np.zeros(SIDE, np.int8),
        }
        nodes = [
            helper.make_node("QuantizeLinear", ["x", "step", "zero"], ["xq"]),
            helper.make_node("DequantizeLinear", ["xq", "step", "zero"], ["xd"]),
            helper.make_node("DequantizeLinear", ["q", "steps", "zeros"], ["wd"], axis=1),
            helper.make_node("MatMul", ["xd", "wd"], ["y"]),
        ]
    ends = [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, (SIDE, SIDE)) for name in ("x", "y")]
    initializers = [numpy_helper.from_array(np.asarray(value), name) for name, value in tensors.items()]
    graph = helper.make_graph(nodes, "product", ends[:1], ends[1:], initializers)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
