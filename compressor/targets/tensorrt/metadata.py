"""What an engine was built from and for, in a file beside it: read and checked before TensorRT sees the engine."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Any, Literal

import pydantic
from pydantic import BaseModel, ConfigDict

from compressor.errors import InputError
from compressor.results import EngineBuild
from compressor.targets.base import Precision
from compressor.targets.cuda import Device
from graph_passes import data_files, load

Shape = tuple[int, ...]
AMPERE = (8, 0)
"""Compute capability of the first GPUs that engines can be compatible with."""
_BLOCK = 1 << 20


class Metadata(BaseModel):
    """An engine's papers.

    `profiles` has the least, the usual and the largest shape of every input; `inputs` the types that the engine takes
    and `outputs` those that it gives, by name. `attentions` counts those of which can be told whether they are `fused`.
    `plan` and `model` are hashes of the engine's own file and of the graph.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    version: Literal[1] = 1
    tensorrt: str
    gpu: str
    capability: tuple[int, int]
    precision: Precision
    profiles: dict[str, tuple[Shape, Shape, Shape]]
    inputs: dict[str, str]
    outputs: dict[str, str]
    plan: str
    model: str
    hardware_compatible: bool
    version_compatible: bool
    attentions: int
    fused: int
    optimization: str
    session: dict[str, Any]
    built: EngineBuild

    def check_machine(self, plan: Path, device: Device, tensorrt: str) -> None:
        """Whether the engine runs on a GPU with a TensorRT.

        Raises:
            InputError: it was built for others.
        """
        other = (self.gpu, self.capability) != (device.name, device.capability)
        newer = self.hardware_compatible and min(self.capability, device.capability) >= AMPERE
        if other and not newer:
            built = Device(self.gpu, self.capability, 0)
            raise InputError(f"{plan}: was built for another GPU, {built}, and this is {device}; {MEND}")
        if tensorrt != self.tensorrt and not (self.version_compatible and follows(tensorrt, self.tensorrt)):
            raise InputError(f"{plan}: was built by TensorRT {self.tensorrt}, and this is {tensorrt}; {MEND}")

    def check_file(self, plan: Path) -> None:
        """Raise InputError where the engine's file is not the one that was built."""
        if digest(plan) != self.plan:
            raise InputError(f"{plan}: is damaged, or was not built with {papers_of(plan).name}; {MEND}")

    def check_shapes(self, shapes: dict[str, Shape]) -> None:
        """Whether the engine takes inputs of these shapes.

        Raises:
            InputError: an input is missing or out of its profile.
        """
        for name, (least, _, most) in self.profiles.items():
            if name not in shapes:
                raise InputError(f"the engine wants an input named {name}; give {', '.join(self.profiles)}")
            shape = shapes[name]
            if len(shape) != len(least) or not all(a <= b <= c for a, b, c in zip(least, shape, most, strict=True)):
                raise InputError(
                    f"{name}: is {list(shape)}, and the engine takes {list(least)} to {list(most)}; build it for such"
                    " sizes too (--batch, --seq)"
                )


MEND = "build it on this machine: compress build OUT --target trt"


def papers_of(plan: Path) -> Path:
    """Where the metadata of an engine lies."""
    return plan.with_name(f"{plan.name}.json")


def read(plan: Path) -> Metadata:
    """The metadata beside an engine.

    Raises:
        InputError: there is none, or it cannot be read.
    """
    if not plan.is_file():
        raise InputError(f"{plan}: no such engine; {MEND}")
    path = papers_of(plan)
    try:
        return Metadata.model_validate_json(path.read_bytes())
    except FileNotFoundError as error:
        raise InputError(
            f"{plan}: {path.name}, which says what it was built for, is missing beside it; {MEND}"
        ) from error
    except pydantic.ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"])) or "file"
        raise InputError(f"{path}: {where}: {' '.join(str(first['msg']).split())}; {MEND}") from error


def digest(*paths: Path) -> str:
    """Hash of files' contents, in order."""
    found = hashlib.sha256()
    for path in paths:
        with path.open("rb") as file:
            while block := file.read(_BLOCK):
                found.update(block)
    return f"sha256:{found.hexdigest()}"


def graph_digest(graph: Path) -> str:
    """Hash of a graph with its external data."""
    return digest(graph, *sorted(data_files(load(graph))))


_NEXT = {8: (8, 9, 10), 9: (9, 10), 10: (10, 11)}
"""Major versions that run the version-compatible engines of one (TensorRT's documentation, "Engine Compatibility")."""


def follows(later: str, earlier: str) -> bool:
    """Whether a TensorRT runs the version-compatible engines of an earlier one."""
    one, other = parts(later), parts(earlier)
    return one >= other and one[0] in _NEXT.get(other[0], other[:1])


def parts(version: str) -> list[int]:
    """A version's numbers, to be compared."""
    return [int(part) for part in re.findall(r"\d+", version)]
