"""What TensorRT's inspector tells of an engine's layers, and whether attention is computed by fused kernels."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from compressor.results import BuiltLayer
from compressor.targets.base import Precision
from graph_passes import GraphSite

_FUSED = re.compile(r"(?<![A-Za-z])(?i:f?mha|ge(mm|mv)_mha|flash_?(attention|attn|fwd)|fused_?attention|sdpa)(?![a-z])")
_MOVES = re.compile(r"reformat|signal|wait|constant|no_?op", re.IGNORECASE)
"""Kinds of layers that compute nothing, whatever stands beside them in their names."""
_GIVEN_NAMES = re.compile(r"\[[^\]]*\]|\{[^}]*\}")
"""Names of the graph's nodes, that a layer's name repeats: theirs are no kernels."""
_NODES = re.compile(r"\[ONNX Layer: |\]|\x1f|\x1e")
"""What stands between the names of nodes in a layer's metadata."""
_TURING = (7, 5)
_HEAD_DIMS = range(16, 257, 8)


def layers(information: str) -> tuple[BuiltLayer, ...]:
    """The table of layers, from the inspector's JSON: none where it is none. Before 10 a layer may be its name alone.

    Names of nodes are parted by control characters, which strict JSON has not.
    """
    try:
        describe = json.loads(information, strict=False).get("Layers", ())
        return tuple(BuiltLayer(name=layer) if isinstance(layer, str) else _layer(layer) for layer in describe)
    except (ValueError, AttributeError, TypeError):  # an engine is worth more than what is told of it
        return ()


def _layer(describe: Mapping[str, Any]) -> BuiltLayer:
    return BuiltLayer(
        name=str(describe.get("Name", "")),
        kind=str(describe.get("LayerType", "")),
        tactic=str(describe.get("TacticName", "")),
        nodes=_NODES.sub("\x1e", str(describe.get("Metadata", ""))),
    )


def is_fused(layer: BuiltLayer) -> bool:
    """Whether a layer is one kernel that computes a whole attention."""
    if _MOVES.search(layer.kind) or layer.name.startswith("Reformatting"):
        return False
    own = _GIVEN_NAMES.sub("", layer.name)
    for node in _nodes(layer):
        own = re.sub(rf"(?<!\w){re.escape(node)}(?!\w)", "", own)
    return any(_FUSED.search(text) for text in (own.rsplit("/", 1)[-1], layer.tactic, layer.kind))


def describe(
    found: Sequence[BuiltLayer], sites: Sequence[GraphSite], capability: tuple[int, int], precision: Precision
) -> tuple[int, int, str]:
    """How many attentions are fused, of how many where that can be told, and a line that says so.

    1. An attention whose node a fused kernel names is kept. One attention may take several kernels.
    2. A kernel that names no nodes is taken for one of the others; so is any, where none names an attention.
    3. An attention inside a layer that shows nothing of its kernels: it cannot be told.
    4. Any other without a kernel was lost; the line says why, as far as it can be known.
    """
    kernels = [layer for layer in found if is_fused(layer)]
    if not sites:
        return len(kernels), len(kernels), "the graph has no attention"
    if not found:
        return 0, 0, "whether attention is fused cannot be told: TensorRT's inspector shows no layers"
    own = {_node(site) for site in sites}
    named = own.intersection(node for layer in kernels for node in _nodes(layer))
    unnamed = sum(not (named and layer.nodes) for layer in kernels)
    kept = [site for site in sites if _node(site) in named]
    opaque = [layer for layer in found if _is_opaque(layer)]
    clear = [layer for layer in found if layer not in opaque]
    hidden = [site for site in sites if site not in kept and _is_hidden(site, opaque, clear)]
    lost = [site for site in sites if site not in kept and site not in hidden] if not unnamed else []
    count = min(len(sites), len(kept) + unnamed)
    counted = max(count, len(sites) - len(hidden))
    lines = []
    if count < counted:
        names = [site.name or _node(site) for site in lost]
        where = f" (not in {', '.join(names)})" if names and kernels else ""
        reasons = "; ".join(dict.fromkeys(_why(site, capability, precision) for site in lost or sites))
        lines.append(f"fused attention in {count} of {counted} attention layers{where}: {reasons}")
    elif kernels:
        lines.append(f"fused attention kept in each of {counted} attention layers")
    if counted < len(sites):
        lines.append(
            f"whether attention is fused cannot be told of {len(sites) - counted} of {len(sites)} attention layers:"
            " TensorRT does not show the kernels of the layers that hold them"
        )
    return count, counted, "; ".join(lines)


def _is_hidden(site: GraphSite, opaque: Sequence[BuiltLayer], clear: Sequence[BuiltLayer]) -> bool:
    """Whether an attention is inside a layer that does not show its kernels (case 3).

    Such a layer names its first and its last node; where it does not list those between, they are all that no other
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
    return [node for node in layer.nodes.split("\x1e") if node]


def _node(site: GraphSite) -> str:
    """The node that gives the heads' outputs."""
    producer = site.output.producer()
    return str(producer.name) if producer is not None else ""


def _why(site: GraphSite, capability: tuple[int, int], precision: Precision) -> str:
    if capability < _TURING:
        return f"fused attention needs SM 7.5, this GPU has {capability[0]}.{capability[1]}"
    if precision == "fp32":
        return "fused attention needs fp16 or bf16 (--precision)"
    if site.head_dim not in _HEAD_DIMS:
        return f"heads {site.head_dim} wide, fused attention takes multiples of 8 from 16 to 256"
    return "TensorRT does not say why"
