"""The reference graph: it computes what the gated model computes, at any size, under the names of the state dict."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
import torch
import transformers as hf
from torch import Tensor
from transformers import PreTrainedModel

from compressor.errors import InputError, SiteRefusedError, UsageError
from compressor.export import export_reference
from compressor.units import find_sites, gated, keep_all
from compressor.units.hook import Attention
from tests.test_sites import same, state
from tests.zoo import FAMILIES, pair, pixels, random_plan, speech, text

TOLERANCE = 1e-5
OUTPUTS = {"clip_text": ["text_embeds", "last_hidden_state"]}
QUICK = {("bert", 18, "eager"), ("qwen3", 23, "sdpa"), ("gpt2", 18, "sdpa"), ("t5", 23, "eager")}
ZOO = [
    pytest.param(*case, marks=() if case in QUICK else pytest.mark.zoo, id="-".join(map(str, case)))
    for case in [(name, opset, form) for name in FAMILIES for opset in (18, 23) for form in ("eager", "sdpa")]
]


def sizes(name: str) -> dict[str, dict[str, Tensor]]:
    """Inputs of other sizes than those the graph was made with, in words."""
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


def session(path: Path) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def feeds(runner: onnxruntime.InferenceSession, inputs: dict[str, Tensor]) -> dict[str, np.ndarray]:
    return {value.name: inputs[value.name].numpy() for value in runner.get_inputs()}


def elements(initializer: ir.Value) -> int:
    assert initializer.const_value is not None
    return int(initializer.const_value.size)


def relative_error(got: np.ndarray, expected: np.ndarray) -> float:
    assert got.shape == expected.shape
    return float(np.abs(got - expected).max() / np.abs(expected).max())


@pytest.mark.parametrize(("name", "opset", "attention"), ZOO)
def test_the_reference_is_the_gated_model(
    name: str, opset: int, attention: Attention, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    model, inputs = FAMILIES[name](0)
    sites = find_sites(model, inputs)
    plan = random_plan(sites, np.random.default_rng([opset, len(attention), len(name)]))
    before = state(model)
    capfd.readouterr()
    export_reference(model, plan, inputs, tmp_path / "reference.onnx", opset=opset, attention=attention)
    assert capfd.readouterr() == ("", "")
    assert same(before, state(model))

    graph = ir.load(tmp_path / "reference.onnx").graph
    assert graph.opset_imports[""] == opset
    for site in plan.sites:
        gate = graph.initializers[f"{site.name}.head_gate"].const_value
        assert gate is not None
        np.testing.assert_array_equal(gate.numpy(), np.array(site.gate, np.float32)[:, None])
    buffers = {key for key, _ in model.named_buffers()}
    weights = {key for key in graph.initializers if not key.endswith(".head_gate")} - buffers
    assert weights <= set(model.state_dict())
    assert sum(elements(graph.initializers[key]) for key in weights) == sum(map(torch.numel, model.parameters()))

    assert [value.name for value in graph.inputs] == list(inputs)
    assert [value.name for value in graph.outputs] == OUTPUTS.get(name, ["logits"])
    axes = {str(dim) for value in graph.inputs for dim in value.shape or () if not isinstance(dim, int)}
    assert axes <= {"batch", "sequence", "decoder_sequence"}

    runner = session(tmp_path / "reference.onnx")
    for case, other in {"as exported": inputs, **sizes(name)}.items():
        with torch.no_grad(), gated(model, plan, attention=attention):
            expected = model(**other)
        results = runner.run(None, feeds(runner, other))
        for value, got in zip(runner.get_outputs(), results, strict=True):
            assert relative_error(got, expected[value.name].numpy()) <= TOLERANCE, (case, value.name)


def _bert() -> tuple[PreTrainedModel, dict[str, Tensor]]:
    model, inputs = FAMILIES["bert"](0)
    return model, {"input_ids": inputs["input_ids"], "attention_mask": torch.ones_like(inputs["attention_mask"])}


def test_one_row_and_a_mask_of_ones_still_give_dynamic_axes_and_every_input(tmp_path: Path) -> None:
    model, inputs = _bert()
    single = {name: value[:1] for name, value in inputs.items()}
    export_reference(model, keep_all(find_sites(model, single)), single, tmp_path / "reference.onnx")
    assert bool((single["attention_mask"] == 1).all())
    runner = session(tmp_path / "reference.onnx")
    assert {value.name: value.shape for value in runner.get_inputs()} == {
        "input_ids": ["batch", "sequence"],
        "attention_mask": ["batch", "sequence"],
    }
    other = text(4, 9)
    (got,) = runner.run(None, feeds(runner, other))
    with torch.no_grad():
        assert relative_error(got, model(**other).logits.numpy()) <= TOLERANCE


def test_equal_sizes_are_not_taken_for_one_axis(tmp_path: Path) -> None:
    model, _ = FAMILIES["bart"](0)
    square = pair(4, 4, 4)
    plan = keep_all(find_sites(model, square))
    wrapped = torch.nn.DataParallel(model)  # its prefix must not reach the names
    export_reference(wrapped, plan, square, tmp_path / "reference.onnx")  # type: ignore[arg-type]
    graph = ir.load(tmp_path / "reference.onnx").graph
    assert "model.encoder.layers.0.self_attn.head_gate" in graph.initializers
    runner = session(tmp_path / "reference.onnx")
    other = pair(2, 9, 5)
    (got,) = runner.run(None, feeds(runner, other))
    with torch.no_grad():
        assert relative_error(got, model(**other).logits.numpy()) <= TOLERANCE


def test_the_model_is_named_and_the_machine_is_not(tmp_path: Path) -> None:
    model, inputs = _bert()
    plan = keep_all(find_sites(model, inputs)).model_copy(update={"model": "sha256:12"})
    logging.getLogger("transformers").setLevel(logging.INFO)
    export_reference(model.train(), plan, inputs, tmp_path / "reference.onnx")
    assert model.training
    assert ir.load(tmp_path / "reference.onnx").metadata_props["compressor.fingerprint"] == "sha256:12"
    assert b".py" not in (tmp_path / "reference.onnx").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["reference.onnx", "reference.onnx.data"]


def test_a_mask_without_a_query_axis_runs_as_an_attention_op(tmp_path: Path) -> None:
    config = hf.LayoutLMConfig(
        vocab_size=99, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=44
    )
    model = hf.LayoutLMForSequenceClassification(config).eval()
    inputs = text()
    plan = random_plan(find_sites(model, inputs), np.random.default_rng(3))
    export_reference(model, plan, inputs, tmp_path / "reference.onnx", opset=23, attention="sdpa")
    runner = session(tmp_path / "reference.onnx")
    with torch.no_grad(), gated(model, plan):
        expected = model(**inputs).logits
    assert relative_error(runner.run(None, feeds(runner, inputs))[0], expected.numpy()) <= TOLERANCE


def test_what_cannot_be_exported_is_refused_and_leaves_no_file(tmp_path: Path) -> None:
    model, inputs = _bert()
    plan = keep_all(find_sites(model, inputs))
    path = tmp_path / "reference.onnx"
    before = state(model)
    with pytest.raises(UsageError, match="opset 17 is not offered; use 18 or 23"):
        export_reference(model, plan, inputs, path, opset=17)
    with pytest.raises(InputError, match=f"site {plan.sites[0].name} of the model is missing"):
        export_reference(model, plan.model_copy(update={"sites": plan.sites[1:]}), inputs, path)
    with pytest.raises(InputError, match="input_ids: one position would be fixed"):
        export_reference(model, plan, {name: value[:, :1] for name, value in inputs.items()}, path)
    mpnet = hf.MPNetModel(hf.MPNetConfig(vocab_size=99, hidden_size=32, num_hidden_layers=1, num_attention_heads=4))
    with pytest.raises(SiteRefusedError, match="mpnet"):
        export_reference(mpnet, plan, inputs, path)
    assert same(before, state(model))
    assert not list(tmp_path.iterdir())


class _Branching(hf.BertModel):
    """Chooses its way by a value of the input, which no graph can."""

    def forward(self, input_ids: Tensor, **inputs: Tensor) -> object:
        return super().forward(input_ids if int(input_ids.sum()) > 0 else -input_ids, **inputs)


def test_a_failing_exporter_is_one_line(tmp_path: Path) -> None:
    model = _Branching(_bert()[0].config).eval()  # type: ignore[arg-type]
    plan = keep_all(find_sites(model, text()))
    before = state(model)
    with pytest.raises(InputError, match=r"^bert: the model cannot be exported \(.*\); try the other form") as caught:
        export_reference(model, plan, text(), tmp_path / "reference.onnx")
    assert "\n" not in str(caught.value)
    assert same(before, state(model))
