"""A process without PyTorch that chooses units of a graph, measures losses and refits weights.

    python -m tests.graph.light_pruning GRAPH.onnx ROWS.npz

prints the share of dropped units whose weights are zero.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from tests.light_environment import hide


def prune(path: Path, rows: Path) -> float:
    """The share of the inputs of linears that are zero once half of the units of each group are removed."""
    import graph_passes
    from compressor.graph.layers import LayeredGraph
    from compressor.progress import ignore_progress
    from compressor.selection.pruners.layerwise.session_network import SessionNetwork
    from compressor.selection.pruners.reconstruct.method import choices_of, loss_curve, refit_in_order
    from compressor.units import PrunableGroup

    model, batches = graph_passes.load(path), [dict(np.load(rows))]
    parts = graph_passes.find_groups(model).groups
    groups = [PrunableGroup(part.name, part.type, part.units, part.width, 1, part.linear) for part in parts]
    network = SessionNetwork(
        LayeredGraph(model),
        {part.linear: part.weight for part in parts},
        batches,
        batches,
        lambda dense: lambda number, before, after: np.square(before["logits"] - after["logits"]).mean(1),
    )
    linears = [str(group.linear) for group in groups]
    metrics = network.weigh(linears, ignore_progress)
    choices = choices_of(network, groups, network.grams(linears, ignore_progress), metrics, 0.01)
    divergence = network.divergence()
    assert all(loss_curve(choice, divergence)[0] > 0 for choice in choices.values())
    refit_in_order(
        network, list(choices.values()), {group.name: group.units // 2 for group in groups}, ignore_progress, ridge=0.2
    )
    return float(np.mean([(network.linear(path).weight == 0).all(0).mean() for path in linears]))


if __name__ == "__main__":
    hide({"torch", "transformers", "datasets", "accelerate"})
    print(prune(Path(sys.argv[1]), Path(sys.argv[2])))
