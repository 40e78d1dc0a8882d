"""Lowered graphs compute what the masked reference computes, for every kind of attention, form of export and length."""

from __future__ import annotations

import dataclasses
import functools
import json
import tempfile
from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
import transformers

from compressor.export import export_reference
from compressor.measure import macs
from compressor.targets.onnxruntime.fusion import fuse
from compressor.targets.onnxruntime.ort_session import describe
from compressor.units import find_sites, keep_all
from graph_passes import BlockMask, Plan, PlanError, SitePlan, find_attention, load, save, shrink
from graph_passes.block_sparse.masks import REACH
from graph_passes.passes import CleanUp, DropUnusedBlocks, LowerBlockSparse, Normalize
from graph_passes.passes.fp16 import halve
from tests.zoo import FAMILIES, pair, random_plan, text

MEMORY = 8
LENGTHS = ((7, 5), (21, 13), (32, 32))
CASES = [
    ("bert", "eager", 18, "row"),
    ("gpt2", "sdpa", 18, "causal row"),
    ("bart", "eager", 18, "row, causal row"),
    pytest.param("t5", "sdpa", 23, "row, row full, causal row full", marks=pytest.mark.zoo),
    pytest.param("llama", "sdpa", 23, "causal row", marks=pytest.mark.zoo),
    pytest.param("all_attention", "eager", 18, "full", marks=pytest.mark.zoo),
]
_FOLDER = tempfile.TemporaryDirectory()


