"""The batches of a check: arrays and texts are read as a model takes them, or refused with the input's name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from compressor.config.check import CheckRequest
from compressor.errors import CompressorError, ErrorCode, InputError, UsageError
from compressor.latency.endpoints import encode_batches
from compressor.latency.local_engine import load_engine
from compressor.latency.request_batches import MAX_BATCHES, Batches, load_batches
from compressor.model_folder import load_processor
from compressor.targets.tensor_specs import FREE, PIXELS, TensorSpec
from tests import folders
from tests.faults import fails_with
from tests.graph.files import classifier
from tests.latency.endpoint import FunctionEndpoint, X
from tests.tasks import pictures

TOKENS = tuple(TensorSpec(name, ir.DataType.INT32, (FREE, FREE)) for name in ("input_ids", "attention_mask"))
PAIRED_TOKENS = (*TOKENS, TensorSpec("token_type_ids", ir.DataType.INT32, (FREE, FREE)))
TEXTS = (TensorSpec("text", ir.DataType.STRING, (FREE, 1)),)


def request_with(**fields: Any) -> CheckRequest:
    return CheckRequest(**{"model": "m.onnx", "baseline": "b.onnx", **fields})


def arrays_file(folder: Path, **arrays: Any) -> Path:
    path = folder / "inputs.npz"
    np.savez(path, **arrays)
    return path


def test_random_batches_are_drawn_for_the_model() -> None:
    batches = load_batches(FunctionEndpoint(), request_with(batch=2, seed=7))
    assert batches.random
    assert len(batches.feeds) == MAX_BATCHES
    assert {batch["x"].shape for batch in batches.feeds} == {(2, 4)}
    again = load_batches(FunctionEndpoint(), request_with(batch=2, seed=7))
    np.testing.assert_array_equal(batches.feeds[3]["x"], again.feeds[3]["x"])
    assert not np.array_equal(batches.feeds[0]["x"], batches.feeds[1]["x"])


def test_batches_have_as_many_tokens_as_the_graph_takes(tmp_path: Path) -> None:
    engine = load_engine(classifier(tmp_path / "model.onnx"), tmp_path)
    batches = load_batches(engine, request_with())
    assert batches.length(128) == 16
    assert engine.infer(batches.feeds[0])
    assert load_batches(engine, request_with(seq=20)).length(128) == 20
    with fails_with(ErrorCode.OUT_OF_RANGE, field="seq", value=50, maximum=12):
        load_batches(engine, request_with(seq=50))


def test_rows_of_arrays_are_divided_into_batches(tmp_path: Path) -> None:
    rows = np.arange(28, dtype=np.float64).reshape(7, 4)
    batches = load_batches(FunctionEndpoint(), request_with(inputs=arrays_file(tmp_path, x=rows, z=rows), batch=2))
    assert (batches.source, batches.random) == ("6 rows of inputs.npz", False)
    assert [set(batch) for batch in batches.feeds] == [{"x"}] * 3
    np.testing.assert_array_equal(np.concatenate([batch["x"] for batch in batches.feeds]), rows[:6].astype(np.float32))
    assert batches.length(128) == 4, "of the inputs, not of the request"


def test_at_most_sixteen_batches_are_read(tmp_path: Path) -> None:
    batches = load_batches(FunctionEndpoint(), request_with(inputs=arrays_file(tmp_path, x=np.zeros((40, 4)))))
    assert (len(batches.feeds), batches.source) == (16, "16 rows of inputs.npz")


def test_texts_go_through_the_tokenizer(tmp_path: Path) -> None:
    folders.tokenizer().save_pretrained(tmp_path)
    rows = tmp_path / "rows.tsv"
    rows.write_text("text\n" + "the good film\n" * 40)
    request = request_with(inputs=rows, tokenizer=tmp_path, batch=2, seq=8)
    batches = load_batches(FunctionEndpoint(inputs=TOKENS), request)
    assert batches.source == "32 rows of rows.tsv"
    tokens = folders.tokenizer()("the good film", padding="max_length", max_length=8)
    for batch in batches.feeds:
        assert {name: (array.dtype, array.tolist()) for name, array in batch.items()} == {
            name: (np.int32, [tokens[name]] * 2) for name in ("input_ids", "attention_mask")
        }


def test_a_sentence_encoder_gets_the_texts_of_pairs_one_by_one(tmp_path: Path) -> None:
    prompts = {"prompts": {"text": "plot "}, "default_prompt_name": "text"}
    limits = {"max_seq_length": 5, "do_lower_case": True}
    folder = folders.save_sentence_encoder(
        tmp_path / "model", config_sentence_transformers=prompts, sentence_bert_config=limits
    )
    rows = tmp_path / "rows.tsv"
    rows.write_text("label\tquery\tpassage\n" + "1\tGOOD film\tone two three\n" * 20)
    request = request_with(inputs=rows, tokenizer=folder, batch=2, seq=7)
    batches = load_batches(FunctionEndpoint(inputs=PAIRED_TOKENS), request)
    assert batches.source == "32 rows of rows.tsv"
    assert {name: array.tolist() for name, array in batches.feeds[0].items()} == {
        "input_ids": [[2, 8, 5, 7, 3, 0, 0], [2, 8, 15, 16, 3, 0, 0]],
        "attention_mask": [[1, 1, 1, 1, 1, 0, 0]] * 2,
        "token_type_ids": [[0] * 7] * 2,
    }


def test_images_go_through_the_image_processor(tmp_path: Path) -> None:
    pictures.save_classifier(tmp_path / "model")
    images = pictures.write_folder(tmp_path / "images", 6, labelled=False)
    endpoint = FunctionEndpoint(inputs=(TensorSpec(PIXELS, ir.DataType.FLOAT, (FREE, 3, 16, 16)),))
    request = request_with(inputs=images, tokenizer=tmp_path / "model", batch=2)
    batches = load_batches(endpoint, request)
    assert [batch[PIXELS].shape for batch in batches.feeds] == [(2, 3, 16, 16)] * 3
    assert batches.source == "6 rows of images"
    with pytest.raises(UsageError) as usage:
        load_batches(endpoint, request_with(inputs=images))
    assert usage.value.details["field"] == "tokenizer"
    with pytest.raises(InputError) as missing:
        load_batches(endpoint, request_with(inputs=images, tokenizer=images))
    assert missing.value.code is ErrorCode.FILE_MISSING


def test_images_of_a_named_column_are_read(tmp_path: Path) -> None:
    pictures.save_classifier(tmp_path / "model")
    pictures.write_folder(tmp_path, 2, labelled=False)
    rows = tmp_path / "rows.tsv"
    rows.write_text("before\tphoto\n000.png\t001.png\n")
    endpoint = FunctionEndpoint(inputs=(TensorSpec(PIXELS, ir.DataType.FLOAT, (FREE, 3, 16, 16)),))
    fields = {"inputs": rows, "tokenizer": tmp_path / "model"}
    with fails_with(ErrorCode.COLUMN_MISSING, field="image_column"):
        load_batches(endpoint, request_with(**fields))
    (batch,) = load_batches(endpoint, request_with(**fields, image_column="photo")).feeds
    processor = load_processor(tmp_path / "model", images=True)
    assert np.array_equal(batch[PIXELS], processor(pictures.picture(1), return_tensors="np")[PIXELS])


def test_arrays_of_text_are_read(tmp_path: Path) -> None:
    path = arrays_file(tmp_path, text=np.array([["yes"], ["caf\u00e9"]]))
    batches = load_batches(FunctionEndpoint(inputs=TEXTS), request_with(inputs=path))
    assert [batch["text"].tolist() for batch in batches.feeds] == [[["yes"]], [["caf\u00e9"]]]
    assert batches.feeds[0]["text"].dtype == np.object_


@pytest.mark.parametrize(
    ("arrays", "fields", "code", "tensor"),
    [
        ({"x": np.zeros((3, 5), np.float32)}, {}, ErrorCode.TENSOR_MISMATCH, "x"),
        ({"x": np.zeros((3, 4, 1), np.float32)}, {}, ErrorCode.TENSOR_MISMATCH, "x"),
        ({"x": np.zeros((3, 4), np.int64)}, {}, ErrorCode.TENSOR_MISMATCH, "x"),
        ({"z": np.zeros((3, 4), np.float32)}, {}, ErrorCode.TENSOR_MISMATCH, "x"),
        ({"x": np.zeros((3, 4), np.float32)}, {"batch": 9}, ErrorCode.TOO_FEW_ROWS, None),
    ],
)
def test_arrays_that_do_not_fit_are_refused(
    arrays: dict[str, np.ndarray], fields: dict[str, Any], code: ErrorCode, tensor: str | None, tmp_path: Path
) -> None:
    path = arrays_file(tmp_path, **arrays)
    with pytest.raises(InputError) as error:
        load_batches(FunctionEndpoint(), request_with(inputs=path, **fields))
    details = error.value.details
    assert (error.value.code, details["path"], details.get("tensor")) == (code, path, tensor)


def test_a_single_number_is_refused(tmp_path: Path) -> None:
    inputs = (*X, TensorSpec("scale", ir.DataType.FLOAT, ()))
    path = arrays_file(tmp_path, x=np.zeros((8, 4), np.float32), scale=np.float32(2.0))
    with fails_with(ErrorCode.INVALID_VALUE, field="inputs"):
        load_batches(FunctionEndpoint(inputs=inputs), request_with(inputs=path))


def test_only_inputs_of_two_axes_have_a_length() -> None:
    assert Batches(({"pixel_values": np.zeros((1, 3, 8, 8))},), "x").length(128) == 0
    assert Batches(({"memory_0": np.zeros((1, 9, 4)), "input_ids": np.zeros((1, 5))},), "x").length(128) == 5
    assert Batches(({},), "x").length(128) == 128


def test_inputs_must_have_equally_many_rows(tmp_path: Path) -> None:
    path = arrays_file(tmp_path, input_ids=np.zeros((3, 4), int), attention_mask=np.zeros((2, 4), int))
    with pytest.raises(InputError) as error:
        load_batches(FunctionEndpoint(inputs=TOKENS), request_with(inputs=path))
    assert error.value.code is ErrorCode.TENSOR_MISMATCH


def test_files_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    truncated = tmp_path / "torn.npz"
    truncated.write_bytes(arrays_file(tmp_path, x=np.zeros((3, 4))).read_bytes()[:40])
    pickled = tmp_path / "pickled.npz"
    np.savez(pickled, x=np.array([{}], np.object_))
    single = tmp_path / "single.npz"
    with single.open("wb") as stream:
        np.save(stream, np.zeros((3, 4)))
    rows = tmp_path / "rows.tsv"
    rows.write_text("text\nhello\n")
    faults: list[tuple[dict[str, Any], ErrorCode, int]] = [
        ({"inputs": truncated}, ErrorCode.FILE_UNREADABLE, 3),
        ({"inputs": pickled}, ErrorCode.FILE_UNREADABLE, 3),
        ({"inputs": single}, ErrorCode.FILE_UNREADABLE, 3),
        ({"inputs": tmp_path / "none.npz"}, ErrorCode.FILE_MISSING, 3),
        ({"inputs": rows}, ErrorCode.MISSING_VALUE, 2),
        ({"inputs": rows, "tokenizer": tmp_path}, ErrorCode.FILE_MISSING, 3),
    ]
    for fields, code, exit_code in faults:
        with pytest.raises(CompressorError) as error:
            load_batches(FunctionEndpoint(), request_with(**fields))
        assert (error.value.code, error.value.exit_code) == (code, exit_code), fields


@pytest.mark.parametrize("dtype", [ir.DataType.INT8, ir.DataType.INT32, ir.DataType.INT64])
def test_integers_may_be_narrower_than_those_of_the_other_model(dtype: ir.DataType) -> None:
    endpoint = FunctionEndpoint(inputs=(TensorSpec("ids", dtype, (FREE, 4)),))
    (encoded,) = encode_batches(endpoint, [{"ids": np.ones((1, 4), np.int64)}])
    assert encoded["ids"].dtype == dtype.numpy()


@pytest.mark.parametrize(
    ("batch", "dtype"),
    [({"x": np.ones((1, 4), np.int64)}, "int64"), ({"z": np.ones((1, 4), np.float32)}, None)],
)
def test_both_models_must_have_the_same_inputs(batch: dict[str, np.ndarray], dtype: str | None) -> None:
    with pytest.raises(InputError) as error:
        encode_batches(FunctionEndpoint(inputs=X), [batch])
    assert error.value.code is ErrorCode.TENSOR_MISMATCH
    assert (error.value.details["tensor"], error.value.details["dtype"]) == ("x", dtype)


def test_ids_outside_of_the_table_of_the_graph_are_named(tmp_path: Path) -> None:
    ids = np.zeros((6, 4), np.int64)
    ids[3, 2] = 25
    path, inputs = arrays_file(tmp_path, input_ids=ids, attention_mask=np.ones_like(ids)), TOKENS
    with fails_with(ErrorCode.ID_OUTSIDE_TABLE, row=4, id=25, size=25, input="input_ids"):
        load_batches(FunctionEndpoint(inputs=inputs, id_limits={"input_ids": 25}), request_with(inputs=path))
    assert load_batches(FunctionEndpoint(inputs=inputs, id_limits={"input_ids": 26}), request_with(inputs=path)).feeds
