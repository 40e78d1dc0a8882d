"""Times of tokens: two folders and two endpoints are compared by their first token and by each further one."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compressor.config.check import CheckRequest
from compressor.errors import CompressorError, ErrorCode, InputError, MismatchError, ServerError
from compressor.latency import CheckPhase, Outcome, check, streams
from compressor.latency.check import StreamTimes
from compressor.latency.local_generator import LocalGenerator
from compressor.latency.streams import Part, TokenSource, read_stream
from compressor.targets.base import Feeds
from tests.command import compress
from tests.generation.counting import END, SIZE, write_decoder_only, write_encoder_decoder
from tests.generation.exported import exported
from tests.latency.event_server import DONE, TEXT, completion, event, serving_events

Cap = pytest.CaptureFixture[str]
LENGTHS: dict[str, Any] = {"prompt_tokens": 5, "new_tokens": 6}
FLAGS = ("--prompt-tokens", "5", "--new-tokens", "6", "--max-slowdown", "100000%", "--seconds", "0.1", "--quiet")


def each_once(
    first: Callable[[], object], second: Callable[[], object], seconds: float, /, **_: Any
) -> Iterator[np.ndarray]:
    """A timer of ten rounds of two calls, whose own times count nothing."""
    for _round in range(10):
        for call in (first, second):
            call()
            call()
        yield np.ones((2, 2))


class TickingSource:
    """A source whose clock passes by as much as each token takes."""

    name, host, graph, tolerance, vocabulary = "ticking", "this process", None, 0.0, 0

    def __init__(self, clock: list[float], first: float, token: float, tokens: int, rng: np.random.Generator) -> None:
        self.clock, self.times, self.rng = clock, [first, *[token] * (tokens - 1)], rng

    def prompt(self, number: int) -> Feeds:
        return {}

    def stream(self, prompt: Feeds) -> Iterator[Part]:
        for number, seconds in enumerate(self.times, 1):
            self.clock[0] += seconds * np.exp(0.02 * self.rng.normal())
            yield Part("x", number)

    def infer(self, prompt: Feeds) -> dict[str, np.ndarray]:
        return {}

    def wait_until_idle(self) -> None: ...


@settings(deadline=None, max_examples=10)
@given(st.integers(0, 1000), st.sampled_from([1.0, 1.2]), st.sampled_from([1.0, 1.2]), st.integers(2, 9))
def test_a_slower_first_token_and_slower_tokens_are_told_apart(
    seed: int, first: float, token: float, tokens: int
) -> None:
    rng, clock = np.random.default_rng(seed), [0.0]
    sources: list[TokenSource] = [
        TickingSource(clock, 0.3 * first, 0.02 * token, tokens, rng),
        TickingSource(clock, 0.3, 0.02, 2 * tokens, rng),
    ]
    times = StreamTimes(sources)
    assert times.slowdowns(0.05, 0) == (None, None)
    with patch.object(streams, "perf_counter", lambda: clock[0]):
        for pair in each_once(*times.callers(), 1.0):
            times.add(pair)
    of_token, of_first = times.slowdowns(0.05, 0)
    assert of_first is not None
    assert of_token is not None
    assert (of_first.holds, of_token.holds) == (first == 1.0, token == 1.0)
    assert of_first.baseline_p50 == pytest.approx(300, rel=0.05)
    assert of_token.baseline_p50 == pytest.approx(20, rel=0.05)
    assert (of_token.rounds, of_token.calls) == (10, 2)
    assert of_token.model_p99 >= of_token.model_p50 * 0.99


WRITERS = {"decoder-only": write_decoder_only, "encoder-decoder": write_encoder_decoder}


@pytest.mark.parametrize("kind", WRITERS)
def test_an_engine_generates_the_most_probable_tokens(kind: str, tmp_path: Path) -> None:
    folder = WRITERS[kind](tmp_path / "model")
    request = CheckRequest(model=folder, baseline=folder, threads=1, **LENGTHS)
    source = LocalGenerator(request, folder)
    prompt = source.prompt(2)
    stream = read_stream(source, prompt)
    ids = prompt["input_ids" if kind == "decoder-only" else "decoder_input_ids"][0]
    start = ids[4] if kind == "decoder-only" else ids[0]
    assert stream.text.split() == [str(min(start + number, END)) for number in range(1, 7)]
    assert (stream.tokens, len(stream.arrivals)) == (6, 6)
    assert source.infer(prompt)["logits"].shape[1:] == (11, SIZE)
    again = source.prompt(2)
    assert all(np.array_equal(again[name], array) for name, array in prompt.items()), "the text replaced the prompt"


def test_two_folders_are_compared(tmp_path: Path, capfd: Cap) -> None:
    out, dense = (write_decoder_only(tmp_path / name) for name in ("out", "dense"))
    files = {name: tmp_path / name for name in ("history", "junit")}
    recorded = [part for name, path in files.items() for part in (f"--{name}", path)]
    result = compress(capfd, "check", out, "--baseline", dense, *FLAGS, *recorded, "--json")
    assert result.code == 0, result.err
    verdict = result.json
    assert (verdict["outputs"]["expected"], verdict["seq"], verdict["batch"]) == ("its own unoptimized graph", 5, 1)
    assert verdict["first_token"]["interleaved"]
    assert verdict["slowdown"]["rounds"] > 0
    assert 'name="first token"' in files["junit"].read_text()
    assert json.loads(files["history"].read_text())["first_token"] == verdict["first_token"]
    plain = compress(capfd, "check", out, "--baseline", dense, *FLAGS)
    starts = [line.split()[0] for line in plain.out.splitlines()]
    assert starts == ["outputs", "first", "p50", "p99", "speed", "each", "p50", "p99", "speed"]


def test_folders_with_other_inputs_are_refused(tmp_path: Path) -> None:
    folders = write_decoder_only(tmp_path / "out"), write_encoder_decoder(tmp_path / "dense")
    for out, dense in (folders, folders[::-1]):
        with pytest.raises(InputError) as error:
            check(CheckRequest(model=out, baseline=dense, threads=1, **LENGTHS), timer=each_once)
        assert error.value.code == ErrorCode.FILE_MISMATCH


@pytest.mark.usefixtures("shared_exports")
@pytest.mark.parametrize("is_larger", [True, False])
def test_prompts_have_tokens_of_both_models(is_larger: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders, read = (exported("llama"), write_decoder_only(tmp_path)), list[int]()

    def record(source: LocalGenerator, prompt: Feeds, infer: Any = LocalGenerator.infer) -> Any:
        read.append(int(prompt["input_ids"].max()))
        return infer(source, prompt)

    monkeypatch.setattr(LocalGenerator, "infer", record)
    out, dense = folders if is_larger else folders[::-1]
    assert check(CheckRequest(model=out, baseline=dense, threads=1, **LENGTHS), timer=each_once).slowdown is not None
    assert 0 < max(read) < SIZE


def test_outputs_of_folders_are_compared_as_requested(tmp_path: Path) -> None:
    out, dense = write_decoder_only(tmp_path / "out"), write_decoder_only(tmp_path / "dense")
    request = {"model": out, "baseline": dense, "threads": 1, "max_slowdown": "100000%", **LENGTHS}
    for expect in (None, "baseline", "any", str(dense)):
        verdict = check(CheckRequest(**request, expect=expect), timer=each_once)
        assert verdict.outputs.error in (0.0, None)
    encoder_decoder = write_encoder_decoder(tmp_path / "encoder_decoder")
    with pytest.raises(InputError):
        check(CheckRequest(**request, expect=str(tmp_path / "nowhere")), timer=each_once)
    with pytest.raises(CompressorError):
        check(CheckRequest(**{**request, "baseline": encoder_decoder}), timer=each_once)


@pytest.mark.parametrize("folder", ["nowhere", "empty"])
def test_a_folder_that_does_not_generate_is_refused(folder: str, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError) as error:
        check(CheckRequest(model=tmp_path / folder, baseline=tmp_path / folder, **LENGTHS), timer=each_once)
    assert error.value.code is ErrorCode.FILE_MISSING


def requested(url: str, baseline: str, **fields: Any) -> CheckRequest:
    return CheckRequest(
        model=f"{url}/v1/completions",
        baseline=f"{baseline}/v1/completions",
        max_slowdown="100000%",
        **LENGTHS,
        **fields,
    )


def test_two_endpoints_are_compared(capfd: Cap) -> None:
    with serving_events() as url:
        endpoint = f"{url}/v1/completions"
        result = compress(capfd, "check", endpoint, "--baseline", endpoint, *FLAGS, "--json")
        assert result.code == 0, result.err
        assert result.json["host"].startswith("small at 127.0.0.1:")
        assert result.json["outputs"] == {"expected": "any", "error": None, "tolerance": 0.0, "batches": 4}
        assert result.json["first_token"]["baseline_p50"] > 0


def test_texts_of_endpoints_are_compared_on_request() -> None:
    shorter = (completion("one"), completion(" three"), DONE)
    with serving_events() as url, serving_events(shorter) as changed:
        assert check(requested(url, changed), timer=each_once).passed
        assert check(requested(url, url, expect="baseline"), timer=each_once).outputs.error == 0.0
        with pytest.raises(MismatchError) as error:
            check(requested(url, changed, expect="baseline"), timer=each_once)
    assert error.value.code is ErrorCode.OUTPUTS_DIFFER


def test_a_server_that_fails_during_the_check_leaves_what_was_measured() -> None:
    served = []

    def pieces(body: Any) -> Any:
        served.append(body)
        return TEXT if len(served) < 12 else [TEXT[0], event({"error": "gone"})]

    with serving_events(pieces) as url, serving_events() as baseline:
        verdict = check(requested(url, baseline), timer=each_once)
    assert (verdict.outcome, verdict.phase) == (Outcome.INTERRUPTED, CheckPhase.TIMING)
    assert "gone" in verdict.interrupted
    assert verdict.slowdown is not None
    assert verdict.slowdown.rounds == 3


def test_a_fault_before_the_timing_has_the_exit_code_of_servers(capfd: Cap) -> None:
    with serving_events([TEXT[0], event({"error": "gone"})]) as url:
        endpoint = f"{url}/v1/completions"
        result = compress(capfd, "check", endpoint, "--baseline", endpoint, *FLAGS)
    assert (result.code, result.error_code) == (10, ErrorCode.SERVER_ERROR)
    assert isinstance(result.cause, ServerError)
    assert "gone" in result.error
