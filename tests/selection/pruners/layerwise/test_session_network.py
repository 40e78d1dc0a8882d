"""A graph is pruned alike by PyTorch and by ONNX Runtime: units, losses and weights."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from compressor.graph.file import GraphFile
from compressor.selection.pruners.base import PruningInputs
from compressor.selection.pruners.layerwise.session_network import SessionNetwork, sessions_of
from compressor.selection.pruners.layerwise.torch_network import TorchNetwork
from compressor.selection.pruners.reconstruct.method import Network
from compressor.selection.pruners.reconstruct.pruner import ReconstructPruner, network_of
from tests.graph.files import classifier, halve
from tests.graph.test_network import legacy, load_file
from tests.selection.pruners.pruning import pruning_inputs, random_counts
from tests.zoo import VOCABULARY, text

Make = Callable[[PruningInputs], Network]
FAMILIES = ("bert", "distilbert", "modernbert", "gpt2", "llama", "qwen3")


def graph_inputs(path: Path, store: Path, length: int = 6, groups: int | None = None) -> PruningInputs:
    """The network of a graph with rows of text, and its first groups."""
    graph, batches = load_file(path), [text(12, seed=1), text(12, length=length, seed=2), text(4, seed=3)]
    for batch in batches:
        batch["input_ids"] %= min(spec.ids or VOCABULARY for spec in graph.input_specs.values())
    inputs = pruning_inputs(graph, store, [{name: batch[name] for name in graph.input_specs} for batch in batches])
    return replace(inputs, groups=inputs.groups[:groups])


def sessions(inputs: PruningInputs) -> SessionNetwork:
    graph = sessions_of(inputs, "gradients")
    assert graph is not None
    return graph


def finished(inputs: PruningInputs, store: Path, make: Make) -> ReconstructPruner:
    """The method after a refit of the weights of the network."""
    inputs = replace(inputs, store=store)
    pruner = ReconstructPruner(inputs, network=make(inputs))
    pruner.rank()
    pruner.finish(random_counts(inputs.groups))
    return pruner


@pytest.fixture(scope="module")
def graph_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The graph of each family, which is written once."""
    return functools.cache(lambda family: legacy(family, tmp_path_factory.mktemp(family))[0])


@pytest.mark.parametrize(
    ("family", "length", "groups"),
    [
        ("bert", 12, 3),
        *(pytest.param(family, length, None, marks=pytest.mark.zoo) for family in FAMILIES for length in (6, 12)),
    ],
)
def test_both_runtimes_prune_alike(
    family: str, length: int, groups: int | None, graph_of: Callable[[str], Path], tmp_path: Path
) -> None:
    """With 12 rows of 12 positions, axes of rows and of positions have one size."""
    path = graph_of(family)
    makes: tuple[Make, ...] = (TorchNetwork, sessions)
    pruners = [
        finished(graph_inputs(path, tmp_path, length, groups), tmp_path / str(number), make)
        for number, make in enumerate(makes)
    ]
    weights: list[dict[str, np.ndarray]] = []
    for pruner in pruners:
        model = pruner.inputs.model
        assert isinstance(model, GraphFile)
        weights.append(model.copy_state())
    for group in pruners[0].inputs.groups:
        kept = [[pruner.kept(group, count) for count in group.counts] for pruner in pruners]
        assert kept[0] == kept[1]
    for name, expected in weights[0].items():
        assert np.abs(weights[1][name] - expected).max() <= 1e-3 * np.abs(expected).max(), name


def test_losses_are_those_of_pytorch_and_do_not_depend_on_memory(
    graph_of: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("compressor.training.precision.bfloat16_instructions", tuple)  # PyTorch would use them
    inputs = graph_inputs(graph_of("bert"), tmp_path)
    inputs = replace(inputs, groups=inputs.groups[1::3])  # one in the first layer, and one in the last
    curves = []
    makes: list[tuple[Make, int]] = [(TorchNetwork, 1 << 30), (sessions, 1 << 30), (sessions, 0)]
    for number, (make, limit) in enumerate(makes):
        monkeypatch.setattr("compressor.selection.pruners.layerwise.session_network._RECORDED_BYTES", limit)
        stored = replace(inputs, store=tmp_path / str(number))
        pruner = ReconstructPruner(stored, network=make(stored))
        pruner.rank()
        curves.append(pruner.losses())
    for name, curve in curves[0].items():
        for actual in curves[1:]:
            assert actual[name] == pytest.approx(curve, rel=1e-3, abs=1e-9)


def test_a_second_refit_starts_from_the_whole_graph(graph_of: Callable[[str], Path], tmp_path: Path) -> None:
    inputs = graph_inputs(graph_of("bert"), tmp_path)
    inputs = replace(inputs, groups=inputs.groups[:3])
    model = inputs.model
    assert isinstance(model, GraphFile)
    whole = model.copy_state()
    pruner = finished(inputs, tmp_path / "store", sessions)
    first = model.copy_state()
    model.load_state(whole)
    pruner.finish({group.name: group.counts[1] for group in inputs.groups})
    model.load_state(whole)
    pruner.finish(random_counts(inputs.groups))
    assert all(np.array_equal(values, first[name]) for name, values in model.state().items())


def test_without_gradients_every_token_counts_alike(graph_of: Callable[[str], Path], tmp_path: Path) -> None:
    inputs = graph_inputs(graph_of("bert"), tmp_path)
    sessions_alone = network_of(inputs, "equal")
    pruner = ReconstructPruner(inputs, network=sessions_alone)
    pruner.rank()
    losses = pruner.losses()
    pruner.finish(random_counts(inputs.groups))
    assert all(curve[0] > 0 for curve in losses.values())
    for group in inputs.groups:
        kept = pruner.kept(group, random_counts(inputs.groups)[group.name])
        columns = sessions_alone.linear(str(group.linear)).weight.reshape(-1, group.units, group.width)
        dropped = sorted(set(range(group.units)) - set(kept))
        assert not columns[:, dropped].any()


def test_sessions_run_graphs_in_half_precision_and_with_one_bias_for_several_linears(
    graph_of: Callable[[str], Path], tmp_path: Path
) -> None:
    path = graph_of("bert")
    half, untrained = halve(path, tmp_path / "half.onnx"), classifier(tmp_path / "untrained.onnx")
    networks = [network_of(graph_inputs(graph, tmp_path)) for graph in (path, half, untrained)]
    assert [type(network) for network in networks] == [SessionNetwork] * 3
    assert not any(network.has_gradients for network in networks)
