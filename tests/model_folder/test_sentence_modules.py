"""Folders of sentence-transformers: what is read from them, and what is refused by name."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from compressor import find_groups
from compressor.errors import ErrorCode, InputError
from compressor.model_folder import example_inputs, load, save_companions
from compressor.model_folder.sentence_modules import SentenceModules, read_sentence_modules
from compressor.models.pooled_encoder import POOLINGS, CausalReranker, ModuleReranker, SentenceEncoder
from compressor.training.distillation import Distillation
from compressor.units.dependencies import kept_outputs
from compressor.workdir import link_library_files
from tests import folders
from tests.faults import fails_with
from tests.rerankers import NEGATIVE, POSITIVE, WIDTH, save_causal_reranker, save_reranker


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with every file of the library; tests must not change it."""
    return folders.save_sentence_encoder(
        tmp_path_factory.mktemp("saved") / "encoder",
        pooling="cls",
        sentence_bert_config={"max_seq_length": 12, "do_lower_case": True},
        config_sentence_transformers={"prompts": {"query": "Find: "}, "default_prompt_name": None},
    )


@pytest.fixture
def encoder(saved: Path, tmp_path: Path) -> Path:
    """A copy of the folder, which a test may change."""
    return shutil.copytree(saved, tmp_path / "encoder")


def test_modules_are_read(saved: Path) -> None:
    folder = load(saved)
    assert isinstance(folder.model, SentenceEncoder)
    assert (folder.task, folder.family) == ("sentence-similarity", "bert")
    assert folder.sentence == SentenceModules(
        "cls", True, max_tokens=12, lower_case=True, prompts={"query": "Find: "}, default_prompt=None
    )
    assert folder.processor.model_max_length == 12


@pytest.mark.parametrize(
    ("config", "pooling"),
    [
        ({"pooling_mode_cls_token": False, "pooling_mode_lasttoken": True}, "lasttoken"),
        ({"pooling_mode_mean_tokens": True, "pooling_mode_weightedmean_tokens": False}, "mean"),
        ({"pooling_mode": ["max"]}, "max"),
        ({}, "mean"),
    ],
)
def test_keys_of_all_versions_name_the_pooling(config: dict[str, Any], pooling: str, encoder: Path) -> None:
    (encoder / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 16, **config}))
    assert read_sentence_modules(encoder).pooling == pooling


@pytest.mark.parametrize(
    ("config", "field", "value"),
    [
        ({"pooling_mode": "weightedmean"}, "pooling_mode", "weightedmean"),
        ({"pooling_mode": "attention"}, "pooling_mode", "attention"),
        ({"pooling_mode": ["mean", "cls"]}, "pooling_mode", "mean+cls"),
        ({"pooling_mode_mean_tokens": True, "include_prompt": False}, "include_prompt", False),
        ({"pooling_mode_median_tokens": True}, "pooling_mode_median_tokens", True),
        ({"pooling_mode": "mean", "pooling_mode_median_tokens": True}, "pooling_mode_median_tokens", True),
    ],
)
def test_other_poolings_are_refused(config: dict[str, Any], field: str, value: object, encoder: Path) -> None:
    file = encoder / "1_Pooling" / "config.json"
    file.write_text(json.dumps(config))
    with fails_with(ErrorCode.UNSUPPORTED_MODEL, path=file, field=field, value=value):
        load(encoder)


@pytest.mark.parametrize("mode", [5, True, False, 0, "", [], {}, [["mean"]], ["mean", 5], {"mean": True}], ids=str)
def test_a_pooling_is_a_text_or_a_list_of_texts(mode: object, encoder: Path) -> None:
    file = encoder / "1_Pooling" / "config.json"
    file.write_text(json.dumps({"pooling_mode": mode}))
    code = ErrorCode.UNSUPPORTED_MODEL if mode == "" else ErrorCode.FILE_UNREADABLE
    with fails_with(code, path=file, field="pooling_mode"):
        read_sentence_modules(encoder)


@pytest.mark.parametrize(
    ("config", "field"),
    [
        ({"pooling_mode_cls_token": "false"}, "pooling_mode_cls_token"),
        ({"pooling_mode_median_tokens": None}, "pooling_mode_median_tokens"),
        ({"pooling_mode_mean_tokens": False, "pooling_mode_cls_token": False}, "pooling_mode"),
    ],
)
def test_keys_of_older_versions_are_flags_of_which_some_is_true(
    config: dict[str, Any], field: str, encoder: Path
) -> None:
    file = encoder / "1_Pooling" / "config.json"
    file.write_text(json.dumps(config))
    with fails_with(ErrorCode.FILE_UNREADABLE, path=file, field=field):
        read_sentence_modules(encoder)


