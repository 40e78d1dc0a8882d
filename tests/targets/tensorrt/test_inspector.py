"""Whether attention is fused, from the layers that TensorRT's inspector lists."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest

from compressor.results import BuiltLayer
from compressor.targets import Precision
from compressor.targets.tensorrt.inspector import (
    AttentionFusion,
    UnfusedReason,
    attention_fusion,
    is_fused,
    parse_layers,
)
from graph_passes import GraphSite, find_attention, load
from tests.targets.graphs import pruned

WHOLE = BuiltLayer(name="{ForeignNode[/embeddings/Gather.../classifier/Gemm]}", kind="Myelin")
"""A layer that holds the whole graph and lists no kernels."""
UNNAMED = BuiltLayer(name="_gemm_mha_v2")
"""A fused kernel that names no nodes."""


@pytest.fixture(scope="module")
def sites() -> Sequence[GraphSite]:
    return find_attention(load(pruned("bert").shrunk))


@pytest.fixture(scope="module")
def nodes(sites: Sequence[GraphSite]) -> list[str]:
    """The node of each attention."""
    return [str(producer.name) for site in sites if (producer := site.output.producer()) is not None]


def fusion_of(
    layers: Sequence[BuiltLayer],
    sites: Sequence[GraphSite],
    capability: tuple[int, int] = (9, 0),
    precision: Precision = "fp16",
) -> AttentionFusion:
    return attention_fusion(layers, sites, capability, precision)


@pytest.mark.parametrize(
    ("layer", "fused"),
    [
        (BuiltLayer(name="_gemm_mha_v2_myl0_5", kind="kgen"), True),
        (BuiltLayer(name="x", tactic="fmha_v2_flash_attention_fp16_64_64_S_64_sm90_kernel_nl"), True),
        (BuiltLayer(name="__myl_MatMul", nodes="/encoder/mha/MatMul"), False),
        (BuiltLayer(name="{ForeignNode[/encoder/attention/mha/MatMul]}"), False),
        (BuiltLayer(name="[HostToDeviceCopy] alphamhax"), False),
        (BuiltLayer(name="x", tactic="fmhaSm90Kernel"), True),
        (BuiltLayer(name="__mye12_gemv_mha_v1_0"), True),
        (BuiltLayer(name="Reformatting CopyNode for Output Tensor 0 to _gemm_mha_v2", kind="Reformat"), False),
        (BuiltLayer(name="mha.MatMul_3", nodes="mha.MatMul_3"), False),
    ],
)
def test_a_fused_attention_is_recognized_by_its_kernel(layer: BuiltLayer, fused: bool) -> None:
    assert is_fused(layer) is fused


def test_layers_are_parsed_with_the_control_characters_between_names_of_nodes() -> None:
    entry = {"Name": "_gemm_mha_v2", "LayerType": "kgen", "Metadata": "[ONNX Layer: a]\x1e[ONNX Layer: b]"}
    layers = parse_layers(json.dumps({"Layers": [entry, "reformat"], "Bindings": []}))
    assert [(layer.name, layer.kind) for layer in layers] == [("_gemm_mha_v2", "kgen"), ("reformat", "")]
    assert [[node for node in layer.nodes.split("\x1e") if node] for layer in layers] == [["a", "b"], []]
    raw = json.dumps({"Layers": [{"Name": "_gemm_mha_v2", "Metadata": "a|b"}]}).replace("|", "\x1e")
    assert parse_layers(raw)[0].nodes == "a\x1eb"


@pytest.mark.parametrize("information", ["", "no layers", "[]"])
def test_without_layers_nothing_is_known(information: str, sites: Sequence[GraphSite]) -> None:
    fusion = fusion_of(parse_layers(information), sites)
    assert (fusion.fused, fusion.known, fusion.total, fusion.shows_layers) == (0, 0, len(sites), False)


def test_an_attention_whose_node_a_kernel_names_is_fused(sites: Sequence[GraphSite], nodes: list[str]) -> None:
    kernels = [BuiltLayer(name="_gemm_mha_v2", nodes=node) for node in nodes]
    all_fused = AttentionFusion(len(sites), len(sites), len(sites), reasons=fusion_of(kernels, sites).reasons)
    assert fusion_of(kernels, sites) == all_fused
    assert fusion_of(kernels[:1] * len(sites), sites).fused == 1, "one attention of several kernels"
    softmax = BuiltLayer(name="_gemm_mha_v2", nodes="its softmax")
    assert fusion_of([kernels[0], softmax], sites).fused == 1, "the second kernel belongs to the same attention"


def test_kernels_are_counted_if_their_attentions_are_unknown(sites: Sequence[GraphSite]) -> None:
    unknown = BuiltLayer(name="_gemm_mha_v2", nodes="unknown")
    for kernel in (UNNAMED, unknown):
        fusion = fusion_of([kernel] * len(sites), sites)
        assert (fusion.fused, fusion.known, fusion.unfused) == (len(sites), len(sites), ())


def test_attentions_that_are_not_fused_are_named_with_the_reason(sites: Sequence[GraphSite], nodes: list[str]) -> None:
    layers = [BuiltLayer(name="_gemm_mha_v2", nodes=f"a\x1e{nodes[0]}"), BuiltLayer(name="reformat")]
    fusion = fusion_of(layers, sites)
    assert (fusion.fused, fusion.known, fusion.total) == (1, len(sites), len(sites))
    assert fusion.unfused == tuple(site.name or node for site, node in zip(sites[1:], nodes[1:], strict=True))
    (reason,) = fusion.reasons
    assert reason[0] is UnfusedReason.HEAD_DIM
    assert "heads are 8 wide" in reason[1]


@pytest.mark.parametrize(
    ("capability", "precision", "reason"),
    [((7, 0), "fp16", UnfusedReason.CAPABILITY), ((9, 0), "fp32", UnfusedReason.PRECISION)],
)
def test_gpus_and_precisions_without_fused_attention_are_the_reason(
    capability: tuple[int, int], precision: Precision, reason: UnfusedReason, sites: Sequence[GraphSite]
) -> None:
    fusion = fusion_of([BuiltLayer(name="reformat")], sites, capability, precision)
    assert [kind for kind, _ in fusion.reasons] == [reason]
    assert fusion.unfused == (), "no kernel at all: none of them in particular"


def test_attentions_inside_an_opaque_layer_are_unknown(sites: Sequence[GraphSite], nodes: list[str]) -> None:
    fusion = fusion_of([WHOLE], sites)
    assert (fusion.fused, fusion.known, fusion.total) == (0, 0, len(sites))
    separate_layers = [BuiltLayer(name=node) for node in nodes]
    fusion = fusion_of([WHOLE, *separate_layers], sites)
    assert (fusion.fused, fusion.known) == (0, len(sites)), "layers of their own show that they are not fused"
    listed = BuiltLayer(name="{ForeignNode[a...b]}", nodes=nodes[0])
    fusion = fusion_of([listed], sites)
    assert (fusion.fused, fusion.known) == (0, len(sites) - 1)


def test_messages(sites: Sequence[GraphSite], nodes: list[str]) -> None:
    """The text of reports on fused attention."""
    count = len(sites)
    kernels = [BuiltLayer(name="_gemm_mha_v2", nodes=node) for node in nodes]
    assert str(fusion_of(kernels, sites)) == f"fused attention in all of {count} attention layers"
    assert str(fusion_of([WHOLE], sites)) == (
        f"it is unknown whether attention is fused in {count} of {count} attention layers: TensorRT does not list the"
        " kernels of the layers that hold them"
    )
    assert str(fusion_of([BuiltLayer(name="reformat")], sites, precision="fp32")) == (
        f"fused attention in 0 of {count} attention layers: fused attention needs fp16 or bf16 (--precision)"
    )
    assert str(fusion_of([], [])) == "the graph has no attention"
