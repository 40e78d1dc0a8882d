"""Write a network back into its file: with its weights, and with the gates of a plan."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx_ir as ir

import graph_passes
from compressor.graph.network import GraphNetwork
from compressor.targets.base import Feeds
from compressor.targets.example_rows import ExampleRows, record_example_rows
from compressor.targets.onnxruntime.ort_session import unoptimized_runner
from compressor.targets.relative_error import Outputs
from graph_passes import Plan
from graph_passes.passes.insert_gates import FINGERPRINT


def write_gated(network: GraphNetwork, plan: Plan, path: Path, example: ExampleRows | None = None) -> None:
    """Write the graph of a network with the gates of a plan, as `export_reference` writes that of a PyTorch model.

    Args:
        network: the network, whose weights the graph gets.
        plan: an entry for each group.
        path: the file to write.
        example: examples that the graph carries; None: inputs of trials and timing are random.

    Raises:
        PlanError: the plan has other groups than the graph.
        OSError: the disk is full or the folder cannot be written; no file remains.
    """
    model = with_weights(network)
    graph_passes.gate_groups(model, plan)
    if example is not None:
        record_example_rows(model, example)
    if plan.model is not None:
        model.metadata_props[FINGERPRINT] = plan.model
    graph_passes.save(model, path)


def reference_run(network: GraphNetwork, plan: Plan) -> Callable[[Feeds], Outputs]:
    """Runs the file in ONNX Runtime, without its optimizations and without the interpreter of the network.

    The weights are those of the network now, and the gates of the plan are multiplied into them: the reference of a
    proof shares neither the inserted gates nor the operators in torch with what is proven.

    Args:
        network: the network.
        plan: the plan.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        graph_passes.save(with_weights(network, plan), path)
        return unoptimized_runner(path)


def with_weights(network: GraphNetwork, gates: Plan | None = None) -> ir.Model:
    """The graph of a network as its file has it, normalized, with the weights that the network has now.

    Args:
        network: the network.
        gates: a plan whose gates are multiplied into the weights of the matmuls that its groups end in; None: the
            weights stay as they are.
    """
    model = network.read_graph()
    factors = {} if gates is None else _factors(network, gates)
    for name, weight in network.weights.items():
        if not weight.is_parameter:
            continue
        value = model.graph.initializers[name]
        assert value.const_value is not None
        content = weight.value.detach().cpu().numpy()
        if name in factors:
            factor = factors[name]
            content = content * (factor[:, None] if weight.is_transposed else factor)
        content = content.astype(value.const_value.dtype.numpy())
        if not np.array_equal(content, value.const_value.numpy()):
            value.const_value = ir.Tensor(content, dtype=value.const_value.dtype, name=name)
    return model


def _factors(network: GraphNetwork, plan: Plan) -> dict[str, np.ndarray]:
    """Initializer of the weight that a group ends in -> the gate of each of its inputs, for groups that are changed."""
    changed = [group for group in plan.groups if group.gate != (1.0,) * group.units]
    gates = {network.get_submodule(group.name): np.repeat(np.array(group.gate), group.width) for group in changed}
    return {
        name: gates[weight.owner]
        for name, weight in network.weights.items()
        if weight.name == "weight" and weight.owner in gates
    }
