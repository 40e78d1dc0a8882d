"""For any plan of any family, graphs with caches compute in steps what the gated model computes on a whole text."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from compressor.engines.prove import Case
from compressor.generation.deliver import CachedGraphs, export_whole, shrink_graphs
from compressor.generation.export_module import whole_outputs
from compressor.generation.prove import generation_cases, graph_outputs, prove_steps
from compressor.generation.steps import LOGITS, TARGET, TEXT, begin, step
from compressor.model_folder import ModelFolder
from compressor.results import ProofStage
from compressor.targets import target
from compressor.targets.caches import DECODER
from compressor.targets.onnxruntime.sessions import OrtSessions, engine_of
from compressor.units import PrunableGroup, find_groups, keep_all
from graph_passes import Plan, load, save
from graph_passes.flow.caches import IN_PLACE, cache_names
from graph_passes.passes import FuseForOrt
from graph_passes.weights import WeightRecord, fingerprint
from tests.generation.exported import QUICK
from tests.generation.families import FAMILIES
from tests.random_plans import random_groups

_FOLDER = tempfile.TemporaryDirectory(prefix="generation-")
TOKENS = 12
GROWING = ("gemma2", "bloom", "t5", "bart", "marian", "whisper", "pegasus")
"""Families whose attention is not fused, or whose decoders have no mask over their own positions."""
CHANGED = {"weight": WeightRecord(*(fingerprint(np.full(3, value)) for value in (1, 2)))}
"""A parameter of another graph than the one that is shrunk."""
EMPTIED: dict[str, Callable[[PrunableGroup], bool]] = {
    "everything": lambda group: True,
    "every head": lambda group: group.type == "heads",
    "every neuron": lambda group: group.type == "neurons",
    "cross-attentions": lambda group: group.site is not None and group.site.kind == "cross",
    "a layer": lambda group: ".1." in group.name,
}
"""What a plan drops as a whole."""

pytestmark = pytest.mark.usefixtures("shared_exports")


@functools.cache
def exported(family: str) -> tuple[ModelFolder, list[PrunableGroup], tuple[Case, ...], CachedGraphs]:
    """A family's graphs with every gate open, its groups, and inputs with padding."""
    model, inputs = FAMILIES[family]()
    folder = ModelFolder(Path("model"), model, None, model.config, "sha256:0", "causal-lm", family)
    feeds = {name: value.numpy() for name, value in inputs.items()}
    single = {name: value[:1] for name, value in feeds.items()}
    cases = (Case(feeds, "three rows"), Case(single, "one row"))
    groups = find_groups(model, inputs)
    out = Path(_FOLDER.name) / family
    out.mkdir()
    return folder, groups, cases, export_whole(folder, keep_all(groups), cases, out, opset=18, attention="eager")


def prove(family: str, plan: Plan, tmp_path: Path) -> OrtSessions:
    """Shrink the graphs by the plan of a run that changed weights, with both proofs, and return what runs them."""
    folder, _, _, whole = exported(family)
    plan = plan.model_copy(update={"model": "sha256:1", "weights": CHANGED})
    scratch, out = tmp_path / "scratch", tmp_path / "out"
    for path in (scratch, out):
        path.mkdir(exist_ok=True)
    proofs = shrink_graphs(whole, folder, plan, target("ort"), scratch, out)
    assert all(proof.holds for proof in proofs)
    return OrtSessions(out, optimized=False)


def prove_in_place(family: str, folder: Path) -> None:
    """Prove that the decoder of a folder computes the same when it writes into the memory of its caches."""
    graph = load(folder / DECODER)
    if not cache_names(graph):
        return
    engine = FuseForOrt(in_place=True)(graph).model
    assert (IN_PLACE in engine.metadata_props) == (family not in GROWING)
    if family not in GROWING:
        save(engine, engine_of(folder / DECODER))
        texts = exported(family)[3].texts
        proof = prove_steps(
            ProofStage.CACHED_BUILD, "compressed", texts, graph_outputs(folder, texts), OrtSessions(folder)
        )
        assert proof.holds


