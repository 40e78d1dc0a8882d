"""Graphs for the tests: written as ONNX text with random weights, and run on ONNX Runtime before and after."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import onnxruntime as ort

from graph_passes import Plan, Shrunk, SitePlan, shrink
from graph_passes.attention.gate_initializers import set_gates
from graph_passes.passes import InsertGates, Normalize

Feeds = Mapping[str, np.ndarray]

SIZES: tuple[Mapping[str, int], ...] = ({"B": 2, "S": 5, "T": 4, "P": 3}, {"B": 1, "S": 3, "T": 6, "P": 2})
"""Sizes of the free dimensions when a graph is run: batch and length must stay free."""


def graph(
    body: str,
    *weights: str,
    inputs: str = "float[B, S, 8] x",
    outputs: str = "float[B, S, 8] y",
    opset: int = 18,
    seed: int = 0,
) -> ir.Model:
    """A graph from ONNX text.

    Args:
        body: the nodes.
        weights: declarations of the initializers, separated by commas. Without content they are random, gates are ones.
            A tensor that a node computes may be declared too, for its shape.
        inputs: declarations of the graph's inputs.
        outputs: declarations of the graph's outputs.
        opset: version of the operator set.
        seed: seed of the random weights.
    """
    imports = f'"" : {opset}, "com.microsoft" : 1'
    declared = ", ".join(weight for weight in weights if weight)
    proto = onnx.parser.parse_model(
        f"<ir_version: 10, opset_import: [{imports}]> g ({inputs}) => ({outputs}) <{declared}> {{ {body} }}"
    )
    rng = np.random.default_rng(seed)
    computed = {name for node in proto.graph.node for name in node.output}
    infos = list(proto.graph.value_info)
    del proto.graph.value_info[:]
    for info in infos:
        if info.name in computed:
            proto.graph.value_info.append(info)
            continue
        shape = [dim.dim_value for dim in info.type.tensor_type.shape.dim]
        content = np.ones(shape) if info.name.endswith("head_gate") else rng.normal(size=shape)
        dtype = onnx.helper.tensor_dtype_to_np_dtype(info.type.tensor_type.elem_type)
        proto.graph.initializer.append(onnx.numpy_helper.from_array(content.astype(dtype), info.name))
    return ir.from_proto(proto)


def site(
    kept: Sequence[int],
    *,
    name: str = "a",
    heads: int = 4,
    kv_heads: int | None = None,
    head_dim: int = 3,
    scale: Sequence[float] = (),
) -> SitePlan:
    """The plan of one site that keeps some heads."""
    return SitePlan(name, "bidirectional", heads, kv_heads or heads, head_dim, tuple(kept), tuple(scale))


def plan(*sites: SitePlan | Sequence[int]) -> Plan:
    """A plan of sites; a list of kept heads stands for site `a` of 4 heads of width 3, with a different scale each."""
    return Plan(
        sites=tuple(
            entry if isinstance(entry, SitePlan) else site(entry, scale=[0.5 + head for head in range(len(entry))])
            for entry in sites
        )
    )


def draw(model: ir.Model, sizes: Mapping[str, int], seed: int = 1) -> dict[str, np.ndarray]:
    """Random inputs of a graph: normal floats, integers below 8, masks of ones with a padded last row."""
    rng = np.random.default_rng(seed)
    feeds: dict[str, np.ndarray] = {}
    for value in model.graph.inputs:
        assert value.name is not None
        assert value.shape is not None
        assert value.dtype is not None
        shape = [dim if isinstance(dim, int) else sizes[str(dim.value)] for dim in value.shape]
        content = np.asarray(rng.normal(size=shape))
        if "mask" in value.name and not value.dtype.is_floating_point():
            content = np.ones(shape)
            content[-1, ..., shape[-1] // 2 :] = 0
        elif value.dtype == ir.DataType.BOOL:
            content = np.ones(shape)
        elif not value.dtype.is_floating_point():
            content = np.floor(rng.uniform(0, 8, shape))
        feeds[value.name] = content.astype(value.dtype.numpy())
    return feeds


def run(model: ir.Model, feeds: Feeds) -> list[np.ndarray]:
    """Outputs of a graph on ONNX Runtime, without its optimizations."""
    return run_all(model, [feeds])[0]


def run_all(model: ir.Model, cases: Sequence[Feeds]) -> list[list[np.ndarray]]:
    """Outputs of a graph for each of several inputs, see `run`."""
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 3
    if any(isinstance(value.const_value, ir.ExternalTensor) for value in model.graph.initializers.values()):
        model = ir.external_data.load_to_model(model.clone())
    session = ort.InferenceSession(ir.to_proto(model).SerializeToString(), options, ["CPUExecutionProvider"])
    return [[np.asarray(output) for output in session.run(None, dict(feeds))] for feeds in cases]


def error(outputs: Sequence[np.ndarray], reference: Sequence[np.ndarray]) -> float:
    """Largest difference relative to the largest magnitude of the reference, over all outputs."""
    assert [a.shape for a in outputs] == [b.shape for b in reference]
    pairs = zip(outputs, reference, strict=True)
    return max(float(np.abs(a - b).max() / max(np.abs(b).max(), 1e-6)) for a, b in pairs)


def gated(model: ir.Model, plan: Plan) -> ir.Model:
    """A copy that computes with the plan's gates and keeps every weight."""
    copy = model.clone()
    Normalize()(copy)
    InsertGates(plan)(copy)
    set_gates(copy.graph, plan)
    return copy


def assert_same(
    model: ir.Model, reference: ir.Model, sizes: Sequence[Mapping[str, int]] = SIZES, tolerance: float = 1e-4
) -> None:
    """Check that both graphs compute the same, for every size of the free dimensions."""
    feeds = [draw(reference, case) for case in sizes]
    for case, outputs, expected in zip(sizes, run_all(model, feeds), run_all(reference, feeds), strict=True):
        assert error(outputs, expected) <= tolerance, case


def shrink_and_compare(
    model: ir.Model, plan: Plan, sizes: Sequence[Mapping[str, int]] = SIZES, tolerance: float = 1e-4
) -> Shrunk:
    """Shrink a copy of a graph, and check that it computes what the gated graph computes."""
    reference = gated(model, plan)
    shrunk = shrink(model.clone(), plan)
    assert_same(shrunk.model, reference, sizes, tolerance)
    return shrunk


def shape(model: ir.Model, name: str) -> tuple[int, ...]:
    """Shape of an initializer."""
    tensor = model.graph.initializers[name].const_value
    assert tensor is not None
    return tuple(tensor.numpy().shape)


def content(model: ir.Model, name: str) -> np.ndarray:
    """Content of an initializer."""
    tensor = model.graph.initializers[name].const_value
    assert tensor is not None
    return np.asarray(tensor.numpy())


def operators(model: ir.Model) -> list[str]:
    """Operator of each node, in order."""
    return [node.op_type for node in model.graph]
