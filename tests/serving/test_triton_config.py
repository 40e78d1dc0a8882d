"""`config.pbtxt` contains the settings of the request and of the files, and is read back without a change."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from hypothesis import given
from hypothesis import strategies as st

from compressor.config.request import ServeRequest
from compressor.errors import ErrorCode, InputError
from compressor.serving import triton_config
from compressor.serving.model_files import ModelFiles, Placement
from compressor.serving.triton_config import warmups
from compressor.targets.tensor_specs import TensorSpec
from tests.targets.graphs import parsed

_TYPES = {
    "FLOAT": "TYPE_FP32",
    "FLOAT16": "TYPE_FP16",
    "INT64": "TYPE_INT64",
    "INT32": "TYPE_INT32",
    "BOOL": "TYPE_BOOL",
    "UINT8": "TYPE_UINT8",
}
_GRAPH = parsed("y = Identity (x)", "float[n, 3] x", "float[n, 3] y")
_NAMES = st.text("abcdefghijklmnopqrstuvwxyz_0123456789", min_size=1, max_size=9)


@st.composite
def tensors(draw: st.DrawFn) -> tuple[TensorSpec, ...]:
    names = draw(st.lists(_NAMES, min_size=1, max_size=4, unique=True))
    dims = st.lists(st.sampled_from([-1, 1, 3, 128]), max_size=3).map(tuple)
    return tuple(
        TensorSpec(name, ir.DataType[draw(st.sampled_from(sorted(_TYPES)))], (-1, *draw(dims))) for name in names
    )


@st.composite
def model_files(draw: st.DrawFn) -> ModelFiles:
    return ModelFiles(
        backend=draw(st.sampled_from(["onnxruntime", "tensorrt", "python"])),
        device=draw(st.sampled_from(["cpu", "gpu"])),
        graph=_GRAPH,
        inputs=draw(tensors()),
        outputs=draw(tensors()),
        max_batch=draw(st.integers(0, 64)),
        lengths=(1, 128),
        files={},
        default=draw(_NAMES),
        by_capability=draw(st.dictionaries(st.sampled_from(["7.5", "8.0", "9.0"]), _NAMES)),
        placement=Placement(draw(st.integers(1, 9)), draw(st.none() | st.integers(1, 64)), draw(st.just("") | _NAMES)),
    )


@st.composite
def requests(draw: st.DrawFn) -> ServeRequest:
    fields = {
        "name": draw(_NAMES),
        "queue_delay": draw(st.integers(0, 10**6)),
        "gpus": draw(st.lists(st.integers(0, 7), max_size=3, unique=True)),
    }
    return ServeRequest(out="out", repository="repository", **fields)


@given(model_files(), requests())
def test_the_configuration_contains_the_request_and_the_files(files: ModelFiles, request: ServeRequest) -> None:
    rows = [{tensor.name: np.ones([max(1, dim) for dim in tensor.dims], tensor.numpy) for tensor in files.inputs}]
    warm = warmups(rows, files.max_batch)
    text = triton_config.to_text(triton_config.model_config(request, files, warm), files.placement.reason)
    config = triton_config.from_text(text)
    first = 1 if files.max_batch else 0
    for tensors, entries in ((files.inputs, config.input), (files.outputs, config.output)):
        assert [(tensor.name, tensor.dims[first:], _TYPES[tensor.dtype.name]) for tensor in tensors] == [
            (entry.name, tuple(entry.dims), triton_config.pb.DataType.Name(entry.data_type)) for entry in entries
        ]
    assert (config.name, config.backend, config.max_batch_size) == (request.name, files.backend, files.max_batch)
    assert config.platform == ("tensorrt_plan" if files.backend == "tensorrt" else "")
    assert config.HasField("dynamic_batching") == (files.max_batch > 1)
    delay = config.dynamic_batching.max_queue_delay_microseconds
    assert delay == (request.queue_delay if files.max_batch > 1 else 0)
    (group,) = config.instance_group
    kind = triton_config.pb.ModelInstanceGroup.Kind.Name(group.kind)
    assert (group.count, list(group.gpus), kind) == (
        *(files.placement.instances, list(request.gpus), f"KIND_{files.device.upper()}"),
    )
    threads = config.parameters["intra_op_thread_count"].string_value
    assert threads == ("" if files.placement.threads is None else str(files.placement.threads))
    assert config.default_model_filename == files.default
    assert dict(config.cc_model_filenames) == dict(files.by_capability)


@given(model_files(), requests())
def test_only_onnx_runtime_on_a_gpu_would_compute_in_tf32(files: ModelFiles, request: ServeRequest) -> None:
    config = triton_config.model_config(request, files, ())
    accelerators = config.optimization.execution_accelerators.gpu_execution_accelerator
    in_tf32 = files.backend == "onnxruntime" and files.device == "gpu"
    assert [(entry.name, dict(entry.parameters)) for entry in accelerators] == [("cuda", {"use_tf32": "0"})] * in_tf32


@given(model_files())
def test_the_warm_up_runs_a_row_alone_and_in_the_largest_batch(files: ModelFiles) -> None:
    rows = [{tensor.name: np.ones([max(1, dim) for dim in tensor.dims], tensor.numpy) for tensor in files.inputs}]
    request = ServeRequest(out="out", repository="repository")
    config = triton_config.model_config(request, files, warmups(rows, files.max_batch))
    assert [entry.batch_size for entry in config.model_warmup] == sorted({1, max(1, files.max_batch)})
    first = 1 if files.max_batch else 0
    for entry in config.model_warmup:
        shapes = {name: tuple(tensor.dims) for name, tensor in entry.inputs.items()}
        assert shapes == {name: array.shape[first:] for name, array in rows[0].items()}


@pytest.mark.parametrize("content", [None, b"name: [", b"\xff\xfe"])
def test_a_file_without_a_configuration_is_refused(content: bytes | None, tmp_path: Path) -> None:
    path = tmp_path / "config.pbtxt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InputError) as error:
        triton_config.load(path)
    assert (error.value.code, error.value.details["path"]) == (ErrorCode.FILE_UNREADABLE, path)
