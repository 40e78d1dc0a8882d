"""The layers of a TensorRT engine as its inspector lists them: fused attentions, and matmuls in 8 bits."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from compressor.results import BuiltLayer, QuantizedProducts
from compressor.targets.base import Precision
from graph_passes import GraphSite

_FUSED_KERNEL = re.compile(
    r"(?<![A-Za-z])(?i:f?mha|ge(mm|mv)_mha|flash_?(attention|attn|fwd)|fused_?attention|sdpa)(?![a-z])"
)
_MOVING_KINDS = re.compile(r"reformat|signal|wait|constant|no_?op", re.IGNORECASE)
"""Kinds of layers that compute nothing, even if their names mention kernels."""
_NODE_LISTS = re.compile(r"\[[^\]]*\]|\{[^}]*\}")
"""Lists of graph nodes inside a layer's name; these names are not names of kernels."""
_SEPARATORS = re.compile(r"\[ONNX Layer: |\]|\x1f|\x1e")
"""Separators between the names of graph nodes in a layer's metadata."""
_SEPARATOR = "\x1e"
_TURING = (7, 5)
"""First compute capability with fused attention."""
_FUSED_HEAD_DIMS = range(16, 257, 8)
_TACTIC_OF_8_BITS = re.compile(r"i8i8|int8|imma|e4m3|fp8", re.IGNORECASE)
"""Names of kernels contain the types of their factors: `xmma_gemm_i8i8_i8i32_f32`."""
_TACTIC_OF_FLOATS = re.compile(r"(b?f16|f32|tf32){2}", re.IGNORECASE)
_FORMAT_OF_8_BITS = re.compile(r"\b(int8|fp8|e4m3)", re.IGNORECASE)


class UnfusedReason(StrEnum):
    """Why an attention is not fused."""

    CAPABILITY = "capability"
    PRECISION = "precision"
    HEAD_DIM = "head-dim"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class AttentionFusion:
    """How many attentions of an engine are computed by fused kernels.

    Attributes:
        fused: number of fused attentions.
        known: number of attentions for which it is known whether they are fused.
        total: number of attentions in the graph.
        shows_layers: whether the inspector lists layers at all.
        unfused: names of the attentions that are not fused; empty where they are unknown.
        reasons: why attentions are not fused: each kind of reason with a text for readers.
    """

    fused: int
    known: int
    total: int
    shows_layers: bool = True
    unfused: tuple[str, ...] = ()
    reasons: tuple[tuple[UnfusedReason, str], ...] = ()

    def __str__(self) -> str:
        if not self.total:
            return "the graph has no attention"
        if not self.shows_layers:
            return "it is unknown whether attention is fused: TensorRT's inspector lists no layers"
        sentences = []
        if self.fused < self.known:
            names = f" (not in {', '.join(self.unfused)})" if self.unfused else ""
            reasons = "; ".join(text for _, text in self.reasons)
            sentences.append(f"fused attention in {self.fused} of {self.known} attention layers{names}: {reasons}")
        elif self.fused:
            sentences.append(f"fused attention in all of {self.known} attention layers")
        if self.known < self.total:
            sentences.append(
                f"it is unknown whether attention is fused in {self.total - self.known} of {self.total} attention"
                " layers: TensorRT does not list the kernels of the layers that hold them"
            )
        return "; ".join(sentences)


def parse_layers(information: str) -> tuple[BuiltLayer, ...]:
    """The layers in the inspector's JSON; none where it cannot be parsed.

    Before TensorRT 10 a layer may be its name alone. Names of nodes are separated by control characters, which strict
    JSON does not permit.
    """
    try:
        entries = json.loads(information, strict=False).get("Layers", ())
        return tuple(BuiltLayer(name=entry) if isinstance(entry, str) else _layer(entry) for entry in entries)
    except (ValueError, AttributeError, TypeError):  # an engine runs without a list of its layers
        return ()


