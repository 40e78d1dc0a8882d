"""Advice of `latency`: see `tests.advice.world`."""

from __future__ import annotations

import contextlib
import functools
import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from compressor.targets.tensor_specs import FREE, TensorSpec
from tests.advice.world import World, advice
from tests.graph.files import classifier
from tests.latency.graphs import rounding_graph, softmax_graph, text_model
from tests.latency.timers import drawn_times

EQUAL_TIMES = drawn_times(1.0, 1.0, rounds=10)


def check_command(w: World, *flags: Any) -> tuple[Any, ...]:
    """A check of `small.onnx` with equal times; `x.npz` has inputs."""
    import compressor.latency as latency

    if not w.file("small.onnx").exists():
        softmax_graph(w.file("small.onnx"))
        softmax_graph(w.file("dense.onnx"))
        np.savez(w.file("x.npz"), x=np.ones((4, 4), np.float32))
        w.patch.setattr(latency, "check", functools.partial(latency.check, timer=EQUAL_TIMES))
    return ("check", "small.onnx", "--baseline", "dense.onnx", "--batch", "1", *flags)


@advice("latency.artifacts read_history text #2")
def _(w: World) -> None:
    w.rows("history.jsonl", "no record")
    command = check_command(w, "--junit", "junit.xml", "--history")
    w.fails(*command, "history.jsonl")
    w.right(*command, "another.jsonl")


@advice("latency.artifacts read_history text")
def _(w: World) -> None:
    from compressor.latency.artifacts import read_history

    w.file("folder").mkdir()
    w.file("history.jsonl").touch()
    w.fails(read_history, w.file("folder"))
    w.right(read_history, w.file("history.jsonl"))


@advice("latency.baseline Baseline.load text", zoo=True)
def _(w: World) -> None:
    command = check_command(w)
    for content in (None, "{}"):
        if content is not None:
            w.rows("base.json", content)
        w.fails(*command, "--baseline", "base.json")
        w.right(*command, "--save-baseline", "base.json")
        w.right(*command, "--baseline", "base.json")
        w.file("base.json").unlink()


@advice("latency.baseline check_comparable text", zoo=True)
def _(w: World) -> None:
    command = check_command(w)
    w.right(*command, "--save-baseline", "base.json")
    stored = json.loads(w.file("base.json").read_text())
    w.file("base.json").write_text(json.dumps({**stored, "host": "elsewhere"}))
    w.fails(*command, "--baseline", "base.json")
    w.right(*command, "--baseline", "base.json", "--force")
    w.right(*command, "--save-baseline", "base.json")
    w.right(*command, "--baseline", "base.json")


@advice("latency.baseline check_comparable text #2")
def _(w: World) -> None:
    command = check_command(w, "--inputs", "x.npz", "--seed", "1")
    w.right(*command, "--save-baseline", "base.json")
    np.savez(w.file("others.npz"), x=np.zeros((4, 4), np.float32))
    w.fails(*command, "--baseline", "base.json", "--inputs", "others.npz")
    w.right(*command, "--baseline", "base.json")
    w.right(*command, "--inputs", "others.npz", "--save-baseline", "base.json")
    w.right(*command, "--inputs", "others.npz", "--baseline", "base.json")


@advice("latency.check _Check.run text")
def _(w: World) -> None:
    command = check_command(w)
    w.notes(*command)
    w.right(*command, "--inputs", "x.npz")


@advice("latency.local_engine load_engine text")
def _(w: World) -> None:
    command = check_command(w)
    w.fails("check", "nowhere.onnx", *command[2:])
    w.right(*command)
    w.clear("server-unreachable", *command[:1], *command[2:], "--model", "small", "--server", "http://127.0.0.1:9")


