"""Model folders load in full precision with unchanged weights, and every fault has a code."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from compressor.errors import ErrorCode
from compressor.model_folder import fingerprint, load
from compressor.results import NoteCode
from tests import folders
from tests.faults import fails_with
from tests.model_folder.edits import (
    Edit,
    delete,
    edit_config,
    edit_weights,
    empty_folder,
    remove_head,
    replace_by_file,
    set_config,
    set_first_value,
    truncate,
    write,
)


def test_a_valid_folder_loads(saved: Path) -> None:
    folder = load(saved)
    assert (folder.task, folder.family, folder.notes) == ("text-classification", "bert", ())
    assert folder.model.dtype == torch.float32
    assert not folder.model.training
    assert folder.processor("good film")["input_ids"] == [2, 5, 7, 3]
    assert folder.fingerprint == fingerprint(folder.model)


def test_loading_is_silent(saved: Path, capfd: pytest.CaptureFixture[str]) -> None:
    load(saved)
    assert capfd.readouterr() == ("", "")


def test_half_precision_loads_in_full_and_has_the_same_fingerprint(tmp_path: Path) -> None:
    half = load(folders.save(folders.bert(), tmp_path / "half", half=True))
    assert half.model.dtype == torch.float32
    full = load(folders.save(half.model, tmp_path / "full"))
    assert full.fingerprint == half.fingerprint


def test_the_fingerprint_depends_on_weights_and_configuration(folder: Path) -> None:
    first = load(folder).fingerprint
    edit_config(folder, hidden_act="relu")
    second = load(folder).fingerprint
    set_first_value("classifier.bias", 7.0)(folder)
    assert len({first, second, load(folder).fingerprint}) == 3


def test_the_fingerprint_does_not_depend_on_label_names(folder: Path) -> None:
    first = load(folder).fingerprint
    edit_config(folder, id2label={"0": "bad", "1": "good"}, label2id={"bad": 0, "good": 1})
    assert load(folder).fingerprint == first


def test_shards_load_as_one(tmp_path: Path) -> None:
    model = folders.bert()
    model.save_pretrained(tmp_path, max_shard_size="3KB")
    folders.tokenizer().save_pretrained(tmp_path)
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert load(tmp_path).fingerprint == fingerprint(model)


def test_unused_tensors_are_noted(folder: Path) -> None:
    edit_weights(folder, lambda weights: weights.update(extra=torch.zeros(2)))
    (note,) = load(folder).notes
    assert note.code is NoteCode.TENSORS_UNUSED
    assert note.text == f"1 tensors of {folder} are not used by BertForSequenceClassification, e.g. extra"


FAULTS: dict[str, tuple[Edit, ErrorCode, str, dict[str, Any]]] = {
    "missing": (shutil.rmtree, ErrorCode.FILE_MISSING, "", {}),
    "empty": (empty_folder, ErrorCode.FILE_MISSING, "", {}),
    "a file": (replace_by_file, ErrorCode.FILE_MISSING, "", {}),
    "no configuration": (delete("config.json"), ErrorCode.FILE_MISSING, "", {}),
    "configuration not JSON": (write("config.json", "{'a': b"), ErrorCode.FILE_UNREADABLE, "config.json", {}),
    "configuration not text": (write("config.json", b"\xff\xfe\x00"), ErrorCode.FILE_UNREADABLE, "config.json", {}),
    "configuration a list": (
        write("config.json", "[1]"),
        ErrorCode.FILE_UNREADABLE,
        "config.json",
        {"field": "model_type"},
    ),
    "no model type": (
        set_config(model_type=None),
        ErrorCode.FILE_UNREADABLE,
        "config.json",
        {"field": "model_type"},
    ),
    "unknown model type": (set_config(model_type="no-such-family"), ErrorCode.FILE_UNREADABLE, "config.json", {}),
    "sizes are not numbers": (set_config(hidden_size="wide"), ErrorCode.FILE_UNREADABLE, "config.json", {}),
    "other sizes": (
        set_config(hidden_size=32),
        ErrorCode.FILE_MISMATCH,
        "model.safetensors",
        {"model_class": "BertForSequenceClassification"},
    ),
    "heads do not divide": (
        set_config(num_attention_heads=3),
        ErrorCode.FILE_MISMATCH,
        "",
        {"model_class": "BertForSequenceClassification"},
    ),
    "remote code": (
        set_config(auto_map={"AutoModel": "modeling.Net"}),
        ErrorCode.UNSAFE_CODE,
        "",
        {"field": "trust_remote_code"},
    ),
    "no head": (
        remove_head,
        ErrorCode.WEIGHTS_MISSING,
        "model.safetensors",
        {"tensors": ("classifier.bias", "classifier.weight"), "model_class": "BertForSequenceClassification"},
    ),
    "no tokenizer": (
        delete("tokenizer.json", "tokenizer_config.json"),
        ErrorCode.FILE_MISSING,
        "tokenizer.json",
        {},
    ),
    "damaged tokenizer": (truncate("tokenizer.json", 0.5), ErrorCode.FILE_UNREADABLE, "", {}),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_names_the_file_or_folder(folder: Path, fault: str) -> None:
    edit, code, name, details = FAULTS[fault]
    edit(folder)
    path = folder / name if name else folder
    with fails_with(code, path=path, **details) as caught:
        load(folder)
    assert str(caught.value).startswith(f"{folder}")


def test_remote_code_runs_only_with_permission(folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    (folder / "net.py").write_text(
        "from pathlib import Path\n"
        "from transformers import BertForSequenceClassification\n"
        f"Path({str(folder / 'ran')!r}).touch()\n"
        "class Net(BertForSequenceClassification):\n    pass\n"
    )
    edit_config(folder, architectures=["Net"], auto_map={"AutoModelForSequenceClassification": "net.Net"})
    with fails_with(ErrorCode.UNSAFE_CODE, field="trust_remote_code"):
        load(folder)
    assert not (folder / "ran").exists()
    loaded = load(folder, trust_remote_code=True)
    assert (type(loaded.model).__name__, loaded.task) == ("Net", "text-classification")


def test_a_folder_without_tokenizer_loads_if_none_is_needed(folder: Path) -> None:
    delete("tokenizer.json", "tokenizer_config.json")(folder)
    assert load(folder, needs_processor=False).processor is None


def test_messages(folder: Path) -> None:
    remove_head(folder)
    with fails_with(ErrorCode.WEIGHTS_MISSING) as caught:
        load(folder)
    assert str(caught.value) == (
        f"{folder / 'model.safetensors'}: has no weights for classifier.bias, classifier.weight, which"
        " BertForSequenceClassification needs; fine-tune and save that head first, or name the task for which the"
        " folder was saved (--task)"
    )
    shutil.rmtree(folder)
    with fails_with(ErrorCode.FILE_MISSING) as caught:
        load(folder)
    assert str(caught.value) == f"{folder}: no such folder; give the folder that save_pretrained wrote"
