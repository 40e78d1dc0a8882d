"""Sessions keep the caches of a decoder, whose layers differ in their heads."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest

from compressor.errors import ErrorCode, InputError, UsageError
from compressor.generation.weights import Rounding
from compressor.targets.base import Provider, WeightPrecision
from compressor.targets.caches import DECODER, ENCODER, PLAN, plan_digest
from compressor.targets.onnxruntime import ort_session
from compressor.targets.onnxruntime.sessions import OrtCaches, OrtSessions, engine_of
from graph_passes import load, save
from graph_passes.flow.caches import CACHES, IN_PLACE
from graph_passes.passes import FuseForOrt, Normalize
from tests.faults import fails_with
from tests.generation.counting import SIZE, write_decoder_only, write_encoder_decoder
from tests.generation.exported import exported
from tests.graph_passes.graphs import plan, site

pytestmark = pytest.mark.usefixtures("shared_exports")

IDS = np.array([[1, 2, 3], [4, 5, 6]])


@pytest.fixture
def sessions(tmp_path: Path) -> OrtSessions:
    return OrtSessions(write_decoder_only(tmp_path), provider="cpu", threads=1)


def decode(sessions: OrtSessions, ids: np.ndarray, caches: OrtCaches) -> tuple[np.ndarray, OrtCaches]:
    mask = np.ones((len(ids), caches.length + ids.shape[1]), np.int64)
    return sessions.decode(ids, mask, mask.cumsum(1)[:, caches.length :] - 1, caches)


def numbers(caches: OrtCaches) -> list[list[float]]:
    """The tokens that a cache was computed from."""
    assert isinstance(caches.decoded, dict)
    keys, values = (caches.decoded[name].numpy() for name in ("keys", "values"))
    assert keys.shape[:2] == (caches.batch, 2)
    assert values.shape[:2] == (caches.batch, 1)
    assert (keys[:, :1] == values).all()
    rows: list[list[float]] = values[:, 0, :, 0].tolist()
    return rows


def test_a_decoder_starts_without_positions_and_adds_them(sessions: OrtSessions) -> None:
    start = sessions.start(2)
    logits, first = decode(sessions, IDS, start)
    assert logits.shape == (2, 3, SIZE)
    assert logits.argmax(-1).tolist() == [[2, 3, 4], [5, 6, 7]]
    _, second = decode(sessions, np.array([[7], [8]]), first)
    assert [start.length, first.length, second.length] == [0, 3, 4]
    assert numbers(second) == [[1, 2, 3, 7], [4, 5, 6, 8]]
    assert numbers(first) == IDS.tolist()


def test_texts_are_selected_and_repeated(sessions: OrtSessions) -> None:
    _, caches = decode(sessions, IDS, sessions.start(2))
    assert numbers(caches.select(np.array([1, 0, 1]))) == [[4, 5, 6], [1, 2, 3], [4, 5, 6]]
    assert caches.select(np.arange(2)).decoded is caches.decoded


def test_what_was_encoded_stays_while_beams_of_a_text_are_reordered(tmp_path: Path) -> None:
    sessions = OrtSessions(write_encoder_decoder(tmp_path), provider="cpu", threads=1)
    encoded = sessions.encode({"input_ids": IDS, "attention_mask": np.ones_like(IDS)})
    beams = encoded.select(np.array([0, 0, 1, 1]))
    assert beams.encoded["source"].numpy()[:, 0, 0, 0].tolist() == [1, 1, 4, 4]
    ids = np.arange(4)[:, None]
    _, caches = sessions.decode(ids, np.ones((4, 3), np.int64), None, beams)
    reordered = caches.select(np.array([1, 0, 3, 3]))
    assert reordered.encoded is beams.encoded
    assert numbers(reordered) == [[1], [0], [3], [3]]
    assert caches.select(np.array([2, 0, 1, 1])).encoded["source"].numpy()[:, 0, 0, 0].tolist() == [4, 1, 1, 1]


def test_caches_share_their_memory_with_the_runtime(sessions: OrtSessions) -> None:
    _, caches = decode(sessions, IDS, sessions.start(2))
    assert isinstance(caches.decoded, dict)
    value = caches.decoded["keys"]
    assert isinstance(value, ort.OrtValue)
    assert value.numpy().ctypes.data == value.data_ptr()


def test_arrays_get_the_types_of_the_graph(sessions: OrtSessions) -> None:
    mask = np.ones((2, 3), np.bool_)
    logits, _ = sessions.decode(IDS.astype(np.int32), mask, mask.cumsum(1), sessions.start(2))
    assert logits.argmax(-1).tolist() == [[2, 3, 4], [5, 6, 7]]


def test_an_input_that_is_missing_is_named(sessions: OrtSessions) -> None:
    with pytest.raises(InputError) as error:
        sessions.decode(IDS, None, None, sessions.start(2))
    assert (error.value.code, error.value.details["tensor"]) == (ErrorCode.TENSOR_MISMATCH, "attention_mask")


def test_inputs_that_do_not_fit_are_an_error_of_the_runtime(sessions: OrtSessions) -> None:
    _, caches = decode(sessions, IDS[:1], sessions.start(1))
    with pytest.raises(InputError) as error:
        decode(sessions, IDS, caches)
    assert error.value.code == ErrorCode.RUNTIME_FAILED


@pytest.mark.parametrize("name", [ENCODER, DECODER])
def test_a_graph_that_is_missing_is_named(tmp_path: Path, name: str) -> None:
    (write_encoder_decoder(tmp_path) / name).unlink()
    with pytest.raises(InputError) as error:
        OrtSessions(tmp_path, provider="cpu", threads=1)
    assert (error.value.code, error.value.details["path"]) == (ErrorCode.FILE_MISSING, tmp_path / name)


def test_a_graph_without_caches_is_refused(tmp_path: Path) -> None:
    graph = load(write_decoder_only(tmp_path) / DECODER)
    del graph.metadata_props[CACHES]
    save(graph, tmp_path / DECODER)
    with pytest.raises(InputError) as error:
        OrtSessions(tmp_path, provider="cpu", threads=1)
    assert error.value.code == ErrorCode.FILE_MISMATCH


@pytest.mark.parametrize("name", [DECODER, ENCODER, "plan.json"])
def test_a_file_of_another_plan_is_refused(name: str, tmp_path: Path) -> None:
    write_encoder_decoder(tmp_path)
    plans = [plan(site(kept, heads=2)) for kept in ((0, 1), (0,))]
    digests = [plan_digest({group.name: group.kept for group in plan.groups}) for plan in plans]
    for file in (DECODER, ENCODER):
        graph = load(tmp_path / file)
        graph.metadata_props[PLAN] = digests[file == name]
        save(graph, tmp_path / file)
    plans[name == "plan.json"].save(tmp_path / "plan.json")
    with fails_with(ErrorCode.FILE_MISMATCH):
        OrtSessions(tmp_path, provider="cpu", threads=1)
    (tmp_path / "plan.json").unlink()
    if name == "plan.json":
        OrtSessions(tmp_path, provider="cpu", threads=1)


def in_place(folder: Path, family: str = "gpt2") -> OrtSessions:
    """A decoder that writes into the memory of its caches, in a folder."""
    shutil.copytree(exported(family), folder, dirs_exist_ok=True)
    engine = FuseForOrt(in_place=True)(Normalize()(load(folder / DECODER))).model
    assert IN_PLACE in engine.metadata_props
    save(engine, engine_of(folder / DECODER))
    return OrtSessions(folder, provider="cpu", threads=1)


@pytest.mark.parametrize("provider", ["cpu", "cuda", None])
@pytest.mark.parametrize("precision", ["int4w", "int8w", None])
def test_rounded_weights_stay_on_every_device(
    precision: WeightPrecision | None, provider: Provider | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA cannot write into the memory of caches: in floats the graph runs there, and rounded weights on the CPU."""
    path, opened = in_place(tmp_path).path, list[str]()
    save(Rounding(precision).apply(load(path)), path)

    def open_on_cpu(path: Path, settings: Mapping[str, Any]) -> ort.InferenceSession:
        opened.append(settings["provider"])
        return ort.InferenceSession(path)

    monkeypatch.setattr(ort_session, "has_cuda", lambda: True)
    monkeypatch.setattr(ort_session, "open_session", open_on_cpu)
    refuses = precision is not None and provider == "cuda"
    fails = fails_with(ErrorCode.CONTRADICTION, UsageError, field="provider", value="cuda")
    with fails if refuses else nullcontext():
        sessions = OrtSessions(tmp_path, provider=provider)
        assert sessions.precision == (precision or "fp32")
        assert opened[-1] == sessions.settings["provider"]
        runs_on_cpu = provider == "cpu" or precision is not None
        assert (opened[-1] == ort_session.PROVIDERS["cpu"]) == runs_on_cpu == (sessions.path == path)