def _layer(entry: Mapping[str, Any]) -> BuiltLayer:
    return BuiltLayer(
        name=str(entry.get("Name", "")),
        kind=str(entry.get("LayerType", "")),
        tactic=str(entry.get("TacticName", "")),
        nodes=_SEPARATORS.sub(_SEPARATOR, str(entry.get("Metadata", ""))),
        formats=tuple(dict.fromkeys(_formats(entry))),
    )


def _formats(entry: Mapping[str, Any]) -> Iterator[str]:
    """Element types of a layer's inputs and weights, as the inspector writes them."""
    for tensor in entry.get("Inputs", ()):
        if isinstance(tensor, Mapping) and "Format/Datatype" in tensor:
            yield str(tensor["Format/Datatype"])
    weights = entry.get("Weights")
    if isinstance(weights, Mapping) and weights.get("Count"):
        yield str(weights.get("Type", ""))


def is_fused(layer: BuiltLayer) -> bool:
    """Whether a layer is one kernel that computes a whole attention."""
    if _MOVING_KINDS.search(layer.kind) or layer.name.startswith("Reformatting"):
        return False
    kernel = _NODE_LISTS.sub("", layer.name)
    for node in _nodes(layer):
        kernel = re.sub(rf"(?<!\w){re.escape(node)}(?!\w)", "", kernel)
    return any(_FUSED_KERNEL.search(text) for text in (kernel.rsplit("/", 1)[-1], layer.tactic, layer.kind))


def computes(layer: BuiltLayer, node: str) -> bool:
    """Whether a layer lists its kernels, computes something, and names a node of the graph."""
    if _MOVING_KINDS.search(layer.kind) or layer.name.startswith("Reformatting") or _is_opaque(layer):
        return False
    return node in _nodes(layer) or re.search(rf"(?<![\w/.]){re.escape(node)}(?![\w/.])", layer.name) is not None


def attention_fusion(
    layers: Sequence[BuiltLayer], sites: Sequence[GraphSite], capability: tuple[int, int], precision: Precision
) -> AttentionFusion:
    """The numbers of attentions of a graph that fused kernels compute, and of those that they do not.

    1. An attention whose node a fused kernel names is fused. One attention may take several kernels.
    2. A kernel that names no nodes counts for one of the remaining attentions; if no kernel names an attention, every
       kernel does.
    3. It is unknown whether an attention inside a layer that does not list its kernels is fused.
    4. All remaining attentions are not fused, for a reason that follows from the GPU, the precision or the heads.
    """
    kernels = [layer for layer in layers if is_fused(layer)]
    if not sites:
        return AttentionFusion(len(kernels), len(kernels), 0)
    if not layers:
        return AttentionFusion(0, 0, len(sites), shows_layers=False)
    attention_nodes = {_node(site) for site in sites}
    named = attention_nodes.intersection(node for layer in kernels for node in _nodes(layer))
    unnamed = sum(not (named and layer.nodes) for layer in kernels)
    fused = [site for site in sites if _node(site) in named]
    opaque = [layer for layer in layers if _is_opaque(layer)]
    clear = [layer for layer in layers if layer not in opaque]
    hidden = [site for site in sites if site not in fused and _is_hidden(site, opaque, clear)]
    unfused = [site for site in sites if site not in fused and site not in hidden] if not unnamed else []
    count = min(len(sites), len(fused) + unnamed)
    return AttentionFusion(
        fused=count,
        known=max(count, len(sites) - len(hidden)),
        total=len(sites),
        unfused=tuple(site.name or _node(site) for site in unfused) if kernels else (),
        reasons=tuple(dict.fromkeys(_reason(site, capability, precision) for site in unfused or sites)),
    )


def _is_hidden(site: GraphSite, opaque: Sequence[BuiltLayer], clear: Sequence[BuiltLayer]) -> bool:
    """Whether an attention is inside a layer that does not list its kernels (case 3).

    Such a layer names its first and its last node. If it does not list the nodes between, it has all nodes that no
    layer names.
    """
    node = _node(site)
    if any(node in _nodes(layer) for layer in opaque):
        return True
    shown = any(node in layer.name or node in _nodes(layer) for layer in clear)
    return any(not layer.nodes for layer in opaque) and not (node and shown)


