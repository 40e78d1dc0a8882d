"""Which products of a quantized graph a TensorRT engine computes in 8 bits, by the layers that its inspector lists."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from compressor.results import BuiltLayer, QuantizedProducts
from compressor.targets.base import Precision
from compressor.targets.tensorrt import inspector

_TACTIC_OF_8_BITS = re.compile(r"i8i8|int8|imma|e4m3|fp8", re.IGNORECASE)
"""Names of kernels say the types of their factors: `xmma_gemm_i8i8_i8i32_f32`."""
_TACTIC_OF_FLOATS = re.compile(r"(b?f16|f32|tf32){2}", re.IGNORECASE)
_FORMAT_OF_8_BITS = re.compile(r"\b(int8|fp8|e4m3)", re.IGNORECASE)


@dataclass(frozen=True)
class ProductTypes:
    """How the quantized products of a graph are computed.

    Attributes:
        known: the products whose layers are listed; None: no product's layer is.
        hidden: number of products inside layers that do not list their kernels.
    """

    known: QuantizedProducts | None
    hidden: int

    def __str__(self) -> str:
        sentences = []
        if self.known is not None:
            sentences.append(f"{self.known.executed} of {self.known.requested} quantized products computed in 8 bits")
        if self.hidden:
            sentences.append(
                f"it is unknown whether {self.hidden} quantized products are computed in 8 bits: TensorRT does not list"
                " the kernels of the layers that hold them"
            )
        return "; ".join(sentences)


def product_types(
    layers: Sequence[BuiltLayer],
    products: Sequence[str],
    float_in_graph: Sequence[str] = (),
    precision: Precision = "int8",
) -> ProductTypes:
    """How the quantized products of a graph are computed.

    1. A product is in 8 bits if a layer that names its node has a kernel for 8 bits; where the kernel's name does not
       say its types, if the layer reads a tensor or weights of 8 bits.
    2. A product that no layer names, or only layers that do not list their kernels, is hidden.
    3. Any other product is in floats.

    Args:
        layers: layers of the engine.
        products: names of the quantized products with weights.
        float_in_graph: names of the products that the graph has in floats.
        precision: numeric precision of the engine.
    """
    executed, in_float, hidden = 0, [], 0
    for product in products:
        computing = [layer for layer in layers if inspector.computes(layer, product)]
        if not computing:
            hidden += 1
        elif any(map(is_in_8_bits, computing)):
            executed += 1
        else:
            in_float.append(product)
    requested = executed + len(in_float)
    known = QuantizedProducts(
        type="fp8" if precision == "fp8" else "int8",
        requested=requested,
        executed=executed,
        in_float=tuple(in_float),
        float_in_graph=tuple(float_in_graph),
    )
    return ProductTypes(known if requested else None, hidden)


def is_in_8_bits(layer: BuiltLayer) -> bool:
    """Whether the kernel of a layer computes with factors of 8 bits (case 1)."""
    if _TACTIC_OF_8_BITS.search(layer.tactic):
        return True
    return not _TACTIC_OF_FLOATS.search(layer.tactic) and any(map(_FORMAT_OF_8_BITS.search, layer.formats))
