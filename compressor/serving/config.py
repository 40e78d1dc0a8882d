"""`config.pbtxt`, made and read back through Triton's own protobuf classes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from compressor.config.serve import ServeRequest
from compressor.errors import InputError, TargetMissingError
from compressor.serving.model_files import Source
from compressor.serving.warmup import Warmup
from compressor.targets.tensor_specs import TensorSpec

try:
    from google.protobuf import text_format
    from tritonclient.grpc import model_config_pb2 as pb
except ImportError as error:
    raise TargetMissingError(
        "tritonclient: is not installed, its classes write Triton's configuration; pip install 'compressor[serving]'"
    ) from error

FILE_NAME = "config.pbtxt"


def make(asked: ServeRequest, source: Source, warmups: Sequence[Warmup]) -> Any:
    """The `ModelConfig` of one model.

    Batches are formed by the server where every input and output has a free first axis, which `dims` then leave out.
    """
    config = pb.ModelConfig(name=asked.model, backend=source.backend, max_batch_size=source.max_batch)
    if source.backend == "tensorrt":
        config.platform = "tensorrt_plan"
    config.default_model_filename = source.default
    config.cc_model_filenames.update(source.by_capability)
    leading = 1 if source.max_batch else 0
    for tensor in source.inputs:
        config.input.add(name=tensor.name, data_type=_type(tensor), dims=tensor.dims[leading:])
    for tensor in source.outputs:
        config.output.add(name=tensor.name, data_type=_type(tensor), dims=tensor.dims[leading:])
    if source.max_batch > 1:
        config.dynamic_batching.max_queue_delay_microseconds = asked.queue_delay
    kind = pb.ModelInstanceGroup.KIND_GPU if source.device == "gpu" else pb.ModelInstanceGroup.KIND_CPU
    config.instance_group.add(count=asked.instances, kind=kind, gpus=asked.gpus)
    if source.backend == "onnxruntime" and source.device == "gpu":
        # The backend hands them to the provider. TensorFloat-32 keeps ten bits of a number: it is not fp32.
        accelerators = config.optimization.execution_accelerators
        accelerators.gpu_execution_accelerator.add(name="cuda", parameters={"use_tf32": "0"})
    if asked.threads is not None:
        config.parameters["intra_op_thread_count"].string_value = str(asked.threads)
    for warmup in warmups:
        made = config.model_warmup.add(name=warmup.name, batch_size=warmup.batch)
        for tensor in source.inputs:
            dims = warmup.feeds[tensor.name].shape[leading:]
            made.inputs[tensor.name].CopyFrom(
                pb.ModelWarmup.Input(data_type=_type(tensor), dims=dims, input_data_file=warmup.files[tensor.name])
            )
    return config


def text(config: Any) -> str:
    """The same as the server reads it."""
    return str(text_format.MessageToString(config))


def parse(text: str) -> Any:
    """The `ModelConfig` of a text.

    Raises:
        google.protobuf.text_format.ParseError: it is none.
    """
    return text_format.Parse(text, pb.ModelConfig())


def load(path: Path) -> Any:
    """Read a `config.pbtxt`.

    Raises:
        InputError: it is missing or no configuration of a model.
    """
    try:
        return parse(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, text_format.ParseError) as error:
        raise InputError(f"{path}: no readable configuration of a Triton model; export it again") from error


def _type(tensor: TensorSpec) -> int:
    # Text is BYTES where it travels and TYPE_STRING in a configuration.
    return int(pb.DataType.Value(f"TYPE_{tensor.type}".replace("BYTES", "STRING")))
