"""Folders that something is wrong with, or more in than a model, are read right or refused by a line on the file."""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import onnxruntime
import pytest
import torch
import transformers as hf
from torch import Tensor, nn

from compressor.errors import ErrorCode, InputError, TargetMissingError
from compressor.model_folder import ModelFolder, example_inputs, load, save_companions
from compressor.models.pooled_encoder import SentenceEncoder
from compressor.results import NoteCode
from tests.command import compress
from tests.faults import fails_with
from tests.marks import mostly_zoo
from tests.model_folder.broken_folders import ADAPTER, CASES, Readable, Refused

REPAIRED = {NoteCode.ADAPTER_MERGED, NoteCode.PREFIX_REMOVED}
"""Notes on what an output folder has no more."""


@pytest.fixture(autouse=True)
def _peft_warns() -> Iterator[None]:
    """Making the folders is no test of the libraries that make them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def make(name: str, path: Path) -> Readable | Refused:
    path.mkdir(exist_ok=True)
    return CASES[name](path)


def outputs(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    with torch.no_grad():
        result = model(**inputs)[0]
    assert isinstance(result, Tensor)
    return result


def network(folder: ModelFolder) -> nn.Module:
    return folder.model.encoder if isinstance(folder.model, SentenceEncoder) else folder.model


LONG = (
    *("compiled without a head", "head of another task", "one of several adapters", "adapter beside others", "dora"),
    *("lora without the head of its task", "scaled activations", "adapter of a compiled base"),
    *("lora with a relative base", "lora with the tokenizer of its training", "lora of a language model"),
)
"""Folders that take longest, of kinds of which others are quick tests."""


@pytest.mark.parametrize("name", mostly_zoo(CASES, *(CASES.keys() - set(LONG))))
def test_a_folder_is_read_right_or_refused_by_its_file(name: str, tmp_path: Path) -> None:
    folder = make(name, tmp_path / "folders")
    if isinstance(folder, Refused):
        with fails_with(folder.code) as caught:
            load(folder.folder)
        assert str(folder.file) in str(caught.value)
        return
    loaded = load(folder.folder)
    inputs = example_inputs(loaded, 2, 8)
    expected = outputs(folder.reference, inputs)
    torch.testing.assert_close(outputs(network(loaded), inputs), expected)
    assert tuple(note.code for note in loaded.notes) == folder.notes
    for file in folder.named:
        assert any(file in note.text for note in loaded.notes), file
    assert not (tmp_path / "folders" / "ran").exists()
    # As the last stage of a run does.
    out = tmp_path / "out"
    out.mkdir()
    save_companions(loaded, out)
    assert {path.name for path in out.iterdir()} >= {*folder.copied, "config.json"}
    if loaded.needs_weights:
        loaded.model.save_pretrained(out)
        again = load(out)
        torch.testing.assert_close(outputs(network(again), inputs), expected)
        assert REPAIRED.isdisjoint(note.code for note in again.notes)
        _, info = cast(Any, type(network(loaded))).from_pretrained(out, output_loading_info=True)
        assert {name for name in info["missing_keys"] if "pooler" not in name} == set()


def test_there_are_thirty_folders() -> None:
    assert len(CASES) >= 30


@pytest.mark.parametrize("name", mostly_zoo(["lora beside its base", "lora alone"], "lora alone"))
def test_without_peft_an_adapter_is_not_left_out(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make(name, tmp_path)
    monkeypatch.setitem(sys.modules, "peft", None)
    with fails_with(ErrorCode.PACKAGE_MISSING, TargetMissingError, package="peft") as caught:
        load(folder.folder)
    assert "adapter_config.json" in str(caught.value)


def test_the_advice_on_a_pickled_adapter_converts_it(tmp_path: Path) -> None:
    folder = make("pickled adapter", tmp_path)
    with pytest.raises(InputError) as caught:
        load(folder.folder)
    code = re.search(r'python -c "(.*)"', str(caught.value))
    assert code is not None
    exec(code[1], {})
    assert (folder.folder / ADAPTER).is_file()
    load(folder.folder)


def test_the_advice_on_several_adapters_names_one_that_is_read(tmp_path: Path) -> None:
    folder = make("several adapters", tmp_path)
    assert isinstance(folder, Refused)
    load(folder.file)


def test_the_advice_on_another_head_names_its_task(tmp_path: Path) -> None:
    folder = make("head of another task", tmp_path)
    with pytest.raises(InputError) as caught:
        load(folder.folder)
    task = re.search(r"--task ([\w-]+)", str(caught.value))
    assert task is not None
    assert type(load(folder.folder, task=task[1]).model) is hf.BertForMaskedLM


@pytest.mark.parametrize(
    "name",
    mostly_zoo(["two models in a file", "lora for more layers", "compiled without a head"], "two models in a file"),
)
def test_a_mismatch_shows_names_that_are_there_beside_those_that_are_missing(name: str, tmp_path: Path) -> None:
    folder = make(name, tmp_path)
    with pytest.raises(InputError) as caught:
        load(folder.folder)
    details = caught.value.details
    assert details["unexpected"] or details["tensors"]
    for names in (details["unexpected"], details["tensors"]):
        assert all(tensor in str(caught.value) for tensor in names[:3])


@pytest.mark.zoo
@pytest.mark.usefixtures("shared_exports")
@pytest.mark.parametrize("name", CASES)
def test_a_run_computes_what_the_folder_says(name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder, out = make(name, tmp_path / "folders"), tmp_path / "out"
    flags = ("--batch", "1", "--seq", "8", "--seconds", "0.1")
    result = compress(capfd, folder.folder, "-o", out, *flags)
    if isinstance(folder, Refused):
        assert (result.code, result.error_code) == (3, folder.code)
        assert str(folder.file) in result.error
        assert not out.exists()
        return
    assert result.code == 0, result.err
    inputs = example_inputs(load(folder.folder), 2, 8)
    session = onnxruntime.InferenceSession(out / "engine.onnx", providers=["CPUExecutionProvider"])
    names = {entry.name for entry in session.get_inputs()}
    values = session.run(None, {key: value.numpy() for key, value in inputs.items() if key in names})
    engine = dict(zip((entry.name for entry in session.get_outputs()), values, strict=True))
    expected = outputs(folder.reference, inputs)
    if "sentence_embedding" in engine:
        mask = inputs["attention_mask"][..., None]
        expected = nn.functional.normalize((expected * mask).sum(1) / mask.sum(1))
    computed = engine["sentence_embedding" if "sentence_embedding" in engine else "logits"]
    np.testing.assert_allclose(computed, expected, rtol=1e-3, atol=1e-4)
    if load(folder.folder).needs_weights:
        assert compress(capfd, out, "-o", tmp_path / "again", *flags).code == 0
