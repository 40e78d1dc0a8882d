"""The reference graph computes what the gated model computes, at any size, under the names of the state dict."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
import transformers as hf
from torch import Tensor
from transformers import PreTrainedModel
from transformers.modeling_outputs import SequenceClassifierOutput

from compressor.errors import ErrorCode, InputError, UsageError
from compressor.export import export_reference, rewrite_reference
from compressor.units import find_groups, find_sites, gated, keep_all
from compressor.units.hook import Attention
from graph_passes import BlockMask, Plan, SitePlan
from graph_passes.attention.gate_initializers import gate_name
from tests.exported_graphs import Inputs, Session, assert_computes
from tests.faults import fails_with
from tests.random_plans import random_groups, random_plan
from tests.tasks.translations import marian
from tests.unchanged import unchanged
from tests.units.masks import one_layer
from tests.zoo import FAMILIES, Case, pair, pixels, speech, text

OUTPUTS = {"clip_text": ["text_embeds", "last_hidden_state"]}
CASES = [
    pytest.param("qwen3", 23, "sdpa", "one", id="qwen3-one-layer"),
    *(
        pytest.param(name, opset, form, "all", marks=pytest.mark.zoo, id=f"{name}-{opset}-{form}")
        for name in FAMILIES
        for opset in (18, 23)
        for form in ("eager", "sdpa")
    ),
]
"""A family, its operator set, its form of attention, and its layers."""


def inputs_of_other_sizes(name: str) -> dict[str, Inputs]:
    """Inputs of sizes that differ from those of the export, by description."""
    if name == "vit":
        return {"batch 1": pixels(1, seed=1), "batch 7": pixels(7, seed=2)}
    if name == "whisper":
        return {"batch 1, length 12": speech(1, 12, seed=1), "batch 5, length 2": speech(5, 2, seed=2)}
    if name in ("t5", "bart", "marian"):
        return {
            "batch 1, 13 to 4": pair(1, 13, 4, seed=1),
            "batch 5, 3 to 9": pair(5, 3, 9, seed=2),
            "batch 2, 6 to 6": pair(2, 6, 6, seed=3),
        }
    return {"batch 1, length 21": text(1, 21, seed=1), "batch 5, length 3": text(5, 3, seed=2)}


@pytest.mark.parametrize(("name", "opset", "attention", "layers"), CASES)
def test_the_reference_graph_equals_the_gated_model(
    name: str, opset: int, attention: Attention, layers: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    model, inputs = FAMILIES[name](0) if layers == "all" else one_layer(name)
    groups = find_groups(model, inputs, attention=attention)
    plan = random_groups(groups, np.random.default_rng([opset, len(attention), len(name)]))
    path = tmp_path / "reference.onnx"
    capfd.readouterr()
    with unchanged(model):
        export_reference(model, plan, inputs, path, opset=opset, attention=attention)
    assert capfd.readouterr() == ("", "")

    graph = ir.load(path).graph
    assert graph.opset_imports[""] == opset
    assert_gates_and_weights(graph, model, plan)
    assert [value.name for value in graph.inputs] == list(inputs)
    assert [value.name for value in graph.outputs] == OUTPUTS.get(name, ["logits"])
    axes = {str(dim) for value in graph.inputs for dim in value.shape or () if not isinstance(dim, int)}
    assert axes <= {"batch", "sequence", "decoder_sequence"}
    with gated(model, plan, attention=attention):
        for sample in (inputs, *inputs_of_other_sizes(name).values()):
            assert_computes(path, model, sample)


@pytest.mark.zoo
def test_outputs_of_parts_are_left_out(tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    text_config: dict[str, Any] = {**sizes, "vocab_size": 9, "max_position_embeddings": 8, "eos_token_id": 2}
    vision_config: dict[str, Any] = {**sizes, "image_size": 4, "patch_size": 2}
    config = hf.CLIPConfig(text_config=text_config, vision_config=vision_config, projection_dim=8)
    inputs = {"input_ids": torch.tensor([[1, 3, 2], [1, 4, 2]]), "pixel_values": torch.randn(2, 3, 4, 4)}
    model = hf.CLIPModel(config).eval()
    export_reference(model, keep_all(find_sites(model, inputs)), inputs, tmp_path / "reference.onnx")
    names = [value.name for value in ir.load(tmp_path / "reference.onnx").graph.outputs]
    assert names == ["logits_per_image", "logits_per_text", "text_embeds", "image_embeds"]


def assert_gates_and_weights(graph: ir.Graph, model: PreTrainedModel, plan: Plan) -> None:
    """Gates are initializers of the plan's values; all other initializers are the parameters of the model."""
    values = {name: value.const_value for name, value in graph.initializers.items()}
    for group in plan.groups:
        gate = values[gate_name(group)]
        assert gate is not None
        content = np.array(group.gate, np.float32)
        np.testing.assert_array_equal(gate.numpy(), content[:, None] if isinstance(group, SitePlan) else content)
    buffers = {name for name, _ in model.named_buffers()}
    weights = values.keys() - buffers - {gate_name(group) for group in plan.groups}
    assert weights <= set(model.state_dict())
    sizes = [tensor.size for name in weights if (tensor := values[name]) is not None]
    assert sum(map(int, sizes)) == sum(map(torch.numel, model.parameters()))


