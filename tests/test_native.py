"""The compiled kernel: made, proven, run in place of the function, and refused in one line where it cannot be."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

import compressor
from compressor.block_masks.mask_selector import MaskSelector
from compressor.config.run import Recipe
from compressor.errors import CompressorError, InputError, MismatchError, TargetMissingError, UsageError
from compressor.run.rebuild import rebuild
from compressor.serving import ServeRequest, export
from compressor.targets import BuildOptions, check, target
from compressor.targets.onnxruntime import cpu_kernel, ort_session
from graph_passes import BlockMask, load, shrink
from tests.command import compress
from tests.kernels import HEADERS, compiled
from tests.test_attention_pruning import place, recipe
from tests.test_block_sparse import Case
from tests.test_lower_block_sparse import exported, written
from tests.test_pipeline import Stages
from tests.zoo import text

__all__ = ["place"]  # a fixture


def test_an_engine_runs_the_kernel_in_place_of_the_function(tmp_path: Path) -> None:
    plan, reference = exported("bert", "eager", 18)
    graph = written(shrink(load(reference), plan).model, "native.onnx")
    plain, quick = (
        target("ort")(graph, tmp_path / f"{name}.onnx", provider="cpu", tuning=BuildOptions(kernel=kernel))
        for name, kernel in (("plain", None), ("quick", compiled()))
    )
    assert quick.kernels["BlockSparseAttention"] == len(plan.masks)
    assert "BlockSparseAttention" not in plain.kernels
    assert f"({len(plan.masks)} by the kernel of {compiled().resolve()})" in quick.optimization
    feeds = {name: value.numpy() for name, value in text(3, 21).items()}
    for name, expected in plain.run(feeds).items():
        np.testing.assert_allclose(quick.run(feeds)[name], expected, atol=1e-5)
    assert quick.memory(feeds) is not None  # a process of its own loads it too


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
    scaled = cpu_kernel.SOURCE.read_text().replace("* call.scale", "* call.scale * 1.01f")
    assert scaled != cpu_kernel.SOURCE.read_text()
    source.write_text(scaled)
    monkeypatch.setattr(cpu_kernel, "SOURCE", source)
    out = tmp_path / "kernel.so"
    with pytest.raises(MismatchError, match="differs from the function by"):
        cpu_kernel.compile_kernel(out, HEADERS if HEADERS.is_dir() else None)
    assert not out.exists()


@pytest.mark.parametrize(
    ("compiler", "error", "said"),
    [
        ("no-such-compiler", TargetMissingError, "no-such-compiler, which CXX names, is not on this machine"),
        ("false", InputError, r"false: cannot compile the kernel \(exit 1\)"),
        ("true", InputError, "true: made no library"),
        ("sh -c 'for out; do :; done; echo no library >\"$out\"'", InputError, "sh: made no library"),
        ("'c++", UsageError, 'CXX "\'c\\+\\+": is no command'),
    ],
)
def test_a_compiler_that_fails(
    compiler: str, error: type[CompressorError], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "onnxruntime_cxx_api.h").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CXX", compiler)
    with pytest.raises(error, match=said):
        cpu_kernel.compile_kernel(tmp_path / "kernel.so", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["onnxruntime_cxx_api.h"]


def test_headers_that_are_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "true")
    with pytest.raises(TargetMissingError, match=r"onnxruntime_cxx_api\.h is not in .*; name its folder \(--include\)"):
        cpu_kernel.compile_kernel(tmp_path / "kernel.so", tmp_path)


def test_a_library_that_is_none(tmp_path: Path) -> None:
    plan, reference = exported("bert", "eager", 18)
    graph = written(shrink(load(reference), plan).model, "native.onnx")
    library = tmp_path / "kernel.so"
    with pytest.raises(UsageError, match=r"there is no such file; compress kernel -o .* makes it"):
        ort_session.describe("cpu", None, library)
    library.write_bytes(b"not a library")
    refused = pytest.raises(InputError, match=r"cannot load this kernel \(.*\); compile it here")
    with refused:
        check("ort", "fp32", None, library)
    with refused:
        target("ort")(graph, tmp_path / "engine.onnx", provider="cpu", tuning=BuildOptions(kernel=library))


@pytest.mark.parametrize("asked", [{"target": "trt"}, {"provider": "cuda"}])
def test_a_kernel_is_for_the_cpu(asked: dict[str, str], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is for ONNX Runtime on the CPU; leave it out"):
        Recipe.model_validate({"model": tmp_path, "kernel": tmp_path / "kernel.so", **asked})


def test_what_is_no_number_stays_none() -> None:
    function, kernel = (Case(BlockMask(np.ones((1, 2, 2), np.bool_), 8), library) for library in (None, compiled()))
    feeds = function.feeds(13, 13)
    feeds["key"][0, 3] = np.nan
    for case in (function, kernel):
        assert np.isnan(case.run(feeds)[0]).all()
        assert np.isfinite(case.run(feeds)[1]).all()


def test_headers_of_a_later_version_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "true")
    (tmp_path / "onnxruntime_cxx_api.h").touch()
    (tmp_path / "onnxruntime_c_api.h").write_text("#define ORT_API_VERSION 999\n")
    with pytest.raises(InputError, match=r"are the headers of ONNX Runtime 1\.999, and .* is installed; name those of"):
        cpu_kernel.compile_kernel(tmp_path / "kernel.so", tmp_path)


def test_another_kernel_is_another_plan(tmp_path: Path) -> None:
    keys = set()
    for name, content in (("a", b"1"), ("b", b"1"), ("b", b"2")):
        (tmp_path / name).write_bytes(content)
        asked = {"model": tmp_path, "data": "rows", "blocks": 0.5, "kernel": tmp_path / name}
        keys.add(Recipe.model_validate(asked).learning_key())
    assert len(keys) == 2


def test_a_gate_on_a_server_takes_no_kernel(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    flags: list[str | Path] = [
        "--server",
        "grpc://localhost:1",
        "--model",
        "m",
        "--baseline",
        "n",
        "--kernel",
        tmp_path / "kernel.so",
    ]
    done = compress(capfd, "check", *flags)
    assert done.code == 2
    assert done.error.endswith("is for engines on this machine; leave it out, or --server")


def test_a_run_is_built_again_with_the_kernel_or_says_that_it_is_not(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MaskSelector, "lowered", lambda self, plan: frozenset(plan.masks))
    library, out = tmp_path / "kernel.so", tmp_path / "out"
    shutil.copy(compiled(), library)
    report = compressor.compress(recipe(place, out, kernel=library), Stages())
    assert all(proof.holds for proof in report.proofs)
    by = f"1 block-sparse attentions (1 by the kernel of {library.resolve()})"
    assert by in report.compressed.optimization
    assert by in rebuild(out, {}, Stages()).compressed.optimization
    (note,) = [note for note in export(ServeRequest(out, tmp_path / "repository")).notes if "kernel" in note]
    assert note.startswith("the run was measured with a compiled kernel; the server computes")
    library.unlink()
    without = rebuild(out, {}, Stages())
    assert "1 block-sparse attentions, " in without.compressed.optimization
    assert f"the run's kernel, {library}, is not used: it is not here" in " ".join(without.notes)
    with pytest.raises(UsageError, match=r"--kernel .*: there is no such file; compress kernel -o .* makes it"):
        rebuild(out, {"kernel": library}, Stages())
