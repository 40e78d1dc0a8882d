"""Find the attention of a graph, whoever exported it.

An attention core is a `Softmax` between two products of activations, or one operator that does it all, or a call of
block-sparse attention. Its facts (heads, key/value heads, width) are read off probed shapes; its name off the scopes
that exporters leave at nodes.
"""

from __future__ import annotations

import ast
import dataclasses
import math
from collections.abc import Collection, Iterator, Sequence

import onnx_ir as ir

from graph_passes.attention.gates import SUFFIX
from graph_passes.block_sparse.function import DOMAIN, NAME
from graph_passes.flow.concrete_shapes import BATCH, Probe
from graph_passes.plan import Kind

_FUSED = frozenset(("Attention", "GroupQueryAttention", "MultiHeadAttention"))
_LAYOUT = frozenset(("Cast", "Expand", "Flatten", "Identity", "Reshape", "Slice", "Squeeze", "Transpose", "Unsqueeze"))
_POINTWISE = frozenset(("Add", "CastLike", "Clip", "Div", "Dropout", "Max", "Min", "Mul", "Sub", "Tanh", "Where"))
_PRODUCTS = frozenset(("FusedMatMul", "Gemm", "MatMul"))
_COMPARES = frozenset(("Greater", "GreaterOrEqual", "Less", "LessOrEqual", "Trilu"))
_SCOPES = "pkg.torch.onnx.name_scopes"


@dataclasses.dataclass(frozen=True)
class GraphSite:
    """One attention of a graph.

    Attributes:
        name: the gate's site or the module path that the exporter left; None where it left none.
        kind: `bidirectional`, `causal` (a causal mask is in the graph) or `cross` (keys come from elsewhere). A mask of
            blocks is no causal one.
        heads, kv_heads, head_dim: query heads, key/value heads, width of one head's value vector.
        output: the tensor that holds the heads' outputs side by side, where a gate belongs.
        axis: its axis of heads, or of heads * head_dim (then it is the last).
        rank: how many axes it has.
    """

    name: str | None
    kind: Kind
    heads: int
    kv_heads: int
    head_dim: int
    output: ir.Value = dataclasses.field(repr=False)
    axis: int = dataclasses.field(repr=False)
    rank: int = dataclasses.field(repr=False)


def find_attention(model: ir.Model) -> list[GraphSite]:
    """Every attention of a graph whose heads can be told, in the order of the graph.

    The graph is read as it is: inline local functions first (`passes.Normalize`), all but block-sparse attention.
    """
    probe = Probe(model)
    found: list[GraphSite] = []
    sparse = {node.overload for node in model.graph if (node.domain, node.op_type) == (DOMAIN, NAME)}
    for node in model.graph:
        site = None
        if (node.domain, node.op_type) == (DOMAIN, NAME):
            site = _block_sparse(node, sparse, probe)
        elif node.op_type in _FUSED:
            site = _fused(node, probe)
        elif node.op_type == "Softmax":
            site = _decomposed(node, probe)
        if site is not None:
            found.append(site)
    return found


def _fused(node: ir.Node, probe: Probe) -> GraphSite | None:
    out, query, key = node.outputs[0], node.inputs[0], node.inputs[1] if len(node.inputs) > 1 else None
    shape, asked = probe.shape(out), probe.shape(query)
    if shape is None or asked is None:
        return None
    attributes = node.attributes
    if node.op_type == "Attention" and node.domain != "com.microsoft":
        keys = probe.shape(key)
        if len(asked) == 4 and keys is not None:
            heads, kv_heads = asked[1], keys[1]
        else:
            heads, kv_heads = attributes.get_int("q_num_heads"), attributes.get_int("kv_num_heads")
        kv_heads //= _repeats(node.inputs[2], probe)
        causal = attributes.get_int("is_causal", 0) or _masked_causally(node.inputs[3:4], probe)
    else:
        heads = attributes.get_int("num_heads")
        kv_heads = attributes.get_int("kv_num_heads", heads)
        causal = attributes.get_int("unidirectional", int(node.op_type == "GroupQueryAttention"))
    packed = node.op_type == "Attention" and node.domain == "com.microsoft"
    cross = not packed and key is not None and _source(query) is not _source(key)
    axis = 1 if len(shape) == 4 else 2
    width = shape[3] if len(shape) == 4 else shape[2] // heads
    kind: Kind = "cross" if cross else "causal" if causal else "bidirectional"
    return GraphSite(_name(node, out), kind, heads, kv_heads, width, out, axis, len(shape))


