"""Reading a text through the graph in segments of any length equals reading it whole, if the memory holds it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compressor.targets.relative_error import relative_error
from compressor.targets.segment_stream import Stream
from compressor.units import keep_all
from tests.targets.segment_models import SIZES, TOLERANCE, build, exported_model, plan_of, token_ids

TEXT = SIZES["memory_length"]


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
    exported = exported_model(family)
    sites = exported.sites
    plan = keep_all(sites) if heads == "dense" else plan_of(sites, [(0, 2, 3), (1,)], np.random.default_rng(0))
    return Stream(*build(exported.shrunk(plan), tmp_path_factory.mktemp("stream")))


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
