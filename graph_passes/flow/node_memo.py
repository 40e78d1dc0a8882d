"""Results of nodes, kept so that equal nodes are computed once: layers repeat, and every pass walks the graph anew."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable
from typing import TypeVar

import numpy as np
import onnx_ir as ir

T = TypeVar("T")
Key = tuple[Hashable, ...]

_MAX_RESULTS = 1 << 14
_LARGEST_ATTRIBUTE = 4096
"""Maximum number of elements of a tensor that is an attribute of a node with a key."""
_COMPARABLE = frozenset(
    getattr(ir.AttributeType, name) for name in ("INT", "INTS", "FLOAT", "FLOATS", "STRING", "STRINGS")
)

_results: dict[Key, object] = {}


def once(key: Key | None, compute: Callable[[], T]) -> T:
    """The result of a computation, which is kept for its key.

    Args:
        key: everything that the result depends on, the computation included; None: the result is not kept.
        compute: computes the result, which must not be changed afterwards.
    """
    if key is None:
        return compute()
    if key in _results:
        return _results[key]  # type: ignore[return-value]
    result = compute()
    if len(_results) >= _MAX_RESULTS:
        _results.clear()
    _results[key] = result
    return result


def node_key(node: ir.Node) -> Key | None:
    """Operator, attributes, and the inputs and outputs that a node has, without names; None if it has no key.

    A node has none if an attribute is a graph, a large tensor, or a reference.
    """
    attributes: list[Hashable] = []
    for name, attribute in node.attributes.items():
        if attribute.is_ref():
            return None
        if attribute.type in _COMPARABLE:
            attributes.append((name, attribute.type, attribute.value))
        elif attribute.type == ir.AttributeType.TENSOR and attribute.value.size <= _LARGEST_ATTRIBUTE:
            attributes.append((name, content_key(attribute.value.numpy())))
        else:
            return None
    inputs = tuple(value is not None and bool(value.name) for value in node.inputs)
    outputs = tuple(bool(value.name) for value in node.outputs)
    return (node.domain, node.op_type, node.overload, node.version, inputs, outputs, *attributes)


def content_key(content: np.ndarray) -> Key:
    """Type, shape and a digest of the content of a tensor."""
    return (content.dtype.str, content.shape, hashlib.blake2b(content.tobytes(), digest_size=16).digest())
