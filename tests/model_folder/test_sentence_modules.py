"""Folders of sentence-transformers: what is read from them, and what is refused by name."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from compressor.errors import ErrorCode, InputError
from compressor.model_folder import link_library_files, load, save_companions
from compressor.model_folder.sentence_modules import SentenceModules, read_sentence_modules
from compressor.models.pooled_encoder import POOLINGS
from compressor.models.sentence_encoder import SentenceEncoder
from tests import folders
from tests.faults import fails_with


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
