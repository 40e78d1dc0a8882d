"""The files that an application needs in addition to the engine."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import transformers as hf

from compressor.model_folder import load, save_companions


def test_companions_are_configuration_tokenizer_and_licence(folder: Path, tmp_path: Path) -> None:
    (folder / "LICENSE").write_text("free")
    (folder / "code.py").write_text("")
    out = tmp_path / "out"
    out.mkdir()
    save_companions(load(folder), out)
    assert {file.name for file in out.iterdir()} == {
        "LICENSE",
        "config.json",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert hf.AutoTokenizer.from_pretrained(out)("good film")["input_ids"] == [2, 5, 7, 3]


@pytest.mark.parametrize("is_processor", [False, True])
def test_vocabularies_are_companions_under_any_name(is_processor: bool, folder: Path, tmp_path: Path) -> None:
    loaded, names = load(folder), hf.FSMTTokenizer.vocab_files_names
    for name in (*names.values(), "video_preprocessor_config.json"):
        (folder / name).write_text(name)
    tokenizer = SimpleNamespace(vocab_files_names=names)
    processor = SimpleNamespace(tokenizer=tokenizer) if is_processor else tokenizer
    save_companions(replace(loaded, processor=processor), tmp_path)
    copied = {file.name for file in tmp_path.iterdir()}
    assert {"vocab-src.json", "vocab-tgt.json", "video_preprocessor_config.json"} <= copied


def test_class_names_from_the_rows_are_saved(folder: Path, tmp_path: Path) -> None:
    loaded = load(folder)
    loaded.config.id2label = {0: "bad", 1: "good"}
    out = tmp_path / "out"
    out.mkdir()
    save_companions(loaded, out)
    config = json.loads((out / "config.json").read_text())
    assert (config["id2label"], config["label2id"]) == ({"0": "bad", "1": "good"}, {"bad": 0, "good": 1})
