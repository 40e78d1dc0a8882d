"""Reading a text through the graph in segments of any length equals reading it whole, if the memory holds it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compressor.export import export_reference
from compressor.segment_memory import memory_names
from compressor.targets.relative_error import relative_error
from compressor.targets.segment_stream import Stream
from compressor.units import find_sites, keep_all
from graph_passes import load, shrink
from tests.targets.segment_models import SIZES, TOLERANCE, build, plan_of, segment_model, token_ids

TEXT = 12


@pytest.fixture(
    scope="module",
    params=[
        ("all_attention", "pruned"),
        pytest.param(("all_attention", "dense"), marks=pytest.mark.zoo),
        pytest.param(("transformer_xl", "dense"), marks=pytest.mark.zoo),
        pytest.param(("transformer_xl", "pruned"), marks=pytest.mark.zoo),
    ],
    ids=" ".join,
)
def stream(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Stream:
    family, heads = request.param
    model = segment_model(family, memory_length=TEXT)
    memories = {name: torch.randn(2, 3, SIZES["hidden_size"]) for name in memory_names(2)}
    inputs = {"input_ids": token_ids(2, 5), **memories}
    sites = find_sites(model, inputs)
    plan = keep_all(sites) if heads == "dense" else plan_of(sites, [(0, 2, 3), (1,)], np.random.default_rng(0))
    folder = tmp_path_factory.mktemp("stream")
    export_reference(model, plan, inputs, folder / "reference.onnx")
    return Stream(*build(shrink(load(folder / "reference.onnx"), plan), folder))


@settings(max_examples=20, deadline=None)
@given(cuts=st.sets(st.integers(1, TEXT - 1)), seed=st.integers(0, 99))
def test_segments_equal_the_whole_text_through_the_graph(stream: Stream, cuts: set[int], seed: int) -> None:
    text = token_ids(2, TEXT, seed).numpy()
    stream.memories = ()
    whole = [stream.read(text), *stream.memories]
    stream.memories = ()
    logits = [stream.read(segment) for segment in np.split(text, sorted(cuts), axis=1)]
    parts = [np.concatenate(logits, axis=1), *stream.memories]
    assert max(relative_error(expected, part, {}) for expected, part in zip(whole, parts, strict=True)) <= TOLERANCE
