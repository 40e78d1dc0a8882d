"""The compiled kernel: built, compared with the function, run in its place, and refused if it cannot be built."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from compressor.errors import CompressorError, ErrorCode, InputError, MismatchError, TargetMissingError, UsageError
from compressor.targets import BuildOptions, target
from compressor.targets.onnxruntime import ort_session
from compressor.targets.onnxruntime.cpu_kernel import SOURCE, compile_kernel
from compressor.targets.onnxruntime.engine import build_engine
from graph_passes import BlockMask, save
from graph_passes.block_sparse.function import block_sparse_attention, standalone_model
from graph_passes.block_sparse.spec import AttentionSpec
from tests.targets.graphs import masked, parsed
from tests.targets.kernels import HEADERS, compiled
from tests.zoo import text


def test_an_engine_runs_the_kernel_in_place_of_the_function(tmp_path: Path) -> None:
    graphs, library = masked(), compiled()
    plain, native = (
        build_engine(
            graphs.shrunk, tmp_path / f"{name}.onnx", provider="cpu", threads=1, options=BuildOptions(kernel=kernel)
        )
        for name, kernel in (("plain", None), ("native", library))
    )
    count = len(graphs.plan.masks)
    assert native.kernels["BlockSparseAttention"] == count
    assert "BlockSparseAttention" not in plain.kernels
    assert f"{count} block-sparse attentions ({count} by the kernel of {library.resolve()})" in native.optimization
    assert f"{count} block-sparse attentions, " in plain.optimization
    assert native.session["kernel"] == str(library.resolve())
    feeds = {name: value.numpy() for name, value in text(3, 21).items()}
    for name, expected in plain.run(feeds).items():
        np.testing.assert_allclose(native.run(feeds)[name], expected, atol=1e-5)
    assert native.memory(feeds) is not None, "the fresh process loads the kernel too"


def test_nan_stays_nan() -> None:
    mask = BlockMask(np.ones((1, 2, 2), np.bool_), 8)
    model = standalone_model(block_sparse_attention(AttentionSpec(mask, 4, 4, 0.5)))
    rng = np.random.default_rng(0)
    feeds = {name: rng.normal(size=(2, 13, 1, 4)).astype(np.float32) for name in ("query", "key", "value")}
    feeds["key"][0, 3] = np.nan
    graph = compiled().with_name("nan.onnx")
    save(model, graph)
    for kernel in (None, compiled()):
        session = ort_session.open_session(graph, ort_session.session_settings("cpu", 1, kernel))
        output = ort_session.run_session(session, {**feeds, "block_mask": mask.kept})["output"]
        assert np.isnan(output[0]).all()
        assert np.isfinite(output[1]).all()


@pytest.mark.zoo
def test_a_kernel_that_computes_something_else_is_not_kept(tmp_path: Path) -> None:
    compiled()
    source, out = tmp_path / "wrong.cpp", tmp_path / "kernel.so"
    wrong = SOURCE.read_text().replace("* call.scale", "* call.scale * 1.01f")
    assert wrong != SOURCE.read_text()
    source.write_text(wrong)
    with pytest.raises(MismatchError) as error:
        compile_kernel(out, HEADERS, source=source)
    assert (error.value.code, error.value.details["path"]) == (ErrorCode.OUTPUTS_DIFFER, out)
    assert error.value.details["error"] > error.value.details["tolerance"]
    assert not out.exists()


@pytest.mark.parametrize(
    ("compiler", "error", "code", "details"),
    [
        ("no-such-compiler", TargetMissingError, ErrorCode.PACKAGE_MISSING, {"package": "no-such-compiler"}),
        ("false", InputError, ErrorCode.RUNTIME_FAILED, {"compiler": "false", "status": 1}),
        ("true", InputError, ErrorCode.RUNTIME_FAILED, {"compiler": "true"}),
        (
            "sh -c 'for out; do :; done; echo no library >\"$out\"'",
            InputError,
            ErrorCode.RUNTIME_FAILED,
            {"compiler": "sh"},
        ),
        ("'c++", UsageError, ErrorCode.INVALID_VALUE, {"field": "CXX", "value": "'c++"}),
    ],
)
def test_a_compiler_that_fails_leaves_nothing(
    compiler: str,
    error: type[CompressorError],
    code: ErrorCode,
    details: dict[str, object],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "onnxruntime_cxx_api.h").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CXX", compiler)
    with pytest.raises(error) as failure:
        compile_kernel(tmp_path / "kernel.so", tmp_path)
    assert (failure.value.code, failure.value.details) == (code, details)
    assert "\n" not in str(failure.value)
    assert [path.name for path in tmp_path.iterdir()] == ["onnxruntime_cxx_api.h"]


def test_missing_headers_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "true")
    with pytest.raises(TargetMissingError) as error:
        compile_kernel(tmp_path / "kernel.so", tmp_path)
    assert error.value.code is ErrorCode.PACKAGE_MISSING
    assert error.value.details == {"package": "onnxruntime_cxx_api.h", "path": tmp_path}


def test_headers_of_a_later_version_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "true")
    (tmp_path / "onnxruntime_cxx_api.h").touch()
    (tmp_path / "onnxruntime_c_api.h").write_text("#define ORT_API_VERSION 999\n")
    with pytest.raises(InputError) as error:
        compile_kernel(tmp_path / "kernel.so", tmp_path)
    assert error.value.code is ErrorCode.FILE_MISMATCH
    assert error.value.details == {"path": tmp_path, "value": 999}


def test_a_file_that_is_not_a_library_is_refused_before_a_build(tmp_path: Path) -> None:
    graph, library = tmp_path / "graph.onnx", tmp_path / "kernel.so"
    save(parsed("y = Identity(x)", "float[B] x", "float[B] y"), graph)
    library.write_bytes(b"not a library")
    for attempt in (
        lambda: target("ort").check(kernel=library),
        lambda: target("ort").build(graph, tmp_path / "engine.onnx", options=BuildOptions(kernel=library)),
    ):
        with pytest.raises(InputError) as error:
            attempt()
        assert (error.value.code, error.value.details["path"]) == (ErrorCode.RUNTIME_FAILED, library)
        assert error.value.details["field"] == "kernel"


def test_messages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The messages about a kernel that cannot be built."""
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(TargetMissingError) as error:
        compile_kernel(tmp_path / "kernel.so")
    assert str(error.value) == (
        "kernel: no-such-compiler, which CXX names, is not installed; install g++ or clang++, or set CXX"
    )
