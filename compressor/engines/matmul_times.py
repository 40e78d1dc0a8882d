"""Times of single matmuls in int8 and in floats: an engine computes each width in the faster precision.

A narrow matmul gains less from int8 than the quantization of its inputs costs. Which widths are too narrow depends on
the processor and the runtime, so they are measured.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
from onnx import TensorProto, helper, numpy_helper

import graph_passes
from compressor.config.sections import EngineConfig
from compressor.engines.build import build_engine
from compressor.engines.choices import DYNAMIC, Choice
from compressor.engines.prove import unoptimized
from compressor.measure import median_times
from compressor.progress import RunLog, tracked
from compressor.targets import BuildOptions, Feeds, target
from compressor.targets.base import Widths
from compressor.targets.graph_facts import matmuls_by_widths, quantized_matmuls

PRODUCT_SECONDS = 0.2
"""Approximate time spent on timing one matmul at one size, in int8 and in floats."""
_OPSET = 17
_MOST_WEIGHTS = 2**27
"""Largest number of weights of a matmul that is timed."""
TimeRatio = Callable[[Choice, Widths, Sequence[int], BuildOptions], float]


@dataclass
class MatmulTimes:
    """Times matmuls of a graph in int8 and in floats, each width once.

    Attributes:
        inputs: inputs of the model, of every size to time.
        log: receives the stage.
        time_ratio: returns the time of a matmul in int8 over its time in floats, from the engine, the widths, numbers
            of activation vectors and options; None: it is measured.
    """

    inputs: Sequence[Feeds]
    log: RunLog
    time_ratio: TimeRatio | None = None
    _ratios: dict[tuple[str, str, Widths], float] = field(default_factory=dict, init=False, repr=False)

    def mixed(
        self, choice: Choice, graph: Path, options: BuildOptions, *, exact: bool = True
    ) -> tuple[EngineConfig, BuildOptions]:
        """The settings of an int8 engine with matmuls in floats where that is faster.

        Args:
            graph: the graph that it is built from: quantized, or in floats where the target quantizes it.
            exact: whether matmuls are timed at their own widths; False: at rounded widths, which many plans share.

        Returns:
            Its target, its precision, which is one of floats if no matmul is faster in int8, and its options.

        Raises:
            TargetMissingError: the runtime is missing.
            InputError: the runtime cannot build a single matmul.
        """
        options = replace(options, float_precision=target(choice.config.target).float_precision)
        in_floats = choice.config.model_copy(update={"precision": options.float_precision})
        model = graph_passes.load(graph)
        by_widths = _candidates(model, choice)
        timed = {widths: widths if exact else _near(widths) for widths in by_widths}
        unknown = {near: widths for widths, near in timed.items() if self._key(choice, near) not in self._ratios}
        if unknown:
            rows = self._rows(model, {widths: by_widths[widths] for widths in unknown.values()})
            with self.log.stage(f"timing matmuls in int8 and in floats ({choice.config.target})") as on_progress:
                for near, widths in tracked(unknown.items(), on_progress):
                    ratio = (self.time_ratio or _time_ratio)(choice, near, rows[widths], options)
                    self._ratios[self._key(choice, near)] = ratio
        slower = frozenset(widths for widths, near in timed.items() if self._ratios[self._key(choice, near)] >= 1)
        config = in_floats if len(slower) == len(by_widths) else choice.config
        return config, replace(options, float_widths=slower)

    def _rows(self, model: ir.Model, by_widths: Mapping[Widths, Sequence[ir.Node]]) -> dict[Widths, tuple[int, ...]]:
        """The number of activation vectors that the products of each width multiply, at every size."""
        values = {widths: [node.inputs[0] for node in nodes] for widths, nodes in by_widths.items()}
        factors = {value.name: value for group in values.values() for value in group if value is not None}
        model.graph.outputs[:] = list(factors.values())
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "factors.onnx"
            graph_passes.save(model, path)
            run = unoptimized(path)
            sizes = [{name: array.size for name, array in run(feeds).items()} for feeds in self.inputs]
        return {
            widths: tuple(max(size[str(value.name)] for value in group if value) // widths[0] for size in sizes)
            for widths, group in values.items()
        }

    @staticmethod
    def _key(choice: Choice, widths: Widths) -> tuple[str, str, Widths]:
        return choice.config.target, choice.form, widths


def _candidates(model: ir.Model, choice: Choice) -> Mapping[Widths, Sequence[ir.Node]]:
    """The products that may be in int8, by widths: all of them where the target quantizes, else the quantized ones."""
    by_widths = matmuls_by_widths(model)
    if choice.form == DYNAMIC:
        return by_widths
    quantized = set(quantized_matmuls(model))
    return {key: nodes for key, nodes in by_widths.items() if quantized & set(nodes)}


def _near(widths: Widths) -> Widths:
    """Widths that few others differ from by more than a tenth: powers of two to the quarter, in multiples of eight."""
    inputs, outputs = (8 * max(1, round(2 ** (round(4 * math.log2(width)) / 4) / 8)) for width in widths)
    return inputs, outputs


def _time_ratio(choice: Choice, widths: Widths, rows: Sequence[int], options: BuildOptions) -> float:
    """The time of a product in int8 over that in floats: the geometric mean over numbers of activation vectors."""
    rng = np.random.default_rng(0)
    plain = BuildOptions(float_precision=options.float_precision)
    in_floats = choice.config.model_copy(update={"precision": options.float_precision})
    with tempfile.TemporaryDirectory() as scratch:
        engines = []
        for config, is_quantized in ((choice.config, choice.form != DYNAMIC), (in_floats, False)):
            folder = Path(scratch) / str(config.precision)
            folder.mkdir()
            onnx.save(matmul_graph(widths, rng, is_quantized=is_quantized), folder / "product.onnx")
            engines.append(build_engine(folder / "product.onnx", folder, config, plain))
        ratios = []
        for count in sorted(set(rows)):
            feeds = {ACTIVATIONS: rng.standard_normal((count, widths[0]), dtype=np.float32)}
            in_int8, floats = median_times(engines, feeds, PRODUCT_SECONDS)
            ratios.append(in_int8 / floats)
    return float(np.exp(np.mean(np.log(ratios))))


ACTIVATIONS, _OUTPUT = "activations", "output"
"""Names of input and output of the graph of one matmul."""


def matmul_graph(
    widths: Widths, rng: np.random.Generator, *, is_quantized: bool, rows: int | str = "rows"
) -> onnx.ModelProto:
    """The graph of one matmul of activations, `[rows, inputs]`, and random weights, `[inputs, outputs]`.

    Args:
        is_quantized: whether both factors are quantized to 8 bits: activations per tensor, weights per output.
    """
    inputs, outputs = widths
    # A part of a large vocabulary has the ratio of the whole.
    outputs = min(outputs, max(1, _MOST_WEIGHTS // inputs))
    weights = rng.standard_normal((inputs, outputs), dtype=np.float32)
    if not is_quantized:
        nodes = [helper.make_node("MatMul", [ACTIVATIONS, "weights"], [_OUTPUT], name="product")]
        constants: dict[str, np.ndarray] = {"weights": weights}
    else:
        scales = np.abs(weights).max(axis=0) / 63  # 7 bits, which no processor saturates
        constants = {
            "scale": np.array(8 / 255, np.float32),
            "zero": np.array(128, np.uint8),
            "weights": np.rint(weights / scales).astype(np.int8),
            "scales": scales,
            "zeros": np.zeros(outputs, np.int8),
        }
        nodes = [
            helper.make_node("QuantizeLinear", [ACTIVATIONS, "scale", "zero"], ["quantized"]),
            helper.make_node("DequantizeLinear", ["quantized", "scale", "zero"], ["left"]),
            helper.make_node("DequantizeLinear", ["weights", "scales", "zeros"], ["right"], axis=1),
            helper.make_node("MatMul", ["left", "right"], [_OUTPUT], name="product"),
        ]
    graph = helper.make_graph(
        nodes,
        "product",
        [helper.make_tensor_value_info(ACTIVATIONS, TensorProto.FLOAT, [rows, inputs])],
        [helper.make_tensor_value_info(_OUTPUT, TensorProto.FLOAT, [rows, outputs])],
        [numpy_helper.from_array(value, name) for name, value in constants.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", _OPSET)], ir_version=10)
