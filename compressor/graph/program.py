"""A graph that is ready to become a network: its nodes, its groups of units, and what its shapes say."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from transformers import PretrainedConfig

import graph_passes
from compressor.graph.fusions import fuse
from compressor.graph.signature import InputSpec, OutputSpec
from compressor.units.projections import Site
from graph_passes import FoundGroups
from graph_passes.passes import Normalize

_TOKENS, _TYPES = "input_ids", "token_type_ids"
_HALVES = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)


class GraphConfig(PretrainedConfig):
    """The configuration of a graph without a `config.json`: what tasks read of that of a model folder.

    Args:
        graph: hash of the operators of the graph.
        options: entries of a configuration of transformers, e.g. `vocab_size`.
    """

    model_type = "onnx"

    def __init__(self, graph: str = "", pad_token_id: int = 0, **options: Any) -> None:
        self.graph, self.pad_token_id = graph, pad_token_id
        super().__init__(**options)


@dataclass(frozen=True)
class Program:
    """A graph that is ready to become a network.

    Attributes:
        file: the file of the graph.
        model: the graph as it is executed: local functions are inlined, constants are initializers, operators are
            fused, and halves of floats are float32.
        found: the groups of units of the graph in the file.
    """

    file: Path
    model: ir.Model
    found: FoundGroups

    @classmethod
    def of(cls, file: Path, sizes: Mapping[str, tuple[int, ...]] | None = None) -> Program:
        """Read a graph and find its groups.

        Args:
            file: the file.
            sizes: shapes of an example of the inputs by name, where some axes fit no other size; None: any fit.

        Raises:
            GraphError: the file cannot be read.
        """
        model = graph_passes.load(file)
        Normalize()(model)
        if sizes:
            graph_passes.record_example_sizes(model, sizes)
        fused = fuse(model)
        _widen(fused)
        return cls(file, fused, graph_passes.find_groups(model))

    @property
    def graph(self) -> ir.Graph:
        """The nodes."""
        return self.model.graph

    @property
    def inputs(self) -> list[str]:
        """Names of the inputs."""
        return [value.name or "" for value in self.graph.inputs if not value.is_initializer()]

    @property
    def outputs(self) -> list[str]:
        """Names of the outputs."""
        return [value.name or "" for value in self.graph.outputs]

    @property
    def signature(self) -> tuple[dict[str, InputSpec], dict[str, OutputSpec]]:
        """Type and axes of each input and of each output by name."""
        inputs = [value for value in self.graph.inputs if not value.is_initializer()]
        return (
            {value.name or "": InputSpec(*_spec(value)) for value in inputs},
            {value.name or "": OutputSpec(*_spec(value)) for value in self.graph.outputs},
        )

    @property
    def paths(self) -> dict[str, str]:
        """Initializer of the weight that a group ends in -> path of its linear, the name of the group in plans."""
        return {group.weight: group.linear for group in self.found.groups}

    @property
    def sites(self) -> tuple[Site, ...]:
        """The attentions, named by the linears that mix their heads."""
        return tuple(
            Site(group.linear, group.kind, group.units, group.kv_heads, group.width)
            for group in self.found.groups
            if group.kind is not None and group.kv_heads is not None
        )

    @property
    def feed_forwards(self) -> dict[str, int]:
        """Path of each linear that reads neurons -> their number."""
        return {group.linear: group.units for group in self.found.groups if group.type == "neurons"}

    @property
    def digest(self) -> str:
        """Hash of the operators, without weights."""
        digest = hashlib.sha256()
        for node in self.graph:
            digest.update(f"{node.domain} {node.op_type} {[value and value.name for value in node.inputs]}".encode())
        return digest.hexdigest()[:16]

    @property
    def settings(self) -> dict[str, Any]:
        """Entries of a configuration that the tables and outputs of a graph of texts show."""
        tables: dict[str, int] = {}
        for node in self.graph:
            if node.op_type == "Gather":
                table, ids = node.inputs
                if table is not None and ids is not None and table.const_value is not None:
                    shape = table.const_value.shape.numpy()
                    tables |= {ids.name or "": shape[0]} if len(shape) == 2 else {}
        settings: dict[str, Any] = {}
        if _TOKENS in tables:
            settings["vocab_size"] = tables[_TOKENS]
        if _TYPES in self.inputs:
            settings["type_vocab_size"] = tables.get(_TYPES, 2)
        axes = self.graph.outputs[0].shape
        if axes is not None and isinstance(axes[-1], int):
            settings["num_labels"] = axes[-1]
        return settings

    def opset(self, node: ir.Node) -> int:
        """Version of the operator set of a node."""
        domain = "" if node.domain == "ai.onnx" else node.domain
        return node.version or self.model.opset_imports.get(domain, 1)


def _widen(model: ir.Model) -> None:
    """Compute in float32 where a graph computes in halves of floats, whose rounding would hide small differences."""
    for node in model.graph:
        to = node.attributes.get("to")
        if node.op_type == "Cast" and to is not None and to.as_int() in _HALVES:
            node.attributes["to"] = ir.AttrInt64("to", ir.DataType.FLOAT)
        value = node.attributes.get("value")
        if value is not None and value.type == ir.AttributeType.TENSOR and value.as_tensor().dtype in _HALVES:
            wide = value.as_tensor().numpy().astype(np.float32)
            node.attributes["value"] = ir.AttrTensor("value", ir.Tensor(wide))


def _spec(value: ir.Value) -> tuple[np.dtype, tuple[int | None, ...]]:
    """Element type and axes of an input or an output; a size that depends on the inputs is None."""
    dtype = np.dtype(np.float32) if value.dtype is None else value.dtype.numpy()
    return dtype, tuple(size if isinstance(size, int) else None for size in value.shape or ())