def _block_sparse(node: ir.Node, others: Collection[str], probe: Probe) -> GraphSite | None:
    out = node.outputs[0]
    shape = probe.shape(out)
    if shape is None or len(shape) != 4 or len(node.inputs) < 4:
        return None
    # Of a module that is called several times, all calls but one have a number behind the site's name.
    site, _, number = node.overload.rpartition(".")
    name = site if number.isdecimal() and site in others else node.overload
    asked, told = _source(node.inputs[0]), _source(node.inputs[1])
    cross = asked is not told and asked is not _before_gather(told)
    causal = node.attributes.get_int("causal", 0) or _masked_causally(node.inputs[4:], probe)
    kind: Kind = "cross" if cross else "causal" if causal else "bidirectional"
    kv_heads = shape[2] // _repeats(node.inputs[2], probe)
    return GraphSite(name or None, kind, shape[2], kv_heads, shape[3], out, 2, 4)


def _before_gather(value: ir.Value | None) -> ir.Value | None:
    """The activation of which `passes.DropUnusedBlocks` gathered the positions that are used, if it did."""
    node = value.producer() if value is not None else None
    gathered = node is not None and node.op_type == "Gather" and node.attributes.get_int("axis", 0) == 1
    return node.inputs[0] if node is not None and gathered else value


