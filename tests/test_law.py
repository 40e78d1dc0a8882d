"""The one contract, over every family: for any plan, the shrunk graph computes what the gated one computes."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest

from compressor.export import export_reference
from compressor.units import Attention, find_sites, keep_all
from graph_passes import Plan, load, save, shrink
from graph_passes.attention.gate_initializers import find_gates, set_gates
from tests.zoo import FAMILIES, PERSISTENT, VOCABULARY, WITH_MEMORY, random_plan

TOLERANCE = 1e-4
WAYS: list[tuple[int, Attention]] = [(18, "eager"), (18, "sdpa"), (23, "eager"), (23, "sdpa")]
EVERY = [(family, opset, attention) for family in FAMILIES for opset, attention in WAYS]
# Continuous integration proves each family in one way, all four ways in turn; `make zoo` proves everything.
SLICE = [(family, *WAYS[place % len(WAYS)]) for place, family in enumerate(FAMILIES)]


class Reference:
    """One family's reference graph, every gate open, and what a test needs beside it."""

    def __init__(self, folder: Path, family: str, opset: int, attention: Attention) -> None:
        model, inputs = (FAMILIES | WITH_MEMORY)[family](0)
        self.sites = find_sites(model, inputs, attention=attention)
        self.weights = frozenset(model.state_dict())
        self.path = folder / "reference.onnx"
        export_reference(model, keep_all(self.sites), inputs, self.path, opset=opset, attention=attention)
        self.inputs = {name: value.numpy() for name, value in inputs.items()}
        self.dense = _weights(shrink(load(self.path), keep_all(self.sites)).model, self.weights)

    def feeds(self) -> Iterator[dict[str, np.ndarray]]:
        """The inputs of the export, and ones of another batch size and other lengths, with padding in both; memories
        that are full, and half full."""
        yield self.inputs
        rng = np.random.default_rng(1)
        lengths = {"input_ids": 11, "attention_mask": 11, "decoder_input_ids": 4, "decoder_attention_mask": 4}
        other: dict[str, np.ndarray] = {}
        for name, value in self.inputs.items():
            if name.startswith("memory_"):
                other[name] = rng.standard_normal((2, value.shape[1] // 2, value.shape[2])).astype(value.dtype)
            elif name not in lengths:
                other[name] = rng.standard_normal((2, *value.shape[1:])).astype(value.dtype)
            elif "mask" in name:
                other[name] = np.ones((2, lengths[name]), value.dtype)
                other[name][1, -2:] = 0
            else:
                other[name] = rng.integers(5, VOCABULARY - 1, (2, lengths[name])).astype(value.dtype)
        if "input_ids" in other:
            other["input_ids"][:, 3] = VOCABULARY - 1  # CLIP reads its embedding at the end token.
        yield other


def run(path: Path, feeds: Sequence[dict[str, np.ndarray]]) -> list[list[np.ndarray]]:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 3
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    names = {value.name for value in session.get_inputs()}
    return [session.run(None, {name: value for name, value in feed.items() if name in names}) for feed in feeds]


def relative_error(one: Sequence[Sequence[np.ndarray]], other: Sequence[Sequence[np.ndarray]]) -> float:
    pairs = zip(itertools.chain(*one), itertools.chain(*other), strict=True)
    return float(np.max([np.abs(a - b).max() / np.abs(a).max() for a, b in pairs]))  # NaN stays NaN, and fails


def prove(family: str, reference: Reference, folder: Path, seeds: range) -> None:
    for seed in seeds:
        prove_plan(family, reference, folder, random_plan(reference.sites, np.random.default_rng(seed)))


def prove_plan(family: str, reference: Reference, folder: Path, plan: Plan) -> None:
    feeds = list(reference.feeds())
    gated, small = folder / "gated.onnx", folder / "small.onnx"
    model = load(reference.path)
    set_gates(model.graph, plan)
    save(model, gated)
    shrunk = shrink(load(reference.path), plan)
    save(shrunk.model, small)
    assert not shrunk.refused
    assert not find_gates(shrunk.model.graph)
    assert {removed.site: removed.heads for removed in shrunk.removed} == {
        site.name: site.dropped for site in plan.sites if site.dropped
    }
    assert relative_error(run(gated, feeds), run(small, feeds)) <= TOLERANCE
    removed = removed_parameters(family, plan)
    crossing = [site for site in plan.sites if site.kind == "cross"]
    if crossing and not any(site.kept for site in crossing):
        # Nobody reads the encoder: all of it has gone, whatever its sites kept.
        rest = Plan(sites=tuple(site for site in plan.sites if site.kind != "bidirectional"))
        encoder = sum(size for name, size in reference.dense.items() if "encoder" in name.split("."))
        removed = removed_parameters(family, rest) + encoder
    assert sum(reference.dense.values()) - sum(_weights(shrunk.model, reference.weights).values()) == removed


@pytest.mark.parametrize(("family", "opset", "attention"), SLICE)
def test_gated_is_shrunk(family: str, opset: int, attention: Attention, tmp_path: Path) -> None:
    reference = Reference(tmp_path, family, opset, attention)
    prove(family, reference, tmp_path, range(3))


@pytest.mark.zoo
@pytest.mark.parametrize(("family", "opset", "attention"), EVERY)
def test_gated_is_shrunk_everywhere(family: str, opset: int, attention: Attention, tmp_path: Path) -> None:
    reference = Reference(tmp_path, family, opset, attention)
    prove(family, reference, tmp_path, range(100, 120))


# -- Parameters removed equal the plan's exactly ---------------------------------------------------------------------

POST_NORM = {"bert", "roberta", "distilbert", "electra", "bart", "marian"}
NO_BIAS = {"modernbert", "llama", "qwen3", "t5", "all_attention", "transformer_xl"}
VECTORS = {"all_attention": 2 * PERSISTENT + 2, "transformer_xl": 2}  # persistent ones and position biases, a head
BUCKETS = 6  # of T5's relative-position table


def removed_parameters(family: str, plan: Plan) -> int:
    """What a plan removes, from the shapes of the modules: width `d`, heads of width `w`.

    A query head takes d*w of the query and w*d of the output projection, a key/value head d*w of key and of value, each
    projection but the output's a bias of w. A norm in front of an attention that has gone normalises for nobody.
    """
    width = 24 if family in ("llama", "qwen3", "t5") else 32
    total = 0
    for place, site in enumerate(plan.sites):
        w = site.head_dim
        shared = site.heads // site.kv_heads
        keys_left = len({head // shared for head in site.kept})
        queries, keys = len(site.dropped), site.kv_heads - keys_left
        query_bias = key_value_bias = 0 if family in NO_BIAS else 1
        total += queries * (2 * width * w + query_bias * w) + keys * (2 * width * w + 2 * key_value_bias * w)
        if family == "whisper":
            total -= keys * w  # Whisper's keys have no bias.
        if family in VECTORS:
            total += queries * (width + VECTORS[family]) * w  # The other width is the position projection's.
        if not site.kept and family not in POST_NORM:
            norms = 1 if family in NO_BIAS and family not in VECTORS else 2
            total += 0 if family == "modernbert" and place == 0 else norms * width
            total += 2 * w if family == "qwen3" else 0
    if family == "t5":
        for kind in {site.kind for site in plan.sites} - {"cross"}:
            stack = [site for site in plan.sites if site.kind == kind]
            total += BUCKETS * len(set.intersection(*(set(site.dropped) for site in stack)))
    return total


def _weights(model: ir.Model, names: Collection[str]) -> dict[str, int]:
    """Elements of each of the model's weights that a graph still has."""
    tensors = {name: value.const_value for name, value in model.graph.initializers.items() if name in names}
    return {name: tensor.size for name, tensor in tensors.items() if tensor is not None}


@pytest.mark.parametrize(
    "family", ["t5", "whisper", *(pytest.param(name, marks=pytest.mark.zoo) for name in ("bart", "marian"))]
)
def test_an_encoder_that_nobody_reads_goes_whole(family: str, tmp_path: Path) -> None:
    reference = Reference(tmp_path, family, 18, "eager")
    drawn = random_plan(reference.sites, np.random.default_rng(5))
    sites = [replace(site, kept=(), scale=()) if site.kind == "cross" else site for site in drawn.sites]
    prove_plan(family, reference, tmp_path, Plan(sites=tuple(sites)))


@pytest.mark.parametrize(("family", "opset", "attention"), [case for case in SLICE if case[0] in WITH_MEMORY])
def test_a_graph_with_memory_loses_every_head(family: str, opset: int, attention: Attention, tmp_path: Path) -> None:
    reference = Reference(tmp_path, family, opset, attention)
    none = [replace(site, kept=(), scale=()) for site in keep_all(reference.sites).sites]
    prove_plan(family, reference, tmp_path, Plan(sites=tuple(none)))
