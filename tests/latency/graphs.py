"""Small ONNX graphs and a model folder for the tests of latency checks and of serving."""

from __future__ import annotations

from pathlib import Path

from graph_passes import save
from tests import folders
from tests.targets.graphs import parsed


def softmax_graph(path: Path, scale: float = 1.0) -> Path:
    """`y = softmax(x w) * scale` with `x` `[B, 4]` and `y` `[B, 3]`; `w` is the same in every graph."""
    body = "h = MatMul (x, w)\n s = Softmax <axis = -1> (h)\n y = Mul (s, k)"
    save(parsed(body, "float[B, 4] x", "float[B, 3] y", f"float[4, 3] w, float k = {{{scale}}}"), path)
    return path


def wide_graph(path: Path) -> Path:
    """A graph with the inputs and outputs of `softmax_graph` that takes many times as long."""
    body = "h = MatMul (x, a)\n t = Tanh (h)\n y = MatMul (t, b)"
    save(parsed(body, "float[B, 4] x", "float[B, 3] y", "float[4, 65536] a, float[65536, 3] b"), path)
    return path


def cast_graph(path: Path, dtype: str = "int64") -> Path:
    """`y = float(ids)` with `ids` `[B, 4]` of an integer type."""
    save(parsed("y = Cast <to = 1> (ids)", f"{dtype}[B, 4] ids", "float[B, 4] y"), path)
    return path


def rounding_graph(path: Path, factor: float) -> Path:
    """`y = int64(x * factor)` with `x` `[B, 4]`."""
    body = "m = Mul (x, k)\n y = Cast <to = 7> (m)"
    save(parsed(body, "float[B, 4] x", "int64[B, 4] y", f"float k = {{{factor}}}"), path)
    return path


def text_model(folder: Path) -> Path:
    """A folder with a small graph of texts, `model.onnx`, its weights in a data file, and a tokenizer.

    `logits` `[batch, 16]` is the sum of the embeddings of the tokens that the mask keeps.
    """
    folder.mkdir()
    model = parsed(
        "rows = Gather (table, input_ids) m = Cast <to = 1> (attention_mask) axis = Constant <value_ints = [2]> ()"
        " wide = Unsqueeze (m, axis) kept = Mul (rows, wide) first = Constant <value_ints = [1]> ()"
        " logits = ReduceSum <keepdims = 0> (kept, first)",
        "int64[batch, sequence] input_ids, int64[batch, sequence] attention_mask",
        "float[batch, 16] logits",
        "float[25, 16] table",
    )
    save(model, folder / "model.onnx")
    folders.tokenizer().save_pretrained(folder)
    return folder
