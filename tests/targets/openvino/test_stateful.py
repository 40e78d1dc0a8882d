"""Engines of OpenVINO keep keys and values in the state of a request, which a search selects, copies and restores."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from compressor.engines.prove import Case
from compressor.errors import ErrorCode, InputError
from compressor.generation.deliver import build_plan
from compressor.generation.prove import prove_steps
from compressor.generation.steps import LOGITS, run_in_steps
from compressor.generation.workload import Workload
from compressor.graph.program import Program
from compressor.results import ProofStage
from compressor.targets import TOLERANCE, target
from compressor.targets.caches import DECODER
from compressor.targets.onnxruntime.sessions import OrtSessions
from compressor.targets.openvino.session import executed_layers
from compressor.targets.openvino.stateful import OpenVinoCaches, OpenVinoSessions
from compressor.targets.relative_error import relative_error
from graph_passes import save
from tests.generation.exported import MODELS, QUICK, built, inputs, whole_graphs
from tests.graph.decoders import decoder

NAMES = [name if name in QUICK else pytest.param(name, marks=pytest.mark.zoo) for name in MODELS]
IDS = np.array([[5, 9, 3], [7, 8, 6]])


@pytest.fixture
def sessions() -> OpenVinoSessions:
    return OpenVinoSessions(built("llama", "openvino"), threads=1)


def decode(sessions: OpenVinoSessions, ids: np.ndarray, caches: OpenVinoCaches) -> tuple[np.ndarray, OpenVinoCaches]:
    mask = np.ones((len(ids), caches.length + ids.shape[1]), np.int64)
    return sessions.decode(ids, mask, mask.cumsum(1)[:, caches.length :] - 1, caches)


@pytest.mark.parametrize("name", NAMES)
def test_steps_compute_what_the_graphs_do(name: str) -> None:
    folder, feeds = built(name, "openvino"), {name: array.numpy() for name, array in inputs(name).items()}
    if MODELS[name]().config.is_encoder_decoder:
        feeds["decoder_input_ids"] = np.arange(6)[None].repeat(len(next(iter(feeds.values()))), axis=0)
    cases = [Case(feeds, "a batch"), Case({name: array[:1] for name, array in feeds.items()}, "a text")]
    expected = [run_in_steps(OrtSessions(folder, optimized=False), case.feeds) for case in cases]
    engines = OpenVinoSessions(folder, threads=1)
    assert prove_steps(ProofStage.CACHED_BUILD, "compressed", cases, expected, engines).holds


def test_attention_is_one_layer_that_extends_the_state(tmp_path: Path) -> None:
    cached, plan, _ = whole_graphs("llama")
    engine = build_plan(cached, plan, target("openvino"), Workload(((1, 6),), 8), tmp_path, 1)
    assert isinstance(engine.sessions, OpenVinoSessions)
    kinds = [layer.kind for layer in executed_layers(engine.sessions.request.get_compiled_model())]
    assert kinds.count("ScaledDotProductAttention") == 2


def test_texts_are_selected_and_repeated(sessions: OpenVinoSessions) -> None:
    _, caches = decode(sessions, IDS, sessions.start(2))
    token = np.array([[4], [4], [4]])
    logits, _ = decode(sessions, token, caches.copy().select(np.array([1, 0, 1])))
    expected, _ = decode(sessions, token, decode(sessions, IDS[[1, 0, 1]], sessions.start(3))[1])
    np.testing.assert_allclose(logits, expected, atol=1e-5)


def test_copies_are_read_again_and_others_once(sessions: OpenVinoSessions) -> None:
    _, caches = decode(sessions, IDS, sessions.start(2))
    kept, token = caches.copy(), IDS[:, :1]
    first, after = decode(sessions, token, caches)
    for _ in range(2):
        np.testing.assert_allclose(decode(sessions, token, kept.copy())[0], first, atol=1e-5)
    for read in (lambda: decode(sessions, token, after), after.copy):
        with pytest.raises(InputError) as error:
            read()
        assert error.value.code is ErrorCode.UNSUPPORTED
    np.testing.assert_allclose(decode(sessions, token, kept)[0], first, atol=1e-5)


def of_file(name: str, folder: Path) -> OpenVinoSessions:
    """Engines of a decoder of `tests.graph.decoders`, beside its graph."""
    cached = Program.of(decoder(name)).cached
    assert cached is not None
    save(cached, folder / DECODER)
    target("openvino").build_sessions(folder, [DECODER], (), 1)
    return OpenVinoSessions(folder, threads=1)


def test_positions_that_the_model_lacks_are_refused(tmp_path: Path) -> None:
    sessions, ids = of_file("gpt2", tmp_path), np.full((2, 33), 5)
    logits, caches = decode(sessions, ids[:, :32], sessions.start(2))
    assert np.isfinite(logits).all()
    for texts, earlier in ((ids[:, :1], caches), (ids, sessions.start(2))):
        with pytest.raises(InputError) as error:
            decode(sessions, texts, earlier)
        assert error.value.code is ErrorCode.RUNTIME_FAILED


def test_an_input_that_is_missing_is_named(sessions: OpenVinoSessions) -> None:
    with pytest.raises(InputError) as error:
        sessions.decode(IDS, None, None, sessions.start(2))
    assert (error.value.code, error.value.details["tensor"]) == (ErrorCode.TENSOR_MISMATCH, "attention_mask")


def test_a_decoder_in_half_precision_holds_its_states_in_float32(tmp_path: Path) -> None:
    sessions, graph = of_file("gpt2, half", tmp_path), OrtSessions(tmp_path, optimized=False)
    feeds = {"input_ids": IDS, "attention_mask": np.ones_like(IDS)}
    expected, logits = (run_in_steps(each, feeds)[LOGITS] for each in (graph, sessions))
    assert relative_error(expected, logits, feeds) <= TOLERANCE["fp16"]
    states = [part.state.data for part in sessions.request.query_state()]
    assert {state.dtype for state in states} == {np.dtype(np.float32)}
    assert sessions.bytes_per_token == sum(state[0, :, 0].nbytes for state in states) == 2 * graph.bytes_per_token
    assert sessions.precision == "fp32"


@pytest.mark.parametrize(("name", "file"), [("llama", "openvino_model.xml"), ("t5", "encoder.xml")])
def test_a_file_that_is_missing_is_named(tmp_path: Path, name: str, file: str) -> None:
    folder = shutil.copytree(built(name, "openvino"), tmp_path / "folder")
    assert folder / file in target("openvino").session_files(folder)
    (folder / file).unlink()
    with pytest.raises(InputError) as error:
        OpenVinoSessions(folder)
    assert (error.value.code, error.value.details["path"]) == (ErrorCode.FILE_MISSING, folder / file)