def bert() -> tuple[PreTrainedModel, Inputs]:
    """A BERT of one layer with a mask of ones."""
    model, inputs = one_layer("bert")
    return model, {"input_ids": inputs["input_ids"], "attention_mask": torch.ones_like(inputs["attention_mask"])}


@pytest.mark.zoo
@pytest.mark.parametrize(("name", "layers"), [("bert", "one"), *((name, "all") for name in FAMILIES)])
def test_a_rewritten_graph_equals_an_exported_graph_of_other_gates_and_weights(
    name: str, layers: str, tmp_path: Path
) -> None:
    family: Callable[[int], Case] = FAMILIES[name] if layers == "all" else functools.partial(one_layer, name)
    model, inputs = family(0)
    sites = find_sites(model, inputs)
    export_reference(model, keep_all(sites), inputs, tmp_path / "template.onnx")
    trained, _ = family(1)
    model.load_state_dict(trained.state_dict())
    plan = random_plan(sites, np.random.default_rng(3)).model_copy(update={"model": "sha256:34"})
    assert rewrite_reference(tmp_path / "template.onnx", model, plan, tmp_path / "rewritten.onnx")
    export_reference(model, plan, inputs, tmp_path / "exported.onnx")
    rewritten, expected = (ir.load(tmp_path / file) for file in ("rewritten.onnx", "exported.onnx"))
    assert rewritten.metadata_props == expected.metadata_props
    assert [node.op_type for node in rewritten.graph] == [node.op_type for node in expected.graph]
    for key, value in expected.graph.initializers.items():
        content = rewritten.graph.initializers[key].const_value
        assert value.const_value is not None
        assert content is not None
        np.testing.assert_array_equal(content.numpy(), value.const_value.numpy(), err_msg=key)


def test_a_graph_without_the_masks_of_a_plan_is_not_rewritten(
    exported: tuple[PreTrainedModel, Path], tmp_path: Path
) -> None:
    model, template = exported
    sites = find_sites(model, text())
    masks = {site.name: BlockMask(np.ones((site.heads, 2, 2), bool), 8, 0) for site in sites}
    assert not rewrite_reference(template, model, keep_all(sites).masked(masks), tmp_path / "rewritten.onnx")
    assert not (tmp_path / "rewritten.onnx").exists()


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> tuple[PreTrainedModel, Path]:
    """A BERT in training mode, exported with one row, a mask of ones and transformers' logging at INFO."""
    model, inputs = bert()
    single = {name: value[:1] for name, value in inputs.items()}
    plan = keep_all(find_sites(model, single)).model_copy(update={"model": "sha256:12"})
    path = tmp_path_factory.mktemp("bert") / "reference.onnx"
    logging.getLogger("transformers").setLevel(logging.INFO)
    export_reference(model.train(), plan, single, path)
    assert model.training
    assert bool((single["attention_mask"] == 1).all())
    return model.eval(), path


def test_one_row_and_a_mask_of_ones_keep_axes_and_inputs(exported: tuple[PreTrainedModel, Path]) -> None:
    model, path = exported
    assert Session(path).axes == {"input_ids": ["batch", "sequence"], "attention_mask": ["batch", "sequence"]}
    assert_computes(path, model, text(4, 9))


def test_the_graph_names_the_model_and_not_the_machine(exported: tuple[PreTrainedModel, Path]) -> None:
    _, path = exported
    assert ir.load(path).metadata_props["compressor.fingerprint"] == "sha256:12"
    assert b".py" not in path.read_bytes()
    assert sorted(file.name for file in path.parent.iterdir()) == ["reference.onnx", "reference.onnx.data"]


