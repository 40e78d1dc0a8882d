"""A graph that is read from a file: its nodes, its groups of units, and the facts that its shapes show."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import ShapeInferencePass

import graph_passes
from compressor.errors import ErrorCode, InputError
from compressor.graph.layers import Division
from compressor.graph.signature import InputSpec, OutputSpec
from compressor.targets.caches import PADDING
from compressor.targets.graph_facts import graph_digest, stored_precision
from compressor.units import Site
from graph_passes import GraphGroup, GraphGroups, Refusal, RefusalCode
from graph_passes.attention.find_groups import are_equal
from graph_passes.attention.linears import GraphLinear
from graph_passes.attention.tracing import KEEPS_ELEMENTS
from graph_passes.errors import listed
from graph_passes.flow.caches import cache_names, record_caches
from graph_passes.passes import NameDecodingAxes, Normalize, ReadWholeTexts
from graph_passes.passes.insert_gates import FINGERPRINT
from graph_passes.passes.name_decoding_axes import IDS, MASK, POSITIONS
from graph_passes.passes.normalize import is_float
from graph_passes.tape import add_initializer

_TOKENS, _TYPES, LOGITS = "input_ids", "token_type_ids", "logits"
_QUANTIZED = frozenset(
    "ConvInteger DequantizeLinear DynamicQuantizeLinear DynamicQuantizeLSTM DynamicQuantizeMatMul MatMulInteger"
    " MatMulIntegerToFloat MatMulNBits QAttention QGemm QLinearAdd QLinearConv QLinearMatMul QuantizeLinear".split()
)
"""Operators of quantized graphs, whose weights no rule cuts."""
_DOMAINS = ("", "ai.onnx", "ai.onnx.ml", "com.microsoft", "com.microsoft.nchwc", "com.ms.internal.nhwc")
"""Domains of the operators that ONNX Runtime has."""
_LEAST_OPSET = 11
"""First version of ONNX's operators that is read."""
_CACHE = re.compile(r"past_key|past_value\b|key_value|past[._]?\d|cache", re.IGNORECASE)
"""Parts of the names of inputs that hold keys and values of earlier positions."""
_OF_TEXTS = (IDS, MASK, POSITIONS)
"""Inputs of a decoder with caches besides these."""
_FROM_LEFT = ("GroupQueryAttention",)
"""Operators that read as many tokens of a text as it has from its first position on."""
CACHED_BRANCH = "use_cache_branch"
"""Input of a decoder that holds two graphs, one of which reads caches."""
_FUSED_TABLES = {"EmbedLayerNormalization": ((0, 2), (1, 4))}
"""Operator that looks up several tables -> positions of ids and of their table among its inputs."""
_KEEP_IDS = ("Cast", "Expand", "Flatten", "Identity", "Reshape", "Squeeze", "Unsqueeze")
"""Operators whose outputs are ids if their inputs are."""
_HALVES = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)


