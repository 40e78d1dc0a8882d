"""A tape that records the nodes of an ONNX function."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir


class GraphBuilder(ir.tape.Tape):
    """Records nodes in order; equal constants share one `Constant` node, because functions have no initializers.

    Args:
        dtype: type of the floating-point constants.
    """

    def __init__(self, dtype: ir.DataType) -> None:
        super().__init__()
        self.dtype = dtype
        self._constants: dict[tuple[str, tuple[int, ...], bytes], ir.Value] = {}

    def __call__(self, op_type: str, *inputs: ir.Value | None, **attributes: Any) -> ir.Value:
        """Add a node of the ONNX standard with one output, and return the output."""
        return self.op(op_type, inputs, attributes)

    def split(self, value: ir.Value, sizes: Sequence[int]) -> list[ir.Value]:
        """Parts of a tensor along its first axis; the tensor itself where it has one part."""
        if len(sizes) == 1:
            return [value]
        return list(self.op_multi_out("Split", [value, self.ints(list(sizes))], {"axis": 0}, num_outputs=len(sizes)))

    def scalar(self, value: ir.Value) -> ir.Value:
        """A tensor `[1]` as a tensor without axes."""
        return self("Squeeze", value, self.ints([0]))

    def ints(self, content: Any) -> ir.Value:
        """An int64 constant."""
        return self._constant(np.asarray(content, np.int64))

    def floats(self, content: Any) -> ir.Value:
        """A constant of the builder's type."""
        return self._constant(np.asarray(content, self.dtype.numpy()))

    def _constant(self, content: np.ndarray) -> ir.Value:
        key = (str(content.dtype), content.shape, content.tobytes())
        if key not in self._constants:
            self._constants[key] = self("Constant", value=ir.tensor(content))
        return self._constants[key]
