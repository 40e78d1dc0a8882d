"""Models with memory are exported, shrunk, proven, scored and built like any other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import compressor
from compressor.config.run import Recipe
from compressor.engines.prove import prove_shrunk
from compressor.engines.prove_export import prove_export
from compressor.model_folder import load
from compressor.models import SegmentForCausalLM, pruned
from compressor.models.forwards import reader
from compressor.results import NoteCode, ProofStage
from compressor.targets import target
from compressor.targets.segment_stream import Stream, limits
from compressor.tasks import open_data
from compressor.tasks.causal_lm import read
from compressor.units import find_sites
from graph_passes import Plan, save
from graph_passes import load as load_graph
from graph_passes.attention.gate_initializers import GATE_SUFFIXES
from tests import folders
from tests.report.reports import FLOAT_STAGES
from tests.targets.segment_models import (
    FAMILIES,
    TOLERANCE,
    SegmentGraph,
    exported_model,
    head_parameters,
    plan_of,
    segment_model,
    stream_error,
    token_ids,
)

FREQUENCIES = 12
"""Constants of the sinusoids in a graph with attention, half as many as the model is wide."""
HEADS = st.sets(st.integers(0, 3)).map(lambda heads: tuple(sorted(heads)))


@pytest.fixture(
    scope="module",
    params=[FAMILIES[0], *(pytest.param(name, marks=pytest.mark.zoo) for name in FAMILIES[1:])],
)
def exported(request: pytest.FixtureRequest) -> SegmentGraph:
    return exported_model(request.param)


def weight_bytes(path: Path) -> int:
    """Bytes of the initializers that are weights or gates; the other constants of a graph are scalars."""
    tensors = {name: value.const_value for name, value in ir.load(path).graph.initializers.items()}
    return sum(
        tensor.nbytes
        for name, tensor in tensors.items()
        if tensor is not None and tensor.dtype.is_floating_point() and (tensor.size > 1 or name.endswith(GATE_SUFFIXES))
    )


def test_memories_are_inputs_and_outputs_of_any_length(exported: SegmentGraph) -> None:
    graph = ir.load(exported.reference).graph
    sizes = {str(value.name): list(map(str, value.shape or ())) for value in graph.inputs}
    assert sizes == {
        "input_ids": ["batch", "sequence"],
        **{f"memory_{layer}": ["batch", "memory", "24"] for layer in range(2)},
    }
    assert [value.name for value in graph.outputs] == ["logits", "new_memory_0", "new_memory_1"]


def test_proofs_cover_empty_half_full_and_full_memories(exported: SegmentGraph) -> None:
    memories = [case.feeds["memory_0"].shape[1] for case in exported.cases]
    assert memories == [0, 3, 6]
    assert [case.feeds["input_ids"].shape for case in exported.cases] == [(1, 5), (2, 17), (3, 32)]


def test_the_reference_graph_equals_the_gated_model(exported: SegmentGraph, tmp_path: Path) -> None:
    plan = plan_of(exported.sites, [(), (0, 2, 3)], np.random.default_rng(7))
    graph = exported.gated(plan, tmp_path / "gated.onnx")
    proof = prove_export(exported.model, plan, graph, exported.cases, "compressed", attention="eager")
    assert proof.error <= 1e-5


@pytest.mark.parametrize(
    "kept",
    [
        [(), (1,)],
        [(0, 2, 3), ()],
        *(pytest.param(kept, marks=pytest.mark.zoo) for kept in ([(1, 3), (0, 1, 2, 3)], [(2,), (0, 3)])),
        [(), ()],
    ],
)
def test_the_shrunk_graph_equals_the_gated_one_and_an_emptied_layer_is_its_bias(
    exported: SegmentGraph, kept: list[tuple[int, ...]], tmp_path: Path
) -> None:
    plan = plan_of(exported.sites, kept, np.random.default_rng(0))
    shrunk = exported.shrunk(plan)
    assert not shrunk.refused
    save(shrunk.model, tmp_path / "small.onnx")
    gated = exported.gated(plan, tmp_path / "gated.onnx")
    proof = prove_shrunk(gated, tmp_path / "small.onnx", exported.cases, "compressed")
    assert proof.error <= TOLERANCE
    emptied = [site.name for site in plan.sites if not site.kept]
    graph = shrunk.model.graph
    for name in emptied:
        layer = name.removesuffix("attention")
        remaining = [value for value in graph.initializers if value.startswith(layer) and "feed_forward" not in value]
        assert remaining == [f"{name}.o_proj.bias"]
        operators = {node.op_type for node in graph if name in node.metadata_props.get("namespace", "")}
        assert not {"MatMul", "Gemm", "Softmax", "LayerNormalization", "Sin"} & operators
    assert sum(node.op_type == "Softmax" for node in graph) == len(plan.sites) - len(emptied)


@settings(max_examples=4, deadline=None)
@example(kept=[(), ()], seed=0)
@example(kept=[(0, 1, 2, 3), (0, 1, 2, 3)], seed=0)
@given(kept=st.lists(HEADS, min_size=2, max_size=2), seed=st.integers(0, 9))
def test_every_dropped_head_removes_its_parameters(
    exported: SegmentGraph, tmp_path_factory: pytest.TempPathFactory, kept: list[tuple[int, ...]], seed: int
) -> None:
    """This holds in PyTorch and in the file; an emptied layer also loses the 2 x 24 parameters of its normalization."""
    model, plan = exported.model, plan_of(exported.sites, kept, np.random.default_rng(seed))
    small = tmp_path_factory.mktemp("small") / "small.onnx"
    save(exported.shrunk(plan).model, small)
    other_parameters = model.num_parameters() - plan.heads * head_parameters(model)
    expected = plan.heads_kept * head_parameters(model) + other_parameters - 48 * kept.count(())
    assert pruned(model, plan).num_parameters() == expected
    assert weight_bytes(small) == 4 * (expected + FREQUENCIES * any(kept))


def write_inputs(folder: Path, memory: int) -> tuple[SegmentForCausalLM, Plan, Recipe]:
    """A folder with a model of one layer, a text, and a plan of two heads; and a recipe to follow the plan.

    The biases of the model are zero, as in a new one: equal constants of a graph must stay separate.
    """
    model = segment_model("all_attention", vocab_size=25, num_hidden_layers=1, memory_length=memory)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.data.zero_()
    folders.save(model, folder / "model")
    rows = [f"the {word} film {number}" for word in ("good", "bad") for number in ("one", "two", "three", "four")]
    (folder / "rows.txt").write_text("\n".join(rows * 4) + "\n")
    plan = plan_of(find_sites(model, {"input_ids": token_ids(2, 5) % 25}), [(1, 3)])
    plan.save(folder / "plan.json")
    timing: dict[str, Any] = {"batch": (1,), "seq": (8,), "seconds": 0.01, "threads": 1}
    paths: dict[str, Any] = {"model": folder / "model", "out": folder / "out", "plan": folder / "plan.json"}
    return model, plan, Recipe(**paths, test_data=str(folder / "rows.txt"), max_length=8, **timing)


@pytest.mark.zoo
def test_a_run_proves_a_model_with_memory_at_every_stage(tmp_path: Path) -> None:
    _, plan, recipe = write_inputs(tmp_path, memory=1)
    report = compressor.compress(recipe)
    assert {proof.stage for proof in report.proofs if proof.holds} == {*FLOAT_STAGES, ProofStage.FIXED_SHAPE}
    of_all_sizes = [proof.cases for proof in report.proofs if proof.stage in FLOAT_STAGES]
    assert all("memory 0" in cases[0] and "memory 1" in cases[-1] for cases in of_all_sizes)
    assert NoteCode.SEGMENT_MEMORY in [note.code for note in report.notes]
    assert report.compressed.parameters < report.dense.parameters
    smaller: Any = pruned(load(tmp_path / "model").model, plan)
    weights = sum(weight.numel() for weight in smaller.parameters())
    graph = tmp_path / "out" / "model.onnx"
    assert weight_bytes(graph) == 4 * (weights + FREQUENCIES)
    stream = Stream(target("ort").load(tmp_path / "out" / "engine.onnx", provider="cpu", threads=1), graph)
    assert stream_error(stream, smaller, [4, 1, 7, 2]) <= TOLERANCE


@pytest.mark.zoo
def test_a_run_scores_a_model_without_memory_segment_by_segment(tmp_path: Path) -> None:
    model, plan, recipe = write_inputs(tmp_path, memory=0)
    report = compressor.compress(recipe)
    graph = tmp_path / "out" / "model.onnx"
    assert limits(graph) is None
    assert [value.name for value in load_graph(graph).graph.inputs] == ["input_ids"]
    data = open_data(recipe.rows, load(tmp_path / "model"), recipe.selection.seed)
    models = (model, pruned(model, plan).eval())
    expected = [data.task.score(read(data.task, data.test, reader(network))) for network in models]
    (score,) = report.scores
    assert [score.dense, score.compressed] == pytest.approx(expected, rel=1e-5)
