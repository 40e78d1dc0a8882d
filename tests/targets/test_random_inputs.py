"""Random inputs are valid for the graph, and the same for the same seed."""

from __future__ import annotations

import numpy as np
import pytest

from compressor.errors import ErrorCode, InputError
from compressor.segment_memory import MAX_POSITIONS, MEMORY_LENGTH
from compressor.targets.id_limits import id_limits
from compressor.targets.random_inputs import fixed_batch, free_sizes, random_feeds
from graph_passes import load
from tests.targets.graphs import parsed, pruned


def test_inputs_of_a_model_are_valid() -> None:
    bert = pruned("bert")
    model = load(bert.shrunk)
    feeds = random_feeds(model, 4, 12, seed=3, padded=True)
    assert {name: array.shape for name, array in feeds.items()} == dict.fromkeys(bert.inputs, (4, 12))
    assert 0 <= feeds["input_ids"].min() <= feeds["input_ids"].max() < 99
    assert len(np.unique(feeds["input_ids"])) > 20
    assert feeds["attention_mask"].sum(1).tolist() == [12, 9, 12, 9]
    assert random_feeds(model, 4, 12)["attention_mask"].all()
    again = random_feeds(model, 4, 12, seed=3, padded=True)
    assert all(np.array_equal(feeds[name], again[name]) for name in feeds)


def test_ids_are_smaller_than_the_table_that_they_index() -> None:
    model = parsed(
        "a = Gather(words, ids)  flat = Reshape(kinds, shape)  b = Gather(types, flat)  y = Identity(a)",
        "int64[B, S] ids, int64[B, S] kinds, int64[B, S] position_ids, float[B, past_length] past, float[B, 3] x",
        "float[B, S, 4] y",
        "float[7, 4] words, float[3, 4] types, int64[1] shape = {-1}",
    )
    feeds = random_feeds(model, 50, 20)
    assert (feeds["ids"].max(), feeds["kinds"].max()) == (6, 2)
    assert feeds["position_ids"][1].tolist() == list(range(20))
    assert feeds["past"].shape == (50, 0)
    assert feeds["x"].shape == (50, 3)


def test_a_table_may_be_stored_in_another_type() -> None:
    model = parsed(
        "table = DequantizeLinear(stored, scale)  half = Cast <to = 10> (table)  a = Gather(half, ids)"
        "  y = Cast <to = 1> (a)",
        "int64[B, S] ids",
        "float[B, S, 4] y",
        "int8[7, 4] stored, float scale = {0.5}",
    )
    assert random_feeds(model, 50, 20)["ids"].max() == 6


def test_a_fixed_batch_is_kept() -> None:
    model = parsed("y = Identity(x)", "float[2, S] x", "float[2, S] y")
    assert fixed_batch(model) == 2
    assert random_feeds(model, 2, 5)["x"].shape == (2, 5)
    with pytest.raises(InputError) as error:
        random_feeds(model, 8, 5)
    assert error.value.code is ErrorCode.TENSOR_MISMATCH
    assert error.value.details == {"field": "batch", "tensor": "x", "value": 8, "expected": 2}


@pytest.mark.parametrize(
    ("limits", "seq", "length"),
    [(("64", "100"), 1, 64), (("64", "100"), 90, 10), (("64", "100"), 200, 0), (None, 7, 7)],
)
def test_memories_have_the_lengths_of_the_model(limits: tuple[str, str] | None, seq: int, length: int) -> None:
    model = parsed("y = Identity(x)", "float[B, S, 4] x, float[B, M, 4] memory_0", "float[B, S, 4] y")
    if limits is not None:
        model.metadata_props.update(zip((MEMORY_LENGTH, MAX_POSITIONS), limits, strict=True))
    assert free_sizes(model, 2, seq)["memory"] == length
    assert random_feeds(model, 2, seq)["memory_0"].shape == (2, length, 4)
    assert random_feeds(model, 2, seq, memory=3)["memory_0"].shape == (2, 3, 4)


def test_the_ids_of_a_graph_are_limited_by_its_tables() -> None:
    model = parsed(
        "a = Gather(words, ids)  flat = Reshape(kinds, shape)  b = Gather(types, flat)  low = Clip(far, zero, six)"
        "  c = Gather(words, low)  y = Identity(a)",
        "int64[B, S] ids, int64[B, S] kinds, int64[B, S] far, float[B, 3] x",
        "float[B, S, 4] y",
        "float[7, 4] words, float[3, 4] types, int64[1] shape = {-1}, int64 zero = {0}, int64 six = {6}",
    )
    assert id_limits(model) == {"ids": 7, "kinds": 3}
