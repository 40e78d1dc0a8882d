"""Decoders with key/value caches as files: compressed on whole texts, delivered and run in steps."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from onnx import TensorProto, helper

import compressor
from compressor.config.run import Recipe
from compressor.config.sections import ExportConfig
from compressor.engines.export import export_graph
from compressor.engines.prove import Case
from compressor.errors import ErrorCode, InputError
from compressor.generation.deliver import CachedGraphs, export_whole, shrink_graphs
from compressor.generation.steps import LOGITS, run_in_steps
from compressor.model_folder import ModelFolder, load
from compressor.results import CACHED_STAGES, ProofStage, Report
from compressor.targets import target
from compressor.targets.caches import DECODER
from compressor.targets.onnxruntime.ort_session import unoptimized_runner
from compressor.targets.onnxruntime.sessions import OrtSessions
from compressor.units import PrunableGroup, find_groups, gated, keep_all
from graph_passes import Plan
from graph_passes import load as load_graph
from graph_passes.flow.caches import bytes_per_token, cache_names
from tests.command import compress
from tests.generation.test_run import SHORT, write_rows
from tests.graph.decoders import FILES, MODELS, copy, decoder, model

CASES = tuple(
    Case({"input_ids": ids, "attention_mask": mask}, name)
    for name, ids, mask in (
        ("one", np.arange(5, 16)[None], np.ones((1, 11), np.int64)),
        ("padded", np.arange(5, 23).reshape(2, 9), np.array([[1] * 9, [1] * 6 + [0] * 3])),
    )
)


@functools.cache
def exported(name: str) -> tuple[ModelFolder, list[PrunableGroup], CachedGraphs]:
    """A file with its groups, and its graph with caches and every gate open."""
    loaded = load(decoder(name))
    groups, folder = loaded.access.groups({}, "eager"), decoder(name).parent / "gated"
    folder.mkdir()
    return loaded, groups, export_whole(loaded, keep_all(groups), CASES, folder, opset=18, attention="eager")


def drawn(groups: list[PrunableGroup], seed: int) -> Plan:
    """A plan that keeps random bundles of units, scaled, and no head of the first attention."""
    rng, plans = np.random.default_rng(seed), []
    for number, group in enumerate(groups):
        bundles = group.units // group.bundle
        count = 0 if number == 0 else int(rng.integers(1, bundles + 1))
        chosen = rng.choice(bundles, count, replace=False)
        kept = [unit for unit in range(group.units) if unit // group.bundle in chosen]
        scale = tuple(rng.uniform(0.5, 1.5, len(kept)).astype(np.float32).tolist())
        plans.append(replace(group.plan(range(group.units)), kept=tuple(kept), scale=scale))
    return Plan(groups=tuple(plans))


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.zoo)])
def test_for_any_plan_the_shrunk_graph_computes_in_steps_what_the_gated_file_does(
    name: str, seed: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    out = tmp_path_factory.mktemp("decoder")
    folder, groups, whole = exported(name)
    plan, scratch = drawn(groups, seed), out / "gated"
    scratch.mkdir()
    proofs = shrink_graphs(whole, folder, plan, target("ort"), scratch, out)
    assert [proof.stage for proof in proofs] == list(CACHED_STAGES[:2])
    assert all(proof.holds for proof in proofs)
    text = export_graph("compressed", folder, plan, ExportConfig(), CASES, out / "text.onnx")
    assert text.proof.holds
    if name in MODELS:
        assert_equals_model(name, plan, OrtSessions(out, optimized=False))


def assert_equals_model(name: str, plan: Plan, sessions: OrtSessions) -> None:
    """Check graphs in steps against the model that the file was exported from, whose units have other names."""
    network, feeds = model(name), CASES[0].feeds
    batch = {key: torch.from_numpy(value) for key, value in feeds.items()}
    groups = find_groups(network, batch)
    assert [group.units for group in groups] == [group.units for group in plan.groups]
    same = [replace(part, name=group.name) for group, part in zip(groups, plan.groups, strict=True)]
    with gated(network, Plan(groups=tuple(same)), attention="eager"), torch.no_grad():
        expected = network(**batch).logits.numpy()
    assert np.allclose(run_in_steps(sessions, feeds)[LOGITS], expected, atol=1e-4)


@pytest.fixture(scope="module", params=["gpt2", pytest.param("unmasked", marks=pytest.mark.zoo), "grouped, half"])
def finished(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Report]:
    """A file, the output folder of a run on it under a budget, and the report."""
    folder = tmp_path_factory.mktemp("decoders")
    file = copy(request.param, folder / "model")
    budget = {"cache": "50%"} if request.param == "grouped, half" else {"macs": "70%"}
    recipe = Recipe(model=file, data=str(write_rows(folder)), out=folder / "out", **budget, **SHORT)
    return file, folder / "out", compressor.compress(recipe)


def test_a_run_delivers_the_file_with_smaller_caches(finished: tuple[Path, Path, Report]) -> None:
    file, out, report = finished
    assert report.task == "causal-lm"
    assert all(proof.holds for proof in report.proofs)
    assert {*CACHED_STAGES[:3], ProofStage.EXPORT} <= {proof.stage for proof in report.proofs}
    assert all(row.met for row in report.budget)
    before, after = load_graph(file), load_graph(out / DECODER)
    assert report.generation is not None
    assert report.generation.compressed_cache == bytes_per_token(after)
    halves = any(value.dtype == ir.DataType.FLOAT16 for value in before.graph.inputs)
    assert report.generation.precision == ("fp16" if halves else "fp32")
    kept = {value.name: value.dtype for value in (*after.graph.inputs, *after.graph.outputs)}
    assert kept.items() <= {value.name: value.dtype for value in (*before.graph.inputs, *before.graph.outputs)}.items()
    assert len(cache_names(after)) == 2 * sum(bool(site.kept) for site in report.plan.sites)


def test_the_metric_is_that_of_the_engines_with_caches(finished: tuple[Path, Path, Report]) -> None:
    _, _, report = finished
    assert report.generation is not None
    assert report.generation.is_scored
    assert [score.metric for score in report.scores] == ["perplexity"]


def test_the_output_folder_of_a_run_is_such_a_file(finished: tuple[Path, Path, Report], tmp_path: Path) -> None:
    _, out, _ = finished
    folder = load(out)
    assert folder.file == out / DECODER
    groups = folder.access.groups({}, "eager")
    whole = export_whole(folder, keep_all(groups), CASES, tmp_path, opset=18, attention="eager")
    assert whole.proof.holds


def test_times_of_a_folder_of_a_file(finished: tuple[Path, Path, Report], capfd: pytest.CaptureFixture[str]) -> None:
    _, out, _ = finished
    flags = ("--prompt-tokens", "6", "--new-tokens", "4", "--batch", "2", "--seconds", "0.02", "--json")
    rows = compress(capfd, "bench", out, *flags).json
    assert [Path(row["folder"]).name for row in rows] == ["dense", out.name]
    assert rows[0]["cache_bytes"] > rows[1]["cache_bytes"]


@pytest.mark.parametrize("finished", ["gpt2"], indirect=True)
def test_generated_tokens_are_those_of_the_graph_that_reads_whole_texts(finished: tuple[Path, Path, Report]) -> None:
    _, out, _ = finished
    run, prompts = unoptimized_runner(out / "model.onnx"), [[7, 9, 11], [0, 0, 5]]
    batch = {"input_ids": torch.tensor(prompts), "attention_mask": (torch.tensor(prompts) != 0).long()}
    tokens = compressor.load_engine(out).generate(**batch, max_new_tokens=8, do_sample=False, pad_token_id=0)
    for prompt, row in zip(prompts, tokens.tolist(), strict=True):
        ids = [token for token in prompt if token]
        for token in row[len(prompt) :]:
            logits = run({"input_ids": np.array([ids]), "attention_mask": np.ones((1, len(ids)), np.int64)})["logits"]
            assert token == logits[0, -1].argmax()
            ids.append(token)
            if token == 3:  # the end token
                break


def test_a_graph_without_padding_on_the_left_refuses_it() -> None:
    sessions = OrtSessions(exported("grouped")[2].folder, optimized=False)
    ids, mask = np.array([[5, 6], [7, 8]]), np.array([[0, 1], [1, 1]])
    with pytest.raises(InputError) as caught:
        sessions.decode(ids, mask, None, sessions.start(2))
    assert caught.value.code == ErrorCode.UNSUPPORTED


def merge(graph: onnx.GraphProto) -> None:
    """Two graphs under a condition, as in `decoder_model_merged.onnx`: one for caches, and one that ignores them."""
    computed = {name for node in graph.node for name in node.output}
    node_type, value_type = onnx.NodeProto, onnx.ValueInfoProto
    branches = []
    for prefix in ("", "other."):
        names = {name: prefix + name for name in computed}
        nodes = [node_type.FromString(node.SerializeToString()) for node in graph.node]
        outputs = [value_type.FromString(value.SerializeToString()) for value in graph.output]
        for node in nodes:
            node.name = prefix + node.name
            node.input[:] = [names.get(name, name) for name in node.input]
            node.output[:] = [names.get(name, name) for name in node.output]
        for value in outputs:
            value.name = names[value.name]
        branches.append(helper.make_graph(nodes, f"branch{prefix}", [], outputs))
    taken = {"then_branch": branches[0], "else_branch": branches[1]}
    node = helper.make_node("If", ["use_cache_branch"], [value.name for value in graph.output], "if", **taken)
    del graph.node[:]
    graph.node.append(node)
    graph.input.append(helper.make_tensor_value_info("use_cache_branch", TensorProto.BOOL, [1]))


def test_of_merged_graphs_the_one_with_caches_is_taken(tmp_path: Path) -> None:
    file = copy("gpt2", tmp_path / "merged")
    merged = onnx.load(file)
    merge(merged.graph)
    onnx.save(merged, file)
    folder, plain = load(file), load(decoder("gpt2"))
    assert folder.access.inputs == plain.access.inputs
    groups, of_plain = (each.access.groups({}, "eager") for each in (folder, plain))
    assert [group.units for group in groups] == [group.units for group in of_plain]
    whole = export_whole(folder, keep_all(groups), CASES, tmp_path, opset=18, attention="eager")
    assert "use_cache_branch" not in {value.name for value in load_graph(tmp_path / DECODER).graph.inputs}
    assert whole.proof.holds


def test_an_operator_that_a_runtime_lacks_ends_the_run_before_anything_is_learned(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file, rows = copy("grouped", tmp_path / "model"), write_rows(tmp_path)
    flags = [part for name, value in SHORT.items() for part in (f"--{name.replace('_', '-')}", value)]
    run = (file, "--data", rows, "--macs", "70%", "-o", tmp_path / "out", *flags)
    result = compress(capfd, *run, "--target", "openvino")
    assert (result.code, result.error_code) == (3, ErrorCode.UNSUPPORTED_MODEL)
    assert result.details["operators"] == "com.microsoft.GroupQueryAttention"
    assert not list(tmp_path.rglob("plan.json"))
    assert compress(capfd, *run, "--target", "auto", "--quiet").code == 0
    report = Report.model_validate_json((tmp_path / "out" / "report.json").read_text())
    rows_of = {row.target: row for row in report.candidates}
    assert "com.microsoft.GroupQueryAttention" in (rows_of["openvino"].failure or "")
    assert rows_of["ort"].chosen


def fixed_length(graph: onnx.GraphProto) -> None:
    """Caches of a fixed length, into which keys and values are written: no output continues an input."""
    for value in graph.output[1:]:
        value.type.tensor_type.shape.dim[1].dim_value = 7


def of_encoder(graph: onnx.GraphProto) -> None:
    axes: list[str | int | None] = ["batch", 2, "source", 12]
    graph.input.append(helper.make_tensor_value_info("past_key_values.0.encoder.key", TensorProto.FLOAT, axes))


def embedded(graph: onnx.GraphProto) -> None:
    graph.input.append(helper.make_tensor_value_info("inputs_embeds", TensorProto.FLOAT, ["batch", "s", 24]))


def other_name(graph: onnx.GraphProto) -> None:
    for node in graph.node:
        node.output[:] = ["scores" if name == "logits" else name for name in node.output]
    graph.output[0].name = "scores"


def few_bits(graph: onnx.GraphProto) -> None:
    node = next(node for node in graph.node if node.op_type == "Gemm")
    node.op_type, node.domain = "MatMulNBits", "com.microsoft"


FAULTS: dict[str, tuple[Callable[[onnx.GraphProto], None], dict[str, Any]]] = {
    "fixed length": (fixed_length, {"input": "past_key_values.0.key"}),
    "of an encoder": (of_encoder, {"input": "past_key_values.0.encoder.key"}),
    "embedded": (embedded, {"input": "inputs_embeds"}),
    "another name": (other_name, {"outputs": "scores"}),
    "few bits": (few_bits, {"op_type": "MatMulNBits"}),
}


@pytest.mark.parametrize("name", FAULTS)
def test_other_caches_are_refused(name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    fault, details = FAULTS[name]
    file = copy("gpt2", tmp_path / "model")
    graph = onnx.load(file)
    fault(graph.graph)
    graph.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    onnx.save(graph, file)
    result = compress(capfd, file, "--data", write_rows(tmp_path), "--macs", "60%", "-o", tmp_path / "out", "--quiet")
    assert (result.code, result.error_code) == (3, ErrorCode.UNSUPPORTED_MODEL)
    assert {key: result.details[key] for key in details} == details
    assert not (tmp_path / "out").exists()
