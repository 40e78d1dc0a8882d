"""`compress train` has one flag per field and prints the result of the training."""

from __future__ import annotations

import json
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from compressor.cli.train import train
from compressor.config.fields import flag_of
from compressor.config.train import Training
from compressor.errors import ErrorCode
from tests import language
from tests.command import compress

TINY = "--layers 1 --hidden 16 --heads 4 --persistent 8 --memory 8 --segment 6 --batch-size 2 --steps 2 --evaluations 1"


def test_every_field_is_one_flag() -> None:
    flags = {str(option.name): option.opts for option in train.params if isinstance(option, click.Option)}
    assert set(flags) - {"quiet", "debug", "json"} == set(Training.model_fields) - {"out"}
    assert all(flag_of(name) in opts for name, opts in flags.items())
    output = CliRunner().invoke(train, ["--help"]).output
    assert all(heading in output for heading in ("Data:", "Model:", "Training:", "Output:"))


def test_the_result_is_printed(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "train.txt").write_text(language.text(30))
    data, out = tmp_path / "train.txt", tmp_path / "out"
    result = compress(capfd, "train", out, "--data", data, *TINY.split(), "--json")
    assert result.code == 0, result.err
    record = json.loads((out / "training.json").read_text())
    assert result.json == {"out": str(out), **record["result"]}
    assert f"the training curves are in {out / 'training.json'}" in result.err


def test_a_missing_text_is_a_usage_error(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    result = compress(capfd, "train", tmp_path / "out")
    assert (result.code, result.error_code, result.details["field"]) == (2, ErrorCode.MISSING_VALUE, "data")
