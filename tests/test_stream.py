"""Graphs with memory: shrunk and built like any other, they read a text segment by segment as the model does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

import compressor
from compressor.config.run import Recipe
from compressor.errors import InputError
from compressor.export import export_reference
from compressor.model_folder import ModelFolder, example_inputs, load
from compressor.models import AllAttentionConfig, AllAttentionForCausalLM, SegmentForCausalLM, pruned
from compressor.run import verify
from compressor.targets import Engine, target
from compressor.targets.relative_error import relative_error
from compressor.targets.segment_stream import Stream, empty_memories, limits
from compressor.tasks import open_data
from compressor.tasks.segment_streams import Streams, read, reader
from compressor.units import Site, find_sites, gated, keep_all
from graph_passes import Plan, Shrunk, save, shrink
from graph_passes import load as load_graph
from graph_passes.attention.gate_initializers import GATE_SUFFIX, set_gates
from tests import folders
from tests.test_models import SMALL, all_attention, ids, share, transformer_xl

TOLERANCE = 1e-4


@dataclass(frozen=True)
class Dense:
    """A model and its reference graph, every gate open."""

    model: SegmentForCausalLM
    sites: list[Site]
    reference: Path
    tried: Sequence[verify.Case]

    def shrunk(self, plan: Plan) -> Shrunk:
        return shrink(load_graph(self.reference), plan)

    def gated(self, plan: Plan, path: Path) -> Path:
        model = load_graph(self.reference)
        set_gates(model.graph, plan)
        save(model, path)
        return path


@pytest.fixture(scope="module", params=["all_attention", "transformer_xl"])
def dense(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Dense:
    model = (all_attention if request.param == "all_attention" else transformer_xl)(num_hidden_layers=2)
    folder = ModelFolder(Path("model"), model, None, model.config, "sha256:1", "causal-lm", model.config.model_type)
    inputs = example_inputs(folder, 2, 8)
    sites = find_sites(model, inputs)
    path = tmp_path_factory.mktemp("graph") / "reference.onnx"
    export_reference(
        model, keep_all(sites), inputs, path, attention="sdpa" if request.param == "transformer_xl" else "eager"
    )
    return Dense(model, sites, path, verify.cases(lambda *size: example_inputs(folder, *size), longest=40))


def keeping(sites: Sequence[Site], kept: Sequence[tuple[int, ...]], rng: np.random.Generator | None = None) -> Plan:
    """A plan of these heads, scaled at random where there is a generator."""
    scales = [tuple(rng.uniform(0.5, 1.5, len(heads))) if rng else () for heads in kept]
    planned = zip(keep_all(sites).sites, kept, scales, strict=True)
    return Plan(sites=tuple(replace(site, kept=heads, scale=scale) for site, heads, scale in planned))


def built(shrunk: Shrunk, folder: Path) -> tuple[Engine, Path]:
    graph = folder / "model.onnx"
    save(shrunk.model, graph)
    return target("ort")(graph, folder / "engine.onnx", provider="cpu", threads=1), graph


# -- The graph ---------------------------------------------------------------------------------------------------------


def test_memories_are_inputs_and_outputs_of_any_length(dense: Dense) -> None:
    graph = ir.load(dense.reference).graph
    sizes = {str(value.name): list(map(str, value.shape or ())) for value in graph.inputs}
    assert sizes == {
        "input_ids": ["batch", "sequence"],
        **{f"memory_{layer}": ["batch", "memory", "24"] for layer in range(2)},
    }
    assert [value.name for value in graph.outputs] == ["logits", "new_memory_0", "new_memory_1"]
    assert limits(dense.reference) == dense.model.config.limits


def test_the_cases_tried_have_memories_empty_half_full_and_full(dense: Dense) -> None:
    words = ["batch 1, length 5, memory 0", "batch 2, length 17, memory 3", "batch 3, length 32, memory 6"]
    assert [case.name for case in dense.tried] == words


def test_the_reference_is_the_gated_model(dense: Dense, tmp_path: Path) -> None:
    plan = keeping(dense.sites, [(), (0, 2, 3)], np.random.default_rng(7))
    graph = dense.gated(plan, tmp_path / "gated.onnx")
    proof = verify.prove_export(dense.model, plan, graph, dense.tried, "compressed", attention="eager")
    assert proof.error <= 1e-5


@pytest.mark.parametrize("kept", [[(), (1,)], [(0, 2, 3), ()], [(1, 3), (0, 1, 2, 3)], [(2,), (0, 3)], [(), ()]])
def test_shrunk_is_gated_and_an_emptied_layer_is_its_bias(
    dense: Dense, kept: list[tuple[int, ...]], tmp_path: Path
) -> None:
    plan = keeping(dense.sites, kept, np.random.default_rng(0))
    found = dense.shrunk(plan)
    assert not found.refused
    save(found.model, tmp_path / "small.onnx")
    proof = verify.prove_shrunk(
        dense.gated(plan, tmp_path / "gated.onnx"), tmp_path / "small.onnx", dense.tried, "compressed"
    )
    assert proof.error <= TOLERANCE
    emptied = [site.name for site in plan.sites if not site.kept]
    for name in emptied:
        of_it = [value for value in found.model.graph.initializers if value.startswith(name.removesuffix("attention"))]
        left = [value for value in of_it if "feed_forward" not in value]
        assert left == [f"{name}.o_proj.bias"]
        scoped = [node.op_type for node in found.model.graph if name in node.metadata_props.get("namespace", "")]
        assert not {"MatMul", "Gemm", "Softmax", "LayerNormalization", "Sin"} & set(scoped)
    assert sum(node.op_type == "Softmax" for node in found.model.graph) == len(plan.sites) - len(emptied)


HEADS = st.sets(st.integers(0, 3)).map(lambda heads: tuple(sorted(heads)))


@settings(max_examples=10, deadline=None)
@example(kept=[(), ()], seed=0)
@example(kept=[(0, 1, 2, 3), (0, 1, 2, 3)], seed=0)
@given(kept=st.lists(HEADS, min_size=2, max_size=2), seed=st.integers(0, 9))
def test_what_remains_is_a_share_for_each_head_kept_and_the_rest(
    dense: Dense, tmp_path_factory: pytest.TempPathFactory, kept: list[tuple[int, ...]], seed: int
) -> None:
    """In PyTorch's count and in the file's bytes; an emptied layer has lost its norm, 2 x 24 parameters, too."""
    plan = keeping(dense.sites, kept, np.random.default_rng(seed))
    small = tmp_path_factory.mktemp("small") / "small.onnx"
    save(dense.shrunk(plan).model, small)
    rest = dense.model.num_parameters() - plan.heads * share(dense.model)
    remain = plan.heads_kept * share(dense.model) + rest - 48 * kept.count(())
    assert pruned(dense.model, plan).num_parameters() == remain
    assert _weight_bytes(small) == 4 * (remain + FREQUENCIES * any(kept))


FREQUENCIES = 12
"""Of the sinusoids, half as many as the model is wide: the graph has them as a constant, where it has attention."""


def _weight_bytes(path: Path) -> int:
    """Bytes of the initializers that are weights, a gate among them; what arithmetic needs beside is scalar."""
    tensors = {name: value.const_value for name, value in ir.load(path).graph.initializers.items()}
    return sum(
        tensor.nbytes
        for name, tensor in tensors.items()
        if tensor is not None and tensor.dtype.is_floating_point() and (tensor.size > 1 or name.endswith(GATE_SUFFIX))
    )


# -- The runner --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def stream(dense: Dense, tmp_path_factory: pytest.TempPathFactory) -> Stream:
    return Stream(*built(dense.shrunk(keep_all(dense.sites)), tmp_path_factory.mktemp("stream")))


def streams_alike(stream: Stream, model: SegmentForCausalLM, lengths: Sequence[int]) -> bool:
    """Whether logits and memories are those of PyTorch after every segment of three texts."""
    memories: tuple[Tensor, ...] | None = None
    errors = []
    with torch.no_grad():
        for step, length in enumerate(lengths):
            segment = ids(3, length, step) % model.config.vocab_size
            out: Any = model(segment, memories=memories)
            memories = out.memories
            got = [stream.read(segment.numpy()), *stream.memories]
            errors += [
                relative_error(one.numpy(), other, {})
                for one, other in zip((out.logits, *out.memories), got, strict=True)
            ]
    return max(errors) <= TOLERANCE


@pytest.mark.parametrize("kept", ["dense", "pruned"])
def test_ten_segments_as_in_pytorch(dense: Dense, stream: Stream, kept: str, tmp_path: Path) -> None:
    stream.memories = ()
    plan = keep_all(dense.sites)
    if kept == "pruned":
        plan = keeping(dense.sites, [(1, 3), ()], np.random.default_rng(1))
        stream = Stream(*built(dense.shrunk(plan), tmp_path))
    with gated(dense.model, plan):
        assert streams_alike(stream, dense.model, [4, 1, 7, 2, 4, 30, 4, 4, 3, 5])


def test_memories_may_be_one_array(stream: Stream) -> None:
    stream.memories = ()
    stream.read(ids(2, 3).numpy())
    before: list[np.ndarray] = list(stream.memories)
    expected = stream.read(ids(2, 4).numpy())
    stream.memories = np.stack(before)
    np.testing.assert_array_equal(stream.read(ids(2, 4).numpy()), expected)


@pytest.mark.parametrize(
    ("memories", "segment", "message"),
    [
        ([(2, 3, 24)] * 3, (2, 4), r"3 memories were given, the model has 2 layers; give one each"),
        ([(2, 3, 24), (2, 2, 24)], (2, 4), r"memory_1 is \[2, 2, 24\], not \[batch 2, length 3, hidden 24\]"),
        ([(2, 7, 24)] * 2, (2, 4), r"memories hold 7 positions, the model keeps 6"),
        ([(1, 3, 24)] * 2, (2, 4), r"memory_0 is \[1, 3, 24\], not \[batch 2"),
        ([], (2, 41), r"0 positions of memory and 41 of the segment are more than the model's 40"),
        ([(2, 6, 24)] * 2, (2, 35), r"6 positions of memory and 35 of the segment are more than the model's 40"),
        ([], (2, 0), r"a segment of int64 \[2, 0\] was given; give token ids \[batch, segment\]"),
        ([], (4,), r"a segment of int64 \[4\] was given"),
    ],
)
def test_what_does_not_fit_is_one_line_and_loses_nothing(
    stream: Stream, memories: list[tuple[int, ...]], segment: tuple[int, ...], message: str
) -> None:
    given = [np.zeros(shape, np.float32) for shape in memories]
    stream.memories = given
    with pytest.raises(InputError, match=message) as caught:
        stream.read(np.ones(segment, np.int64))
    assert "\n" not in str(caught.value)
    assert stream.memories is given


def test_tokens_beyond_the_vocabulary_lose_nothing(stream: Stream) -> None:
    stream.memories = ()
    stream.read(np.ones((1, 3), np.int32))
    before = stream.memories
    with pytest.raises(InputError, match="cannot run the graph on these inputs"):
        stream.read(np.full((1, 3), 29))
    assert stream.memories is before


def test_a_graph_without_memory_is_refused(stream: Stream, tmp_path: Path) -> None:
    model = ir.from_onnx_text(
        '<ir_version: 10, opset_import: ["": 18]> g (int64[N, T] ids) => (int64[N, T] y) { y = Neg(ids) }'
    )
    save(model, tmp_path / "model.onnx")
    assert empty_memories(tmp_path / "model.onnx", 2) == {}
    with pytest.raises(InputError, match="has no memory_0 among its inputs"):
        Stream(stream.engine, tmp_path / "model.onnx")


def test_a_graph_whose_memory_has_no_fixed_width_is_refused_for_that(stream: Stream, tmp_path: Path) -> None:
    model = ir.from_onnx_text(
        '<ir_version: 10, opset_import: ["": 18]> g (float[N, S, W] memory_0) => (float[N, S, W] y)'
        " { y = Neg(memory_0) }"
    )
    save(model, tmp_path / "model.onnx")
    with pytest.raises(InputError, match=r"memory_0 is \[N, S, W\], not \[batch, memory, width\] of a fixed width"):
        Stream(stream.engine, tmp_path / "model.onnx")


# -- The whole way -----------------------------------------------------------------------------------------------------


def folder_and_rows(at: Path, memory: int) -> tuple[SegmentForCausalLM, Plan, Recipe]:
    """An untrained model of one layer, two of its heads, and what `compress` is asked to do with them and a text."""
    sizes = {**SMALL, "vocab_size": 25, "num_hidden_layers": 1, "num_persistent": 5, "memory_length": memory}
    model = AllAttentionForCausalLM(AllAttentionConfig(**sizes)).eval()
    folders.save(model, at / "model")
    rows = [f"the {word} film {place}" for word in ("good", "bad") for place in ("one", "two", "three", "four")]
    (at / "rows.txt").write_text("\n".join(rows * 4) + "\n")
    plan = keeping(find_sites(model, {"input_ids": ids(2, 5) % 25}), [(1, 3)])
    plan.save(at / "plan.json")
    timing: dict[str, Any] = {"batch": (1,), "seq": (8,), "seconds": 0.01}
    paths: dict[str, Any] = {"model": at / "model", "out": at / "out", "plan": at / "plan.json"}
    return model, plan, Recipe(**paths, test_data=str(at / "rows.txt"), max_length=8, **timing)


def test_compress_takes_a_folder_like_any_other(tmp_path: Path) -> None:
    """Untrained, its biases are all zero, and no two of them are taken for one; one position is all it remembers."""
    model, plan, recipe = folder_and_rows(tmp_path, memory=1)
    assert not any(value.any() for name, value in model.named_parameters() if name.endswith("bias"))
    report = compressor.compress(recipe)
    assert {proof.stage for proof in report.proofs if proof.holds} == {proof.stage for proof in report.proofs}
    assert all("memory 0" in proof.cases[0] and "memory 1" in proof.cases[2] for proof in report.proofs)
    assert any("segment by segment" in note for note in report.notes)
    assert report.compressed.parameters < report.dense.parameters
    graph = tmp_path / "out" / "model.onnx"
    stream = Stream(target("ort")(graph, tmp_path / "engine.onnx", provider="cpu", threads=1), graph)
    smaller: Any = pruned(load(tmp_path / "model").model, plan)  # type: ignore[type-var]
    assert _weight_bytes(graph) == 4 * (sum(weight.numel() for weight in smaller.parameters()) + FREQUENCIES)
    assert streams_alike(stream, smaller, [4, 1, 7, 2])


def test_compress_scores_a_model_without_memory_segment_by_segment(tmp_path: Path) -> None:
    model, plan, recipe = folder_and_rows(tmp_path, memory=0)
    report = compressor.compress(recipe)
    graph = tmp_path / "out" / "model.onnx"
    assert limits(graph) is None
    assert [value.name for value in load_graph(graph).graph.inputs] == ["input_ids"]
    data = open_data(recipe, load(tmp_path / "model"))
    assert isinstance(data.task, Streams)
    smaller = pruned(model, plan).eval()
    by_hand = [data.task.score(read(data.task, data.test, reader(each))) for each in (model, smaller)]
    (score,) = report.scores
    assert [score.dense, score.compressed] == pytest.approx(by_hand, rel=1e-5)