@advice("latency.local_generator LocalGenerator.__init__ text")
def _(w: World) -> None:
    from tests.generation.counting import write_decoder_only

    for name in ("out", "dense"):
        write_decoder_only(w.file(name))
    streams = ("--prompt-tokens", "5", "--max-slowdown", "100000%", "--seconds", "0.1")
    w.fails("check", "small.onnx", "--baseline", "dense.onnx", *streams)
    w.right("check", "out", "--baseline", "dense", *streams)
    w.right(*check_command(w))


@advice("latency.streams read_stream text")
def _(w: World) -> None:
    from compressor.config.check import CheckRequest
    from compressor.latency.event_streams import EventSource
    from tests.latency.event_server import DONE, TEXT, completion, serving_events

    def texts(body: Any) -> Any:
        return TEXT if body["max_tokens"] > 2 else (completion("one"), DONE)

    def run(url: str, new: int) -> None:
        EventSource(CheckRequest(model=url, baseline=url, new_tokens=new), url)

    with serving_events(texts) as url, serving_events(TEXT) as changed:
        w.fails(run, f"{url}/v1/completions", 2)
        w.right(run, f"{url}/v1/completions", 8)
        w.right(run, f"{changed}/v1/completions", 2)


@advice("latency.local_engine _load_built contradiction")
def _(w: World) -> None:
    from compressor.latency.local_engine import _load_built
    from compressor.targets import target

    w.fails(_load_built, target("openvino"), w.file("engine.xml"), w.path, 1, w.file("kernel.so"))
    w.clear("file-missing", _load_built, target("openvino"), w.file("engine.xml"), w.path, 1, None)


@advice("latency.output_check ExpectedOutputs._error outputs-differ")
def _(w: World) -> None:
    command = check_command(w, "--inputs", "x.npz", "--expect", "baseline")
    rounding_graph(w.file("small.onnx"), 29_500.0)
    rounding_graph(w.file("dense.onnx"), 30_000.0)
    w.fails(*command)
    w.right(*command, "--tolerance", "0.02")


@advice("latency.output_check _read_expected text")
def _(w: World) -> None:
    command = check_command(w, "--inputs", "x.npz")
    np.savez(w.file("y.npz"))
    w.fails(*command, "--expect", "y.npz")
    outputs(w)
    w.right(*command, "--expect", "y.npz")


def outputs(w: World, rows: int = 4) -> None:
    """Write the outputs of the graph for `x.npz`."""
    from compressor.targets import target

    engine = target("ort").load(w.file("small.onnx"))
    computed: Any = engine.run({"x": np.ones((rows, 4), np.float32)})
    np.savez(w.file("y.npz"), **computed)


@advice("latency.output_check _read_expected text #2")
def _(w: World) -> None:
    command = check_command(w, "--inputs", "x.npz")
    w.fails(*command, "--expect", "nowhere")
    outputs(w)
    run = w.file("run")
    run.mkdir()
    softmax_graph(run / "model.onnx")
    for expect in ("baseline", "any", "y.npz", "dense.onnx", "run"):
        w.right(*command, "--expect", expect)


@advice("latency.output_check _rows text")
def _(w: World) -> None:
    command = check_command(w, "--inputs", "x.npz", "--expect", "y.npz")
    np.savez(w.file("y.npz"), y=np.float32(1.0))
    w.fails(*command)
    outputs(w)
    w.right(*command)


@advice("latency.output_check _rows text #2")
def _(w: World) -> None:
    command = check_command(w, "--inputs", "x.npz", "--expect", "y.npz")
    outputs(w, 2)
    w.fails(*command)
    outputs(w, 4)
    w.right(*command)


@advice("latency.output_check _run_graph text")
def _(w: World) -> None:
    from compressor.targets import target

    command = check_command(w)
    target("openvino").build(w.file("small.onnx"), w.file("engine.xml"))
    engine = ("check", "engine.xml", *command[2:], "--inputs", "x.npz")
    w.fails(*engine)
    for expect in ("small.onnx", "baseline", "any"):
        w.right(*engine, "--expect", expect)


