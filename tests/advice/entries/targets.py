"""Advice of `targets`: see `tests.advice.world`."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import numpy as np
import pytest

from compressor.results import Note, NoteCode
from compressor.targets import BuildOptions, target
from graph_passes import save
from tests.advice.world import World, advice
from tests.latency.graphs import softmax_graph
from tests.targets.graphs import parsed

GPU = "needs a GPU and TensorRT"


def build(w: World, name: str, graph: str = "small.onnx", **settings: Any) -> Any:
    """Build an engine of a small graph."""
    if not w.file("small.onnx").exists():
        softmax_graph(w.file("small.onnx"))
    runtime = target(name)
    return runtime.build(w.file(graph), w.file(runtime.engine_file), **settings)


def short(w: World, *flags: str) -> tuple[Any, ...]:
    return w.run("--plan", "plan.json", *flags)


@advice("targets.base Target.check_request contradiction")
def _(w: World) -> None:
    w.fails(lambda: target("openvino").check(provider="cuda"))
    w.right(*short(w, "--target", "openvino"))
    w.clear("device-missing", *short(w, "--target", "ort", "--provider", "cuda"))
    w.right(*short(w, "--target", "ort", "--provider", "cpu"))


@advice("targets.base Target.check_request contradiction #2", zoo=True)
def _(w: World) -> None:
    from tests.targets.kernels import compiled

    w.fails(lambda: target("openvino").check(kernel=w.file("kernel.so")))
    w.right(*short(w, "--target", "openvino"))
    w.right(*short(w, "--target", "ort", "--kernel", str(compiled())))


def headers(w: World) -> Path:
    """Headers of ONNX Runtime; skips where there are none."""
    from tests.targets.kernels import HEADERS, compiled

    compiled()
    assert HEADERS is not None
    return HEADERS


@advice("targets.onnxruntime.cpu_kernel _headers text")
def _(w: World) -> None:
    w.patch.setenv("CXX", "true")
    w.file("empty").mkdir()
    w.fails("kernel", "-o", "kernel.so", "--include", "empty")
    w.rows("headers/onnxruntime_cxx_api.h", "")
    w.clear("runtime-failed", "kernel", "-o", "kernel.so", "--include", "headers")


@advice("targets.onnxruntime.cpu_kernel _require_older text")
def _(w: World) -> None:
    w.patch.setenv("CXX", "true")
    w.rows("headers/onnxruntime_cxx_api.h", "")
    w.rows("headers/onnxruntime_c_api.h", "#define ORT_API_VERSION 999")
    w.fails("kernel", "-o", "kernel.so", "--include", "headers")
    w.rows("headers/onnxruntime_c_api.h", "#define ORT_API_VERSION 20")
    w.clear("runtime-failed", "kernel", "-o", "kernel.so", "--include", "headers")


@advice("targets.onnxruntime.cpu_kernel _run_compiler text", zoo=True)
def _(w: World) -> None:
    include = headers(w)
    command = ("kernel", "-o", "kernel.so", "--include", include)
    w.patch.setenv("CXX", "false")
    w.fails(*command)
    w.patch.delenv("CXX")
    w.right(*command)
    w.fails(*command, "--force", "--march", "no-such-processor")
    w.right(*command, "--force", "--march", "x86-64-v2")


@advice("targets.onnxruntime.cpu_kernel compile_kernel text", zoo=True)
def _(w: World) -> None:
    include = headers(w)
    command = ("kernel", "-o", "kernel.so", "--include", include)
    w.patch.setenv("CXX", "true")
    w.fails(*command)
    w.patch.delenv("CXX")
    w.right(*command)


@advice("targets.onnxruntime.cpu_kernel compile_kernel text #2", zoo=True)
def _(w: World) -> None:
    from compressor.targets.onnxruntime import cpu_kernel

    include = headers(w)
    command = ("kernel", "-o", "kernel.so", "--include", include)
    error_of = cpu_kernel._largest_error
    w.patch.setattr(cpu_kernel, "_largest_error", lambda *_: 0.1)
    w.fails(*command)
    w.patch.setattr(cpu_kernel, "_largest_error", error_of)
    w.right(*command, "--march", "x86-64-v3")
    w.right(*w.keep_one())


@advice("targets.onnxruntime.dynamic quantize_dynamically text")
def _(w: World) -> None:
    from compressor.targets.onnxruntime import dynamic

    w.patch.setattr(dynamic, "lost_dependencies", lambda *_: ["product"])
    w.fails(lambda: build(w, "ort", precision="int8", provider="cpu"))
    w.right(lambda: build(w, "ort", precision="fp32"))
    w.right(lambda: build(w, "openvino", precision="fp32"))


@advice("targets.onnxruntime.dynamic _quantize text")
def _(w: World) -> None:
    import onnxruntime.quantization

    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise RuntimeError("no luck")

    w.patch.setattr(onnxruntime.quantization, "quantize_dynamic", refuse)
    w.fails(lambda: build(w, "ort", precision="int8", provider="cpu"))
    w.right(lambda: build(w, "ort", precision="fp32"))


@advice("targets.onnxruntime.engine load_engine file-missing", zoo=True)
def _(w: World) -> None:
    run = w.finished()
    (run / "engine.onnx").unlink()
    w.whole()
    w.fails(target("ort").load, run / "engine.onnx")
    w.right("build", run, "--seconds", "0.01", "--threads", "1")
    w.right(target("ort").load, run / "engine.onnx")


@advice("targets.onnxruntime.ort_session choose_provider text")
def _(w: World) -> None:
    w.fails(*short(w, "--provider", "cuda"))
    w.right(*short(w, "--provider", "cpu"))


@advice("targets.onnxruntime.ort_session choose_provider text #2")
def _(w: World) -> None:
    w.fails(*short(w, "--precision", "bf16"))
    w.right(*short(w, "--precision", "fp32"))
    w.patch.setattr("compressor.targets.openvino.session.native_bfloat16", lambda: True)
    w.right(*short(w, "--precision", "bf16", "--target", "openvino"))
    w.patch.setattr("compressor.targets.openvino.session.native_bfloat16", lambda: False)
    w.clear("unsupported", *short(w, "--precision", "bf16", "--target", "openvino"))
    w.right(*short(w, "--precision", "bf16", "--target", "trt"))  # without a GPU: proven graphs, and a note


@advice("targets.onnxruntime.ort_session choose_provider text #3")
def _(w: World) -> None:
    from compressor.targets.onnxruntime.ort_session import choose_provider

    w.fails(choose_provider, None, "fp8")
    for precision in ("int8", "fp32"):
        w.right(choose_provider, None, precision)
    w.right(*short(w, "--precision", "fp8", "--target", "trt"))


@advice("targets.onnxruntime.ort_session choose_provider text #4")
def _(w: World) -> None:
    from compressor.targets.onnxruntime import ort_session

    w.patch.setattr(ort_session, "has_cuda", lambda: True)
    w.fails(ort_session.choose_provider, "cuda", "int8")
    w.right(ort_session.choose_provider, "cpu", "int8")
    w.right(*short(w, "--precision", "int8", "--target", "trt"))


@advice("targets.onnxruntime.ort_session choose_provider text #5")
def _(w: World) -> None:
    w.fails(*short(w, "--precision", "fp16"))
    w.right(*short(w, "--precision", "fp32"))


@advice("targets.onnxruntime.ort_session session_settings contradiction")
def _(w: World) -> None:
    from compressor.targets.onnxruntime.ort_session import session_settings

    w.fails(session_settings, "cuda", 1, w.file("kernel.so"))
    w.right(session_settings, "cuda", 1)
    w.clear("file-missing", session_settings, "cpu", 1, w.file("kernel.so"))


@advice("targets.onnxruntime.ort_session session_settings file-missing", zoo=True)
def _(w: World) -> None:
    include = headers(w)
    w.fails(*short(w, "--kernel", "kernel.so"))
    w.right("kernel", "-o", "kernel.so", "--include", include)
    w.right(*short(w, "--kernel", "kernel.so"))


@advice("targets.onnxruntime.ort_session _register text", zoo=True)
def _(w: World) -> None:
    from tests.targets.kernels import compiled

    w.rows("kernel.so", "no library")
    w.fails(*short(w, "--kernel", "kernel.so"))
    w.right(*short(w))
    w.right(*short(w, "--kernel", str(compiled())))


@advice("targets.onnxruntime.ort_session open_session text")
def _(w: World) -> None:
    from compressor.targets.onnxruntime import ort_session

    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise RuntimeError("no kernel for tensor(float16)")

    softmax_graph(w.file("small.onnx"))
    settings = {**ort_session.session_settings("cpu", 1), "kernel": "kernel.so"}
    w.patch.setattr(ort_session, "_register", lambda *_: None)
    session = ort_session.ort.InferenceSession
    w.patch.setattr(ort_session.ort, "InferenceSession", refuse)
    w.fails(ort_session.open_session, w.file("small.onnx"), settings)
    w.patch.setattr(ort_session.ort, "InferenceSession", session)
    settings.pop("kernel")
    w.right(ort_session.open_session, w.file("small.onnx"), settings)


@advice("targets.openvino.engine build_engine text")
def _(w: World) -> None:
    pytest.importorskip("openvino")
    w.fails(lambda: build(w, "openvino", precision="int8"))
    w.right(lambda: build(w, "openvino", precision="fp32"))
    body = (
        "q = QuantizeLinear (x, s, z) d = DequantizeLinear (q, s, z) v = DequantizeLinear (w, s, n) y = MatMul (d, v)"
    )
    weights = "float s = {0.1}, uint8 z = {128}, int8 n = {0}, int8[4, 3] w"
    save(parsed(body, "float[B, 4] x", "float[B, 3] y", weights), w.file("model.int8.onnx"))
    w.right(lambda: build(w, "openvino", "model.int8.onnx", precision="int8"))


@advice("targets.openvino.engine build_engine text #2")
def _(w: World) -> None:
    pytest.importorskip("openvino")
    from compressor.targets.openvino.engine import build_engine

    body = parsed("y = MatMul(x, w)", "float[N, sequence, 4] x", "float[N, sequence, 5] y", "float[4, 5] w")
    save(body, w.file("model.onnx"))
    w.fails(lambda: build_engine(w.file("model.onnx"), w.file("engine.xml"), options=BuildOptions(shapes=((1, 8),))))
    w.right(lambda: build_engine(w.file("model.onnx"), w.file("engine.xml")))


@advice("targets.openvino.engine load_engine text", zoo=True)
def _(w: World) -> None:
    pytest.importorskip("openvino")
    run = w.finished()
    w.whole()
    w.fails(target("openvino").load, run / "engine.xml")
    w.right("build", run, "--target", "openvino", "--seconds", "0.01", "--threads", "1")
    w.right(target("openvino").load, run / "engine.xml")


@advice("targets.openvino.session compile_fixed text")
def _(w: World) -> None:
    pytest.importorskip("openvino")
    from compressor.targets.openvino.engine import build_engine

    def fixed(*shapes: tuple[int, int]) -> None:
        build_engine(w.file("dense.onnx"), w.file("engine.xml"), options=BuildOptions(shapes=shapes), threads=1)

    w.fails(fixed, (1, 64))
    w.right(fixed, (1, 8))


@advice("targets.openvino.session check_precision text #2")
def _(w: World) -> None:
    pytest.importorskip("openvino")
    w.patch.setattr("compressor.targets.openvino.session.native_bfloat16", lambda: False)
    w.fails(*short(w, "--target", "openvino", "--precision", "bf16"))
    w.right(*short(w, "--target", "openvino", "--precision", "fp32"))


@advice("targets.openvino.session check_precision text")
def _(w: World) -> None:
    w.fails(*short(w, "--target", "openvino", "--precision", "fp16"))
    w.right(*short(w, "--target", "openvino", "--precision", "fp32"))
    w.right(*short(w, "--target", "trt", "--precision", "fp16"))


@advice("targets.openvino.session read_model text #2")
def _(w: World) -> None:
    pytest.importorskip("openvino")
    build(w, "openvino", threads=1)
    w.file("engine.xml").write_text("no graph")
    w.fails(target("openvino").load, w.file("engine.xml"))
    w.right(lambda: build(w, "openvino", threads=1))
    w.right(lambda: build(w, "ort", threads=1))


@advice("targets.openvino.session read_model text")
def _(w: World) -> None:
    pytest.importorskip("openvino")
    body = "y = com.microsoft.BiasSplitGelu (x, b)"
    save(parsed(body, "float[N, 4, 8] x", "float[N, 4, 4] y", "float[8] b"), w.file("foreign.onnx"))
    w.fails(lambda: build(w, "openvino", "foreign.onnx"))
    save(parsed("y = Gelu (x)", "float[N, 4] x", "float[N, 4] y", opset=20), w.file("own.onnx"))
    w.right(lambda: build(w, "openvino", "own.onnx"))
    # ONNX Runtime runs this operator on GPUs alone; a GELU with a bias it runs on any.
    save(
        parsed("y = com.microsoft.BiasGelu (x, b)", "float[N, 4] x", "float[N, 4] y", "float[4] b"), w.file("gelu.onnx")
    )
    w.right(lambda: build(w, "ort", "gelu.onnx"))


@advice("targets.openvino.session compile_model text")
def _(w: World) -> None:
    pytest.importorskip("openvino")
    from compressor.targets.openvino import session

    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise RuntimeError("no memory")

    core = session._CORE
    w.patch.setattr(session, "_CORE", SimpleNamespace(read_model=core.read_model, compile_model=refuse))
    w.fails(lambda: build(w, "openvino", threads=1))
    w.right(lambda: build(w, "ort", threads=1))


@advice("targets.base check_reach text")
def _(w: World) -> None:
    from compressor.targets.base import check_reach

    ids = {"input_ids": np.ones((1, 9), np.int64)}
    w.fails(check_reach, {"input_ids": 8}, ids)
    w.right(check_reach, {"input_ids": 8}, {"input_ids": ids["input_ids"][:, :8]})
    w.right(check_reach, {"input_ids": 9}, ids)


@advice("targets.tensorrt.bindings Features.require text")
def _(w: World) -> None:
    from compressor.targets.cuda import Device
    from tests.targets.tensorrt.machines import NEW

    old = Device("NVIDIA A100", (8, 0), 1 << 36)
    w.fails(NEW.require, "fp8", old)
    w.right(NEW.require, "int8", old)


@advice("targets.tensorrt.bindings library text", unfollowed="installs a package")
def _(w: World) -> None:
    from compressor.targets.tensorrt.bindings import library

    w.patch.setitem(sys.modules, "tensorrt", None)
    w.fails(library)


@advice("targets.tensorrt.engine build_engine unsupported", unfollowed=GPU)
def _(w: World) -> None:
    from compressor.targets.base import BuildOptions
    from compressor.targets.cuda import Device
    from compressor.targets.tensorrt import bindings
    from compressor.targets.tensorrt import engine as builds
    from tests.targets.tensorrt.machines import NEW

    w.patch.setattr(bindings, "features", lambda trt: NEW)
    driver: Any = SimpleNamespace(device=Device("NVIDIA T4", (7, 5), 1 << 34))
    options = BuildOptions(hardware_compatible=True)
    paths = w.file("small.onnx"), w.file("engine.plan")
    w.fails(lambda: builds.build_engine(*paths, precision="fp16", options=options, runtime=(driver, None)))  # type: ignore[arg-type]


def engine_builder(failure: type[Exception] | None) -> Any:
    """A builder of engines whose builds fail."""
    from compressor.targets.base import BuildOptions
    from compressor.targets.tensorrt.builder import EngineBuilder
    from tests.targets.tensorrt.machines import H200, NEW

    class Builder(EngineBuilder):
        def _build_typed(self, *_: Any) -> Any:
            if failure is not None:
                raise failure

    driver: Any = SimpleNamespace(enter=lambda: None, free_memory=lambda: 1 << 30, device=H200)
    builder: Any = Builder
    return builder(None, NEW, driver, BuildOptions(), None, "fp16", False)


@advice("targets.tensorrt.builder EngineBuilder.build text")
def _(w: World) -> None:
    from compressor.targets.tensorrt.builder import _OutOfMemoryError

    w.fails(engine_builder(_OutOfMemoryError).build, w.file("small.onnx"), {})
    w.right(engine_builder(None).build, w.file("small.onnx"), {})


@advice("targets.tensorrt.builder EngineBuilder._build_error text", unfollowed=GPU)
def _(w: World) -> None:
    w.fails(build_error, True)


@advice("targets.tensorrt.builder EngineBuilder._build_error text #2")
def _(w: World) -> None:
    w.fails(build_error, False)
    w.right(*short(w, "--target", "trt", "--opset", "18"))
    w.right(*short(w, "--target", "ort"))


def build_error(small: bool) -> NoReturn:
    errors = ["insufficient workspace"] if small else []
    log: Any = SimpleNamespace(errors=errors, memory_warning=False, summary=lambda error: "no kernel")
    raise engine_builder(None)._build_error(log, RuntimeError())


@advice("targets.tensorrt.engine TrtEngine.__init__ text", unfollowed=GPU)
def _(w: World) -> None:
    from compressor.targets.tensorrt import bindings
    from compressor.targets.tensorrt.engine import TrtEngine

    w.patch.setattr(bindings, "activation_bytes", lambda engine: 1 << 30)
    engine: Any = SimpleNamespace(create_execution_context=lambda: None)
    driver: Any = SimpleNamespace(enter=lambda: None)
    anything: Any = None
    w.fails(lambda: TrtEngine(w.file("engine.plan"), engine, anything, driver, anything))


@advice("targets.tensorrt.engine TrtEngine._bind_output text")
def _(w: World) -> None:
    from compressor.targets.tensorrt.engine import TrtEngine

    engine: Any = SimpleNamespace(
        path=w.file("engine.plan"), context=SimpleNamespace(get_tensor_shape=lambda name: (-1, 3))
    )
    w.fails(TrtEngine._bind_output, engine, "y")
    w.right(lambda: build(w, "ort"))


@advice("targets.tensorrt.graph _check_quantizers text")
def _(w: World) -> None:
    from compressor.targets.tensorrt.graph import _check_quantizers
    from graph_passes import load

    softmax_graph(w.file("small.onnx"))
    graph = load(w.file("small.onnx"))
    w.fails(_check_quantizers, graph, w.file("small.onnx"), "int8")
    w.right(_check_quantizers, graph, w.file("small.onnx"), "fp16")
    w.right(_check_quantizers, quantized_graph(w, 0), w.file("small.onnx"), "int8")


def quantized_graph(w: World, zero: int) -> Any:
    """A graph with a quantized product."""
    from graph_passes import load

    body = (
        "q = QuantizeLinear (x, s, z) d = DequantizeLinear (q, s, z) v = DequantizeLinear (w, s, n) y = MatMul (d, v)"
    )
    weights = f"float s = {{0.1}}, int8 z = {{{zero}}}, int8 n = {{0}}, int8[4, 3] w"
    save(parsed(body, "float[B, 4] x", "float[B, 3] y", weights), w.file("quantized.onnx"))
    return load(w.file("quantized.onnx"))


@advice("targets.tensorrt.graph _check_quantizers text #2")
def _(w: World) -> None:
    from compressor.targets.tensorrt.graph import _check_quantizers

    w.fails(_check_quantizers, quantized_graph(w, 5), w.file("small.onnx"), "int8")
    w.right(_check_quantizers, quantized_graph(w, 0), w.file("small.onnx"), "int8")
    w.right(*short(w, "--target", "trt", "--precision", "int8"))


@advice("targets.tensorrt.graph _axis_span text")
def _(w: World) -> None:
    from compressor.targets.base import BuildOptions
    from compressor.targets.tensorrt.graph import profile

    body = parsed("y = Identity (past_key)", "float[batch, 2, past, 4] past_key", "float[batch, 2, past, 4] y")
    w.fails(profile, body, BuildOptions())
    softmax_graph(w.file("small.onnx"))
    w.right(lambda: build(w, "ort"))


@advice("targets.tensorrt.metadata EngineMetadata.check_shapes text")
def _(w: World) -> None:
    from tests.targets.tensorrt.machines import write_engine

    small = write_engine(w.file("engine.plan"))
    w.fails(small.check_shapes, {"ids": (64, 8)})
    larger = write_engine(w.file("engine.plan"), profiles={"ids": ((1, 1), (8, 128), (64, 384))})
    w.right(larger.check_shapes, {"ids": (64, 8)})


@advice("targets.tensorrt.metadata constant text", unfollowed=GPU)
def _(w: World) -> None:
    from compressor.targets.tensorrt.metadata import read_metadata

    w.fails(read_metadata, w.file("engine.plan"))


@advice(
    "targets.tensorrt.target TensorRtTarget.check_machine text", unfollowed="needs another machine, which has a GPU"
)
def _(w: World) -> None:
    w.fails("bench", "dense.onnx", "dense.onnx", "--target", "trt")


@advice("targets.tensorrt.builder _require_writable text")
def _(w: World) -> None:
    from compressor.targets.tensorrt.builder import _require_writable

    w.rows("file", "")
    w.fails(_require_writable, w.file("file") / "cache")
    w.right(_require_writable, w.file("cache"))


@advice("targets.tensorrt.inspector _reason text", unfollowed="needs a GPU and TensorRT")
def _(w: World) -> None:
    from compressor.targets.tensorrt.inspector import _reason

    site: Any = SimpleNamespace(head_dim=64)
    (part,) = w.site.texts
    assert part in _reason(site, (9, 0), "fp32")[1]
    assert part not in _reason(site, (9, 0), "fp16")[1]
    w.provoked += 1


@advice("targets.openvino.stateful write_tokenizer text", unfollowed="installs a package")
def _(w: World) -> None:
    from compressor.targets.caches import GeneratingModel
    from compressor.targets.openvino.stateful import ALONE, write_tokenizer

    w.patch.setitem(sys.modules, "openvino_tokenizers", None)
    w.file(ALONE).touch()
    model = GeneratingModel({}, {}, None, object())
    text = write_tokenizer(w.file(ALONE).parent, model)
    w.notes(lambda: [Note(code=NoteCode.LIBRARY_LIMITED, text=str(text))])