@functools.cache
def exported(family: str, attention: str, opset: int, heads: bool = False) -> tuple[Plan, Path]:
    """A plan with random masks, of every site but the last, and the reference graph."""
    model, inputs = FAMILIES[family](0)
    sites, rng = find_sites(model, inputs), np.random.default_rng(2)
    whole = Plan(
        sites=tuple(
            SitePlan(site.name, site.kind, site.heads, site.kv_heads, site.head_dim, tuple(range(site.heads)))
            for site in sites
        )
    )
    plan = random_plan(sites, rng) if heads else whole
    memory = MEMORY if family == "all_attention" else 0
    masks = {site.name: BlockMask(rng.random((site.heads, 4, 4 + memory // 8)) < 0.5, 8, memory) for site in sites[:-1]}
    masks[sites[0].name].kept[1] = False
    plan = plan.masked(masks)
    path = Path(_FOLDER.name) / f"{family}-{attention}-{opset}-{heads}.onnx"
    export_reference(model, plan, inputs, path, attention=attention, opset=opset)  # type: ignore[arg-type]
    return plan, path


def session(path: Path, level: ort.GraphOptimizationLevel | None = None) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.graph_optimization_level = level or ort.GraphOptimizationLevel.ORT_ENABLE_ALL
    options.intra_op_num_threads, options.log_severity_level = 1, 4
    return ort.InferenceSession(str(path), options)


def assert_equal(one: Path, other: Path) -> None:
    """Outputs of two graphs, at several lengths, padded; the second optimized by the runtime, and as it is."""
    first = session(one)
    seconds = [session(other), session(other, ort.GraphOptimizationLevel.ORT_DISABLE_ALL)]
    names = [value.name for value in first.get_inputs()]
    for length, target in LENGTHS:
        feeds = pair(3, length, target) if any(name.startswith("causal") for name in names) else text(3, length)
        given = {name: value.numpy() for name, value in feeds.items() if name in names}
        for second in seconds:
            for expected, found in zip(first.run(None, given), second.run(None, given), strict=True):
                assert np.abs(found - expected).max() <= 1e-5 * np.abs(expected).max()


def written(model: ir.Model, name: str) -> Path:
    path = Path(_FOLDER.name) / name
    save(model, path)
    return path


def calls(model: ir.Model) -> list[ir.Node]:
    return [node for node in model.graph if node.op_type == "BlockSparseAttention"]


@pytest.mark.parametrize(("family", "attention", "opset", "forms"), CASES)
def test_lowered_equals_masked(family: str, attention: str, opset: int, forms: str) -> None:
    plan, reference = exported(family, attention, opset)
    result = shrink(load(reference), plan)
    assert not result.dense
    assert set(result.lowered) == set(plan.masks)
    nodes = calls(result.model)
    found = {
        " ".join(
            (["causal"] if node.attributes.get_int("causal") else [])
            + [value.name or "" for value in result.model.functions[node.op_identifier()].inputs[4:]]
        )
        for node in nodes
    }
    assert found == set(forms.split(", "))
    assert len(nodes) == len(plan.masks)
    assert_equal(reference, written(result.model, "lowered.onnx"))


@pytest.mark.parametrize(("family", "attention", "opset", "forms"), CASES)
def test_masked_and_lowered_graphs_have_the_sites_of_the_model(
    family: str, attention: str, opset: int, forms: str
) -> None:
    plan, reference = exported(family, attention, opset)
    # Keys of which some are a memory come from elsewhere, as far as a graph tells.
    kinds = {site.name: "cross" if family == "all_attention" else site.kind for site in plan.sites}
    dense, lowered = (shrink(load(reference), plan, lower=lower) for lower in ((), None))
    for model, done in ((load(reference), plan), (dense.model, dense.plan), (lowered.model, lowered.plan)):
        found = find_attention(load(written(model, "sites.onnx")))
        assert [site.name for site in found] == [site.name for site in plan.sites]
        assert {site.name: site.kind for site in found} == kinds
        assert [site.heads for site in found] == [len(site.kept) for site in done.sites]
        assert {site.head_dim for site in found} == {plan.sites[0].head_dim}


def test_a_module_that_is_called_twice_is_one_site_when_lowered() -> None:
    config = transformers.AlbertConfig(
        vocab_size=120, embedding_size=16, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=64, max_position_embeddings=64,
    )  # fmt: skip
    model, inputs = transformers.AlbertModel(config).eval(), text()
    plan = keep_all(find_sites(model, inputs))
    (site,) = plan.sites
    plan = plan.masked({site.name: BlockMask(np.random.default_rng(0).random((4, 4, 4)) < 0.5, 8)})
    path = Path(_FOLDER.name) / "twice.onnx"
    export_reference(model, plan, inputs, path)
    lowered = shrink(load(path), plan).model
    assert {node.overload for node in calls(lowered)} == {site.name, f"{site.name}.1"}
    assert [(found.name, found.kind) for found in find_attention(lowered)] == [(site.name, "bidirectional")] * 2


def test_a_lowered_graph_never_lets_the_future_in() -> None:
    plan, reference = exported("gpt2", "sdpa", 18)
    lowered = session(written(shrink(load(reference), plan).model, "future.onnx"))
    names = [value.name for value in lowered.get_inputs()]
    feeds = {name: value.numpy() for name, value in text(3, 29).items() if name in names}
    (before, *_) = lowered.run(None, feeds)
    feeds["input_ids"][:, 13:] = 9
    (after, *_) = lowered.run(None, feeds)
    np.testing.assert_array_equal(after[:, :13], before[:, :13])
    assert (after[:, 13:] != before[:, 13:]).any()


@pytest.mark.parametrize(
    ("family", "attention"), [("bert", "eager"), pytest.param("gpt2", "sdpa", marks=pytest.mark.zoo)]
)
def test_dropped_heads_and_masks_together(family: str, attention: str) -> None:
    plan, reference = exported(family, attention, 18, heads=True)
    result = shrink(load(reference), plan)
    assert not result.refused
    kept = {site.name: len(site.kept) for site in plan.sites}
    for node in calls(result.model):
        assert node.inputs[3] is not None
        assert node.inputs[3].shape is not None
        assert int(str(node.inputs[3].shape[0])) <= kept[node.overload]
    assert_equal(reference, written(result.model, "both.onnx"))
    dense = shrink(load(reference), plan, lower=())
    assert not dense.lowered
    assert_equal(reference, written(dense.model, "dense.onnx"))


def test_a_lowered_graph_is_fused_and_counted_like_any_other() -> None:
    plan, reference = exported("bert", "eager", 18)
    model, dense = (shrink(load(reference), plan, lower=lower).model for lower in (None, ()))
    lowered, fused = written(model, "counted.onnx"), Path(_FOLDER.name) / "fused.onnx"
    assert fuse(lowered, fused, describe("cpu", 1)).startswith("fused by onnxscript's rules")
    assert len(calls(load(fused))) == len(plan.masks)
    assert "SkipLayerNormalization" in {node.op_type for node in load(fused).graph}
    assert_equal(lowered, fused)
    batch, length = 2, 21
    skipped = 0
    for site in plan.sites:
        if site.name in plan.masks:
            seen = plan.masks[site.name].entries(length, length, memory=0)
            mask = plan.masks[site.name]
            assert mask.kept.any(axis=(0, 1)).all()  # else keys would not be projected, which saves more
            heads = mask.kept.any(axis=(1, 2))  # the others are gone from both
            skipped += batch * 2 * site.head_dim * int((~seen[heads]).sum())
    whole, some_pairs = macs(dense, batch, length), macs(load(lowered), batch, length)
    assert whole is not None
    assert some_pairs == whole - skipped
    normal = load(lowered)
    Normalize()(normal)  # what block-sparse attention computes is told by its calls, not by its body
    assert len(calls(normal)) == len(plan.masks)
    assert macs(normal, batch, length) == some_pairs


def test_a_head_whose_mask_is_empty_is_removed() -> None:
    plan, reference = exported("bert", "eager", 18)
    result = shrink(load(reference), plan)
    assert result.removed[0].site == plan.sites[0].name
    assert 1 in result.removed[0].heads
    assert 1 in plan.sites[0].kept
    assert 1 not in result.plan.sites[0].kept
    again = shrink(load(reference), result.plan)  # the plan that was carried out gives the same graph
    files = [written(found.model, "emptied.onnx").read_bytes() for found in (result, again)]
    assert files[0] == files[1]


def test_only_the_sites_asked_for_and_no_site_twice() -> None:
    plan, reference = exported("bert", "eager", 18)
    first = next(iter(plan.masks))
    model = load(reference)
    Normalize()(model)
    lower = LowerBlockSparse(plan.masks, (first,))
    assert lower(model).modified
    assert lower.lowered == [first]
    assert [node.overload for node in calls(model)] == [first]
    assert sum(node.op_type == "Softmax" for node in model.graph) == len(plan.sites) - 1
    assert not LowerBlockSparse(plan.masks, (first,))(model).modified


def test_entry_masks_and_what_does_not_match_stay_dense() -> None:
    plan, reference = exported("bert", "eager", 18)
    first = next(iter(plan.masks))
    model = load(reference)
    Normalize()(model)
    entries = LowerBlockSparse({first: BlockMask(plan.masks[first].kept, 1)})
    assert not entries(model).modified
    assert "single entries" in str(entries.refused[0])
    softmax = next(node for node in model.graph if node.op_type == "Softmax")
    softmax.op_type = "LogSoftmax"
    other = LowerBlockSparse(plan.masks, (first,))
    assert not other(model).modified
    assert other.refused[0].op == "LogSoftmax"


def test_a_plan_whose_masks_the_graph_lacks_is_refused() -> None:
    plan, reference = exported("bert", "eager", 18)
    last = plan.sites[-1]
    more = plan.masked({**plan.masks, last.name: BlockMask(np.ones((last.heads, 4, 4), np.bool_), 8)})
    with pytest.raises(PlanError, match="none in this graph"):
        shrink(load(reference), more)


def test_a_lowered_graph_is_not_given_another_mask() -> None:
    plan, reference = exported("bert", "eager", 18)
    lowered = shrink(load(reference), plan).model
    last = plan.sites[1]  # none of its heads is gone
    other = BlockMask(~plan.masks[last.name].kept, 8)
    with pytest.raises(PlanError, match="none in this graph"):
        shrink(lowered, plan.masked({last.name: other}))


@functools.cache
def with_unused_blocks(heads: tuple[int, ...] = (0, 1, 2, 3)) -> tuple[Plan, Path]:
    """A plan whose first site keeps some heads and never uses two of four key blocks, and the reference graph."""
    model, inputs = FAMILIES["bert"](0)
    first, *others = exported("bert", "eager", 18)[0].sites
    site = SitePlan(first.name, first.kind, first.heads, first.kv_heads, first.head_dim, heads)
    plan = Plan(sites=(site, *(dataclasses.replace(other, mask=None, block=1) for other in others)))
    kept = np.zeros((4, 4, 4), np.bool_)
    kept[:, :, [0, 3]] = np.random.default_rng(0).random((4, 4, 2)) < 0.7
    plan = plan.masked({plan.sites[0].name: BlockMask(kept, 8)})
    reference = Path(_FOLDER.name) / f"unused-{len(heads)}.onnx"
    export_reference(model, plan, inputs, reference)
    return plan, reference


@pytest.mark.parametrize("heads", [(0, 1, 2, 3), (0, 2, 3)])
def test_keys_that_are_not_projected_are_not_counted(heads: tuple[int, ...]) -> None:
    plan, reference = with_unused_blocks(heads)
    dense, lowered = shrink(load(reference), plan, lower=()), shrink(load(reference), plan)
    site = lowered.plan.sites[0]
    assert (site.kept, lowered.unused) == (heads, {site.name: 2})
    read = load(written(lowered.model, "counted-unused.onnx"))
    Normalize()(read)
    mask, batch, hidden = plan.masks[site.name], 2, 32
    for length in (5, 8, 13, 21, 27, 32):
        left_out = int((~mask.entries(length, length)[list(heads)]).sum())
        unused = sum(8 <= position < 24 for position in range(length))
        saved = batch * (2 * site.head_dim * left_out + 2 * hidden * len(heads) * site.head_dim * unused)
        whole = macs(dense.model, batch, length)
        assert whole is not None
        assert macs(lowered.model, batch, length) == macs(read, batch, length) == whole - saved


def test_a_site_that_does_not_project_every_key_is_found() -> None:
    plan, reference = with_unused_blocks()
    result = shrink(load(reference), plan)
    assert result.unused
    found = find_attention(load(written(result.model, "sites-unused.onnx")))
    assert [(site.name, site.kind) for site in found] == [(site.name, "bidirectional") for site in plan.sites]
    assert [site.heads for site in found] == [len(site.kept) for site in result.plan.sites]


def test_key_blocks_that_no_query_uses_are_not_projected() -> None:
    plan, reference = with_unused_blocks()
    lowered = load(reference)
    for step in (Normalize(), CleanUp(), LowerBlockSparse(plan.masks)):
        step(lowered)
    drop = DropUnusedBlocks()
    assert drop(lowered).modified
    assert drop.dropped == {plan.sites[0].name: 2}
    (node,) = calls(lowered)
    for projected in node.inputs[1:3]:
        # It is no longer the length of the queries, and memory is planned by what the graph says of lengths.
        assert projected is not None
        assert projected.shape is not None
        assert projected.shape[1] != lowered.graph.inputs[0].shape[1]  # type: ignore[index]
    assert_equal(reference, written(lowered, "dropped.onnx"))
    assert not DropUnusedBlocks()(lowered).modified
    assert shrink(load(reference), plan).unused == drop.dropped


def test_the_reach_of_masks_is_written_into_the_graph() -> None:
    plan, reference = exported("bart", "eager", 18)
    told = json.loads(shrink(load(reference), plan, lower=()).model.metadata_props[REACH])
    assert told == {"input_ids": 32, "decoder_input_ids": 32}


@pytest.mark.parametrize(
    ("family", "attention"), [("bert", "eager"), pytest.param("gpt2", "eager", marks=pytest.mark.zoo)]
)
def test_a_lowered_graph_in_half_precision(family: str, attention: str) -> None:
    plan, reference = exported(family, attention, 18)
    half = written(shrink(load(reference), plan).model, "half.onnx")
    halve(half)
    assert len(calls(load(half))) == len(plan.masks)
    one, other = session(reference), session(half)
    for length, _ in LENGTHS:
        names = [value.name for value in one.get_inputs()]
        feeds = {name: value.numpy() for name, value in text(3, length).items() if name in names}
        for expected, found in zip(one.run(None, feeds), other.run(None, feeds), strict=True):
            assert np.isfinite(found).all()
            assert np.abs(found - expected).max() <= 2e-2 * np.abs(expected).max()
