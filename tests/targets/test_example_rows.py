"""Example rows of any size keep their markers, and travel in the metadata of a graph."""

from __future__ import annotations

import json

import numpy as np
import pytest

from compressor.errors import ErrorCode
from compressor.targets.example_rows import EXAMPLE_ROWS, ExampleRows, read_example_rows, record_example_rows
from tests.faults import fails_with
from tests.targets.end_readers import END, MARKERS, PADDING, START, end_reader, pairs


@pytest.mark.parametrize("padded", [(), (1,), (0, 1, 2)])
@pytest.mark.parametrize("seq", [6, 7, 9, 10, 11, 40])
def test_every_row_has_the_markers_and_tokens_of_an_example(seq: int, padded: tuple[int, ...]) -> None:
    example = pairs()
    rows = example.sized(3, seq, padded=padded)
    assert {array.shape for array in rows.values()} == {(3, seq)}
    for number in range(3):
        mask, source = rows["attention_mask"][number], example.inputs["input_ids"][number % 2]
        length = seq - max(1, seq // 4) if number in padded else seq
        assert mask.tolist() == [1] * length + [0] * (seq - length)
        ids = rows["input_ids"][number]
        assert (ids[length:] == PADDING).all()
        ids = ids[:length]
        if length >= 4:
            assert ids[np.isin(ids, list(MARKERS))].tolist() == [START, END, END, END]
            assert set(ids.tolist()) <= set(source.tolist())
            types = rows["token_type_ids"][number, :length]
            assert (np.diff(types) >= 0).all(), "the second text comes after the first"
            of_source = dict(zip(source.tolist(), example.inputs["token_type_ids"][number % 2].tolist(), strict=True))
            assert all(of_source[token] == kind for token, kind in zip(ids, types, strict=True) if token not in MARKERS)


def test_rows_of_their_own_length_stay_as_they_are() -> None:
    example = pairs()
    rows = example.sized(3, 10, first=1)
    for name, array in example.inputs.items():
        assert rows[name].tolist() == array[[1, 0, 1]].tolist()


def test_a_row_keeps_its_share_of_padding() -> None:
    rows = pairs().sized(2, 20)
    assert rows["attention_mask"].sum(1).tolist() == [20, 16]
    left = {name: array[:, ::-1] for name, array in pairs().inputs.items()}
    mask = ExampleRows(left, MARKERS, PADDING).sized(2, 20)["attention_mask"]
    assert mask[1].tolist() == [0] * 4 + [1] * 16


@pytest.mark.parametrize(("row", "kept"), [([START, 5, END], [END]), ([5, END, 9], [END, 9]), ([START, 5], [START])])
def test_a_row_that_is_too_short_keeps_the_markers_behind_its_text(row: list[int], kept: list[int]) -> None:
    example = ExampleRows({"input_ids": np.array([row])}, frozenset((START, END, 9)))
    assert example.sized(1, len(kept))["input_ids"].tolist() == [kept]


def test_only_what_belongs_to_the_tokens_changes_with_them() -> None:
    inputs: dict[str, np.ndarray] = {
        "input_ids": np.arange(12).reshape(1, 2, 6),
        "bbox": np.zeros((1, 2, 6, 4), np.int64),
        "pixel_values": np.zeros((1, 3, 6, 6), np.float32),
        "decoder_input_ids": np.arange(6)[None],
        "decoder_attention_mask": np.ones((1, 6), np.int64),
    }
    rows = ExampleRows(inputs).sized(2, {"input_ids": 9, "decoder_input_ids": 4})
    assert {name: array.shape for name, array in rows.items()} == {
        "input_ids": (2, 2, 9),
        "bbox": (2, 2, 9, 4),
        "pixel_values": (2, 3, 6, 6),
        "decoder_input_ids": (2, 4),
        "decoder_attention_mask": (2, 4),
    }
    assert rows["input_ids"][0, 1].tolist() == [6, 7, 8, 9, 10, 11, 6, 7, 8]


def test_rows_are_read_as_they_were_stored() -> None:
    images = {"pixel_values": np.zeros((2, 3, 32, 32), np.float32), "memory_0": np.zeros((2, 4, 8), np.float32)}
    points = {"past_values": np.array([[0.5, 1.5], [2.5, 3.5]], np.float32)}
    example = ExampleRows({**pairs().inputs, **images, **points}, MARKERS, PADDING, image_positions=3)
    model = end_reader()
    assert read_example_rows(model) is None
    record_example_rows(model, example)
    stored = read_example_rows(model)
    assert stored is not None
    assert (stored.markers, stored.padding, stored.image_positions) == (MARKERS, PADDING, 3)
    assert stored.inputs.keys() == {*pairs().inputs, *points}
    assert all(np.array_equal(array, example.inputs[name]) for name, array in stored.inputs.items())


@pytest.mark.parametrize(
    "content",
    ["{", "[]", {"inputs": {}}, {"inputs": {"input_ids": [["a"]]}, "markers": [], "padding": 0, "image_positions": 0}],
)
def test_damaged_metadata_are_refused(content: object) -> None:
    model = end_reader()
    model.metadata_props[EXAMPLE_ROWS] = content if isinstance(content, str) else json.dumps(content)
    with fails_with(ErrorCode.FILE_UNREADABLE):
        read_example_rows(model)
