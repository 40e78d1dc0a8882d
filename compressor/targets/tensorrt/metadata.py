"""Metadata of a TensorRT engine: its graph, GPU and sizes, which are checked before TensorRT loads the engine."""

from __future__ import annotations

import re
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal

import numpy as np
import onnx_ir as ir
import pydantic
from pydantic import BaseModel, ConfigDict, Field

from compressor.errors import ErrorCode, InputError
from compressor.results import EngineBuild, QuantizedProducts
from compressor.targets.base import Precision, missing_input
from compressor.targets.cuda import Device
from compressor.targets.graph_facts import digest
from compressor.targets.tensor_specs import FREE, TensorSpec

Shape = tuple[int, ...]
AMPERE = (8, 0)
"""Compute capability of the first GPUs that hardware-compatible engines run on."""
REBUILD_HINT = "build it on this machine: compress build OUT --target trt"


class TimingsState(StrEnum):
    """Whether a build used the kernel timings of earlier builds, and if not, why."""

    NEW = "new"
    """There were none."""
    REUSED = "reused"
    EMPTY = "empty"
    DAMAGED = "damaged"
    OTHER_MACHINE = "other-machine"
    """They were of another GPU or another version of TensorRT."""
    REFUSED = "refused"
    """TensorRT did not accept them."""


class TimingsUse(BaseModel):
    """How a build used the timing cache.

    Attributes:
        state: state of the earlier timings; all states but `REUSED` and `NEW` discard them.
        path: the cache's file.
        machine: version of TensorRT and GPU of discarded timings of another machine.
        save_error: why the new timings could not be saved; None: they were saved.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    state: TimingsState
    path: Path
    machine: str | None = None
    save_error: str | None = None

    def __str__(self) -> str:
        discarded = f"kernels were timed again because {self.path}"
        sentences = {
            TimingsState.NEW: [],
            TimingsState.REUSED: [f"kernel timings of earlier builds were used ({self.path})"],
            TimingsState.EMPTY: [f"{discarded} was empty"],
            TimingsState.DAMAGED: [f"{discarded} was damaged"],
            TimingsState.OTHER_MACHINE: [f"{discarded} was of {self.machine}"],
            TimingsState.REFUSED: [f"{discarded} was refused by TensorRT"],
        }[self.state]
        if self.save_error is not None:
            sentences.append(f"kernel timings could not be saved in {self.path} ({self.save_error})")
        return "; ".join(sentences)


class EngineMetadata(BaseModel):
    """The graph that an engine was built from, and the GPU, the version and the sizes that it was built for.

    Attributes:
        tensorrt: version of TensorRT.
        gpu: name of the GPU.
        capability: its compute capability.
        precision: numeric precision of the engine.
        profiles: input -> smallest, usual and largest shape.
        inputs: input -> NumPy's name of its element type.
        outputs: output -> NumPy's name of its element type.
        engine_hash: hash of the engine's file; the JSON key is `plan`.
        graph_hash: hash of the graph with its external data; the JSON key is `model`.
        hardware_compatible: whether it runs on other GPUs too, from Ampere on.
        version_compatible: whether later versions of TensorRT run it too.
        attentions: number of attentions for which it is known whether they are fused.
        fused: number of fused attentions.
        optimization: what was done to the graph, in one line.
        session: runtime, device and options.
        built: sizes, duration and layers.
        timings: how the timing cache was used; None in metadata of version 0.1.
        quantized: the matmuls in 8 bits, as far as the inspector lists their layers; None: it lists none.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", validate_by_name=True, validate_by_alias=True, serialize_by_alias=True
    )

    version: Literal[1] = 1
    tensorrt: str
    gpu: str
    capability: tuple[int, int]
    precision: Precision
    profiles: dict[str, tuple[Shape, Shape, Shape]]
    inputs: dict[str, str]
    outputs: dict[str, str]
    engine_hash: str = Field(alias="plan")
    graph_hash: str = Field(alias="model")
    hardware_compatible: bool
    version_compatible: bool
    attentions: int
    fused: int
    optimization: str
    session: dict[str, Any]
    built: EngineBuild
    timings: TimingsUse | None = None
    quantized: QuantizedProducts | None = None

    @property
    def specs(self) -> tuple[TensorSpec, ...]:
        """Names, element types and shapes of the inputs; an axis is free where the profile has several sizes."""
        specs = []
        for name, (smallest, _, largest) in self.profiles.items():
            dims = tuple(low if low == high else FREE for low, high in zip(smallest, largest, strict=True))
            specs.append(TensorSpec(name, ir.DataType.from_numpy(np.dtype(self.inputs[name])), dims))
        return tuple(specs)

    def check_machine(self, path: Path, device: Device, tensorrt: str) -> None:
        """Make sure that the engine runs on a GPU and with a version of TensorRT.

        Raises:
            InputError: the engine was built for another GPU or version.
        """
        same = (self.gpu, self.capability) == (device.name, device.capability)
        compatible = self.hardware_compatible and min(self.capability, device.capability) >= AMPERE
        if not same and not compatible:
            text = (
                f"built for another GPU, {Device(self.gpu, self.capability, 0)}, and this is {device}; {REBUILD_HINT}"
            )
            raise InputError.of_file(path, text, ErrorCode.FILE_MISMATCH, field="gpu", value=device.name)
        if tensorrt != self.tensorrt and not (self.version_compatible and runs_engines_of(tensorrt, self.tensorrt)):
            text = f"{path}: built by TensorRT {self.tensorrt}, and this is {tensorrt}; {REBUILD_HINT}"
            raise InputError(text, code=ErrorCode.FILE_MISMATCH, path=path, field="tensorrt", value=tensorrt)

    def check_file(self, path: Path) -> None:
        """Make sure that a file is the engine that was built.

        Raises:
            InputError: its hash differs.
        """
        if digest(path) != self.engine_hash:
            text = f"{path}: damaged, or not built with {metadata_path(path).name}; {REBUILD_HINT}"
            raise InputError(text, code=ErrorCode.FILE_UNREADABLE, path=path)

    def check_shapes(self, shapes: dict[str, Shape]) -> None:
        """Make sure that the engine takes inputs of these shapes.

        Raises:
            InputError: an input is missing, or its shape is outside of the profile.
        """
        for name, (smallest, _, largest) in self.profiles.items():
            if name not in shapes:
                raise missing_input(name, self.profiles)
            shape = shapes[name]
            bounds = zip(smallest, shape, largest, strict=False)
            if len(shape) != len(smallest) or not all(low <= size <= high for low, size, high in bounds):
                text = (
                    f"{name}: its shape is {list(shape)}, and the engine takes {list(smallest)} to {list(largest)};"
                    " build it for these sizes too (--batch, --seq)"
                )
                raise InputError(
                    text, code=ErrorCode.TENSOR_MISMATCH, tensor=name, shape=shape, minimum=smallest, maximum=largest
                )

    def write(self, path: Path) -> None:
        """Write the metadata beside an engine's file."""
        metadata_path(path).write_text(self.model_dump_json(indent=1) + "\n", encoding="utf-8")