@advice("latency.local_engine LocalEngine._model text")
def _(w: World) -> None:
    from compressor.targets import target

    command = check_command(w)
    target("openvino").build(w.file("small.onnx"), w.file("engine.xml"))
    engine = ("check", "engine.xml", *command[2:])
    w.fails(*engine)
    w.right(*engine, "--inputs", "x.npz", "--expect", "baseline")
    softmax_graph(w.file("model.onnx"))
    w.right(*engine)


@advice("latency.output_check expected_outputs text")
def _(w: World) -> None:
    import pytest

    from compressor.config.check import CheckRequest
    from compressor.latency import check
    from tests.latency.http_server import serving_http

    pytest.importorskip("tritonclient.http")
    response = {"outputs": [{"name": "y", "datatype": "FP32", "shape": [1, 3], "data": [9.0, 9.0, 9.0]}]}
    np.savez(w.file("x.npz"), x=np.ones((4, 4), np.float32))
    np.savez(w.file("y.npz"), y=np.full((4, 3), 9.0, np.float32))
    with serving_http(small=lambda x: response) as url:

        def run(**fields: Any) -> None:
            request = {"server": url, "model": "small", "baseline": "dense", "batch": 1, "inputs": w.file("x.npz")}
            check(CheckRequest(**request, **fields), timer=EQUAL_TIMES)

        w.fails(run)
        w.right(lambda: run(expect="any"))
        w.right(lambda: run(expect=str(w.file("y.npz"))))


@advice("latency.request_batches load_batches text", zoo=True)
def _(w: World) -> None:
    command = check_command(w)
    file = classifier(w.file("text.onnx"))
    command = ("check", file, "--baseline", file, *command[4:])
    w.fails(*command, "--seq", "40")
    w.right(*command, "--seq", "20")
    w.right(*command)


@advice("latency.request_batches load_batches text #2")
def _(w: World) -> None:
    w.fails(*check_command(w, "--inputs", "nowhere.npz"))
    w.right(*check_command(w, "--inputs", "x.npz"))


@advice("latency.request_batches load_batches text #3")
def _(w: World) -> None:
    command = check_command(w, "--inputs", "x.npz", "--batch")
    w.fails(*command, "8")
    w.right(*command, "4")
    np.savez(w.file("x.npz"), x=np.ones((8, 4), np.float32))
    w.right(*command, "8")


def check_texts(w: World) -> tuple[Any, ...]:
    check_command(w)
    text_model(w.file("texts"))
    graph = w.file("texts/model.onnx")
    return ("check", graph, "--baseline", graph, "--batch", "1", "--inputs", "rows.tsv", "--text-columns", "text")


@advice("latency.request_batches _encode_rows missing-value")
def _(w: World) -> None:
    command = check_texts(w)
    w.fails(*command)
    w.right(*command, "--tokenizer", "texts")


@advice("latency.request_batches _encode_texts text")
def _(w: World) -> None:
    command = check_texts(w)
    w.file("empty").mkdir()
    w.fails(*command, "--tokenizer", "empty")
    w.right(*command, "--tokenizer", "texts")


@advice("latency.triton TritonModel.trial_batch text")
def _(w: World) -> None:
    from types import SimpleNamespace

    import pytest

    pytest.importorskip("tritonclient.http")
    from compressor.latency.triton import TritonModel

    spec = SimpleNamespace(name="x", dtype=ir.DataType.STRING)
    model: Any = TritonModel.__new__(TritonModel)
    model.name, model.inputs = "small", [spec]
    w.fails(model.trial_batch, 1, 8, 0)
    np.savez(w.file("x.npz"), x=np.array([["good"], ["bad"]]))
    from compressor.config.check import CheckRequest
    from compressor.latency.request_batches import load_batches

    endpoint: Any = SimpleNamespace(id_limits={}, inputs=[TensorSpec("x", ir.DataType.STRING, (FREE, 1))])
    request = CheckRequest(
        model="small", server="http://127.0.0.1:9", baseline="dense", inputs=w.file("x.npz"), batch=2
    )
    w.right(load_batches, endpoint, request)


