"""`compress export-triton`, and `compress kernel`, which replaces a library only with `--force`."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from compressor.errors import ErrorCode
from tests.command import compress
from tests.serving.outputs import run_folder
from tests.targets.kernels import HEADERS, compiled

Cap = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = run_folder(tmp_path_factory.mktemp("export") / "half")
    (folder / "file").touch()
    return folder


def test_a_model_is_exported_with_its_service(out: Path, tmp_path: Path, capfd: Cap) -> None:
    result = compress(capfd, "export-triton", out, "-o", tmp_path / "repository", "--quiet", "--json")
    assert (result.code, result.err) == (0, "")
    model = tmp_path / "repository" / "half"
    assert result.json["model"] == str(model)
    assert (result.json["backend"], result.json["device"], result.json["max_batch"]) == ("onnxruntime", "cpu", 8)
    assert "storage-uri" in [note["code"] for note in result.json["notes"]]
    service = yaml.safe_load((tmp_path / "repository" / "kserve.yaml").read_text())
    assert (service["kind"], service["metadata"]["name"]) == ("InferenceService", "repository")
    assert {path.name for path in tmp_path.iterdir()} == {"repository"}


@pytest.mark.parametrize(
    ("arguments", "exit_code", "code", "field"),
    [
        (["{tmp}/none", "-o", "{tmp}/r"], 3, ErrorCode.FILE_MISSING, None),
        (["{tmp}", "-o", "{tmp}/r"], 3, None, None),
        (["{out}", "-o", "{out}/file"], 3, ErrorCode.FILE_UNWRITABLE, None),
        (["{out}", "-o", "{tmp}/r", "--name", "a/b"], 2, ErrorCode.INVALID_VALUE, "name"),
        (["{out}", "-o", "{tmp}/r", "--gpus", "0,0"], 2, ErrorCode.CONTRADICTION, "gpus"),
        (["{out}", "-o", "{tmp}/r", "--gpus", "0", "--device", "cpu"], 2, ErrorCode.CONTRADICTION, "gpus"),
        (["{out}", "-o", "{tmp}/r", "--backend", "tensorrt"], 3, ErrorCode.FILE_MISSING, "engine"),
        (["{out}", "-o", "{tmp}/r", "--engine", "{tmp}/no.plan"], 3, None, None),
        (["{out}", "-o", "{tmp}/r", "--data", "{tmp}/no.tsv"], 3, None, None),
        (["{out}"], 2, ErrorCode.MISSING_VALUE, "repository"),
    ],
)
def test_bad_input_gives_a_one_line_error(
    arguments: list[str],
    exit_code: int,
    code: ErrorCode | None,
    field: str | None,
    out: Path,
    tmp_path: Path,
    capfd: Cap,
) -> None:
    result = compress(
        capfd, "export-triton", "--quiet", *(argument.format(tmp=tmp_path, out=out) for argument in arguments)
    )
    assert (result.code, result.out) == (exit_code, "")
    assert result.error
    assert code is None or result.error_code == code
    assert field is None or result.details["field"] == field
    assert not list(tmp_path.iterdir())


@pytest.mark.zoo
def test_a_library_is_compiled_once(tmp_path: Path, capfd: Cap) -> None:
    compiled()
    include = () if HEADERS is None else ("--include", HEADERS)
    out = tmp_path / "kernel.so"
    result = compress(capfd, "kernel", "-o", out, *include, "--json", "--quiet")
    assert result.code == 0, result.err
    assert result.json["error"] < 1e-5
    library = out.read_bytes()
    repeated = compress(capfd, "kernel", "-o", out, *include)
    assert (repeated.code, repeated.error_code) == (2, ErrorCode.OUTPUT_EXISTS)
    assert out.read_bytes() == library
    assert [path.name for path in tmp_path.iterdir()] == ["kernel.so"]