def metadata_path(path: Path) -> Path:
    """The file of an engine's metadata, from the engine's file."""
    return path.with_name(f"{path.name}.json")


def read_metadata(path: Path) -> EngineMetadata:
    """The metadata of an engine.

    Raises:
        InputError: the engine or its metadata is missing, or cannot be read.
    """
    if not path.is_file():
        raise InputError(f"{path}: no such engine; {REBUILD_HINT}", code=ErrorCode.FILE_MISSING, path=path)
    metadata = metadata_path(path)
    try:
        return EngineMetadata.model_validate_json(metadata.read_bytes())
    except FileNotFoundError as error:
        text = f"{path}: its metadata {metadata.name} are missing; {REBUILD_HINT}"
        raise InputError(text, code=ErrorCode.FILE_MISSING, path=metadata) from error
    except pydantic.ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        field = ".".join(map(str, first["loc"])) or "file"
        text = f"{metadata}: {field}: {' '.join(str(first['msg']).split())}; {REBUILD_HINT}"
        raise InputError(text, code=ErrorCode.FILE_UNREADABLE, path=metadata, field=field) from error


_RUNS_ON = {8: (8, 9, 10), 9: (9, 10), 10: (10, 11)}
"""Major version -> major versions that run its version-compatible engines (TensorRT's documentation, "Engine
Compatibility")."""


def runs_engines_of(later: str, earlier: str) -> bool:
    """Whether a version of TensorRT runs the version-compatible engines of an earlier one."""
    newer, older = version_numbers(later), version_numbers(earlier)
    return newer >= older and newer[0] in _RUNS_ON.get(older[0], older[:1])


def version_numbers(version: str) -> list[int]:
    """The numbers of a version, for comparison."""
    return [int(part) for part in re.findall(r"\d+", version)]