def growing() -> OrtSessions:
    """The same decoder, whose caches grow."""
    return OrtSessions(exported("gpt2"), optimized=False)


def test_an_engine_that_numbers_positions_refuses_other_numbers(tmp_path: Path) -> None:
    sessions, ids = in_place(tmp_path, "llama"), np.array([[5, 6, 7, 8], [0, 5, 6, 7]])
    mask = (ids != 0).astype(np.int64)
    places = mask.cumsum(1) - 1
    expected, caches = sessions.decode(ids, mask, places, sessions.start(2))
    logits, _ = sessions.decode(ids, mask, None, sessions.start(2))
    np.testing.assert_array_equal(logits, expected)
    following, longer = np.array([[9], [8]]), np.pad(mask, ((0, 0), (0, 1)), constant_values=1)
    sessions.decode(following, longer, places[:, -1:] + 1, caches.copy())
    with fails_with(ErrorCode.UNSUPPORTED, InputError):
        sessions.decode(following, longer, places[:, -1:] + 2, caches)


@pytest.mark.parametrize("counts", [True, False])
def test_texts_that_go_on_after_padding_are_refused(counts: bool, tmp_path: Path) -> None:
    """Padding behind a text that ends there changes nothing; a token behind it would be turned by a wrong number."""
    exact, sessions = OrtSessions(exported("llama"), optimized=False), in_place(tmp_path, "llama")
    ids, mask = np.array([[5, 6, 7], [5, 6, 0]]), np.array([[1, 1, 1], [1, 1, 0]])
    (expected, _), (logits, caches) = (
        each.decode(ids, mask, mask.cumsum(1) - 1, each.start(2)) for each in (exact, sessions)
    )
    np.testing.assert_allclose(logits[mask == 1], expected[mask == 1], atol=1e-4)
    longer = np.pad(mask, ((0, 0), (0, 1)), constant_values=1)
    with fails_with(ErrorCode.UNSUPPORTED, InputError):
        sessions.decode(ids[:, :1], longer, longer.cumsum(1)[:, -1:] - 1 if counts else None, caches)