@pytest.mark.parametrize("length", ["12", 12.5, True, [12], 0, -1], ids=repr)
def test_a_maximum_length_is_a_positive_number(length: object, encoder: Path) -> None:
    file = encoder / "sentence_bert_config.json"
    file.write_text(json.dumps({"max_seq_length": length}))
    with fails_with(ErrorCode.FILE_UNREADABLE, path=file, field="max_seq_length", value=length):
        load(encoder)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.sampled_from((*POOLINGS, "", "x")),
    lambda values: st.lists(values, max_size=3) | st.dictionaries(st.text(max_size=4), values, max_size=3),
    max_leaves=6,
)
KEYS = st.sampled_from(
    ("pooling_mode", "pooling_mode_cls_token", "pooling_mode_mean_tokens", "pooling_mode_x", "include_prompt")
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(pooling=st.dictionaries(KEYS, JSON, max_size=3), length=JSON)
def test_any_values_are_read_or_give_one_error(pooling: dict[str, Any], length: object, encoder: Path) -> None:
    (encoder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    (encoder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": length}))
    try:
        modules = read_sentence_modules(encoder)
    except InputError as error:
        message, field = str(error), error.details["field"]
    else:
        assert modules.pooling in POOLINGS
        assert modules.max_tokens == length
        flags = [value for key, value in pooling.items() if key.startswith("pooling_mode_")]
        assert pooling.get("pooling_mode") is not None or True in flags or not flags
        return
    assert field in {*pooling, "pooling_mode", "max_seq_length"}
    assert field in message


@pytest.mark.parametrize(
    "types",
    [
        ["Transformer", "Pooling", "LSTM"],
        ["Transformer", "Dense", "Pooling"],
        ["Transformer", "Pooling", "Normalize", "Dense"],
        ["Transformer", "Pooling", "Pooling"],
        ["Pooling"],
        ["Transformer"],
    ],
    ids=str,
)
def test_other_modules_are_refused(types: list[str], encoder: Path) -> None:
    modules = [{"path": "" if name == "Transformer" else "1_Pooling", "type": f"x.{name}"} for name in types]
    (encoder / "modules.json").write_text(json.dumps(modules))
    with fails_with(ErrorCode.UNSUPPORTED_MODEL, path=encoder / "modules.json", field="type"):
        load(encoder)


@pytest.mark.parametrize("path", ["/etc", "../1_Pooling", "a/../../b"])
def test_modules_outside_of_the_folder_are_refused(path: str, encoder: Path) -> None:
    modules = [{"path": "", "type": "x.Transformer"}, {"path": path, "type": "x.Pooling"}]
    (encoder / "modules.json").write_text(json.dumps(modules))
    with fails_with(ErrorCode.UNSUPPORTED_MODEL, path=encoder / "modules.json", field="path"):
        load(encoder)


@pytest.mark.parametrize("content", ["{", "[" * 100_000], ids=["open", "deep"])
@pytest.mark.parametrize("file", ["modules.json", "1_Pooling/config.json", "sentence_bert_config.json"])
def test_damaged_files_are_refused(file: str, content: str, encoder: Path) -> None:
    (encoder / file).write_text(content)
    with fails_with(ErrorCode.FILE_UNREADABLE, path=encoder / file):
        load(encoder)


@pytest.mark.parametrize(
    ("content", "field"),
    [
        ({"prompts": ["a"]}, "prompts"),
        ({"prompts": {"query": None}}, "prompts"),
        ({"prompts": {"query": "Find: "}, "default_prompt_name": "find"}, "default_prompt_name"),
        ({"default_prompt_name": "find"}, "default_prompt_name"),
        ({"default_prompt_name": ["a"]}, "default_prompt_name"),
    ],
)
def test_prompts_have_names_and_the_default_one_exists(content: dict[str, Any], field: str, encoder: Path) -> None:
    file = encoder / "config_sentence_transformers.json"
    file.write_text(json.dumps(content))
    with fails_with(ErrorCode.FILE_UNREADABLE, path=file, field=field):
        load(encoder)


def test_the_library_knows_empty_prompts_of_queries_and_documents(encoder: Path) -> None:
    (encoder / "config_sentence_transformers.json").write_text(json.dumps({"default_prompt_name": "document"}))
    assert read_sentence_modules(encoder).prepare("a film") == "a film"


@pytest.mark.parametrize(
    "modules",
    [
        {},
        5,
        "x",
        [5],
        [{"type": "x.Transformer"}],
        [{"path": ""}],
        [{"type": "x.Transformer", "path": None}],
        [{"type": None, "path": ""}],
    ],
    ids=str,
)
def test_a_module_has_a_type_and_a_path(modules: object, encoder: Path) -> None:
    (encoder / "modules.json").write_text(json.dumps(modules))
    with fails_with(ErrorCode.FILE_UNREADABLE, path=encoder / "modules.json") as caught:
        load(encoder)
    assert "type and a path" in str(caught.value)


def test_a_folder_without_modules_is_refused(encoder: Path) -> None:
    (encoder / "modules.json").write_text("[]")
    with fails_with(ErrorCode.UNSUPPORTED_MODEL, path=encoder / "modules.json", field="type", value=""):
        load(encoder)


def test_a_missing_configuration_is_refused(encoder: Path) -> None:
    (encoder / "1_Pooling" / "config.json").unlink()
    with fails_with(ErrorCode.FILE_MISSING, path=encoder / "1_Pooling" / "config.json"):
        load(encoder)


def test_a_requested_task_needs_modules(tmp_path: Path) -> None:
    path = folders.save(folders.bert_encoder(), tmp_path)
    with fails_with(ErrorCode.FILE_MISSING, path=path / "modules.json"):
        load(path, task="sentence-similarity")


def test_a_missing_tokenizer_is_refused(encoder: Path) -> None:
    (encoder / "tokenizer.json").unlink()
    (encoder / "tokenizer_config.json").unlink()
    with fails_with(ErrorCode.FILE_MISSING, path=encoder / "tokenizer.json"):
        load(encoder)


def test_the_first_token_needs_padding_on_the_right(encoder: Path) -> None:
    config = json.loads((encoder / "tokenizer_config.json").read_text())
    (encoder / "tokenizer_config.json").write_text(json.dumps({**config, "padding_side": "left"}))
    with fails_with(ErrorCode.UNSUPPORTED_MODEL, field="padding_side", value="left"):
        load(encoder)


@pytest.mark.parametrize(
    "modules", ["[]", "{", '[{"type": "x.Transformer", "path": ""}]', '[{"type": "x.Dense", "path": "../2_Dense"}]']
)
def test_modules_of_other_models_are_no_fault(modules: str, tmp_path: Path) -> None:
    folder = load(folders.save(folders.bert(), tmp_path / "model"))
    (tmp_path / "model" / "modules.json").write_text(modules)
    save_companions(folder, tmp_path / "out")
    assert (tmp_path / "out" / "modules.json").read_text() == modules
    assert not (tmp_path / "2_Dense").exists()


def test_a_reranker_is_a_regression(tmp_path: Path) -> None:
    path = folders.save(folders.bert(num_labels=1), tmp_path)
    (path / "modules.json").write_text(json.dumps([{"path": "", "type": "x.Transformer"}]))
    folder = load(path)
    assert (folder.task, folder.sentence) == ("regression", None)


@pytest.mark.parametrize(
    ("names", "expected"), [((), "a Film"), (("query",), "Find: a Film"), (("document",), "a Film")], ids=str
)
def test_prompts_are_put_before_texts(names: tuple[str, ...], expected: str) -> None:
    modules = SentenceModules("mean", True, prompts={"query": "Find: ", "all": "Any: "})
    assert modules.prepare("a Film", *names) == expected
    lower = SentenceModules("mean", True, lower_case=True, prompts={"all": "Any: "}, default_prompt="all")
    assert lower.prepare("a Film") == "any: a film"


def test_the_output_folder_has_the_modules_by_their_paths(encoder: Path, tmp_path: Path) -> None:
    modules = json.loads((encoder / "modules.json").read_text())
    modules[1]["path"] = "modules/pooling"
    (encoder / "modules").mkdir()
    (encoder / "1_Pooling").rename(encoder / "modules" / "pooling")
    (encoder / "modules.json").write_text(json.dumps(modules))
    save_companions(load(encoder), tmp_path / "out")
    assert (tmp_path / "out" / "modules" / "pooling" / "config.json").is_file()


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"sentence_transformers": {"version": "5.1.0"}},
        {"sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"},
    ],
    ids=["none", "library", "older"],
)
def test_a_reranker_without_modules_is_known_by_its_settings(config: dict[str, object], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert", **config}))
    (tmp_path / "engine.xml").write_text("engine")
    link_library_files(tmp_path)
    assert (tmp_path / "openvino" / "openvino_model.xml").is_file() is bool(config)


def test_the_output_folder_has_the_files_of_the_library(saved: Path, tmp_path: Path) -> None:
    save_companions(load(saved), tmp_path)
    (tmp_path / "model.safetensors").write_bytes((saved / "model.safetensors").read_bytes())
    assert load(tmp_path).sentence == load(saved).sentence
    for name in ("engine.xml", "engine.bin"):
        (tmp_path / name).write_text(name)
    for _ in range(2):
        link_library_files(tmp_path)
    assert (tmp_path / "openvino" / "openvino_model.bin").read_text() == "engine.bin"
    (tmp_path / "engine.xml").unlink()
    link_library_files(tmp_path)
    assert not (tmp_path / "openvino" / "openvino_model.xml").exists()


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
