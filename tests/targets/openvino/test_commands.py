"""The commands with the target `openvino`: a run, its engine built again, timed, and checked."""

from __future__ import annotations

from pathlib import Path

import pytest

from compressor import report as reports
from compressor.errors import ErrorCode
from compressor.results import ProofStage
from tests import folders
from tests.command import compress
from tests.report.reports import FLOAT_STAGES

Cap = pytest.CaptureFixture[str]
QUICK = ("--seconds", "0.01", "--batch", "2", "--seq", "8", "--threads", "1", "--quiet")


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run with the target."""
    folder = tmp_path_factory.mktemp("openvino")
    folders.save(folders.bert(), folder / "model")
    rows = [f"{index % 2}\tthe {'good' if index % 2 else 'bad'} film" for index in range(40)]
    (folder / "rows.tsv").write_text("\n".join(["label\ttext", *rows, ""]))
    return folder


@pytest.fixture(scope="module")
def finished(out: Path) -> Path:
    from compressor import Recipe
    from compressor import compress as run

    settings = {"method": "taylor", "keep": 1, "max_length": 8, "target": "openvino"}
    timing = {"batch": (1,), "seq": (8,), "seconds": 0.01, "threads": 1}
    run(Recipe(model=out / "model", data=str(out / "rows.tsv"), out=out / "out", **settings, **timing))
    return out / "out"


@pytest.mark.zoo
def test_a_run_writes_a_proven_engine(finished: Path) -> None:
    report = reports.load(finished)
    assert (report.target, report.precision) == ("openvino", "fp32")
    assert {proof.stage for proof in report.proofs} == {*FLOAT_STAGES, ProofStage.FIXED_SHAPE}
    assert all(proof.holds for proof in report.proofs)
    assert (report.compressed.attentions, report.compressed.fused) == (1, 1)
    assert all((finished / name).is_file() for name in ("engine.xml", "engine.bin", "model.onnx"))
    assert str(report.session["runtime"]).startswith("openvino ")


@pytest.mark.zoo
def test_the_engine_is_built_again_and_for_another_runtime(finished: Path, capfd: Cap) -> None:
    (finished / "engine.xml").unlink()
    for target, engine in (("openvino", "engine.xml"), ("ort", "engine.onnx")):
        result = compress(capfd, "build", finished, "--target", target, *QUICK)
        assert result.code == 0
        assert (finished / engine).is_file()


@pytest.mark.zoo
def test_engines_are_timed_and_checked(finished: Path, capfd: Cap) -> None:
    graph = finished / "model.onnx"
    result = compress(capfd, "bench", graph, graph, "--target", "openvino", *QUICK, "--json")
    assert result.code == 0
    assert result.json["session"]["provider"] == "CPU"
    engine = finished / "engine.xml"
    limits = ("--max-slowdown", "10000%", "--seconds", "0.01", "--seq", "8", "--threads", "1", "--quiet", "--json")
    result = compress(capfd, "check", engine, "--baseline", graph, *limits)
    assert result.code == 0
    assert result.json["host"].endswith("on CPU, 1 threads")


@pytest.mark.parametrize(
    ("flags", "code"),
    [
        (("--precision", "fp16"), ErrorCode.UNSUPPORTED),
        (("--provider", "cuda"), ErrorCode.CONTRADICTION),
        (("--kernel", "kernel.so"), ErrorCode.CONTRADICTION),
    ],
)
def test_settings_that_the_target_lacks_are_refused_first(
    flags: tuple[str, ...], code: ErrorCode, out: Path, tmp_path: Path, capfd: Cap
) -> None:
    rows = ("--data", out / "rows.tsv", "--keep", "1", "-o", tmp_path / "out", "--quiet")
    result = compress(capfd, out / "model", "--target", "openvino", *flags, *rows)
    assert result.error_code == code
    assert not (tmp_path / "out").exists()
