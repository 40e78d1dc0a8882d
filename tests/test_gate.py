"""The latency gate: right answers before times, no false alarm, every real slowdown, and whatever a server does."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent import futures
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compressor.cli.check import MILLISECONDS, SHARE
from compressor.errors import InputError, MismatchError, ServerError, UsageError
from compressor.gate import Asked, check, load, record
from compressor.gate.times import Times
from compressor.measure import timing
from graph_passes import save
from tests.command import compress
from tests.engines import parsed

grpc = pytest.importorskip("grpc")
service = pytest.importorskip("tritonclient.grpc.service_pb2_grpc")
messages = pytest.importorskip("tritonclient.grpc.service_pb2")

RNG = np.random.default_rng(0)
WEIGHT = RNG.normal(size=(4, 3)).astype(np.float32)


def graph(path: Path, scale: float = 1.0) -> Path:
    """`y = softmax(x w) * scale`."""
    body = "h = MatMul (x, w)\n s = Softmax <axis = -1> (h)\n y = Mul (s, k)"
    save(parsed(body, "float[B, 4] x", "float[B, 3] y", f"float[4, 3] w, float k = {{{scale}}}"), path)
    return path


@pytest.fixture
def graphs(tmp_path: Path) -> tuple[Path, Path]:
    return graph(tmp_path / "one.onnx"), graph(tmp_path / "other.onnx")


@pytest.fixture(autouse=True)
def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "settle", lambda: None)
    monkeypatch.setattr("compressor.gate.server._REST_SECONDS", 0.0)


def measured(model: float, baseline: float, spread: float = 0.02) -> Callable[..., Iterator[np.ndarray]]:
    """In place of `turns`: calls are made, and their times drawn about the two medians."""

    def turns(one: Any, other: Any, seconds: float, **_: Any) -> Iterator[np.ndarray]:
        for _block in range(30):
            one()
            other()
            yield 1e-3 * np.array([[model], [baseline]]) * np.exp(spread * RNG.normal(size=(2, 10)))

    return turns


@settings(deadline=None, max_examples=20)
@given(st.integers(0, 10_000), st.floats(0.0, 0.05), st.booleans())
def test_a_slowdown_is_told_from_noise(seed: int, drift: float, interleaved: bool) -> None:
    """A/A within the limit passes, twice the limit fails, whatever drifts together with both sides."""
    rng = np.random.default_rng(seed)
    for slower, holds in ((1.0, True), (1.12, False)):
        times, before = Times(), []
        for block in range(40):
            noise = np.exp(0.02 * rng.normal(size=(2, 20)) + (drift * block / 40 if interleaved else 0.0))
            pair = np.array([[slower], [1.0]]) * noise
            if interleaved:
                times.add(pair, True)
            else:
                times.model.append(pair[0])
                before.append(pair[1])
        found = times.slowdown(None if interleaved else before, 0.05, seed)
        assert found is not None
        assert found.low <= found.slowdown <= found.high
        assert found.holds is holds


def test_a_graph_against_itself(graphs: tuple[Path, Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    one, other = graphs
    files = {name: tmp_path / name for name in ("b.json", "j.xml", "h.jsonl", "p.svg")}
    args = ("check", one, "--baseline", other, "--seconds", "0.2", "--max-slowdown", "1000%", "--json")
    more = ("--save-baseline", files["b.json"], "--junit", files["j.xml"], "--history", files["h.jsonl"])
    for count in (1, 2):
        done = compress(capfd, *args, *more, "--plot", files["p.svg"])
        assert done.code == 0, done.err
        assert done.json["passed"]
        assert done.json["answers"]["error"] <= 1e-5
        assert len(record.history(files["h.jsonl"])) == count
    suite = ElementTree.parse(files["j.xml"]).getroot()
    assert [case.get("name") for case in suite] == ["answers", "slowdown", None]
    assert (suite.get("tests"), suite.get("failures"), suite.get("errors")) == ("2", "0", "0")
    assert files["p.svg"].read_text().startswith("<?xml")
    again = compress(capfd, "check", one, "--baseline", files["b.json"], "--seconds", "0.2", "--max-slowdown", "1000%")
    assert again.code == 0
    assert "blocks" in again.out


def test_a_slower_graph_fails_and_says_so(
    graphs: tuple[Path, Path], tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = graphs
    monkeypatch.setattr("compressor.gate.run.turns", measured(1.1, 1.0))
    junit = tmp_path / "j.xml"
    done = compress(capfd, "check", one, "--baseline", other, "--quiet", "--junit", junit)
    assert done.code == 7
    assert "slower than" in done.error
    assert "the limit is 5.0%" in done.error
    suite = ElementTree.parse(junit).getroot()
    assert suite.get("failures") == "1"
    monkeypatch.setattr("compressor.gate.run.turns", measured(0.9, 1.0))
    assert compress(capfd, "check", one, "--baseline", other, "--quiet").code == 0


def test_wrong_answers_are_not_timed(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("compressor.gate.run.turns", lambda *_, **__: pytest.fail("it was timed"))
    right, wrong = graph(tmp_path / "right.onnx"), graph(tmp_path / "wrong.onnx", scale=1.5)
    junit = tmp_path / "j.xml"
    done = compress(capfd, "check", wrong, "--baseline", right, "--expect", "baseline", "--quiet", "--junit", junit)
    assert done.code == 5
    assert ElementTree.parse(junit).getroot().get("failures") == "1"
    assert "not those of the baseline" in done.error
    answers = tmp_path / "answers.npz"
    inputs = tmp_path / "inputs.npz"
    np.savez(inputs, x=RNG.normal(size=(4, 4)).astype(np.float32))
    np.savez(answers, y=np.zeros((4, 3), np.float32))
    done = compress(capfd, "check", right, "--baseline", right, "--inputs", inputs, "--expect", answers, "--quiet")
    assert done.code == 5


def test_loadgen_bounds_the_tail_and_measures_throughput(graphs: tuple[Path, Path]) -> None:
    pytest.importorskip("mlperf_loadgen")
    one, other = graphs
    common: dict[str, Any] = {"seconds": 0.1, "load_seconds": 1.0, "max_slowdown": 1000.0}
    found = check(Asked(str(one), str(other), scenarios=("SingleStream", "Server", "Offline"), p99=10_000.0, **common))
    single, server, offline = found.loads
    assert single.holds
    assert server.holds
    assert offline.samples_per_second is not None
    assert offline.samples_per_second > 0
    assert min(single.queries, server.queries) >= 662
    tight = check(Asked(str(one), str(other), p99=1e-6, **common))
    assert not tight.passed
    assert "p99 may be" in tight.failures[0]


def test_bad_input_is_one_line(
    graphs: tuple[Path, Path], tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = graphs
    monkeypatch.setattr("compressor.gate.run.turns", measured(1.0, 1.0))
    wrong, short, text = tmp_path / "wrong.npz", tmp_path / "short.npz", tmp_path / "rows.tsv"
    np.savez(wrong, x=np.zeros((3, 5), np.float32))
    np.savez(short, z=np.zeros((3, 4), np.float32))
    text.write_text("text\nhello\n")
    torn = tmp_path / "torn.npz"
    torn.write_bytes(wrong.read_bytes()[:40])
    history = tmp_path / "history.jsonl"
    history.write_text("nothing\n")
    baseline = tmp_path / "b.json"
    base: tuple[str | Path, ...] = ("check", one, "--baseline", other, "--quiet")
    assert compress(capfd, *base, "--save-baseline", baseline).code == 0
    elsewhere = json.loads(baseline.read_text())
    elsewhere["machine"]["processor"] = "another"
    (tmp_path / "elsewhere.json").write_text(json.dumps(elsewhere))
    cases: list[tuple[tuple[str | Path, ...], int, str]] = [
        (("check", "--baseline", other), 2, "name an ONNX file"),
        (("check", tmp_path / "none.onnx", "--baseline", other), 3, "no such file"),
        ((*base, "--inputs", wrong), 3, "the model takes ['any', 4]"),
        ((*base, "--inputs", short), 3, "nothing for the input 'x'"),
        ((*base, "--inputs", torn), 3, "no archive of arrays"),
        ((*base, "--inputs", text), 2, "--tokenizer"),
        ((*base, "--inputs", wrong, "--batch", "9"), 3, "the model takes"),
        ((*base, "--max-slowdown", "much"), 2, "as in 5% or 0.05"),
        ((*base, "--p99", "-1ms"), 2, "as in 10ms"),
        ((*base, "--scenario", "multistream"), 2, "use singlestream, server, offline"),
        ((*base, "--plot", tmp_path / "p.svg"), 2, "give --history"),
        ((*base, "--plot", tmp_path / "p.foo", "--history", tmp_path / "h"), 2, "ends in .svg or .png"),
        ((*base, "--junit", tmp_path / "none" / "j.xml"), 2, "there is no folder"),
        ((*base, "--max-slowdown", "5"), 2, "as in 5% or 0.05"),
        ((*base, "--tolerance", "nan"), 2, "give a finite number"),
        ((*base, "--deadline", "inf"), 2, "give a finite number"),
        ((*base, "--p99", "1ms", "--scenario", "offline"), 2, "has no bound"),
        ((*base, "--rate", "5"), 2, "server scenario"),
        ((*base, "--history", history), 3, "line 1"),
        (("check", one, "--baseline", tmp_path / "elsewhere.json", "--quiet"), 3, "another machine (processor another"),
        (("check", one, "--baseline", baseline, "--quiet", "--batch", "2"), 3, "measured on other inputs"),
        (("check", one, "--baseline", history.with_suffix(".json"), "--quiet"), 3, "no baseline"),
        ((*base, "--expect", tmp_path / "nowhere"), 3, "give baseline, any"),
    ]
    for args, code, said in cases:
        done = compress(capfd, *args)
        assert (done.code, said in done.error) == (code, True), done.err
    forced = compress(capfd, "check", one, "--baseline", tmp_path / "elsewhere.json", "--quiet", "--force")
    assert forced.code == 0


@settings(deadline=None)
@given(st.text(max_size=8) | st.floats(allow_nan=True).map(str) | st.floats(0, 1e3).map("{}%".format))
def test_shares_and_times_parse_or_are_refused(text: str) -> None:
    for kind in (SHARE, MILLISECONDS):
        found = None
        with contextlib.suppress(UsageError):
            found = kind.convert(text, None, None)
        assert found is None or 0 <= found < float("inf")


def test_a_scenario_ends_though_more_arrives_than_is_answered() -> None:
    pytest.importorskip("mlperf_loadgen")
    found = load.measure("Server", [lambda: time.sleep(0.05)], batch=1, p50=0.01, bound=1.0, rate=5000.0, seconds=0.05)
    assert not found.holds
    assert "more queries arrive" in found.why or "took longer" in found.why

    def broken() -> None:
        raise RuntimeError("no call")

    with pytest.raises(RuntimeError, match="no call"):
        load.measure("SingleStream", [broken], batch=1, p50=1.0, bound=1.0, rate=None, seconds=0.05)


class Served(service.GRPCInferenceServiceServicer):  # type: ignore[name-defined]
    """A server of the KServe v2 protocol that misbehaves as it is told to.

    Args:
        models: name -> a function of `x [batch, 4]`.
        dies_after: calls after which it answers no more.
        slow: seconds that every answer takes.
    """

    def __init__(self, models: Mapping[str, Callable[[np.ndarray], np.ndarray]], dies_after: int, slow: float) -> None:
        self.models, self.left, self.slow = models, dies_after, slow

    def ServerLive(self, request: Any, context: Any) -> Any:  # noqa: N802
        return messages.ServerLiveResponse(live=True)

    def ServerMetadata(self, request: Any, context: Any) -> Any:  # noqa: N802
        return messages.ServerMetadataResponse(name="served", version="1")

    def ModelReady(self, request: Any, context: Any) -> Any:  # noqa: N802
        return messages.ModelReadyResponse(ready=request.name in self.models)

    def ModelMetadata(self, request: Any, context: Any) -> Any:  # noqa: N802
        tensor = messages.ModelMetadataResponse.TensorMetadata
        return messages.ModelMetadataResponse(
            name=request.name, inputs=[tensor(name="x", datatype="FP32", shape=[-1, 4])]
        )

    def ModelInfer(self, request: Any, context: Any) -> Any:  # noqa: N802
        time.sleep(self.slow)
        self.left -= 1
        if self.left < 0:
            context.abort(grpc.StatusCode.UNAVAILABLE, "gone")
        x = np.frombuffer(request.raw_input_contents[0], np.float32).reshape(-1, 4)
        y = self.models[request.model_name](x).astype(np.float32)
        shape = (1, 3) if y.size == 0 else y.shape  # no bytes, whatever the shape promises
        output = messages.ModelInferResponse.InferOutputTensor(name="y", datatype="FP32", shape=shape)
        return messages.ModelInferResponse(outputs=[output], raw_output_contents=[y.tobytes()])


def answer(x: np.ndarray) -> np.ndarray:
    return x @ WEIGHT


@contextmanager
def serving(
    models: Mapping[str, Callable[[np.ndarray], np.ndarray]] | None = None, dies_after: int = 10**9, slow: float = 0.0
) -> Iterator[str]:
    """Its URL."""
    server = grpc.server(futures.ThreadPoolExecutor(4))
    served = Served(models or {"small": answer, "dense": answer}, dies_after, slow)
    service.add_GRPCInferenceServiceServicer_to_server(served, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"grpc://127.0.0.1:{port}"
    finally:
        server.stop(None)


def asked(url: str, **more: Any) -> Asked:
    return Asked(**{"model": "small", "baseline": "dense", "server": url, "seconds": 0.1, "max_slowdown": 1e3, **more})


def test_models_of_a_server() -> None:
    with serving() as url:
        found = check(asked(url))
        assert found.passed
        assert found.host.startswith("served 1 at")
        assert found.answers.expected == "the baseline"


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda x: np.zeros((0, 3)), "is no array"),
        (lambda x: answer(x) + 1, "not those of the baseline"),
        (lambda x: answer(x) * np.nan, "NaN"),
        (lambda x: answer(x)[:, :2], "not those of the baseline"),
    ],
)
def test_a_server_that_answers_wrong(wrong: Callable[[np.ndarray], np.ndarray], said: str) -> None:
    with serving({"small": wrong, "dense": answer}) as url, pytest.raises(MismatchError, match=said):
        check(asked(url))


def test_a_compressed_model_answers_otherwise_by_design() -> None:
    with serving({"small": lambda x: answer(x) + 1, "dense": answer}) as url:
        assert check(asked(url, expect="any")).passed
    other = r"is float32 \[1, 2\], the baseline's is float32 \[1, 3\]"
    narrow = {"small": lambda x: answer(x)[:, :2], "dense": answer}
    with serving(narrow) as url, pytest.raises(MismatchError, match=other):
        check(asked(url, expect="any"))


def test_a_server_that_is_not_there_or_lacks_the_model() -> None:
    with pytest.raises(ServerError, match="is the server up"):
        check(asked("grpc://127.0.0.1:9", deadline=1.0))
    with serving({"dense": answer}) as url, pytest.raises(ServerError, match="no model 'small' that is ready"):
        check(asked(url))
    with pytest.raises(UsageError, match="give grpc://HOST:PORT"):
        check(asked("localhost:8001"))


def test_what_speaks_no_http_is_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def hang_up() -> None:
            with contextlib.suppress(OSError):
                while True:
                    listening.accept()[0].close()

        threading.Thread(target=hang_up, daemon=True).start()
        with pytest.raises(ServerError, match="is the server up"):
            check(asked(f"http://127.0.0.1:{listening.getsockname()[1]}", deadline=1.0))
        listening.shutdown(socket.SHUT_RDWR)


def test_a_call_that_takes_too_long_is_given_up() -> None:
    began = time.monotonic()
    with serving(slow=3.0) as url, pytest.raises(ServerError, match="--deadline allows longer"):
        check(asked(url, deadline=0.3))
    assert time.monotonic() - began < 30


def test_a_server_that_dies_midway_leaves_what_was_measured(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    history = tmp_path / "history.jsonl"
    with serving(dies_after=400) as url:
        done = compress(
            capfd,
            *("check", "--server", url, "--model", "small", "--baseline", "dense", "--seconds", "60", "--quiet"),
            *("--history", history, "--max-slowdown", "1000%"),
        )
    assert done.code == 10
    assert "until then" in done.error
    (kept,) = record.history(history)
    assert kept.interrupted
    assert kept.slowdown is not None
    assert kept.slowdown.blocks >= 1


def test_other_inputs_than_the_baseline_takes(graphs: tuple[Path, Path], tmp_path: Path) -> None:
    other = tmp_path / "ids.onnx"
    save(parsed("y = Identity (ids)", "int64[B, 4] ids", "int64[B, 4] y"), other)
    with pytest.raises(InputError, match="the two must have the same inputs"):
        check(Asked(str(graphs[0]), str(other), seconds=0.1))


def test_the_fixture_fails_where_the_check_does(graphs: tuple[Path, Path], tmp_path: Path) -> None:
    one, other = graphs
    wrong = graph(tmp_path / "wrong.onnx", scale=2.0)
    (tmp_path / "test_latency.py").write_text(
        f"""
import pytest
pytestmark = pytest.mark.latency_gate(baseline={str(other)!r}, seconds=0.1, max_slowdown="1000%")

@pytest.mark.latency_gate(history="history.jsonl")
def test_as_fast(latency_gate):
    assert latency_gate({str(one)!r}).passed

@pytest.mark.latency_gate(expect="baseline")
def test_wrong(latency_gate):
    latency_gate({str(wrong)!r})

def test_unknown_option(latency_gate):
    latency_gate({str(one)!r}, speed=3)
"""
    )
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "--strict-markers",
        str(tmp_path),
    ]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "1 passed" in done.stdout, done.stdout + done.stderr
    assert "2 failed" in done.stdout
    assert "not those of the baseline" in done.stdout
    assert "options are those of compress check" in done.stdout
    assert (tmp_path / "history.jsonl").exists()