@pytest.mark.parametrize("chunks", [(3,), (3, 1, 1), (2, 3, 1), (1,) * 8])
@pytest.mark.parametrize("texts", [1, 3])
def test_tokens_are_read_into_one_memory(texts: int, chunks: tuple[int, ...], tmp_path: Path) -> None:
    both, rng = (in_place(tmp_path), growing()), np.random.default_rng(0)
    caches = [sessions.start(texts) for sessions in both]
    for new in chunks:
        ids = rng.integers(3, 90, (texts, new))
        (logits, caches[0]), (expected, caches[1]) = (
            decode(*pair) for pair in zip(both, [ids] * 2, caches, strict=True)
        )
        np.testing.assert_allclose(logits, expected, atol=1e-4)
    assert [each.length for each in caches] == [sum(chunks)] * 2


def test_two_calls_go_on_from_the_same_positions(tmp_path: Path) -> None:
    sessions = in_place(tmp_path)
    _, first = decode(sessions, IDS, sessions.start(2))
    tokens = [np.array([[7], [8]]), np.array([[9], [10]])]
    answers = [decode(sessions, token, first) for token in tokens]
    last = np.array([[11], [12]])
    both = [decode(sessions, last, caches)[0] for _, caches in answers]
    for token, logits in zip(tokens, both, strict=True):
        whole = np.concatenate([IDS, token, last], axis=1)
        expected = decode(sessions, whole, sessions.start(2))[0][:, -1:]
        np.testing.assert_allclose(logits, expected, atol=1e-4)


def test_memory_has_room_for_every_length_and_order_of_texts(tmp_path: Path) -> None:
    ids, order = np.random.default_rng(0).integers(3, 90, (2, 150)), np.array([1, 0, 1])
    mask, places = np.ones((3, 150), np.int64), np.tile(np.arange(150) % 50, (3, 1))
    sessions = in_place(tmp_path)
    caches = sessions.start(2)
    for end in range(1, 150):
        tokens, positions = ids[:, end - 1 : end], places[:2, end - 1 : end]
        _, caches = sessions.decode(tokens, mask[:2, :end], positions, caches if end % 3 else caches.copy())
    logits, _ = sessions.decode(ids[order, -1:], mask, places[:, -1:], caches.select(order))
    expected, _ = growing().decode(ids[order], mask, places, growing().start(3))
    np.testing.assert_allclose(logits, expected[:, -1:], atol=1e-4)