def _is_opaque(layer: BuiltLayer) -> bool:
    return not is_fused(layer) and ("ForeignNode" in layer.name or layer.kind == "Myelin")


def _nodes(layer: BuiltLayer) -> list[str]:
    return [node for node in layer.nodes.split(_SEPARATOR) if node]


def _node(site: GraphSite) -> str:
    """The node that computes the heads' outputs."""
    producer = site.output.producer()
    return str(producer.name) if producer is not None else ""


def _reason(site: GraphSite, capability: tuple[int, int], precision: Precision) -> tuple[UnfusedReason, str]:
    """Why an attention is not fused (case 4)."""
    if capability < _TURING:
        version = f"{capability[0]}.{capability[1]}"
        return UnfusedReason.CAPABILITY, f"fused attention needs SM 7.5, and this GPU has {version}"
    if precision == "fp32":
        return UnfusedReason.PRECISION, "fused attention needs fp16 or bf16 (--precision)"
    if site.head_dim not in _FUSED_HEAD_DIMS:
        return (
            UnfusedReason.HEAD_DIM,
            f"heads are {site.head_dim} wide, and fused attention takes multiples of 8 from 16 to 256",
        )
    return UnfusedReason.UNKNOWN, "TensorRT reports no reason"


@dataclass(frozen=True)
class MatmulTypes:
    """How the quantized matmuls of a graph are computed.

    Attributes:
        known: the matmuls whose layers are listed; None: no layer of a matmul is listed.
        hidden: number of matmuls inside layers that do not list their kernels.
    """

    known: QuantizedProducts | None
    hidden: int

    def __str__(self) -> str:
        sentences = []
        if self.known is not None:
            sentences.append(f"{self.known.executed} of {self.known.requested} quantized matmuls computed in 8 bits")
        if self.hidden:
            sentences.append(
                f"it is unknown whether {self.hidden} quantized matmuls are computed in 8 bits: TensorRT does not list"
                " the kernels of the layers that hold them"
            )
        return "; ".join(sentences)


def matmul_types(
    layers: Sequence[BuiltLayer],
    matmuls: Sequence[str],
    float_in_graph: Sequence[str] = (),
    precision: Precision = "int8",
) -> MatmulTypes:
    """How the quantized matmuls of a graph are computed.

    1. A matmul is in 8 bits if a layer that names its node has a kernel for 8 bits, or, where the name of the kernel
       does not contain types, if that layer reads a tensor or weights of 8 bits.
    2. A matmul is hidden if no layer names it, or only layers that do not list their kernels.
    3. All remaining matmuls are in floats.

    Args:
        matmuls: names of the quantized matmuls with weights.
        float_in_graph: names of the matmuls that the graph has in floats.
    """
    executed, in_float, hidden = 0, [], 0
    for matmul in matmuls:
        computing = [layer for layer in layers if computes(layer, matmul)]
        if not computing:
            hidden += 1
        elif any(map(is_in_8_bits, computing)):
            executed += 1
        else:
            in_float.append(matmul)
    requested = executed + len(in_float)
    known = QuantizedProducts(
        type="fp8" if precision == "fp8" else "int8",
        requested=requested,
        executed=executed,
        in_float=tuple(in_float),
        float_in_graph=tuple(float_in_graph),
    )
    return MatmulTypes(known if requested else None, hidden)


def is_in_8_bits(layer: BuiltLayer) -> bool:
    """Whether the kernel of a layer computes with factors of 8 bits (case 1)."""
    if _TACTIC_OF_8_BITS.search(layer.tactic):
        return True
    return not _TACTIC_OF_FLOATS.search(layer.tactic) and any(map(_FORMAT_OF_8_BITS.search, layer.formats))