@dataclass(frozen=True)
class Program:
    """A graph of a file.

    Attributes:
        file: the file of the graph.
        content: hash of the file and its external data when it was read.
        model: the graph, normalized: local functions are inlined, constants are initializers, and each linear has its
            own bias. That of a decoder with key/value caches reads whole texts, without caches.
        search: the groups of units of the graph, and what prevents more.
        precision: the precision in which the file stores its matrices.
        cached: the graph of a decoder with its caches, whose weights are those of `model`; None: it has none.
    """

    file: Path
    content: str
    model: ir.Model
    search: GraphGroups
    precision: Literal["fp32", "fp16", "bf16"]
    cached: ir.Model | None = None

    @classmethod
    def of(cls, file: Path, sizes: Mapping[str, tuple[int, ...]] | None = None) -> Program:
        """Read a graph and find its groups.

        Args:
            file: the file.
            sizes: shapes of an example of the inputs by name, where some axes fit no other size; None: any fit.

        Raises:
            GraphError: the file cannot be read.
            InputError: graphs of this kind are not supported.
        """
        content, model = graph_digest(file), graph_passes.load(file)
        _require_readable(model, file)
        model.metadata_props.pop(FINGERPRINT, None)  # of the whole model, where a run wrote the file
        _take_cached_branch(model.graph)
        Normalize()(model)
        _require_operators(model, file)
        if any(value.shape is None for value in model.graph.outputs):
            ShapeInferencePass()(model)
        graph_passes.record_example_sizes(model, sizes or {})
        search, precision = graph_passes.find_groups(model), stored_precision(model)
        _require_caches(model, file)
        if not (caches := cache_names(model)):
            return cls(file, content, model, search, precision)
        record_caches(model, caches.items())  # also of what a plan cuts
        NameDecodingAxes()(model)
        if any(node.op_type in _FROM_LEFT for node in model.graph) or MASK not in {v.name for v in model.graph.inputs}:
            model.metadata_props[PADDING] = "right"
        whole = ReadWholeTexts()(model.clone()).model
        Normalize()(whole)
        return cls(file, content, whole, search, precision, model)

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
        inputs, tables = [value for value in self.graph.inputs if not value.is_initializer()], self.tables
        return (
            {value.name or "": InputSpec(*_spec(value), tables.get(value.name or "")) for value in inputs},
            {value.name or "": OutputSpec(*_spec(value)) for value in self.graph.outputs},
        )

    @property
    def paths(self) -> dict[str, str]:
        """Initializer of the weight that a group ends in -> path of its linear, the name of the group in plans."""
        return {weight: group.linear for group in self.groups for weight in group.weights}

    @cached_property
    def division(self) -> Division:
        """The graph in layers."""
        return Division(self.graph)

    @cached_property
    def linears(self) -> dict[str, list[GraphLinear]]:
        """Path of the linear that a group ends in -> its matmuls: several where a module is called several times."""
        paths = {weight: group.linear for group in self.search.groups for weight in group.weights}
        linears: dict[str, list[GraphLinear]] = {}
        for linear in self.division.linears:
            if (path := paths.get(linear.weight.name or "")) is not None:
                linears.setdefault(path, []).append(linear)
        return linears

    @cached_property
    def groups(self) -> list[GraphGroup]:
        """The groups that end in a matmul of an activation with a matrix, or in several calls of one module."""
        return [group for group in self.search.groups if self._is_changeable(group)]

    def _is_changeable(self, group: GraphGroup) -> bool:
        """Whether all that reads the units, or a weight that they end in, is a call of one module, which is changed."""
        calls = self.linears.get(group.linear, ())
        weights = {call.weight for call in calls}
        return 0 < len(group.products) == len(calls) == sum(map(_count_readers, weights)) and _are_one_module(calls)

    @property
    def sites(self) -> tuple[Site, ...]:
        """The attentions, named by the linears that mix their heads."""
        return tuple(
            Site(group.linear, group.kind, group.units, group.kv_heads, group.width)
            for group in self.groups
            if group.kind is not None and group.kv_heads is not None
        )

    @property
    def obstacles(self) -> tuple[Refusal, ...]:
        """What looks like an attention or a feed-forward and is no group, and why."""
        unresolved = (group for group in self.search.groups if group not in self.groups)
        return (*self.search.obstacles, *map(_no_linear, unresolved))

    @property
    def outcome(self) -> str:
        """The searched patterns and the first obstacle, for the message about a graph without groups."""
        return replace(self.search, obstacles=self.obstacles).outcome

    @property
    def digest(self) -> str:
        """Hash of the operators with their attributes, of the types and shapes of weights, and of integers.

        Integers are structure: a `Reshape` reads the number of heads.
        """
        digest = hashlib.sha256(f"{sorted(self.model.opset_imports.items())}".encode())
        for node in self.graph:
            digest.update(f"{node.domain} {node.op_type} {[value and value.name for value in node.inputs]}".encode())
            for _, attribute in sorted(node.attributes.items()):
                digest.update(ir.serde.serialize_attribute(attribute).SerializeToString(deterministic=True))
        for name, value in sorted(self.graph.initializers.items()):
            digest.update(f"{name} {value.dtype} {value.shape}".encode())
            if value.const_value is not None and not is_float(value):
                digest.update(value.const_value.tobytes())
        return digest.hexdigest()[:16]

    @property
    def tables(self) -> dict[str, int]:
        """Name of an input -> number of ids in the smallest table of embeddings that it is looked up in."""
        tables: dict[str, int] = {}
        for table, ids in _lookups(self.graph):
            while ids is not None and (node := ids.producer()) is not None and node.op_type in _KEEP_IDS:
                ids = node.inputs[0]
            if table is None or table.const_value is None or ids is None or not ids.is_graph_input():
                continue
            shape, name = table.const_value.shape.numpy(), ids.name or ""
            if len(shape) == 2:
                tables[name] = min(shape[0], tables.get(name, shape[0]))
        return tables

    @property
    def settings(self) -> dict[str, Any]:
        """Entries of a configuration that the tables and outputs of a graph of texts show."""
        settings: dict[str, Any] = {}
        tables = self.tables
        if _TOKENS in tables:
            settings["vocab_size"] = tables[_TOKENS]
        if _TYPES in self.inputs:
            settings["type_vocab_size"] = tables.get(_TYPES, 2)
        axes = self.graph.outputs[0].shape
        if axes is not None and isinstance(axes[-1], int):
            settings["num_labels"] = axes[-1]
        return settings


