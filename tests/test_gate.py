"""The latency gate: right answers before times, no false alarm, every real slowdown, and whatever a server does."""

from __future__ import annotations

import contextlib
import itertools
import json
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compressor.cli.check import MILLISECONDS, SHARE
from compressor.errors import InputError, MismatchError, ServerError, UsageError
from compressor.latency import CheckRequest, artifacts, check
from compressor.latency.baseline import Baseline
from compressor.latency.round_times import Times
from compressor.measure import timing
from compressor.targets import target
from compressor.targets.cuda import Device
from compressor.targets.onnxruntime.ort_session import describe, open_session, run
from compressor.targets.relative_error import relative_error
from graph_passes import save
from tests.command import compress
from tests.engines import parsed
from tests.served import MODELS, RNG, answer, asked, graph, measured, serving, text_model


@pytest.fixture
def graphs(tmp_path: Path) -> tuple[Path, Path]:
    return graph(tmp_path / "one.onnx"), graph(tmp_path / "other.onnx")


@pytest.fixture(autouse=True)
def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "settle", lambda: None)
    monkeypatch.setattr("compressor.latency.triton_client._REST_SECONDS", 0.0)


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
        assert len(artifacts.history(files["h.jsonl"])) == count
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
    monkeypatch.setattr("compressor.latency.check.turns", measured(1.1, 1.0))
    junit = tmp_path / "j.xml"
    done = compress(capfd, "check", one, "--baseline", other, "--quiet", "--junit", junit)
    assert done.code == 7
    assert "slower than" in done.error
    assert "the limit is 5.0%" in done.error
    suite = ElementTree.parse(junit).getroot()
    assert suite.get("failures") == "1"
    monkeypatch.setattr("compressor.latency.check.turns", measured(0.9, 1.0))
    assert compress(capfd, "check", one, "--baseline", other, "--quiet").code == 0