def assert_bytes(sessions: OrtSessions, plan: Plan) -> None:
    """Check that a token adds the keys and values of the heads that are kept."""
    sites = [site for site in plan.sites if site.kind == "causal"]
    shared = [site.heads // site.kv_heads for site in sites]
    kept = [len({head // group for head in site.kept}) for site, group in zip(sites, shared, strict=True)]
    widths = [2 * 4 * site.head_dim * heads for site, heads in zip(sites, kept, strict=True)]
    # Where no layer has heads, an encoder-decoder reads the number of earlier positions off a cache that is left.
    left = max(4 * site.head_dim * site.kv_heads for site in sites) if not any(kept) else 0
    assert sum(widths) <= sessions.bytes_per_token <= sum(widths) + left


@pytest.mark.parametrize(
    ("family", "plans"),
    [*((name, 1) for name in QUICK), *(pytest.param(name, 10, marks=pytest.mark.zoo) for name in FAMILIES)],
)
def test_graphs_with_caches_equal_the_gated_model(family: str, plans: int, tmp_path: Path) -> None:
    groups = exported(family)[1]
    for seed in range(plans):
        plan = random_groups(groups, np.random.default_rng(seed))
        assert_bytes(prove(family, plan, tmp_path), plan)
        prove_in_place(family, tmp_path / "out")


@pytest.mark.parametrize("emptied", EMPTIED)
@pytest.mark.parametrize(
    "family", [*QUICK, *(pytest.param(n, marks=pytest.mark.zoo) for n in FAMILIES if n not in QUICK)]
)
def test_a_plan_may_keep_nothing(family: str, emptied: str, tmp_path: Path) -> None:
    plan = keep_all(exported(family)[1])
    dropped = {group.name for group in exported(family)[1] if EMPTIED[emptied](group)}
    plan = plan.replace_groups(replace(group, kept=(), scale=()) for group in plan.groups if group.name in dropped)
    assert_bytes(prove(family, plan, tmp_path), plan)
    prove_in_place(family, tmp_path / "out")


@pytest.mark.parametrize(
    "family", [*QUICK, *(pytest.param(n, marks=pytest.mark.zoo) for n in FAMILIES if n not in QUICK)]
)
def test_greedy_tokens_are_those_of_the_gated_model(family: str, tmp_path: Path) -> None:
    folder, groups, cases, whole = exported(family)
    plan = keep_all(groups)
    plan = plan.replace_groups(
        replace(group, kept=tuple(range(0, group.units, 2)), scale=())
        for group in plan.groups
        if group.type == "neurons"
    )
    sessions = prove(family, plan, tmp_path)
    text = generation_cases(cases)[1].feeds
    name = TARGET if TARGET in text else TEXT
    logits, caches = step(sessions, text, 0, text[name].shape[1], begin(sessions, text))
    for _ in range(TOKENS):
        token = logits[:, -1:].argmax(-1)
        text = {**text, name: np.concatenate([text[name], token], axis=1)}
        if name == TEXT and "attention_mask" in text:
            text["attention_mask"] = np.ones_like(text[name])
        length = text[name].shape[1]
        logits, caches = step(sessions, text, length - 1, length, caches)
    (expected,) = whole_outputs(folder.model, plan, [Case(text, "all")], whole.attention)
    started = text[name].shape[1] - TOKENS
    assert np.array_equal(expected[LOGITS][:, started - 1 : -1].argmax(-1), text[name][:, started:])


def test_weights_are_cut_with_the_heads(tmp_path: Path) -> None:
    _, groups, _, whole = exported("llama")
    prove("llama", random_groups(groups, np.random.default_rng(1)), tmp_path)
    sizes = [
        sum(
            value.const_value.size
            for value in load(path / "decoder.onnx").graph.initializers.values()
            if value.const_value
        )
        for path in (whole.folder, tmp_path / "out")
    ]
    assert sizes[1] < sizes[0]