@pytest.mark.zoo
def test_equal_sizes_are_separate_axes(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model: Any = marian().eval()
    square = {name: value % 19 for name, value in pair(4, 4, 4).items()}
    plan = keep_all(find_sites(model, square))
    wrapped: Any = torch.nn.DataParallel(model)  # its prefix must not appear in names
    export_reference(wrapped, plan, square, tmp_path / "reference.onnx")
    graph = ir.load(tmp_path / "reference.onnx").graph
    assert "model.encoder.layers.0.self_attn.head_gate" in graph.initializers
    assert_computes(tmp_path / "reference.onnx", model, {name: value % 19 for name, value in pair(2, 9, 5).items()})


class TwoTexts(hf.BertForSequenceClassification):
    """A model of two inputs whose lengths differ."""

    def forward(self, input_ids: torch.Tensor, query_ids: torch.Tensor) -> SequenceClassifierOutput:
        first, second = (hf.BertForSequenceClassification.forward(self, ids).logits for ids in (input_ids, query_ids))
        return SequenceClassifierOutput(logits=first - 2 * second)


@pytest.mark.zoo
def test_inputs_of_different_lengths_have_axes_of_their_own(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config: Any = bert()[0].config
    model = TwoTexts(config).eval()

    def inputs(batch: int, *lengths: int) -> Inputs:
        names = ("input_ids", "query_ids")
        return {name: text(batch, size)["input_ids"] for name, size in zip(names, lengths, strict=True)}

    sample = inputs(2, 7, 5)
    export_reference(model, keep_all(find_sites(model, sample)), sample, tmp_path / "reference.onnx")
    first, second = (value.shape for value in ir.load(tmp_path / "reference.onnx").graph.inputs)
    assert first is not None
    assert second is not None
    assert (first[0], first[1] == second[1]) == (second[0], False)
    assert_computes(tmp_path / "reference.onnx", model, inputs(3, 4, 9))


@pytest.mark.zoo
def test_a_mask_without_query_axis_runs_as_an_attention_operator(tmp_path: Path) -> None:
    config = hf.LayoutLMConfig(
        vocab_size=99, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=44
    )
    model = hf.LayoutLMForSequenceClassification(config).eval()
    inputs = text()
    plan = random_plan(find_sites(model, inputs), np.random.default_rng(3))
    export_reference(model, plan, inputs, tmp_path / "reference.onnx", opset=23, attention="sdpa")
    with gated(model, plan):
        assert_computes(tmp_path / "reference.onnx", model, inputs)


def test_a_refused_export_changes_neither_model_nor_folder(tmp_path: Path) -> None:
    model, inputs = bert()
    plan = keep_all(find_sites(model, inputs))
    path = tmp_path / "reference.onnx"
    config = hf.ConvBertConfig(
        vocab_size=99, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, embedding_size=32
    )
    convbert = hf.ConvBertModel(config)
    with unchanged(model):
        with fails_with(ErrorCode.OUT_OF_RANGE, UsageError, field="opset", value=17):
            export_reference(model, plan, inputs, path, opset=17)
        with fails_with(ErrorCode.INVALID_VALUE, UsageError, field="fixed", value=["pixel_values"]):
            export_reference(model, plan, inputs, path, fixed=["pixel_values"])
        with fails_with(ErrorCode.PLAN_MISMATCH, site=plan.sites[0].name):
            export_reference(model, plan.model_copy(update={"groups": plan.sites[1:]}), inputs, path)
        with fails_with(ErrorCode.OUT_OF_RANGE, input="input_ids", value=1, minimum=2):
            export_reference(model, plan, {name: value[:, :1] for name, value in inputs.items()}, path)
        with fails_with(ErrorCode.PLAN_MISMATCH, site=plan.sites[0].name):
            export_reference(convbert, plan, inputs, path)
    assert not list(tmp_path.iterdir())


class Branching(hf.BertModel):
    """A model with a branch on the value of an input, which a graph cannot have."""

    def forward(self, input_ids: Tensor, **inputs: Tensor) -> object:
        return super().forward(input_ids if int(input_ids.sum()) > 0 else -input_ids, **inputs)


def test_a_fault_of_the_exporter_gives_a_one_line_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config: Any = bert()[0].config
    model = Branching(config).eval()
    plan = keep_all(find_sites(model, text()))
    with unchanged(model), fails_with(ErrorCode.EXPORT_FAILED, family="bert", remedy=None):
        export_reference(model, plan, text(), tmp_path / "reference.onnx")
    assert capsys.readouterr() == ("", "")


class BranchingEagerly(hf.BertModel):
    """A model with such a branch in one form of attention."""

    def forward(self, input_ids: Tensor, **inputs: Tensor) -> object:
        is_odd = self.config._attn_implementation == "eager" and int(input_ids.sum()) < 0
        return super().forward(-input_ids if is_odd else input_ids, **inputs)


@pytest.mark.zoo
def test_the_form_of_attention_that_can_be_exported_is_the_remedy_for_the_other(tmp_path: Path) -> None:
    config: Any = bert()[0].config
    model = BranchingEagerly(config).eval()
    plan = keep_all(find_sites(model, text()))
    with fails_with(ErrorCode.EXPORT_FAILED, InputError, remedy="sdpa"):
        export_reference(model, plan, text(), tmp_path / "reference.onnx", attention="eager")


class Echoing(hf.BertModel):
    """A model that returns its mask."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> object:
        outputs = super().forward(input_ids, attention_mask)
        return {"last_hidden_state": outputs.last_hidden_state, "attention_mask": attention_mask}


@pytest.mark.zoo
def test_an_input_that_the_model_returns_keeps_its_name(tmp_path: Path) -> None:
    config: Any = bert()[0].config
    model = Echoing(config).eval()
    plan = keep_all(find_sites(model, text()))
    export_reference(model, plan, text(), tmp_path / "reference.onnx")
    graph = ir.load(tmp_path / "reference.onnx").graph
    assert [value.name for value in graph.inputs] == ["input_ids", "attention_mask"]
    assert [value.name for value in graph.outputs] == ["last_hidden_state"]
