"""What a model declares that was loaded from an ONNX file: its inputs, outputs and weights, and the file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
from torch import Tensor, nn

from compressor.targets.base import Feeds
from compressor.targets.example_rows import ExampleRows
from compressor.targets.relative_error import Outputs
from compressor.units.hook import unwrap
from graph_passes import Plan


@dataclass(frozen=True)
class InputSpec:
    """An input of a graph.

    Attributes:
        dtype: its element type.
        shape: the size of each axis, rows first; None: any size.
        ids: number of ids in the table of embeddings that it is looked up in; None: it is no input of ids.
    """

    dtype: np.dtype
    shape: tuple[int | None, ...]
    ids: int | None = None


@dataclass(frozen=True)
class OutputSpec:
    """An output of a graph.

    Attributes:
        dtype: its element type.
        shape: the size of each axis, rows first; None: any size.
    """

    dtype: np.dtype
    shape: tuple[int | None, ...]


@runtime_checkable
class HasSignature(Protocol):
    """A model with the inputs and outputs of a graph.

    Attributes:
        input_specs: type and shape of each input by name.
        output_specs: type and shape of each output by name.
    """

    input_specs: Mapping[str, InputSpec]
    output_specs: Mapping[str, OutputSpec]


@runtime_checkable
class FileModel(HasSignature, Protocol):
    """A model that was loaded from an ONNX file, and whose weights are written back into a copy of it.

    Attributes:
        file: the file.
        precision: the precision in which the file stores its matrices.
    """

    file: Path
    precision: Literal["fp32", "fp16", "bf16"]

    @property
    def initializers(self) -> Mapping[str, Tensor]:
        """The weights by the names of the graph, in its layouts."""

    def write_gated(self, plan: Plan, path: Path, example: ExampleRows | None = None) -> None:
        """Write the graph with the gates of a plan, as `compressor.export.export_reference` writes that of a model."""

    def reference_run(self, plan: Plan) -> Callable[[Feeds], Outputs]:
        """Runs the file under a plan, independently of what `write_gated` writes."""


def file_model(model: nn.Module) -> FileModel | None:
    """The model inside the wrappers of training, if it was loaded from an ONNX file; else None."""
    bare: Any = unwrap(model)
    return bare if isinstance(bare, FileModel) else None
