"""Express the model's native mask of a masked attention as block-sparse attention takes it: a row, a flag, or pairs.

Models compute `[batch, 1, query, key]` from a padding mask, positions and causality, each in its own way. Where a row
of keys and a flag for causality are equivalent (see `mask_meaning`), the mask of every pair is not needed.
"""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
import onnx_ir as ir

from graph_passes.attention.mask_meaning import MaskMeaning, mask_meaning
from graph_passes.flow.concrete_shapes import Probe
from graph_passes.tape import Tape


@dataclasses.dataclass(frozen=True)
class NativeMask:
    """What a site's native mask adds to the scores.

    Attributes:
        row: numbers for each key, `[batch, 1, 1, key]`.
        causal: whether keys after the query are hidden.
        full: numbers for each pair, `[batch or 1, 1 or head, query, key]`, for masks that row and flag cannot express.
        heads: number of heads of `full`; 0 where there is none.
    """

    row: ir.Value | None = None
    causal: bool = False
    full: ir.Value | None = None
    heads: int = 0


class NativeMaskReader:
    """Reads the native masks of one graph. Each tensor is evaluated once, and each row is computed once.

    Args:
        model: the graph; nodes are added where a mask is read.
        longest: number of positions for which the meaning of a mask must hold.
    """

    def __init__(self, model: ir.Model, longest: int, probe: Probe) -> None:
        self._model, self._longest, self._probe = model, longest, probe
        self._meanings: dict[ir.Value, MaskMeaning | None] = {}
        self._rows: dict[ir.Value, ir.Value] = {}

    def read(self, addends: list[ir.Value], before: ir.Node, *, allow_causal: bool) -> NativeMask:
        """The native mask of one site.

        Args:
            addends: numbers to add to the scores, or booleans that are True where a pair is allowed; each broadcasts to
                `[batch, head, query, key]`.
            before: the attention; new nodes are inserted before it.
            allow_causal: whether causality may be expressed by the flag.
        """
        padding: ir.Value | None = None
        causal, pairs = False, []
        for value in addends:
            meaning = self._meaning(value)
            if meaning is None or (meaning.causal and not allow_causal):
                pairs.append(value)
            elif meaning.padding is not None and padding not in (None, meaning.padding):
                pairs.append(value)  # only one padding mask fits into the row
            else:
                padding, causal = meaning.padding or padding, causal or meaning.causal
        full, heads = self._sum(pairs, before)
        return NativeMask(None if padding is None else self._row(padding), causal, full, heads)

    def _meaning(self, value: ir.Value) -> MaskMeaning | None:
        if value not in self._meanings:
            self._meanings[value] = mask_meaning(self._model, value, self._longest)
        return self._meanings[value]

    def _sum(self, addends: list[ir.Value], before: ir.Node) -> tuple[ir.Value | None, int]:
        """The sum of some masks, and its number of heads; None and 0 if there are none."""
        if not addends:
            return None, 0
        op = Tape()
        numbers = [_as_numbers(value, op) for value in addends]
        total = functools.reduce(lambda total, addend: op("Add", total, addend), numbers)
        op.insert_before(before)
        shapes = [self._probe.shape(value) or () for value in addends]
        return total, max(shape[1] if len(shape) == 4 else 1 for shape in shapes)

    def _row(self, padding: ir.Value) -> ir.Value:
        """Numbers for each key, zero where a padding mask keeps it, computed once from the graph's input."""
        if padding not in self._rows:
            op = Tape()
            allowed = op("Cast", padding, to=ir.DataType.BOOL)
            allowed.dtype = ir.DataType.BOOL
            self._rows[padding] = op("Unsqueeze", _as_numbers(allowed, op), op.ints([1, 2]))
            op.insert_before(self._model.graph[0])
        return self._rows[padding]


def _as_numbers(value: ir.Value, op: Tape) -> ir.Value:
    """A mask as numbers to add, converted from a boolean one."""
    if value.dtype != ir.DataType.BOOL:
        return value
    zero, lowest = (op("Constant", value=ir.tensor(np.float32(n))) for n in (0.0, np.finfo(np.float32).min))
    return op("Where", value, zero, lowest)
