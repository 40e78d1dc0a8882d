"""Write and read `config.pbtxt` with Triton's protobuf classes, with requests that warm a server up.

A server runs these requests before it reports ready: real rows, single and in the largest batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from compressor.config.request import ServeRequest
from compressor.errors import ErrorCode, InputError, TargetMissingError
from compressor.serving.model_files import ModelFiles
from compressor.targets import Feeds
from compressor.targets.tensor_specs import TensorSpec

try:
    from google.protobuf import text_format
    from tritonclient.grpc import model_config_pb2 as pb
except ImportError as error:
    text = "tritonclient, which writes Triton's configuration, is not installed"
    raise TargetMissingError.of_package("tritonclient", "serving", text) from error

FILE_NAME, WARMUP_FOLDER = "config.pbtxt", "warmup"
"""The configuration of a model, and the folder of the files of warm-up requests."""


@dataclass(frozen=True)
class Warmup:
    """A warm-up request.

    Attributes:
        row: number of the row.
        batch: number of times that the server repeats the row in one batch.
        feeds: input name -> array `[batch, ...]` of the row.
    """

    row: int
    batch: int
    feeds: Feeds

    @property
    def name(self) -> str:
        """Name of the request in the server's log."""
        return f"row {self.row}, batch {self.batch}"

    @property
    def files(self) -> Mapping[str, str]:
        """File name of each input."""
        return {name: f"row{self.row}.{index}" for index, name in enumerate(self.feeds)}

    def write(self, folder: Path) -> None:
        """Write the inputs as the server reads them: raw bytes, row by row."""
        for name, file in self.files.items():
            (folder / file).write_bytes(np.ascontiguousarray(self.feeds[name]).tobytes())


def warmups(rows: Sequence[Feeds], max_batch: int) -> tuple[Warmup, ...]:
    """The shortest and the longest row, each in a batch of one row and in the largest batch that the server forms."""
    if not rows:
        return ()
    by_size = {sum(array.size for array in row.values()): row for row in reversed(rows)}
    extremes = [by_size[size] for size in sorted({min(by_size), max(by_size)})]
    return tuple(
        Warmup(index, batch, row) for index, row in enumerate(extremes) for batch in sorted({1, max_batch or 1})
    )


def model_config(request: ServeRequest, files: ModelFiles, warmups: Sequence[Warmup]) -> Any:
    """The `ModelConfig` of one model.

    If every input and output has a free first axis, the server forms batches, and `dims` leave that axis out.

    Args:
        request: name, batching and GPUs.
        files: files, inputs, outputs and instances.
    """
    config = pb.ModelConfig(name=request.model, backend=files.backend, max_batch_size=files.max_batch)
    if files.backend == "tensorrt":
        config.platform = "tensorrt_plan"
    config.default_model_filename = files.default
    config.cc_model_filenames.update(files.by_capability)
    leading = 1 if files.max_batch else 0
    for tensors, entries in ((files.inputs, config.input), (files.outputs, config.output)):
        for tensor in tensors:
            entries.add(name=tensor.name, data_type=_data_type(tensor), dims=tensor.dims[leading:])
    if files.streams:
        config.model_transaction_policy.decoupled = True
        for entry in config.input[1:]:
            entry.optional = True
    if files.max_batch > 1:
        config.dynamic_batching.max_queue_delay_microseconds = request.queue_delay
    kind = pb.ModelInstanceGroup.KIND_GPU if files.device == "gpu" else pb.ModelInstanceGroup.KIND_CPU
    config.instance_group.add(count=files.placement.instances, kind=kind, gpus=request.gpus)
    if files.backend == "onnxruntime" and files.device == "gpu":
        # The backend passes the parameters to the provider. TensorFloat-32 keeps ten bits of a number: it is not fp32.
        accelerators = config.optimization.execution_accelerators
        accelerators.gpu_execution_accelerator.add(name="cuda", parameters={"use_tf32": "0"})
    threads = {} if files.placement.threads is None else {"intra_op_thread_count": str(files.placement.threads)}
    for name, value in {**threads, **files.parameters}.items():
        config.parameters[name].string_value = value
    for warmup in warmups:
        entry = config.model_warmup.add(name=warmup.name, batch_size=warmup.batch)
        for tensor in files.inputs:
            dims, file = warmup.feeds[tensor.name].shape[leading:], warmup.files[tensor.name]
            entry.inputs[tensor.name].CopyFrom(
                pb.ModelWarmup.Input(data_type=_data_type(tensor), dims=dims, input_data_file=file)
            )
    return config


def to_text(config: Any, comment: str = "") -> str:
    """The text of a `ModelConfig`, as the server reads it, after a comment of one line."""
    return (f"# {comment}\n" if comment else "") + str(text_format.MessageToString(config))


def from_text(text: str) -> Any:
    """The `ModelConfig` of a text.

    Raises:
        google.protobuf.text_format.ParseError: the text is not a `ModelConfig`.
    """
    return text_format.Parse(text, pb.ModelConfig())


def load(path: Path) -> Any:
    """Read a `config.pbtxt`.

    Raises:
        InputError: the file is missing, or is not the configuration of a model.
    """
    try:
        return from_text(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, text_format.ParseError) as error:
        text = "not a readable configuration of a Triton model; export the model again"
        raise InputError.of_file(path, text, ErrorCode.FILE_UNREADABLE) from error


def _data_type(tensor: TensorSpec) -> int:
    # Text is BYTES in the protocol and TYPE_STRING in a configuration.
    return int(pb.DataType.Value(f"TYPE_{tensor.type}".replace("BYTES", "STRING")))
