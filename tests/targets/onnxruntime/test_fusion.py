"""Fusing for ONNX Runtime: the result is kept only if it computes the same function."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from compressor.errors import ErrorCode, InputError
from compressor.targets.onnxruntime import ort_session
from compressor.targets.onnxruntime.engine import build_engine
from compressor.targets.onnxruntime.fusion import Fusion, Rewrite, fuse
from graph_passes import save
from tests.targets.graphs import parsed, pruned

POSITIONS = """
    length = Shape <start = 1, end = 2> (x)
    end = Squeeze (length)
    positions = Range (zero, end, one)
    offsets = Gather (table, positions)
    y = Add (x, offsets)
"""


def negate_a_product(model: ir.Model) -> ir.Model:
    product = next(node for node in model.graph if node.op_type == "MatMul")
    negative = ir.node("Neg", [product.outputs[0]])
    product.outputs[0].replace_all_uses_with(negative.outputs[0])
    negative.replace_input_with(0, product.outputs[0])
    model.graph.insert_after(product, negative)
    return model


def break_a_product(model: ir.Model) -> ir.Model:
    next(node for node in model.graph if node.op_type == "MatMul").op_type = "NoSuchOperator"
    return model


def fail(model: ir.Model) -> ir.Model:
    raise KeyError("no rule\nfor this")


@pytest.mark.parametrize(
    ("rewrite", "compared", "reason"),
    [(negate_a_product, True, "differ by"), (break_a_product, False, "NoSuchOperator"), (fail, False, "KeyError")],
)
def test_a_fused_graph_that_is_wrong_is_not_kept(rewrite: Rewrite, compared: bool, reason: str, tmp_path: Path) -> None:
    bert = pruned("bert")
    engine = build_engine(bert.shrunk, tmp_path / "engine.onnx", provider="cpu", threads=1, rewrite=rewrite)
    assert engine.fusion is not None
    assert not engine.fusion.fused
    assert (engine.fusion.error is not None) is compared
    assert engine.fusion.error is None or engine.fusion.error > 1e-4
    assert reason in engine.fusion.reason
    assert engine.optimization.startswith(str(engine.fusion))
    assert "\n" not in engine.optimization
    assert (engine.fused, engine.attentions) == (0, bert.attentions)
    expected = ort_session.run_session(ort_session.open_session(bert.shrunk, engine.session), bert.inputs)
    np.testing.assert_allclose(engine.run(bert.inputs)["logits"], expected["logits"], rtol=1e-5)


@pytest.mark.parametrize(("positions", "runs"), [(7, True), (2, False)])
def test_a_graph_is_compared_on_the_lengths_that_it_accepts(positions: int, runs: bool, tmp_path: Path) -> None:
    """It has positions for six tokens of nine, or for none of the lengths tried."""
    weights = f"int64 zero = {{0}}, int64 one = {{1}}, float[{positions}, 4] table"
    graph, out = tmp_path / "graph.onnx", tmp_path / "engine.onnx"
    save(parsed(POSITIONS, "float[B, S, 4] x", "float[B, S, 4] y", weights), graph)
    settings = ort_session.session_settings("cpu", 1)
    if runs:
        assert fuse(graph, out, settings).fused
        return
    with pytest.raises(InputError) as error:
        fuse(graph, out, settings)
    assert error.value.code is ErrorCode.RUNTIME_FAILED


def test_messages() -> None:
    """The text of reports on fusion."""
    assert str(Fusion(True, 1e-6)) == "fused by onnxscript's rules, equal to the original graph within 1.0e-06"
    assert str(Fusion(False, None, "KeyError: a")) == ("not fused beyond ONNX Runtime's own optimizations: KeyError: a")
