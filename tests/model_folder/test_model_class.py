"""The model class and the task of a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import transformers as hf
from safetensors.torch import load_file, save_file

from compressor.config.tasks import TASK_NAMES
from compressor.errors import ErrorCode, UsageError
from compressor.model_folder import load
from compressor.model_folder.model_class import class_of_tensors
from tests import folders
from tests.faults import fails_with
from tests.marks import mostly_zoo
from tests.model_folder.edits import edit_config
from tests.zoo import FAMILIES


@pytest.mark.parametrize(
    ("entries", "task"),
    [
        ({}, "text-classification"),
        ({"problem_type": "regression"}, "regression"),
        ({"problem_type": "multi_label_classification"}, "multi-label-classification"),
    ],
)
def test_the_task_follows_from_the_class(folder: Path, entries: dict[str, Any], task: str) -> None:
    edit_config(folder, **entries)
    assert load(folder).task == task


def test_one_output_is_a_regression(tmp_path: Path) -> None:
    assert load(folders.save(folders.bert(num_labels=1), tmp_path)).task == "regression"


@pytest.mark.parametrize("count", [1, 3])
def test_a_head_of_another_number_of_classes_is_named(count: int, tmp_path: Path) -> None:
    def name_classes(number: int) -> None:
        names = {str(index): f"class {index}" for index in range(number)}
        edit_config(path, id2label=names, label2id={name: int(index) for index, name in names.items()})

    path = folders.save(folders.bert(num_labels=count), tmp_path)
    name_classes(2)
    with fails_with(ErrorCode.FILE_MISMATCH, path=path / "model.safetensors", classes=count):
        load(path)
    name_classes(count)
    assert load(path).config.num_labels == count


def test_a_language_model_has_its_task(tmp_path: Path) -> None:
    path = folders.save(folders.gpt2(), tmp_path)
    assert load(path).task == "causal-lm"
    assert load(path, task="causal-lm").model.lm_head is not None


def test_a_requested_task_takes_precedence(tmp_path: Path) -> None:
    bart, _ = FAMILIES["bart"](0)
    path = folders.save(bart, tmp_path, with_tokenizer=False)
    assert load(path, needs_processor=False).task == "text2text-generation"
    assert load(path, task="fill-mask", needs_processor=False).task == "fill-mask"
    assert load(path, task="translation", needs_processor=False).task == "translation"


def test_an_unknown_task_is_refused(folder: Path) -> None:
    with fails_with(ErrorCode.UNKNOWN_NAME, UsageError, field="task", value="juggling") as caught:
        load(folder, task="juggling")
    assert all(task in str(caught.value) for task in TASK_NAMES)


def test_a_task_that_the_family_lacks_is_refused(folder: Path) -> None:
    with fails_with(ErrorCode.UNSUPPORTED_MODEL, UsageError, field="task", family="bert"):
        load(folder, task="text2text-generation")


@pytest.mark.parametrize("name", ["BertForJuggling", None, "BertConfig"])
def test_a_folder_without_a_class_of_transformers_is_refused(folder: Path, name: str | None) -> None:
    edit_config(folder, architectures=None if name is None else [name])
    path = folder / "config.json"
    with fails_with(ErrorCode.UNSUPPORTED_MODEL, path=path, field="architectures", value=name or ""):
        load(folder)


def test_a_missing_head_is_refused(tmp_path: Path) -> None:
    path = folders.save(folders.bert_encoder(), tmp_path)
    assert load(path).task == "feature-extraction"
    weights = path / "model.safetensors"
    with fails_with(ErrorCode.WEIGHTS_MISSING, path=weights, model_class="BertForSequenceClassification"):
        load(path, task="text-classification")


@pytest.mark.parametrize("prefix", mostly_zoo(["", "_orig_mod.", "module._orig_mod.", "model."], "module._orig_mod."))
@pytest.mark.parametrize(
    ("architecture", "task"),
    [("Token", "token-classification"), pytest.param("MaskedLM", "fill-mask", marks=pytest.mark.zoo)],
)
def test_the_class_that_the_weights_fit_is_named(prefix: str, architecture: str, task: str, tmp_path: Path) -> None:
    """The configuration names another class, and the advice is followed."""
    cls = hf.BertForTokenClassification if architecture == "Token" else hf.BertForMaskedLM
    path = folders.save(cls(hf.BertConfig(**folders.SIZES)), tmp_path)
    edit_config(path, architectures=["BertForQuestionAnswering"])
    weights = path / "model.safetensors"
    save_file({f"{prefix}{name}": tensor for name, tensor in load_file(weights).items()}, weights, {"format": "pt"})
    with fails_with(ErrorCode.WEIGHTS_MISSING, path=weights, model_class="BertForQuestionAnswering") as caught:
        load(path)
    assert f"{cls.__name__}, " in str(caught.value)
    assert f"--task {task})" in str(caught.value)
    assert type(load(path, task=task).model) is cls


def test_of_several_classes_with_the_same_tensors_none_is_exact() -> None:
    config = hf.BertConfig(**folders.SIZES)
    for cls, expected in (
        (hf.BertForSequenceClassification, None),  # a choice among several texts has the same
        (hf.BertForQuestionAnswering, ("BertForQuestionAnswering", "question-answering")),
    ):
        assert class_of_tensors(config, cls(config).state_dict()) == expected
