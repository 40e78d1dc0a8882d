"""Requests of `compress export-triton`: names, engines and GPUs, and every fault names its field."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from compressor.config.request import ServeRequest
from compressor.errors import ErrorCode, UsageError


def request_with(**fields: Any) -> ServeRequest:
    return ServeRequest(**{"out": "runs/half", "repository": "repository", **fields})


def test_a_model_is_named_after_the_folder_of_its_run() -> None:
    assert request_with().model_dir == Path("repository/half")
    assert request_with(out="runs/half/.").model == "half"
    assert request_with(name="small").model_dir == Path("repository/small")


def test_flags_and_python_values_are_read_alike() -> None:
    flags = request_with(gpus="0,2", engine=("a.plan", "b.plan"), max_batch="8")
    values = request_with(gpus=(0, 2), engine=[Path("a.plan"), Path("b.plan")], max_batch=8)
    assert request_with(data="d", text_columns="a,b") == request_with(data="d", text_columns=["a", "b"])
    assert flags == values


@pytest.mark.parametrize(
    ("fields", "code", "field"),
    [
        ({"name": "a/b"}, ErrorCode.INVALID_VALUE, "name"),
        ({"out": "runs/half the heads"}, ErrorCode.INVALID_VALUE, "name"),
        ({"gpus": "0,0"}, ErrorCode.CONTRADICTION, "gpus"),
        ({"gpus": "first"}, ErrorCode.INVALID_VALUE, "gpus"),
        ({"gpus": "0", "device": "cpu"}, ErrorCode.CONTRADICTION, "gpus"),
        ({"text_columns": "a"}, ErrorCode.CONTRADICTION, "text_columns"),
        ({"image_column": "a"}, ErrorCode.CONTRADICTION, "image_column"),
        ({"engine": ("a.plan",), "backend": "python"}, ErrorCode.CONTRADICTION, "engine"),
        ({"backend": "onnx"}, ErrorCode.UNKNOWN_NAME, "backend"),
        ({"device": "tpu"}, ErrorCode.UNKNOWN_NAME, "device"),
        ({"max_batch": 0}, ErrorCode.OUT_OF_RANGE, "max_batch"),
        ({"queue_delay": -1}, ErrorCode.OUT_OF_RANGE, "queue_delay"),
        ({"instances": "some"}, ErrorCode.INVALID_VALUE, "instances"),
        ({"repository": None}, ErrorCode.MISSING_VALUE, "repository"),
    ],
)
def test_faults_name_their_field(fields: dict[str, Any], code: ErrorCode, field: str) -> None:
    with pytest.raises(UsageError) as error:
        request_with(**fields)
    assert (error.value.code, error.value.details["field"]) == (code, field)