def widen(model: ir.Model) -> None:
    """Compute in float32 where a graph computes in halves of floats, whose rounding would hide small differences."""
    for node in model.graph:
        to = node.attributes.get("to")
        if node.op_type == "Cast" and to is not None and to.as_int() in _HALVES:
            node.attributes["to"] = ir.AttrInt64("to", ir.DataType.FLOAT)
        value = node.attributes.get("value")
        if value is not None and value.type == ir.AttributeType.TENSOR and value.as_tensor().dtype in _HALVES:
            wide = value.as_tensor().numpy().astype(np.float32)
            node.attributes["value"] = ir.AttrTensor("value", ir.Tensor(wide))
    for weight in model.graph.initializers.values():
        if weight.const_value is not None and weight.const_value.dtype in _HALVES:
            weight.const_value = ir.Tensor(weight.const_value.numpy().astype(np.float32), name=weight.name)
    computed = (output for node in model.graph for output in node.outputs)
    for each in (*model.graph.inputs, *model.graph.initializers.values(), *computed):
        if each.dtype in _HALVES:
            each.type = ir.TensorType(ir.DataType.FLOAT)


def _count_readers(value: ir.Value) -> int:
    """Number of nodes that read a weight, as it is, transposed or converted."""
    readers = [node for node, _ in value.uses()]
    return sum(_count_readers(node.outputs[0]) if node.op_type in KEEPS_ELEMENTS else 1 for node in readers)


def _are_one_module(linears: Sequence[GraphLinear]) -> bool:
    """Whether matmuls have one weight and one bias, of which an exporter may store copies."""
    first, *others = linears
    return all(
        linear.is_transposed == first.is_transposed
        and are_equal(linear.weight, first.weight)
        and are_equal(linear.bias, first.bias)
        for linear in others
    )


def _no_linear(group: GraphGroup) -> Refusal:
    node = group.products[0]
    why = "reads the units, but is no matmul of an activation with a matrix, or other matmuls read them too"
    return Refusal(frozenset((group.linear,)), node.op_type, node.name or "", why, RefusalCode.NO_RULE)


def _require_readable(model: ir.Model, file: Path) -> None:
    """Raise InputError for a graph of another kind than those that are compressed."""
    opset = model.opset_imports.get("")
    if opset is not None and opset < _LEAST_OPSET:
        text = f"its operator set is version {opset}; export it with {_LEAST_OPSET} or later, e.g. opset_version=17"
        raise _other_kind(file, text, opset=opset)
    for node in (node for node in model.graph.all_nodes() if node.op_type in _QUANTIZED):
        raise _other_kind(
            file,
            f"is quantized already ({node.op_type} {node.name}); compress the graph in floats, and quantize it by"
            " --precision int8",
            op_type=node.op_type,
            node=node.name,
        )
    for value in (*model.graph.inputs, *model.graph.outputs):
        if value.type is not None and not isinstance(value.type, ir.TensorType):
            kind = type(value.type).__name__.removesuffix("Type").lower()
            text = (
                f"its input or output {value.name} is of type {kind}; use a graph whose inputs and outputs are tensors"
            )
            raise _other_kind(file, text, tensor=value.name)
    if not any(value.dtype is None or value.dtype.is_floating_point() for value in model.graph.outputs):
        names = ", ".join(value.name or "" for value in model.graph.outputs)
        raise _other_kind(
            file,
            f"no output has floats to compare plans by ({names}); use a graph that returns logits, numbers or vectors",
            outputs=names,
        )


