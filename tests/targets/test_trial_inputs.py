"""Graphs are tried on the example rows that they carry; engines, checks and benches take such rows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from compressor.config.check import CheckRequest
from compressor.errors import ErrorCode, InputError
from compressor.latency import check
from compressor.measure import bench, bench_folder
from compressor.measure.macs import macs
from compressor.results import NoteCode
from compressor.segment_memory import MAX_POSITIONS, MEMORY_LENGTH
from compressor.targets import target
from compressor.targets.example_rows import ExampleRows, record_example_rows
from compressor.targets.onnxruntime.engine import fuse
from compressor.targets.onnxruntime.ort_session import session_settings
from compressor.targets.trial_inputs import (
    decoding_feeds,
    draws_ids,
    fixed_batch,
    free_sizes,
    has_lengths,
    has_random_inputs,
    id_limits,
    random_feeds,
    trial_feeds,
)
from graph_passes import load, record_example_sizes, save
from graph_passes.flow.caches import record_caches
from tests.faults import fails_with
from tests.run.listeners import RecordingListener
from tests.targets.end_readers import END, MARKERS, end_reader, pairs
from tests.targets.graphs import parsed, pruned


@pytest.mark.parametrize("padded", [False, True])
def test_ids_are_those_of_the_example(padded: bool) -> None:
    model = end_reader(pairs())
    feeds = trial_feeds(model, 3, 12, seed=1, padded=padded)
    assert feeds.keys() == {"input_ids", "attention_mask"}
    assert (feeds["input_ids"] == END).sum(1).tolist() == [3, 3, 3]
    assert feeds["attention_mask"].sum(1).tolist() == ([9, 12, 9] if padded else [12, 12, 12])
    assert set(feeds["input_ids"][0].tolist()) - MARKERS <= {1, *range(11, 15)}, "the first row is that of the seed"
    assert not draws_ids(model)
    assert not has_random_inputs(model)


def test_an_image_in_a_text_keeps_its_places() -> None:
    """Three places come before a text, whose length does not count them; two of its tokens are markers."""
    model = parsed("y = Identity(input_ids)", "int64[B, S] input_ids", "int64[B, S] y")
    record_example_rows(
        model, ExampleRows({"input_ids": np.array([[19] * 3 + [0, 5, 2]])}, frozenset((0, 2, 19)), 1, 3)
    )
    for seq in (3, 7):
        assert trial_feeds(model, 1, seq)["input_ids"].tolist() == [[19] * 3 + [0] + [5] * (seq - 2) + [2]]


def test_a_fixed_length_is_kept() -> None:
    model = parsed("y = Identity(input_ids)", "int64[B, 16] input_ids", "int64[B, 16] y")
    model.metadata_props.update(end_reader(pairs()).metadata_props)
    feeds = trial_feeds(model, 2, 5)
    assert feeds["input_ids"].shape == (2, 16)
    assert (feeds["input_ids"] == END).sum(1).tolist() == [3, 3]


def test_inputs_without_example_rows_are_random() -> None:
    model = end_reader()
    for seed, padded in ((0, False), (4, True)):
        drawn = random_feeds(model, 2, 8, seed=seed, padded=padded)
        feeds = trial_feeds(model, 2, 8, seed=seed, padded=padded)
        assert all(np.array_equal(array, drawn[name]) for name, array in feeds.items())
    assert draws_ids(model)
    images = parsed("y = Identity(x)", "float[B, 3] x", "float[B, 3] y")
    assert not draws_ids(images)
    assert has_random_inputs(images)


def test_images_and_sounds_have_the_sizes_of_the_exporters_example() -> None:
    """A sound is a row of real numbers, and its mask has its length; tokens beside an image have any."""
    sound = parsed(
        "w = Unsqueeze(x, one)  y = Conv(w, kernel)  z = Identity(attention_mask)",
        "float[batch, sequence] x, int64[batch, sequence] attention_mask",
        "float[batch, 2, frames] y, int64[batch, sequence] z",
        "float[2, 1, 40] kernel, int64[1] one = {1}",
    )
    assert has_lengths(sound)
    record_example_sizes(sound, {"x": (2, 100)})
    assert not has_lengths(sound)
    assert {array.shape for array in trial_feeds(sound, 3, 5).values()} == {(3, 100)}
    assert macs(sound, 1, 1) == 2 * 61 * 40
    text = parsed(
        "a = Identity(pixel_values)  b = Identity(inputs_embeds)  c = Identity(input_ids)",
        "float[batch, 3, height] pixel_values, float[batch, words, 4] inputs_embeds, int64[batch, sequence] input_ids",
        "float[batch, 3, height] a, float[batch, words, 4] b, int64[batch, sequence] c",
    )
    record_example_sizes(text, {"pixel_values": (2, 3, 16), "inputs_embeds": (2, 8, 4)})
    shapes = {name: array.shape for name, array in trial_feeds(text, 3, 5).items()}
    assert shapes == {"pixel_values": (3, 3, 16), "inputs_embeds": (3, 5, 4), "input_ids": (3, 5)}
    assert has_lengths(text)
    patches = parsed("y = Identity(shapes)", "int64[batch, 2] shapes", "int64[batch, 2] y")
    assert not has_lengths(patches)


def test_an_engine_is_fused_on_rows_that_the_model_can_have(tmp_path: Path) -> None:
    source = tmp_path / "model.onnx"
    save(end_reader(), source)
    with fails_with(ErrorCode.RUNTIME_FAILED, path=source):
        target("ort").build(source, tmp_path / "engine.onnx")
    save(end_reader(pairs()), source)
    assert fuse(source, tmp_path / "engine.onnx", session_settings("cpu", None)).fused
    assert not draws_ids(load(tmp_path / "engine.onnx")), "the engine carries the rows too"


@pytest.mark.zoo
def test_benches_and_checks_use_the_rows_of_the_graph(tmp_path: Path) -> None:
    for name in ("dense.onnx", "model.onnx"):
        save(end_reader(pairs()), tmp_path / name)
    listener = RecordingListener()
    dense, model = tmp_path / "dense.onnx", tmp_path / "model.onnx"
    result = bench(dense, model, [2], [7], seconds=0.01, threads=1, listener=listener)
    assert [(row.batch, row.seq) for row in result.speeds] == [(2, 7)]
    (row,) = bench_folder(tmp_path, ["ort"], [2], [7], threads=1, seconds=0.01, listener=listener)
    assert not row.failure
    request = CheckRequest(model=str(model), baseline=str(dense), batch=2, seq=7, seconds=0.05, threads=1)
    check(request, listener)
    assert NoteCode.RANDOM_INPUTS not in listener.codes


@pytest.mark.zoo
def test_a_bench_says_that_ids_are_random(tmp_path: Path) -> None:
    save(parsed("y = Gather(t, ids)", "int64[B, S] ids", "float[B, S, 4] y", "float[9, 4] t"), tmp_path / "model.onnx")
    listener, path = RecordingListener(), tmp_path / "model.onnx"
    bench(path, path, [1], [4], seconds=0.01, threads=1, listener=listener)
    assert listener.codes == [NoteCode.RANDOM_INPUTS]
    save(end_reader(), path)
    with fails_with(ErrorCode.RUNTIME_FAILED, path=path):
        bench(path, path, [1], [4], seconds=0.01, threads=1)


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


def test_the_ids_of_a_graph_are_limited_by_its_tables() -> None:
    model = parsed(
        "a = Gather(words, ids)  flat = Reshape(kinds, shape)  b = Gather(types, flat)  low = Clip(far, zero, six)"
        "  c = Gather(words, low)  y = Identity(a)",
        "int64[B, S] ids, int64[B, S] kinds, int64[B, S] far, float[B, 3] x",
        "float[B, S, 4] y",
        "float[7, 4] words, float[3, 4] types, int64[1] shape = {-1}, int64 zero = {0}, int64 six = {6}",
    )
    assert id_limits(model) == {"ids": 7, "kinds": 3}


def test_a_step_of_a_decoder_reads_caches_of_earlier_tokens() -> None:
    """Masks of the decoder cover earlier and new tokens, those of the encoder the positions of its cache."""
    model = parsed(
        "new = Cast <to = 1> (position_ids)  rows = Unsqueeze(new, axes)  all = Concat <axis = 2> (past, rows)",
        "int64[B, S] input_ids, int64[B, T] attention_mask, int64[B, S] position_ids, float[B, 1, P, 1] past,"
        " int64[B, C] encoder_attention_mask, float[B, 2, C, 4] cross, float[B, 2, 9, 4] sound",
        "float[B, 1, T, 1] all",
        "int64[2] axes = {1, 3}",
    )
    record_caches(model, [("past", "all"), ("cross", "elsewhere"), ("sound", "elsewhere too")])
    feeds = decoding_feeds(model, 2, 6, 3)
    assert {name: array.shape for name, array in feeds.items()} == {
        "input_ids": (2, 3),
        "attention_mask": (2, 9),
        "position_ids": (2, 3),
        "past": (2, 1, 6, 1),
        "encoder_attention_mask": (2, 6),
        "cross": (2, 2, 6, 4),
        "sound": (2, 2, 9, 4),
    }
    assert feeds["position_ids"].tolist() == [[6, 7, 8]] * 2
    assert feeds["attention_mask"].all()
    assert decoding_feeds(model, 1, 0, 4)["past"].shape == (1, 1, 0, 1)
