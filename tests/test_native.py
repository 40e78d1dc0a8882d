"""The compiled kernel: made, proven, run in place of the function, and refused in one line where it cannot be."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from compressor.errors import CompressorError, InputError, MismatchError, TargetMissingError, UsageError
from compressor.recipe import Recipe
from compressor.targets import Tuning, native, session, target
from graph_passes import load, shrink
from tests.command import compress
from tests.kernels import HEADERS, compiled
from tests.test_lower_block_sparse import exported, written
from tests.zoo import text


def test_an_engine_runs_the_kernel_in_place_of_the_function(tmp_path: Path) -> None:
    plan, reference = exported("bert", "eager", 18)
    graph = written(shrink(load(reference), plan).model, "native.onnx")
    plain, quick = (
        target("ort")(graph, tmp_path / f"{name}.onnx", provider="cpu", tuning=Tuning(kernel=kernel))
        for name, kernel in (("plain", None), ("quick", compiled()))
    )
    assert quick.kernels["BlockSparseAttention"] == len(plan.masks)
    assert "BlockSparseAttention" not in plain.kernels
    assert f"({len(plan.masks)} by the kernel of {compiled().resolve()})" in quick.optimization
    feeds = {name: value.numpy() for name, value in text(3, 21).items()}
    for name, expected in plain.run(feeds).items():
        np.testing.assert_allclose(quick.run(feeds)[name], expected, atol=1e-5)
    assert (quick.memory(feeds) or 0) >= 0  # a process of its own loads it too


def test_the_command_makes_a_kernel_once(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    compiled()
    include: list[str | Path] = ["--include", HEADERS] if HEADERS.is_dir() else []
    out = tmp_path / "kernel.so"
    done = compress(capfd, "kernel", "-o", out, *include, "--json", "--quiet")
    assert done.code == 0, done.err
    assert done.json["error"] < 1e-5
    written = out.read_bytes()
    again = compress(capfd, "kernel", "-o", out, *include)
    assert (again.code, again.error) == (
        2,
        f"{out}: is there already; add --force to replace it, or name another file (-o)",
    )
    assert out.read_bytes() == written
    assert [path.name for path in tmp_path.iterdir()] == ["kernel.so"]


def test_a_kernel_that_computes_something_else_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled()
    source = tmp_path / "wrong.cpp"
    scaled = native.SOURCE.read_text().replace("* call.scale", "* call.scale * 1.01f")
    assert scaled != native.SOURCE.read_text()
    source.write_text(scaled)
    monkeypatch.setattr(native, "SOURCE", source)
    out = tmp_path / "kernel.so"
    with pytest.raises(MismatchError, match="differs from the function by"):
        native.compile_kernel(out, HEADERS if HEADERS.is_dir() else None)
    assert not out.exists()


@pytest.mark.parametrize(
    ("compiler", "error", "said"),
    [
        ("no-such-compiler", TargetMissingError, "no-such-compiler, which CXX names, is not on this machine"),
        ("false", InputError, r"false: cannot compile the kernel \(exit 1\)"),
        ("true", InputError, "true: made no library"),
        ("sh -c 'echo not a library > \"$0\"'", InputError, "sh: made no library"),
    ],
)
def test_a_compiler_that_fails(
    compiler: str, error: type[CompressorError], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "onnxruntime_cxx_api.h").touch()
    monkeypatch.setenv("CXX", compiler)
    with pytest.raises(error, match=said):
        native.compile_kernel(tmp_path / "kernel.so", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["onnxruntime_cxx_api.h"]


def test_headers_that_are_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "true")
    with pytest.raises(TargetMissingError, match=r"onnxruntime_cxx_api\.h is not in .*; name its folder \(--include\)"):
        native.compile_kernel(tmp_path / "kernel.so", tmp_path)


def test_a_library_that_is_none(tmp_path: Path) -> None:
    plan, reference = exported("bert", "eager", 18)
    graph = written(shrink(load(reference), plan).model, "native.onnx")
    library = tmp_path / "kernel.so"
    with pytest.raises(UsageError, match=r"there is no such file; compress kernel -o .* makes it"):
        session.describe("cpu", None, library)
    library.write_bytes(b"not a library")
    with pytest.raises(InputError, match=r"cannot load this kernel \(.*\); compile it here"):
        target("ort")(graph, tmp_path / "engine.onnx", provider="cpu", tuning=Tuning(kernel=library))


@pytest.mark.parametrize("asked", [{"target": "trt"}, {"provider": "cuda"}])
def test_a_kernel_is_for_the_cpu(asked: dict[str, str], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is for ONNX Runtime on the CPU; leave it out"):
        Recipe.model_validate({"model": tmp_path, "kernel": tmp_path / "kernel.so", **asked})
