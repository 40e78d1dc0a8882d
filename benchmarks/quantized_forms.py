"""Speed of int8 by form of the graph: for OpenVINO, for ONNX Runtime, and for the shape of BERT-base.

    python -m benchmarks.quantized_forms              # after python -m benchmarks.quantization sst2

The first table compares two int8 engines of OpenVINO for MiniLM on SST-2: from the portable graph, and from what NNCF
makes of OpenVINO's own form of the same graph with the same calibration rows. The second compares ONNX Runtime's
dynamic quantization with its `MatMulNBits` (8 bits, blocks of 32 weights, int8 activations). The third times the shape
of BERT-base with random weights against ONNX Runtime's fused fp32, and prints the share of the machine's int8 limit:
the multiply-accumulates of the graph a second over those of the fastest of several large int8 products on the same
threads.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer
from transformers import BertForSequenceClassification

from benchmarks.machine import machine
from benchmarks.speed import SHAPES, plans, table
from benchmarks.text_sets import ENCODER, rows_file
from compressor.config.sections import RowsConfig
from compressor.export import export_reference
from compressor.measure import macs, median_times
from compressor.model_folder import load as load_folder
from compressor.quantization import quantize_graph, require_nncf
from compressor.silence_libraries import quiet_tools
from compressor.targets import BuildOptions, Engine, Feeds, target
from compressor.targets.openvino.engine import convert, load_engine
from compressor.targets.openvino.session import write_model
from compressor.targets.trial_inputs import random_feeds
from compressor.tasks import Data, open_data, statistics
from compressor.tasks.base import Batch
from compressor.tasks.calibration import calibration_rows
from graph_passes import load, save, shrink
from graph_passes.passes import CleanUp, DropUnreadPositions, FoldWeights

LIMITS = ((512, 768, 3072), (1024, 1024, 4096), (2048, 2048, 2048), (4096, 1024, 4096))
"""Rows, inputs and outputs of the products that the int8 limit is measured with."""


def forms(folder: Path, scratch: Path, seconds: float) -> None:
    """Print the comparison of the portable graph with NNCF's own form."""
    graph = folder / "openvino-int8" / "model.onnx"
    data = open_data(RowsConfig(data=str(rows_file("sst2", folder))), load_folder(ENCODER))
    rows = calibration_rows(data, 300, seed=0)
    portable = quantize_graph(graph, rows, scratch / "portable.onnx")
    model = load(graph)
    FoldWeights()(model)
    save(model, scratch / "folded.onnx")
    nncf = require_nncf()
    with quiet_tools():
        native = nncf.quantize(
            convert(scratch / "folded.onnx"), nncf.Dataset(rows), model_type=nncf.ModelType.TRANSFORMER, subset_size=300
        )
    inputs, outputs = ([str(value.name) for value in values] for values in (model.graph.inputs, model.graph.outputs))
    write_model(native, scratch / "native.xml", {"inputs": inputs, "outputs": outputs})
    engines: dict[str, Engine] = {
        "portable": target("openvino").build(portable.path, scratch / "portable.xml", precision="int8"),
        "NNCF's own": load_engine(scratch / "native.xml"),
    }
    print_forms(engines, graph, data, seconds)


def print_forms(engines: dict[str, Engine], graph: Path, data: Data, seconds: float) -> None:
    """Print times and accuracy of engines of the same graph."""
    times = {batch: median_times(list(engines.values()), sized(graph, batch, 128), seconds) for batch in (1, 8)}
    printed = []
    for number, (name, engine) in enumerate(engines.items()):

        def forward(batch: Batch, engine: Engine = engine) -> np.ndarray:
            return data.task.logits(engine.run(batch))

        accuracy = data.task.score(statistics(data.task, data.test, forward))
        milliseconds = {f"batch {batch}, ms": f"{1e3 * medians[number]:.2f}" for batch, medians in times.items()}
        printed.append({"form": name, **milliseconds, f"accuracy ({len(data.test)} rows)": f"{100 * accuracy:.2f}"})
    print(table(printed), flush=True)


def blockwise(graph: Path, out: Path) -> Path:
    """Write a graph with ONNX Runtime's `MatMulNBits` for products with weights: 8 bits, a scale for 32 weights."""
    model = load(graph)
    FoldWeights()(model)
    save(model, out)
    quantizer = MatMulNBitsQuantizer(str(out), bits=8, block_size=32, is_symmetric=True, accuracy_level=4)
    with quiet_tools():
        quantizer.process()
    save(ir.from_proto(quantizer.model.model), out)
    return out


