"""Which products are computed in 8 bits, from layers as TensorRT's inspector writes them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from compressor.results import QuantizedProducts
from compressor.targets.tensorrt.inspector import MatmulTypes, matmul_types, parse_layers

INT8 = "sm80_xmma_gemm_i8i8_i8i32_f32_tn_n_tilesize64x64x64_stage6_warpsize2x2x1_tensor16x8x32"
FP16 = "sm80_xmma_gemm_f16f16_f16f16_f16_nn_n_tilesize32x32x64_stage6_warpsize2x2x1_tensor16x8x16"
FP8 = "sm89_xmma_gemm_e4m3e4m3_e4m3f32_f32_tn_n_tilesize64x64x128_stage3"


def entry(node: str, *formats: str, **more: Any) -> dict[str, Any]:
    """A layer that computes one node from inputs of element types."""
    inputs = [{"Name": "x", "Dimensions": [1, 40, 256], "Format/Datatype": text} for text in formats]
    layer = {"Name": f"{node}_myl0_7", "LayerType": "gemm", "Inputs": inputs, "Metadata": f"[ONNX Layer: {node}]"}
    return {**layer, **more}


def types_of(products: list[str], *entries: Any) -> MatmulTypes:
    return matmul_types(parse_layers(json.dumps({"Layers": list(entries)})), products)


def known(executed: int, in_float: tuple[str, ...] = ()) -> MatmulTypes:
    requested = executed + len(in_float)
    return MatmulTypes(QuantizedProducts(requested=requested, executed=executed, in_float=in_float), 0)


@pytest.mark.parametrize(
    "layer",
    [
        entry("a", "Int8", TacticName=INT8),
        entry("a", "Half", TacticName=INT8),
        entry("a", "FP8", TacticName=FP8),
        entry("a", "Half", "FP8", TacticName="__myl_Fc_0xf25"),
        entry("a", "Thirty-two wide channel vectorized row major Int8 format", LayerType="CaskGemmConvolution"),
        entry("a", "Row major linear FP32", Weights={"Type": "Int8", "Count": 9}),
    ],
)
def test_a_product_is_in_8_bits_by_its_kernel_or_by_what_it_reads(layer: dict[str, Any]) -> None:
    assert types_of(["a"], layer) == known(1)


@pytest.mark.parametrize(
    "layer",
    [
        entry("a", "Half", TacticName=FP16),
        entry("a", "Int8", TacticName=FP16),
        entry("a", "Row major linear FP32", Weights={"Type": "Float", "Count": 9}),
        entry("a", "Float", Weights={"Type": "Int8", "Count": 0}),
    ],
)
def test_a_product_is_in_floats_otherwise(layer: dict[str, Any]) -> None:
    assert types_of(["a"], layer) == known(0, ("a",))


def test_one_layer_computes_several_products() -> None:
    """TensorRT joins the projections of queries, keys and values."""
    metadata = "\x1e".join(f"[ONNX Layer: {name}]" for name in ("q", "k", "v"))
    joined = entry("q+k+v", "Int8", TacticName=INT8, Metadata=metadata)
    assert types_of(["q", "k", "v", "o"], joined, entry("o", "Half", TacticName=FP16)) == known(3, ("o",))


def test_names_that_contain_each_other_are_told_apart() -> None:
    layers = [entry("/l/MatMul_1", "Half", TacticName=FP16, Metadata=""), entry("/l/MatMul", "Int8", TacticName=INT8)]
    layers[0]["Name"] = "/l/MatMul_1 + /l/Add"
    assert types_of(["/l/MatMul", "/l/MatMul_1"], *layers) == known(1, ("/l/MatMul_1",))


@pytest.mark.parametrize(
    "layers",
    [
        [],
        ["a_name_alone"],
        [{"Name": "{ForeignNode[a...b]}", "LayerType": "Myelin", "Metadata": "[ONNX Layer: a]"}],
        [entry("a", "Int8", LayerType="Reformat"), entry("a", "Int8", Name="Reformatting CopyNode for a")],
    ],
    ids=["nothing", "names", "whole graph", "moves"],
)
def test_a_product_in_no_listed_layer_is_hidden(layers: list[Any]) -> None:
    types = types_of(["a", "b"], *layers)
    assert types == MatmulTypes(None, 2)
    assert "unknown" in str(types)


def test_an_engine_in_floats_says_nothing() -> None:
    assert str(types_of([], entry("a", "Half", TacticName=FP16))) == ""


def test_a_message_has_the_known_and_the_hidden_matmuls() -> None:
    types = MatmulTypes(QuantizedProducts(requested=13, executed=12, in_float=("a",)), 17)
    known, hidden = str(types).split("; ")
    assert "12 of 13" in known
    assert "17" in hidden


def test_products_have_the_type_of_the_engine() -> None:
    layers = parse_layers(json.dumps({"Layers": [entry("a", TacticName=FP8)]}))
    known = matmul_types(layers, ["a"], precision="fp8").known
    assert known is not None
    assert (known.type, known.executed) == ("fp8", 1)
