"""A text through the graph in segments of any lengths is the text read whole, where the memory holds it."""

from __future__ import annotations

from pathlib import Path

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
from tests.targets.segment_models import TOLERANCE, build, plan_of
from tests.test_models import all_attention, ids, transformer_xl

TEXT = 12


@pytest.fixture(
    scope="module",
    params=[
        (all_attention, "pruned"),
        (transformer_xl, "dense"),
        pytest.param((all_attention, "dense"), marks=pytest.mark.zoo),
        pytest.param((transformer_xl, "pruned"), marks=pytest.mark.zoo),
    ],
    ids=lambda given: f"{given[0].__name__} {given[1]}",
)
def stream(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Stream:
    make, kept = request.param
    model = make(num_hidden_layers=2, memory_length=TEXT)
    inputs = {"input_ids": ids(2, 5), **{name: torch.randn(2, 3, 24) for name in memory_names(2)}}
    sites = find_sites(model, inputs)
    plan = keep_all(sites)
    if kept == "pruned":
        plan = plan_of(sites, [(0, 2, 3), (1,)], np.random.default_rng(0))
    folder: Path = tmp_path_factory.mktemp("stream")
    export_reference(model, plan, inputs, folder / "reference.onnx")
    return Stream(*build(shrink(load(folder / "reference.onnx"), plan), folder))


@settings(max_examples=20, deadline=None)
@given(cuts=st.sets(st.integers(1, TEXT - 1)), seed=st.integers(0, 99))
def test_segments_equal_the_whole_through_the_graph(stream: Stream, cuts: set[int], seed: int) -> None:
    text = ids(2, TEXT, seed).numpy()
    stream.memories = ()
    whole = [stream.read(text), *stream.memories]
    stream.memories = ()
    logits = [stream.read(segment) for segment in np.split(text, sorted(cuts), axis=1)]
    parts = [np.concatenate(logits, axis=1), *stream.memories]
    assert max(relative_error(one, other, {}) for one, other in zip(whole, parts, strict=True)) <= TOLERANCE