def test_wrong_answers_are_not_timed(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("compressor.latency.check.turns", lambda *_, **__: pytest.fail("it was timed"))
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


def test_bad_input_is_one_line(
    graphs: tuple[Path, Path], tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = graphs
    monkeypatch.setattr("compressor.latency.check.turns", measured(1.0, 1.0))
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
    kept = json.loads(baseline.read_text())
    assert "CPUExecutionProvider" in kept["host"]
    first, *others = kept["answers"]
    changed = {
        "elsewhere": {"machine": {**kept["machine"], "processor": "another"}},
        "provider": {"host": kept["host"].replace("CPU", "CUDA")},
        "few": {"answers": others},
        "list": {"answers": [[1.0], *others]},
        "dtype": {"answers": [{"y": {**first["y"], "dtype": "float99"}}, *others]},
        "ragged": {"answers": [{"y": {**first["y"], "values": [[1.0], []]}}, *others]},
    }
    for name, fields in changed.items():
        (tmp_path / f"{name}.json").write_text(json.dumps({**kept, **fields}))
    other_code = tmp_path / "utf16.jsonl"
    other_code.write_text("history", encoding="utf-16")
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
        ((*base, "--max-slowdown", "5.0"), 2, "as in 5% or 0.05"),
        ((*base, "--save-baseline", tmp_path / "b.dat"), 2, "ends in .json"),
        ((*base, "--save-baseline", tmp_path / "none" / "b.json"), 2, "there is no folder"),
        ((*base, "--history", history), 3, "none of its lines is a check"),
        ((*base, "--history", other_code), 3, "none of its lines is a check"),
        (("check", one, "--baseline", tmp_path / "elsewhere.json", "--quiet"), 3, "another machine (processor another"),
        (("check", one, "--baseline", tmp_path / "provider.json", "--quiet"), 3, "another machine (host onnxruntime"),
        (("check", one, "--baseline", tmp_path / "few.json", "--quiet"), 3, "has answers to 15 of 16 batches"),
        (("check", one, "--baseline", tmp_path / "list.json", "--quiet"), 3, "no baseline"),
        (("check", one, "--baseline", tmp_path / "dtype.json", "--quiet"), 3, "no baseline"),
        (("check", one, "--baseline", tmp_path / "ragged.json", "--quiet"), 3, "no baseline"),
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
@given(st.text(max_size=8) | st.floats() | st.integers() | st.floats(0, 1e3).map("{}%".format))
def test_shares_and_times_parse_or_are_refused(value: object) -> None:
    for kind in (SHARE, MILLISECONDS):
        found = None
        with contextlib.suppress(UsageError):
            found = kind.convert(value, None, None)
        assert found is None or 0 <= found < float("inf")
        assert found is None or kind is MILLISECONDS or found < 1 or "%" in str(value)


def test_five_is_no_share() -> None:
    assert [SHARE.convert(value, None, None) for value in (0.05, "0.05", "5%", "500%")] == [0.05, 0.05, 0.05, 5.0]
    for value in (5, 5.0, "5", -0.1):
        with pytest.raises(UsageError, match=r"as in 5% or 0\.05"):
            SHARE.convert(value, None, None)


def test_a_check_that_cannot_be_made_leaves_no_older_report(
    graphs: tuple[Path, Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    one, other = graphs
    torn, junit, history = tmp_path / "torn.onnx", tmp_path / "j.xml", tmp_path / "history.jsonl"
    torn.write_bytes(one.read_bytes()[:20])
    history.write_text("nothing\n")
    faults: list[tuple[tuple[str | Path, ...], int]] = [
        ((torn, "--baseline", other), 3),
        ((one, "--baseline", other, "--history", history), 3),
        ((one, "--baseline", other, "--rate", "5"), 2),
    ]
    for args, code in faults:
        junit.write_text("an older one, that passed")
        assert compress(capfd, "check", *args, "--junit", junit, "--quiet").code == code
        suite = ElementTree.parse(junit).getroot()
        assert (suite.get("failures"), suite.get("errors")) == ("0", "1")
        assert suite[0][0].tag == "error"


def test_a_report_is_xml_whatever_a_server_says() -> None:
    said = "\x1b[31mgone\x00\x0b \ud800 <\ufffe> & \U0001f600 \u00fc"
    (case,) = ElementTree.fromstring(artifacts.broken("small\x08", ServerError(said)).encode())
    assert case[0].get("message") == "[31mgone  <> & \U0001f600 \u00fc"


def ids(path: Path, kind: str = "int64") -> Path:
    save(parsed("y = Cast <to = 1> (ids)", f"{kind}[B, 4] ids", "float[B, 4] y"), path)
    return path


def test_integers_may_be_narrower_than_those_of_the_other_model(tmp_path: Path) -> None:
    wide, narrow = str(ids(tmp_path / "wide.onnx")), str(ids(tmp_path / "narrow.onnx", "int32"))
    for one, other in ((wide, narrow), (narrow, wide)):
        found = check(CheckRequest(one, other, expect=other, seconds=0.1, max_slowdown=1e3))
        assert (found.answers.expected, found.answers.error) == (other, 0.0)


def test_a_plan_with_narrow_integers_is_compared_with_its_graph(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph, path = ids(tmp_path / "model.onnx"), tmp_path / "engine.plan"
    path.touch()
    engine = target("ort")(ids(tmp_path / "narrow.onnx", "int32"), tmp_path / "engine.onnx")
    papers = SimpleNamespace(precision="fp16", inputs={"ids": "int32"}, profiles={"ids": ((1, 4), (2, 4), (8, 4))})
    plan = SimpleNamespace(metadata=papers, session={"runtime": "tensorrt 8.6.1"}, run=engine.run)
    monkeypatch.setattr("compressor.targets.tensorrt.target.load", lambda path: plan)
    gpu = SimpleNamespace(device=Device("NVIDIA H200", (9, 0), 1 << 37))
    monkeypatch.setattr("compressor.latency.local_engine.driver", lambda: gpu)
    found = check(CheckRequest(str(path), str(graph), seconds=0.1, max_slowdown=1e3))
    assert found.host == "tensorrt 8.6.1 on NVIDIA H200 (SM 9.0)"
    assert (found.answers.expected, found.answers.tolerance) == ("its own graph, run plainly", 2e-2)
    with pytest.raises(UsageError, match=r"engine\.plan is a TensorRT engine; leave it out"):
        check(CheckRequest(str(path), str(graph), kernel=path))


def test_rows_of_text_are_what_a_model_is_asked(tmp_path: Path) -> None:
    folder, rows = text_model(tmp_path / "out"), tmp_path / "rows.tsv"
    rows.write_text("text\n" + "the good film\n" * 40)
    path = str(folder / "model.onnx")
    found = check(
        CheckRequest(path, path, inputs=rows, tokenizer=folder, batch=2, seq=8, seconds=0.1, max_slowdown=1e3)
    )
    assert found.inputs == "32 rows of rows.tsv"


def test_right_answers_are_those_of_a_file(graphs: tuple[Path, Path], tmp_path: Path) -> None:
    one, other = graphs
    x = RNG.normal(size=(4, 4)).astype(np.float32)
    inputs, answers = tmp_path / "inputs.npz", tmp_path / "answers.npz"
    np.savez(inputs, x=x)
    np.savez(answers, **run(open_session(one, describe("cpu", 1)), {"x": x}))
    for expect in (other, answers):
        found = check(
            CheckRequest(str(one), str(other), inputs=inputs, expect=str(expect), seconds=0.1, max_slowdown=1e3)
        )
        assert (found.answers.expected, found.answers.batches) == (str(expect), 4)


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


def test_answers_that_change_while_they_are_timed() -> None:
    calls = itertools.count()
    changing = {"small": lambda x: answer(x) + (next(calls) >= 40), "dense": answer}
    with serving(changing) as url, pytest.raises(MismatchError, match="not those of the baseline"):
        check(asked(url))
    assert next(calls) > 40, "it was timed"
    calls = itertools.count()
    with serving(changing) as url:
        assert check(asked(url, expect="any")).passed
    assert next(calls) > 40


def test_whole_numbers_are_equal_or_wrong(tmp_path: Path) -> None:
    paths = []
    for k in (29_500.0, 30_000.0):
        paths.append(str(tmp_path / f"{k}.onnx"))
        body = "m = Mul (x, k)\n y = Cast <to = 7> (m)"
        save(parsed(body, "float[B, 4] x", "int64[B, 4] y", f"float k = {{{k}}}"), Path(paths[-1]))
    np.savez(tmp_path / "ones.npz", x=np.ones((2, 4), np.float32))
    options: dict[str, Any] = {"inputs": tmp_path / "ones.npz", "expect": "baseline", "seconds": 0.1}
    with pytest.raises(MismatchError, match="whole numbers have to be equal"):
        check(CheckRequest(paths[0], paths[1], **options))
    assert check(CheckRequest(paths[0], paths[1], **options, tolerance=0.02, max_slowdown=1e3)).passed


def test_a_version_of_a_model_is_asked_for_by_number() -> None:
    with serving() as url:
        assert check(asked(url, model="small:1", baseline="small:2")).model == "small:1"
        with pytest.raises(ServerError, match="no model 'small:3' that is ready"):
            check(asked(url, model="small:3"))
        for name in ("small:", ":1", "small:new"):
            with pytest.raises(UsageError, match="give NAME or NAME:VERSION, a number"):
                check(asked(url, model=name))


def test_the_length_that_is_kept_is_that_of_the_inputs(tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", x=np.ones((2, 4), np.float32))
    with serving() as url:
        assert check(asked(url, inputs=tmp_path / "x.npz")).seq == 4


def test_a_history_outlives_torn_lines_and_later_versions(
    graphs: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("compressor.latency.check.turns", measured(1.0, 1.0))
    history, picture = tmp_path / "history.jsonl", tmp_path / "history.svg"
    found = check(CheckRequest(str(graphs[0]), str(graphs[1])))
    artifacts.append(history, found)
    line = history.read_text()
    history.write_text(line.replace('{"time"', '{"known_later": 1, "time"') + line[:40])
    artifacts.append(history, found.model_copy(update={"batch": 8}))
    assert [kept.batch for kept in artifacts.history(history)] == [1, 8]
    assert history.read_text().splitlines()[1] == line[:40]
    drawn: list[int] = []
    monkeypatch.setattr("matplotlib.axes.Axes.scatter", lambda self, places, *_, **__: drawn.append(len(places)))
    artifacts.picture(artifacts.history(history), found, picture)
    assert drawn == [1], "batches of eight have a picture of their own"


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
    for url in ("localhost:8001", "http://", "http://localhost:here", "grpc://localhost:99999"):
        with pytest.raises(UsageError, match="give grpc://HOST:PORT"):
            check(asked(url))


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
    (kept,) = artifacts.history(history)
    assert kept.interrupted
    assert kept.slowdown is not None
    assert kept.slowdown.blocks >= 1
    assert "passed" not in "".join(kept.lines())
    cases = {case.get("name"): [entry.tag for entry in case] for case in ElementTree.fromstring(artifacts.junit(kept))}
    assert cases == {"answers": [], "slowdown": ["skipped"], "timing": ["error"], None: []}


def test_a_model_that_is_unloaded_midway_leaves_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("compressor.latency.check.turns", measured(1.0, 1.0))
    models, calls = dict(MODELS), itertools.count(1)

    def unloaded(x: np.ndarray) -> np.ndarray:
        if next(calls) == 40:
            del models["small"]
        return answer(x)

    models["small"] = unloaded
    with serving(models) as url:
        found = check(asked(url))
    assert "small refuses the request" in found.interrupted
    assert found.slowdown is not None
    assert found.slowdown.blocks == 24, "sixteen calls were to compare the answers"


def test_a_saved_baseline_of_a_servers_model(tmp_path: Path) -> None:
    saved = tmp_path / "dense.json"
    with serving() as url:
        assert check(asked(url, model="dense", save_baseline=saved)).passed
        found = check(asked(url, baseline=str(saved)))
        assert found.passed
        assert found.slowdown is not None
        assert not found.slowdown.interleaved
        with serving() as another, pytest.raises(InputError, match="measured on another machine"):
            check(asked(another, baseline=str(saved)))


def test_texts_are_answers_too(tmp_path: Path) -> None:
    saved = tmp_path / "texts.json"
    texts = np.array([["yes", "caf\u00e9", b"\xff"]], np.object_)
    models = {"small": lambda x: texts[:, ::-1], "dense": lambda x: texts, "same": lambda x: texts}
    with serving(models) as url:
        assert check(asked(url, model="dense", baseline="same", save_baseline=saved)).passed
        assert check(asked(url, model="same", baseline=str(saved))).passed
        for baseline in ("dense", str(saved)):
            with pytest.raises(MismatchError, match="not those of the baseline"):
                check(asked(url, baseline=baseline))


def test_a_baseline_keeps_texts_as_bytes(tmp_path: Path) -> None:
    texts = np.array([["yes", "caf\u00e9", b"\xff"]], np.object_)  # a runtime gives str, a server bytes
    facts: dict[str, Any] = {"model": "m", "host": "h", "inputs": "rows", "batch": 1, "seq": 8, "machine": {}}
    Baseline(**facts, times=((1.0,),), answers=({"y": texts},)).save(tmp_path / "texts.json")
    (found,) = Baseline.load(tmp_path / "texts.json").answers
    assert found["y"].tolist() == [[b"yes", "caf\u00e9".encode(), b"\xff"]]
    assert relative_error(texts, found["y"], {}) == 0.0
    assert relative_error(texts[:, ::-1], found["y"], {}) == float("inf")


def test_other_inputs_than_the_baseline_takes(graphs: tuple[Path, Path], tmp_path: Path) -> None:
    with pytest.raises(InputError, match="the two must have the same inputs"):
        check(CheckRequest(str(graphs[0]), str(ids(tmp_path / "ids.onnx")), seconds=0.1))
    floats = tmp_path / "floats.onnx"
    save(parsed("y = Identity (ids)", "float[B, 4] ids", "float[B, 4] y"), floats)
    with pytest.raises(InputError, match=r"ids \(int64\) is float32 in what the other model takes"):
        check(CheckRequest(str(floats), str(ids(tmp_path / "ids.onnx")), seconds=0.1))
