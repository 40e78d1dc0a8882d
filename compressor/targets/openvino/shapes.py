"""Fixed shapes: an engine compiled for some sizes of its inputs pads shorter ones, and cuts the outputs.

OpenVINO plans the memory and the kernels of a graph whose axes are numbers ahead of time, and is faster with it. Rows
are padded at their end with zeros if the graph has an attention mask and only looks up the embeddings of its tokens:
padded positions are masked, and their outputs are cut off. Any other graph, such as one that searches for the token
that pads, runs at a fixed shape only if its inputs have that size. A graph that reads padded positions in another way,
such as the last position of every row, computes something else then; the proofs of a run, which pad, find it.
"""

from __future__ import annotations

import onnx_ir as ir

from compressor.targets.openvino.batches import Axes


def can_pad(model: ir.Model) -> bool:
    """Whether rows of a graph may be padded with zeros: it has a mask, and reads its tokens only to look them up."""
    inputs = {str(value.name): value for value in model.graph.inputs if not value.is_initializer()}
    is_masked = any(name.endswith("attention_mask") for name in inputs)
    return is_masked and all(_is_looked_up(value) for name, value in inputs.items() if name.endswith("input_ids"))


def _is_looked_up(value: ir.Value) -> bool:
    """Whether a tensor is read only as the indices of `Gather`, or for its shape."""
    return all(
        (reader.op_type == "Gather" and position == 1)
        or reader.op_type == "Shape"
        or (reader.op_type in ("Cast", "Identity", "Reshape") and position == 0 and _is_looked_up(reader.outputs[0]))
        for reader, position in value.uses()
    )


def axis_names(value: ir.Value) -> tuple[str, ...]:
    """Names of the axes of an input or output of a graph."""
    return tuple(str(size) for size in value.shape or ())


def unfixable(inputs: Axes, outputs: Axes) -> str | None:
    """Why a graph cannot be compiled for fixed shapes, in a few words; None if it can."""
    known = {"batch", "sequence"}
    for tensor, names in (*inputs.items(), *outputs.items()):
        free = [name for name in names if not name.isdecimal() and name not in known]
        if free:
            return f"the axis {free[0]} of {tensor} is neither the batch nor the length of the rows"
    return None
