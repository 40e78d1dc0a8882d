"""Lowered graphs compute what the masked reference computes, for every kind of attention and form of export."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from compressor.measure import macs
from compressor.targets.onnxruntime.engine import fuse
from compressor.targets.onnxruntime.ort_session import session_settings
from compressor.units import Attention
from graph_passes import Plan, find_attention, load, shrink
from graph_passes.passes import LowerBlockSparse, Normalize, ReducePrecision
from tests.graph_passes.masked_layer import MaskedLayer, random_mask
from tests.law.outputs import Feeds, relative_error, run
from tests.law.references import gated, masked_reference, write_graph
from tests.random_plans import random_plan
from tests.zoo import pair, text

LENGTHS = ((7, 5), (21, 13), (32, 32))
CASES = [
    ("bert", "eager", 18, {"row"}),
    pytest.param("gpt2", "sdpa", 18, {"causal row"}, marks=pytest.mark.zoo),
    pytest.param("bart", "eager", 18, {"row", "causal row"}, marks=pytest.mark.zoo),
    pytest.param("t5", "sdpa", 23, {"row", "row full", "causal row full"}, marks=pytest.mark.zoo),
    pytest.param("llama", "sdpa", 23, {"causal row"}, marks=pytest.mark.zoo),
    pytest.param("all_attention", "eager", 18, {"full"}, marks=pytest.mark.zoo),
]
"""A family, its form of attention, the operator set, and the forms of the calls of block-sparse attention."""


def feeds(*, decoder: bool) -> list[Feeds]:
    """Padded inputs of several lengths, of text or of a source and a target."""
    batches = [pair(3, length, target) if decoder else text(3, length) for length, target in LENGTHS]
    return [{name: value.numpy() for name, value in batch.items()} for batch in batches]


def assert_equal(reference: Path, path: Path) -> None:
    """Check that two graphs have equal outputs, the second one with and without the optimizations of the runtime."""
    decoder = any("decoder" in str(value.name) for value in load(reference).graph.inputs)
    expected = run(reference, feeds(decoder=decoder))
    for optimized in (True, False):
        assert relative_error(expected, run(path, feeds(decoder=decoder), optimized=optimized)) <= 1e-5


def calls(model: ir.Model) -> list[ir.Node]:
    return [node for node in model.graph if node.op_type == "BlockSparseAttention"]


@pytest.mark.parametrize(("family", "attention", "opset", "forms"), CASES)
def test_lowered_equals_masked(family: str, attention: Attention, opset: int, forms: set[str]) -> None:
    plan, reference = masked_reference(family, attention, opset)
    result = shrink(load(reference), plan)
    assert not result.dense
    assert set(result.lowered) == set(plan.masks)
    nodes = calls(result.model)
    assert len(nodes) == len(plan.masks)
    call_forms = {
        " ".join(
            (["causal"] if node.attributes.get_int("causal") else [])
            + [value.name or "" for value in result.model.functions[node.op_identifier()].inputs[4:]]
        )
        for node in nodes
    }
    assert call_forms == forms
    assert_equal(reference, write_graph(result.model, "lowered.onnx"))


@pytest.mark.parametrize(("family", "attention", "opset", "forms"), CASES)
def test_masked_and_lowered_graphs_have_the_sites_of_the_model(
    family: str, attention: Attention, opset: int, forms: set[str]
) -> None:
    plan, reference = masked_reference(family, attention, opset)
    # In a graph, keys that include a memory come from another tensor than the queries.
    kinds = {site.name: "cross" if family == "all_attention" else site.kind for site in plan.sites}
    dense, lowered = (shrink(load(reference), plan, lower=lower) for lower in ((), None))
    for model, expected in ((load(reference), plan), (dense.model, dense.plan), (lowered.model, lowered.plan)):
        sites = find_attention(load(write_graph(model, "sites.onnx")))
        assert [site.name for site in sites] == [site.name for site in plan.sites]
        assert {site.name: site.kind for site in sites} == kinds
        assert [site.heads for site in sites] == [len(site.kept) for site in expected.sites]
        assert {site.head_dim for site in sites} == {plan.sites[0].head_dim}


@pytest.mark.parametrize(
    ("family", "attention"), [("bert", "eager"), pytest.param("gpt2", "sdpa", marks=pytest.mark.zoo)]
)
def test_dropped_heads_and_masks_together(family: str, attention: Attention) -> None:
    whole, path = masked_reference(family, attention, 18)
    plan = random_plan(whole.sites, np.random.default_rng(2)).masked(whole.masks)
    reference = gated(path, plan)
    result = shrink(load(reference), plan)
    assert not result.refused
    kept = plan.counts
    for node in calls(result.model):
        assert node.inputs[3] is not None
        assert node.inputs[3].shape is not None
        assert int(str(node.inputs[3].shape[0])) <= kept[node.overload]
    assert_equal(reference, write_graph(result.model, "both.onnx"))
    dense = shrink(load(reference), plan, lower=())
    assert not dense.lowered
    assert_equal(reference, write_graph(dense.model, "dense.onnx"))


def test_a_lowered_graph_is_fused_and_counted_like_any_other(tmp_path: Path) -> None:
    plan, reference = masked_reference("bert", "eager", 18)
    model, dense = (shrink(load(reference), plan, lower=lower).model for lower in (None, ()))
    lowered, fused = write_graph(model, "counted.onnx"), tmp_path / "fused.onnx"
    assert fuse(lowered, fused, session_settings("cpu", 1)).fused
    assert len(calls(load(fused))) == len(plan.masks)
    assert "SkipLayerNormalization" in {node.op_type for node in load(fused).graph}
    assert_equal(lowered, fused)
    batch, length = 2, 21
    skipped = skipped_macs(plan, batch, length)
    whole, some_pairs = macs(dense, batch, length), macs(load(lowered), batch, length)
    assert whole is not None
    assert some_pairs == whole - skipped
    normal = load(lowered)
    Normalize()(normal)  # It keeps the calls, whose attributes say which pairs are computed.
    assert len(calls(normal)) == len(plan.masks)
    assert macs(normal, batch, length) == some_pairs


def skipped_macs(plan: Plan, batch: int, length: int) -> int:
    """Multiply-accumulates of the pairs of positions that the masks of a plan drop, in heads that keep any block."""
    skipped = 0
    for site in plan.sites:
        if (mask := plan.masks.get(site.name)) is not None:
            assert mask.kept.any(axis=(0, 1)).all()  # Otherwise keys would not be projected, which saves more.
            heads = mask.kept.any(axis=(1, 2))
            skipped += batch * 2 * site.head_dim * int((~mask.entries(length, length)[heads]).sum())
    return skipped


@pytest.mark.parametrize(
    ("family", "attention"), [("bert", "eager"), pytest.param("gpt2", "eager", marks=pytest.mark.zoo)]
)
def test_a_lowered_graph_in_half_precision(family: str, attention: Attention) -> None:
    plan, reference = masked_reference(family, attention, 18)
    half = write_graph(ReducePrecision()(shrink(load(reference), plan).model).model, "half.onnx")
    assert len(calls(load(half))) == len(plan.masks)
    outputs = run(half, feeds(decoder=False))
    assert all(np.isfinite(output).all() for batch in outputs for output in batch)
    assert relative_error(run(reference, feeds(decoder=False)), outputs) <= 2e-2


def test_only_the_requested_sites_are_lowered() -> None:
    plan, reference = masked_reference("bert", "eager", 18)
    first = next(iter(plan.masks))
    model = load(reference)
    Normalize()(model)
    result = LowerBlockSparse(plan.masks, (first,))(model)
    assert result.report.lowered == (first,)
    assert [node.overload for node in calls(model)] == [first]
    assert sum(node.op_type == "Softmax" for node in model.graph) == len(plan.sites) - 1
    assert not LowerBlockSparse(plan.masks, (first,))(model).modified


@pytest.mark.parametrize("heads", [(0, 1), (1,)])
def test_keys_that_are_not_projected_are_not_counted(heads: tuple[int, ...]) -> None:
    layer = MaskedLayer(random_mask(0.7, unused=(1, 2)))
    (site,) = layer.plan.sites
    plan = Plan(sites=(replace(site, kept=heads, scale=(1.0,) * len(heads)),)).masked(layer.plan.masks)
    dense, lowered = shrink(layer.graph(), plan, lower=()), shrink(layer.graph(), plan)
    assert lowered.unused == {"a": 2}
    normal = load(write_graph(lowered.model, "counted-unused.onnx"))
    Normalize()(normal)
    batch, hidden = 2, 8
    for length in (5, 8, 13, 21, 27, 32):
        skipped_pairs = int((~layer.mask.entries(length, length)[list(heads)]).sum())
        unused = sum(8 <= position < 24 for position in range(length))
        saved = batch * (2 * site.head_dim * skipped_pairs + 2 * hidden * len(heads) * site.head_dim * unused)
        whole = macs(dense.model, batch, length)
        assert whole is not None
        assert macs(lowered.model, batch, length) == macs(normal, batch, length) == whole - saved
