"""Rerankers of modules: what they compute, what a run does with them, and what is refused by name."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor

from compressor import find_groups
from compressor.errors import ErrorCode, InputError
from compressor.model_folder import example_inputs, load, save_companions
from compressor.models.rerankers import CausalReranker, ModuleReranker
from compressor.training.distillation import Distillation
from compressor.units.outputs import kept_outputs
from tests import folders
from tests.faults import fails_with
from tests.rerankers import NEGATIVE, POSITIVE, WIDTH, save_causal_reranker, save_reranker


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def _weights(path: Path, number: int, name: str) -> dict[str, Tensor]:
    return safetensors.torch.load_file(path / f"{number}_{name}" / "model.safetensors")


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("pooling", ["cls", "mean"])
def test_scores_pass_the_layers_in_order(pooling: str, residual: bool, tmp_path: Path) -> None:
    path = save_reranker(tmp_path / "model", pooling=pooling, residual=residual)
    folder = load(path)
    assert (folder.task, folder.config.num_labels, type(folder.model)) == ("regression", 1, ModuleReranker)
    inputs = example_inputs(folder, 3, 6)
    with torch.no_grad():
        output = folder.model(**inputs)
        encoder: Any = folder.model.encoder
        states = encoder(**inputs)[0]
        mask = inputs["attention_mask"][..., None].float()
        pooled = states[:, 0] if pooling == "cls" else (states * mask).sum(1) / mask.sum(1)
        first, norm, last = _weights(path, 2, "Dense"), _weights(path, 3, "LayerNorm"), _weights(path, 5, "Dense")
        hidden = torch.nn.functional.gelu(pooled @ first["linear.weight"].T + first["linear.bias"])
        hidden = hidden + pooled if residual else hidden
        hidden = torch.nn.functional.layer_norm(hidden, (WIDTH,), norm["norm.weight"], norm["norm.bias"])
        expected = hidden @ last["linear.weight"].T + last["linear.bias"]
    torch.testing.assert_close(output.logits, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(output.last_hidden_state, pooled[:, None])
    assert kept_outputs(folder.model, output.keys()) == ["logits", "last_hidden_state"]


@pytest.mark.parametrize("tied", [False, True])
def test_the_score_of_a_language_model_is_a_difference_of_logits(tied: bool, tmp_path: Path) -> None:
    path = save_causal_reranker(tmp_path / "model", tied=tied)
    folder, whole = load(path), load(path, task="causal-lm").model
    assert (folder.task, type(folder.model)) == ("regression", CausalReranker)
    inputs = example_inputs(folder, 3, 6)
    with torch.no_grad():
        logits = whole(**inputs, use_cache=False).logits
        last = inputs["attention_mask"].sum(1) - 1
        ends = logits[torch.arange(3), last]
        torch.testing.assert_close(folder.model(**inputs).logits[:, 0], ends[:, POSITIVE] - ends[:, NEGATIVE])
        left = {name: value.flip(1).roll(0) for name, value in inputs.items()}
        assert torch.isfinite(folder.model(**left).logits).all()


@pytest.mark.parametrize("save", [save_reranker, save_causal_reranker])
def test_the_output_folder_is_the_reranker(save: Any, tmp_path: Path) -> None:
    path, out = save(tmp_path / "model"), tmp_path / "out"
    before = load(path)
    save_companions(before, out)
    before.model.save_pretrained(out)
    again = load(out)
    assert (again.fingerprint, again.surroundings, again.task) == (
        before.fingerprint,
        before.surroundings,
        before.task,
    )
    inputs = example_inputs(before, 2, 6)
    with torch.no_grad():
        assert torch.equal(again.model(**inputs).logits, before.model(**inputs).logits)


def test_the_head_is_neither_pruned_nor_trained(tmp_path: Path) -> None:
    folder, encoder = load(save_reranker(tmp_path / "model")), load(folders.save_sentence_encoder(tmp_path / "plain"))
    groups = [[group.name for group in find_groups(f.model, example_inputs(f, 2, 8))] for f in (folder, encoder)]
    assert groups[0] == groups[1]
    assert all(name.startswith("encoder.") for name, _ in folder.model.named_parameters())


def test_the_pooling_is_part_of_what_a_reranker_computes(tmp_path: Path) -> None:
    path = save_reranker(tmp_path / "model")
    before = load(path)
    (path / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode": "mean"}))
    after = load(path)
    assert after.surroundings != before.surroundings
    first, second = (Distillation.of(folder.model, ("logits",)).settings for folder in (before, after))
    assert first != second


def test_a_reranker_of_several_scores_is_a_classifier(tmp_path: Path) -> None:
    folder = load(save_reranker(tmp_path / "model", outputs=3))
    assert (folder.task, folder.config.num_labels) == ("text-classification", 3)
    inputs = example_inputs(folder, 2, 6)
    loss = folder.model(**inputs, labels=torch.tensor([2, 0])).loss
    expected = torch.nn.functional.cross_entropy(folder.model(**inputs).logits, torch.tensor([2, 0]))
    torch.testing.assert_close(loss, expected)


def test_a_pooling_of_the_first_token_needs_padding_on_the_right(tmp_path: Path) -> None:
    path = save_reranker(tmp_path / "model")
    config = json.loads((path / "tokenizer_config.json").read_text())
    (path / "tokenizer_config.json").write_text(json.dumps({**config, "padding_side": "left"}))
    with fails_with(ErrorCode.UNSUPPORTED_MODEL, field="padding_side"):
        load(path)


def _modules(path: Path, *names: str) -> None:
    kept = [entry for entry in json.loads((path / "modules.json").read_text()) if entry["path"] in ("", *names)]
    (path / "modules.json").write_text(json.dumps(kept))


@pytest.mark.parametrize(
    ("change", "details"),
    [
        (lambda path: _modules(path, "1_Pooling"), {"code": ErrorCode.UNSUPPORTED_MODEL, "field": "type"}),
        (lambda path: _modules(path, "1_Pooling", "2_Dense"), {"code": ErrorCode.UNSUPPORTED_MODEL}),
        (
            lambda path: _modules(path, "1_Pooling", "2_Dense", "3_LayerNorm"),
            {"code": ErrorCode.UNSUPPORTED_MODEL, "field": "type"},
        ),
        (lambda path: shutil.rmtree(path / "5_Dense"), {"code": ErrorCode.FILE_MISSING}),
        (lambda path: (path / "3_LayerNorm" / "model.safetensors").unlink(), {"code": ErrorCode.FILE_MISSING}),
        (
            lambda path: (path / "config_sentence_transformers.json").write_text(
                json.dumps({"prompts": {"web": "the "}, "default_prompt_name": "web"})
            ),
            {"code": ErrorCode.UNSUPPORTED_MODEL, "field": "default_prompt_name"},
        ),
    ],
)
def test_what_is_no_reranker_is_named(change: Any, details: dict[str, Any], tmp_path: Path) -> None:
    path = save_reranker(tmp_path / "model")
    change(path)
    with fails_with(details.pop("code"), InputError, **details):
        load(path)


def test_answers_that_are_no_tokens_are_refused(tmp_path: Path) -> None:
    path = save_causal_reranker(tmp_path / "model")
    (path / "1_LogitScore" / "config.json").write_text('{"true_token_id": "yes"}')
    with fails_with(ErrorCode.FILE_UNREADABLE, field="true_token_id"):
        load(path)