def onnxruntime_forms(folder: Path, scratch: Path, seconds: float) -> None:
    """Print the comparison of the ways in which ONNX Runtime computes products with 8-bit weights."""
    graph = folder / "openvino-int8" / "model.onnx"
    data = open_data(RowsConfig(data=str(rows_file("sst2", folder))), load_folder(ENCODER))
    runtime = target("ort")
    fused = scratch / "fused.onnx"
    engines = {
        "fp32": runtime.build(graph, fused),
        "dynamic": runtime.build(
            graph, scratch / "dynamic.onnx", precision="int8", options=BuildOptions(norm_seconds=1.0)
        ),
        "MatMulNBits, attention fused and in fp32": runtime.load(blockwise(fused, scratch / "blockwise.onnx")),
        "MatMulNBits, every product": runtime.load(blockwise(graph, scratch / "every.onnx")),
    }
    print_forms(engines, graph, data, seconds)


def sized(graph: Path, batch: int, seq: int) -> Feeds:
    """Random inputs of a size."""
    return random_feeds(load(graph), batch, seq)


def base(scratch: Path, seconds: float) -> None:
    """Print the speed of BERT-base's shape, and the share of the int8 limit."""
    model, inputs, by_kept = plans("base", 0)
    assert isinstance(model, BertForSequenceClassification)
    whole = max(by_kept)
    export_reference(model, by_kept[whole], inputs, scratch / "reference.onnx")
    dense = shrink(load(scratch / "reference.onnx"), by_kept[whole]).model
    save(dense, scratch / "dense.onnx")
    thinned = load(scratch / "dense.onnx")
    DropUnreadPositions()(thinned)
    CleanUp()(thinned)
    save(thinned, scratch / "thinned.onnx")
    rows = [sized(scratch / "thinned.onnx", 1, seq) for seq in (16, 48, 128, 384)]
    quantized = quantize_graph(scratch / "thinned.onnx", rows, scratch / "int8.onnx")
    sizes = ((1, 128), (1, 384), (8, 128))
    engines: dict[str, Engine] = {
        "ort fp32": target("ort").build(scratch / "dense.onnx", scratch / "dense.engine.onnx"),
        "openvino int8": target("openvino").build(
            quantized.path, scratch / "int8.xml", precision="int8", options=BuildOptions(shapes=sizes)
        ),
        "ort int8": target("ort").build(
            scratch / "thinned.onnx",
            scratch / "dynamic.onnx",
            precision="int8",
            options=BuildOptions(norm_seconds=1.0),
        ),
    }
    limit = int8_limit(scratch, seconds)
    print(f"int8 limit: {limit / 1e9:.0f} billion multiply-accumulates a second")
    printed: list[dict[str, Any]] = []
    for batch, seq in sizes:
        medians = median_times(list(engines.values()), sized(scratch / "dense.onnx", batch, seq), 3 * seconds)
        work = macs(load(scratch / "thinned.onnx"), batch, seq) or 0
        for name, median in zip(engines, medians, strict=True):
            share = f"{100 * work / median / limit:.0f}%" if "int8" in name else ""
            printed.append(
                {
                    "size": f"{batch} x {seq}",
                    "engine": name,
                    "ms": f"{1e3 * median:.1f}",
                    "speed": f"{medians[0] / median:.2f}",
                    "of the int8 limit": share,
                }
            )
    print(table(printed), flush=True)


def int8_limit(scratch: Path, seconds: float) -> float:
    """Multiply-accumulates a second of the fastest of several int8 products in OpenVINO."""
    rng, rates = np.random.default_rng(0), []
    for rows, inputs, outputs in LIMITS:
        x = ir.Value(name="x", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape([rows, inputs]))
        weights = ir.tensor(rng.standard_normal((inputs, outputs)).astype(np.float32), name="w")
        w = ir.Value(
            name="w", const_value=weights, type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape([inputs, outputs])
        )
        product = ir.node("MatMul", [x, w])
        product.outputs[0].name = "y"
        product.outputs[0].type = ir.TensorType(ir.DataType.FLOAT)
        product.outputs[0].shape = ir.Shape([rows, outputs])
        graph = ir.Graph([x], product.outputs, nodes=[product], initializers=[w], opset_imports={"": 18}, name="limit")
        save(ir.Model(graph, ir_version=9), scratch / "limit.onnx")
        feeds = {"x": rng.standard_normal((rows, inputs)).astype(np.float32)}
        quantized = quantize_graph(scratch / "limit.onnx", [feeds], scratch / "limit.int8.onnx")
        engine = target("openvino").build(quantized.path, scratch / "limit.xml", precision="int8")
        rates.append(rows * inputs * outputs / median_times([engine], feeds, seconds)[0])
    return max(rates)


def main() -> None:
    """Print the three tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, default=Path("build/quantization"))
    parser.add_argument("--seconds", type=float, default=5.0, help="approximate time of each measurement")
    args = parser.parse_args()
    print(f"machine: {machine('onnxruntime', 'openvino', 'nncf')}; shapes {SHAPES['base']}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        forms(args.models / "sst2", Path(folder), args.seconds)
        onnxruntime_forms(args.models / "sst2", Path(folder), args.seconds)
        base(Path(folder), args.seconds)


if __name__ == "__main__":
    main()
