"""A graph that reads the end tokens of its rows, as classifiers of the family of BART do, and rows that it can have."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from compressor.targets.example_rows import ExampleRows, record_example_rows
from tests.targets.graphs import parsed

START, PADDING, END = 0, 1, 2
MARKERS = frozenset((START, END))


def pairs() -> ExampleRows:
    """Two rows of two texts each, of ten tokens; the last is padded."""
    ids = [[START, 5, 6, 7, END, END, 8, 9, 10, END], [START, 11, 12, END, END, 13, 14, END, PADDING, PADDING]]
    mask = (np.array(ids) != PADDING).astype(np.int64)
    types = [[0, 0, 0, 0, 0, 1, 1, 1, 1, 1], [0, 0, 0, 0, 1, 1, 1, 1, 0, 0]]
    inputs = {"input_ids": np.array(ids), "attention_mask": mask, "token_type_ids": np.array(types)}
    return ExampleRows(inputs, MARKERS, PADDING)


def end_reader(example: ExampleRows | None = None) -> ir.Model:
    """A graph that returns the embedding of the last end token of each row, with example rows if there are any."""
    model = parsed(
        "words = Gather(table, input_ids)  is_end = Equal(input_ids, end)  places = NonZero(is_end)"
        "  indices = Transpose(places)  ends = GatherND(words, indices)  batch = Shape <start = 0, end = 1> (input_ids)"
        "  size = Concat <axis = 0> (batch, rest)  rows = Reshape(ends, size)  last = Gather <axis = 1> (rows, minus)"
        "  floats = Cast <to = 1> (attention_mask)  count = ReduceSum <keepdims = 1> (floats, axis)"
        "  y = Mul(last, count)",
        "int64[batch, sequence] input_ids, int64[batch, sequence] attention_mask",
        "float[batch, 4] y",
        "float[20, 4] table, int64 end = {2}, int64[2] rest = {-1, 4}, int64 minus = {-1}, int64[1] axis = {1}",
    )
    if example is not None:
        record_example_rows(model, example)
    return model