@advice("latency.server_faults Fault text", zoo=True)
def _(w: World) -> None:
    import pytest

    from compressor.config.check import CheckRequest
    from compressor.latency import check
    from tests.latency.http_server import serving_http

    pytest.importorskip("tritonclient.http")
    np.savez(w.file("x.npz"), x=np.ones((1, 4), np.float32))
    with serving_http(byte_seconds=0.01) as url:

        def run(deadline: float) -> None:
            request = {"server": url, "model": "small", "baseline": "dense", "batch": 1, "inputs": w.file("x.npz")}
            check(CheckRequest(**request, deadline=deadline), timer=quick)

        quick = functools.partial(_two_rounds)
        w.fails(run, 0.1)
        w.right(run, 30.0)


def _two_rounds(first: Any, second: Any, seconds: float, /, **_: Any) -> Any:
    for _round in range(2):
        first()
        second()
        yield 1e-3 * np.ones((2, 10)) + 1e-6 * np.arange(20).reshape(2, 10)


@advice("latency.triton TritonModel.__init__ text", unfollowed="installs a package")
def _(w: World) -> None:
    import sys

    w.patch.setitem(sys.modules, "tritonclient", None)
    w.patch.setitem(sys.modules, "tritonclient.http", None)
    w.fails("check", "--server", "http://127.0.0.1:9", "--model", "small", "--baseline", "dense")


@advice("latency.triton split_url text")
def _(w: World) -> None:
    command = ("check", "--model", "small", "--baseline", "dense", "--server")
    w.fails(*command, "127.0.0.1:9")
    for scheme in ("grpc", "http"):
        w.clear("server-unreachable", *command, f"{scheme}://127.0.0.1:9")


@advice("latency.server_faults certificate_file code")
def _(w: World) -> None:
    import certifi

    command = ("check", "--model", "small", "--baseline", "dense", "--server", "grpcs://127.0.0.1:9", "--certificate")
    w.fails(*command, "nowhere.pem")
    w.clear("server-unreachable", *command, certifi.where())


def denied(w: World, name: str, *request: Any) -> Any:
    """A server whose client reports a fault, as which the message ends; returns the client."""
    pytest.importorskip("tritonclient.http")
    from compressor.latency.server_faults import Fault
    from compressor.latency.triton import TritonModel

    def call() -> None:
        raise RuntimeError("no luck")

    model: Any = TritonModel.__new__(TritonModel)
    model.url, model.name, model.inputs = (
        "https://127.0.0.1:9",
        "small",
        [TensorSpec("x", ir.DataType.FLOAT, (FREE, 4))],
    )
    model._request = SimpleNamespace(deadline=1.0, headers={})
    model._protocol = SimpleNamespace(
        deadline=contextlib.nullcontext, errors=(RuntimeError,), fault=lambda error: Fault[name], reason=str
    )
    w.fails(model._send, call, *request)
    return model


@advice("latency.server_faults Fault text #2")
def _(w: World) -> None:
    denied(w, "FORBIDDEN")
    command = ("check", "--model", "small", "--baseline", "dense", "--server", "https://127.0.0.1:9")
    w.clear("server-unreachable", *command, "--header", "Authorization: Bearer TOKEN")


@advice("latency.server_faults Fault text #3")
def _(w: World) -> None:
    import certifi

    denied(w, "UNTRUSTED")
    command = ("check", "--model", "small", "--baseline", "dense", "--server", "https://127.0.0.1:9")
    w.clear("server-unreachable", *command, "--certificate", certifi.where())


@advice("latency.triton TritonModel._misfit text")
def _(w: World) -> None:
    def sent(width: int) -> list[Any]:
        return [SimpleNamespace(shape=lambda: [2, width])]

    model = denied(w, "REFUSED", sent(5))
    w.right(model._send, dict, sent(4))
