"""TensorRT engines of several GPUs share a model, or are refused with their difference."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from compressor.config.request import ServeRequest
from compressor.errors import ErrorCode, InputError, UsageError
from compressor.results import NoteCode
from compressor.serving import export, triton_config
from compressor.serving.tensorrt_engines import load_engines
from compressor.targets.graph_facts import graph_digest
from compressor.workdir import FP8_GRAPH, SYMMETRIC_GRAPH
from tests.serving.outputs import tensorrt_engine


@pytest.fixture
def built(out: Path, tmp_path: Path) -> Path:
    """The folder of a run with an engine for compute capability 8.0."""
    folder = shutil.copytree(out, tmp_path / "built")
    tensorrt_engine(folder, (8, 0), 32, graph_hash=graph_digest(folder / "model.onnx"))
    return folder


def other_engine(built: Path, folder: Path, **fields: Any) -> Path:
    """An engine of the same graph for compute capability 9.0."""
    return tensorrt_engine(folder, (9, 0), 32, graph_hash=graph_digest(built / "model.onnx"), **fields)


def test_an_engine_whose_inputs_are_scalars_takes_one_row(built: Path) -> None:
    scalar: dict[str, Any] = {"profiles": {"threshold": ((), (), ())}, "inputs": {"threshold": "float32"}}
    engine = tensorrt_engine(built, (8, 0), 32, graph_hash=graph_digest(built / "model.onnx"), **scalar)
    assert load_engines(built, (engine,)).max_batch == 1


@pytest.mark.parametrize(("precision", "file"), [("int8", SYMMETRIC_GRAPH), ("fp8", FP8_GRAPH)])
def test_a_quantized_engine_is_that_of_its_quantized_graph(built: Path, precision: str, file: str) -> None:
    graph = built / file
    shutil.copy(built / "model.onnx", graph)
    engine = tensorrt_engine(built, (8, 0), 32, precision=precision, graph_hash=graph_digest(graph))
    assert load_engines(built, (engine,)).first.precision == precision
    graph.unlink()
    with pytest.raises(InputError) as error:
        load_engines(built, (engine,))
    assert (error.value.code, error.value.details["path"]) == (ErrorCode.FILE_MISMATCH, engine)


def test_engines_of_several_gpus_share_a_model(built: Path, tmp_path: Path) -> None:
    hopper = tensorrt_engine(tmp_path / "hopper", (9, 0), 16, graph_hash=graph_digest(built / "model.onnx"))
    request = ServeRequest(
        out=built, repository=tmp_path / "r", name="fast", engine=(hopper,), gpus=(0, 1), storage_uri="s3://models"
    )
    exported = export(request)
    config = triton_config.load(exported.model / "config.pbtxt")
    assert (config.backend, config.platform, config.max_batch_size) == ("tensorrt", "tensorrt_plan", 16)
    assert dict(config.cc_model_filenames) == {"8.0": "model.sm80.plan", "9.0": "model.sm90.plan"}
    assert config.default_model_filename == "model.sm80.plan"
    assert (exported.model / "1" / "model.sm90.plan").read_bytes() == hopper.read_bytes()
    assert (exported.model / "1" / "model.sm90.plan.json").is_file()
    assert {triton_config.pb.DataType.Name(entry.data_type) for entry in config.input} == {"TYPE_INT32"}
    (note,) = exported.notes
    assert note.code is NoteCode.SERVER_REQUIREMENT
    assert "10.9.0" in note.text
    service = yaml.safe_load(exported.service.read_text())
    resources = {"cpu": "2", "memory": "3Gi", "nvidia.com/gpu": "2"}
    assert service["spec"]["predictor"]["model"]["resources"] == {"requests": resources, "limits": resources}
    (warmup, _) = config.model_warmup
    ids = np.frombuffer((exported.model / "warmup" / warmup.inputs["input_ids"].input_data_file).read_bytes(), np.int32)
    assert len(ids) == 16, "the sentence is longer than the engines take"
    with pytest.raises(UsageError) as error:
        export(request.model_copy(update={"name": "more", "max_batch": 17}))
    assert (error.value.code, error.value.details["maximum"]) == (ErrorCode.OUT_OF_RANGE, 16)


def test_a_version_compatible_engine_needs_a_flag_of_the_server(out: Path, tmp_path: Path) -> None:
    built = shutil.copytree(out, tmp_path / "built")
    fields: dict[str, Any] = {
        "graph_hash": graph_digest(built / "model.onnx"),
        "version_compatible": True,
        "outputs": {"logits": "int32"},
    }
    tensorrt_engine(built, (8, 0), 32, **fields)
    exported = export(ServeRequest(out=built, repository=tmp_path / "r", storage_uri="s3://models"))
    flag = "--backend-config=tensorrt,version-compatible=true"
    assert [note.code for note in exported.notes] == [NoteCode.SERVER_REQUIREMENT] * 2
    assert flag in exported.notes[1].text
    assert yaml.safe_load(exported.service.read_text())["spec"]["predictor"]["model"]["args"] == [flag]
    (output,) = triton_config.load(exported.model / "config.pbtxt").output
    assert triton_config.pb.DataType.Name(output.data_type) == "TYPE_INT32", "the engine's type, not the graph's"
    tensorrt_engine(built, (8, 0), 32, graph_hash=fields["graph_hash"])
    export(ServeRequest(out=built, repository=tmp_path / "r", force=True))
    assert "args" not in yaml.safe_load(exported.service.read_text())["spec"]["predictor"]["model"]


def test_a_run_for_tensorrt_without_an_engine_is_refused(out: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError) as error:
        export(ServeRequest(out=out, repository=tmp_path / "r", backend="tensorrt"))
    assert (error.value.code, error.value.details["path"]) == (ErrorCode.FILE_MISSING, out)
    with pytest.raises(InputError) as error:
        export(ServeRequest(out=out, repository=tmp_path / "r", engine=(tmp_path / "none.plan",)))
    assert not (tmp_path / "r").exists()


@pytest.mark.parametrize(("field", "value"), [("device", "cpu"), ("plain", True), ("threads", 2)])
def test_options_without_effect_on_an_engine_are_refused(
    field: str, value: object, built: Path, tmp_path: Path
) -> None:
    with pytest.raises(UsageError) as error:
        export(ServeRequest(out=built, repository=tmp_path / "r", **{field: value}))
    assert (error.value.code, error.value.details["field"]) == (ErrorCode.CONTRADICTION, field)


def test_an_engine_of_another_graph_or_a_damaged_one_is_refused(built: Path, tmp_path: Path) -> None:
    request = ServeRequest(out=built, repository=tmp_path / "r")
    path = tensorrt_engine(built, (8, 0), 32, graph_hash="sha256:other")
    with pytest.raises(InputError) as error:
        export(request)
    assert (error.value.code, error.value.details["path"]) == (ErrorCode.FILE_MISMATCH, path)
    tensorrt_engine(built, (8, 0), 32, graph_hash=graph_digest(built / "model.onnx"))
    path.write_bytes(b"cut")
    with pytest.raises(InputError):
        export(request)
    assert not (tmp_path / "r").exists()


def test_two_engines_for_one_gpu_are_refused(built: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(built, tmp_path / "again")
    with pytest.raises(UsageError) as error:
        export(ServeRequest(out=built, repository=tmp_path / "r", engine=(copy / "engine.plan",)))
    assert (error.value.code, error.value.details["difference"]) == (ErrorCode.CONTRADICTION, "capability")
    assert export(ServeRequest(out=built, repository=tmp_path / "r", engine=(built / "engine.plan",))).model.is_dir()


_MASK = {"attention_mask": ((1, 1), (2, 8), (32, 16))}


@pytest.mark.parametrize(
    ("fields", "difference"),
    [
        ({"tensorrt": "10.16.1"}, "tensorrt"),
        ({"precision": "fp32"}, "precision"),
        ({"inputs": {"input_ids": "int64", "attention_mask": "int64"}}, "types"),
        ({"profiles": {"input_ids": ((1, 17), (2, 18), (32, 20)), **_MASK}}, "profiles"),
        ({"profiles": {"input_ids": ((1, 8), (1, 8), (1, 8)), **_MASK}}, "shapes"),
    ],
)
def test_engines_that_cannot_share_a_server_are_refused(
    fields: dict[str, Any], difference: str, built: Path, tmp_path: Path
) -> None:
    hopper = other_engine(built, tmp_path / "other", **fields)
    with pytest.raises(UsageError) as error:
        export(ServeRequest(out=built, repository=tmp_path / "r", engine=(hopper,)))
    assert (error.value.code, error.value.details["difference"]) == (ErrorCode.CONTRADICTION, difference)
    assert not (tmp_path / "r").exists()


def test_the_default_is_an_engine_for_other_gpus(built: Path, tmp_path: Path) -> None:
    hopper = other_engine(built, tmp_path / "other", hardware_compatible=True)
    exported = export(ServeRequest(out=built, repository=tmp_path / "r", engine=(hopper,)))
    assert triton_config.load(exported.model / "config.pbtxt").default_model_filename == "model.sm90.plan"