def _require_operators(model: ir.Model, file: Path) -> None:
    """Raise InputError for an operator that ONNX Runtime does not have, and that is no function of the graph."""
    for node in model.graph.all_nodes():
        if node.domain not in _DOMAINS and node.op_identifier() not in model.functions:
            name = f"{node.domain}.{node.op_type}"
            text = f"ONNX Runtime has no operator {name} (node {node.name}); replace it by operators of ONNX"
            raise _other_kind(file, text, op_type=name, node=node.name)


def _take_cached_branch(graph: ir.Graph) -> None:
    """Let a decoder that holds two graphs be the one that reads caches."""
    for value in [value for value in graph.inputs if value.name == CACHED_BRANCH]:
        taken = add_initializer(graph, f"{CACHED_BRANCH}.taken", np.ones(1, np.bool_))
        value.replace_all_uses_with(taken)
        graph.inputs.remove(value)


def _require_caches(model: ir.Model, file: Path) -> None:
    """Raise InputError for a graph with caches that is no decoder of texts, or whose caches no call extends."""
    inputs = [value.name or "" for value in model.graph.inputs if not value.is_initializer()]
    caches, outputs = cache_names(model), {value.name for value in model.graph.outputs}
    held = [name for name in inputs if caches.get(name) not in outputs and (name in caches or _CACHE.search(name))]
    if held:
        raise _other_kind(
            file,
            f"its input {held[0]} holds keys and values of earlier positions, and no output extends them; export a "
            f"decoder-only model with caches that grow, or without caches (use_cache=False)",
            input=held[0],
        )
    unknown = [name for name in inputs if name not in (*caches, *_OF_TEXTS)] if caches else []
    if unknown or (caches and IDS not in inputs):
        problem = f"reads {unknown[0]}" if unknown else f"reads no {IDS}"
        raise _other_kind(
            file,
            f"has key/value caches and {problem}: only decoders that read {listed(_OF_TEXTS)} are compressed with "
            f"caches; export such a graph, or a graph without caches (use_cache=False)",
            input=unknown[0] if unknown else IDS,
        )
    for value in (value for value in model.graph.inputs if caches and value.name in _OF_TEXTS):
        axes = list(value.shape or ())
        if len(axes) != 2 or isinstance(axes[1], int):
            raise _other_kind(
                file,
                f"has key/value caches, and its input {value.name} is {axes}, which does not take texts of any length; "
                f"export it with two free axes, texts and tokens",
                input=value.name,
            )
    if caches and LOGITS not in outputs:
        names = ", ".join(sorted(map(str, outputs - set(caches.values()))))
        text = f"has key/value caches and no output {LOGITS} ({names}); give the output with the scores of tokens this"
        raise _other_kind(file, f"{text} name", outputs=names)


def _other_kind(file: Path, problem: str, **details: Any) -> InputError:
    return InputError(f"{file}: {problem}", code=ErrorCode.UNSUPPORTED_MODEL, path=file, **details)


def _lookups(graph: ir.Graph) -> Iterator[tuple[ir.Value | None, ir.Value | None]]:
    """The tables of embeddings, and the ids that are looked up in them."""
    for node in graph:
        if node.op_type == "Gather" and node.attributes.get_int("axis", 0) == 0:
            yield node.inputs[0], node.inputs[1]
        for ids, table in _FUSED_TABLES.get(node.op_type, ()):
            yield node.inputs[table], node.inputs[ids]


def _spec(value: ir.Value) -> tuple[np.dtype, tuple[int | None, ...]]:
    """Element type and axes of an input or an output; a size that depends on the inputs is None."""
    dtype = np.dtype(np.float32) if value.dtype is None else value.dtype.numpy()
    return dtype, tuple(size if isinstance(size, int) else None for size in value.shape or ())