def _decomposed(softmax: ir.Node, probe: Probe) -> GraphSite | None:
    scores = _back_to_product(softmax.inputs[0])
    values = _on_to_product(softmax.outputs[0])
    if scores is None or values is None:
        return None
    shape, other = probe.shapes(values.outputs[0])
    if shape is None or other is None or len(shape) not in (3, 4):
        return None
    batch, again = BATCH
    if len(shape) == 4:
        output, axis, heads = values.outputs[0], 1, shape[1]
    elif shape[0] * again == other[0] * batch:
        # Batch and heads share the first axis: the gate belongs where they are taken apart again.
        heads = shape[0] // batch
        taken = _taken_apart(values.outputs[0], heads, probe)
        if taken is None:
            return None
        output, axis = taken, 1
    else:
        return None
    cross = _source(scores.inputs[0]) is not _source(scores.inputs[1])
    causal = _masked_causally(softmax.inputs, probe)
    kind: Kind = "cross" if cross else "causal" if causal else "bidirectional"
    shared = _repeats(values.inputs[1], probe)
    return GraphSite(_name(softmax, output), kind, heads, heads // shared, shape[-1], output, axis, 4)


def _back_to_product(value: ir.Value | None) -> ir.Node | None:
    """The product of two activations that scores come from."""
    while value is not None and (node := value.producer()) is not None:
        if node.op_type in _PRODUCTS:
            return node if all(_computed(operand) for operand in node.inputs[:2]) else None
        if node.op_type not in _POINTWISE | _LAYOUT:
            return None
        branches = [operand for operand in node.inputs if _computed(operand)]
        if node.op_type == "Where":
            branches = [operand for operand in node.inputs[1:] if _computed(operand)]
        if len(branches) > 1:
            products = [operand for operand in branches if _back_to_product(operand) is not None]
            branches = products[:1]
        value = branches[0] if branches else None
    return None


def _on_to_product(value: ir.Value) -> ir.Node | None:
    """The product of probabilities and values."""
    while True:
        readers = [node for node, _ in value.uses()]
        for node in readers:
            if node.op_type in _PRODUCTS and node.inputs[0] is value and _computed(node.inputs[1]):
                return node
        onward = [node for node in readers if node.op_type in _POINTWISE | _LAYOUT]
        if not onward:
            return None
        value = onward[-1].outputs[0]


def _computed(value: ir.Value | None) -> bool:
    """Whether a tensor depends on the graph's inputs, as far as a few steps tell."""
    for _ in range(8):
        if value is None or value.is_initializer():
            return False
        node = value.producer()
        if node is None:
            return True
        if node.op_type not in ("Cast", "Identity", "Transpose") or not node.inputs:
            return bool(node.inputs)
        value = node.inputs[0]
    return True


def _source(value: ir.Value | None) -> ir.Value | None:
    """The activation that a query or key is projected from."""
    while value is not None and (node := value.producer()) is not None:
        operands = [operand for operand in node.inputs if _computed(operand)]
        if node.op_type in _PRODUCTS and len(operands) == 1:
            return operands[0]
        data = [operand for operand in operands if operand is not None and not _is_shape(operand)]
        looked_up = node.op_type == "Gather" and _computed(node.inputs[1])
        if not data or looked_up or node.op_type == "LayerNormalization":
            return value
        value = data[0]
    return value


def _is_shape(value: ir.Value) -> bool:
    return value.dtype in (ir.DataType.INT64, ir.DataType.INT32, ir.DataType.BOOL)


def _taken_apart(value: ir.Value, heads: int, probe: Probe) -> ir.Value | None:
    while True:
        onward = [node for node, _ in value.uses() if node.op_type in ("Identity", "Reshape")]
        if len(onward) != 1:
            return None
        value = onward[0].outputs[0]
        shape = probe.shape(value)
        if shape is not None and len(shape) == 4 and shape[1] == heads:
            return value


def _repeats(value: ir.Value | None, probe: Probe) -> int:
    """How many query heads share one key/value head: by how much an `Expand` on the way from the projection grows."""
    while value is not None and (node := value.producer()) is not None and node.op_type in _LAYOUT:
        before, after = probe.shape(node.inputs[0]), probe.shape(node.outputs[0])
        if node.op_type == "Expand" and before is not None and after is not None and len(before) == len(after):
            grown = [b for a, b in zip(before, after, strict=True) if a == 1 and b > 1]
            if grown:
                return grown[0]
        value = node.inputs[0]
    return 1


def _masked_causally(values: Sequence[ir.Value | None], probe: Probe) -> bool:
    """Whether a mask on the way to the scores compares query and key positions."""
    stack, seen = list(values), set[ir.Value]()
    while stack:
        value = stack.pop()
        if value is None or value in seen or (node := value.producer()) is None:
            continue
        seen.add(value)
        if node.op_type in _PRODUCTS | {"Gather", "Shape"}:
            continue
        shape = probe.shape(node.outputs[0]) or ()
        pairs = len(shape) >= 2 and shape[-1] > 1 and shape[-2] > 1
        if node.op_type in _COMPARES and pairs and not _threshold(node, probe):
            return True
        stack.extend(node.inputs)
    return False


def _threshold(node: ir.Node, probe: Probe) -> bool:
    """Whether a computed mask of floats is compared with one number: what it hides is asked, as block masks ask of the
    family's own; positions are not compared there, but where that mask was made. A stored mask was made nowhere."""
    if node.op_type == "Trilu":
        return False
    sizes = [math.prod(shape) for shape in map(probe.shape, node.inputs) if shape is not None]
    dtypes = [dtype for dtype in map(probe.dtype, node.inputs) if dtype is not None]
    if 1 not in sizes or not any(dtype.is_floating_point() for dtype in dtypes):
        return False
    return any(_made(value) for value in node.inputs)


def _made(value: ir.Value | None) -> bool:
    """Whether a tensor is computed, and no stored one brought into shape."""
    while value is not None and (node := value.producer()) is not None:
        if node.op_type not in _LAYOUT:
            return node.op_type != "Constant"
        value = node.inputs[0]
    return False


def _name(node: ir.Node, output: ir.Value) -> str | None:
    """Site of the gate that multiplies the output, else the module path that the exporter recorded."""
    gated = next(_gates_after(output), None)
    if gated is not None:
        return gated
    scopes = node.metadata_props.get(_SCOPES)
    if scopes:
        try:
            path = [scope for scope in ast.literal_eval(scopes)[:-1] if scope]
        except (ValueError, SyntaxError):
            path = []
        if path:
            return str(path[-1])
    parts = (node.name or "").strip("/").split("/")[:-1]
    return ".".join(parts) or None


def _gates_after(value: ir.Value) -> Iterator[str]:
    """Sites whose gates multiply this tensor, a few layout steps on."""
    for node, _ in value.uses():
        if node.op_type == "Mul":
            for operand in node.inputs:
                if operand is not None and operand.is_initializer() and (operand.name or "").endswith(SUFFIX):
                    yield (operand.name or "").removesuffix(SUFFIX)
        elif node.op_type in _LAYOUT | {"Where"}:
            yield from _gates_after(node.outputs[0])
