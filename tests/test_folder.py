"""Model folders: what loads, loads in full and as it was stored; whatever is wrong is one line."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file

from compressor.errors import InputError, UsageError
from compressor.model_folder import example_inputs, fingerprint, load, save_companions
from tests import folders
from tests.zoo import FAMILIES


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folders.save(folders.bert(), tmp_path_factory.mktemp("models") / "good")


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "model"))


def edit_config(folder: Path, **entries: Any) -> None:
    file = folder / "config.json"
    config = {**json.loads(file.read_text()), **entries}
    file.write_text(json.dumps({name: value for name, value in config.items() if value is not None}))


def edit_weights(folder: Path, edit: Callable[[dict[str, torch.Tensor]], object]) -> None:
    weights = load_file(folder / "model.safetensors")
    edit(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def refused(path: Path, **options: Any) -> str:
    with pytest.raises(InputError) as caught:
        load(path, **options)
    message = str(caught.value)
    assert "\n" not in message
    assert str(path) in message
    assert ";" in message, "no mend"
    return message


def test_a_good_folder(saved: Path) -> None:
    found = load(saved)
    assert (found.task, found.family, found.notes) == ("text-classification", "bert", ())
    assert found.model.dtype == torch.float32
    assert not found.model.training
    assert found.processor("good film")["input_ids"] == [2, 5, 7, 3]
    assert found.fingerprint == fingerprint(found.model)


def test_loading_is_silent(saved: Path, capfd: pytest.CaptureFixture[str]) -> None:
    load(saved)
    assert capfd.readouterr() == ("", "")


def test_half_precision_is_learned_in_full_and_has_the_same_fingerprint(tmp_path: Path) -> None:
    half = load(folders.save(folders.bert(), tmp_path / "half", half=True))
    assert half.model.dtype == torch.float32
    full = load(folders.save(half.model, tmp_path / "full"))
    assert full.fingerprint == half.fingerprint


def test_fingerprint_tells_weights_and_configuration_apart(folder: Path) -> None:
    first = load(folder).fingerprint
    edit_config(folder, hidden_act="relu")
    second = load(folder).fingerprint
    _set("classifier.bias", 7.0)(folder)
    assert len({first, second, load(folder).fingerprint}) == 3


def test_shards_load_as_one(tmp_path: Path) -> None:
    model = folders.bert()
    model.save_pretrained(tmp_path, max_shard_size="3KB")
    folders.tokenizer().save_pretrained(tmp_path)
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert load(tmp_path).fingerprint == fingerprint(model)


@pytest.mark.parametrize(
    ("entries", "task"),
    [
        ({}, "text-classification"),
        ({"problem_type": "regression"}, "regression"),
        ({"problem_type": "multi_label_classification"}, "text-classification"),
    ],
)
def test_the_task_comes_from_the_class(folder: Path, entries: dict[str, Any], task: str) -> None:
    edit_config(folder, **entries)
    assert load(folder).task == task


def test_one_output_is_a_regression(tmp_path: Path) -> None:
    assert load(folders.save(folders.bert(num_labels=1), tmp_path)).task == "regression"


def test_a_language_model(tmp_path: Path) -> None:
    path = folders.save(folders.gpt2(), tmp_path)
    assert load(path).task == "causal-lm"
    assert load(path, task="causal-lm").model.lm_head is not None


def test_a_task_that_is_named_wins(tmp_path: Path) -> None:
    bart, _ = FAMILIES["bart"](0)
    path = folders.save(bart, tmp_path, with_tokenizer=False)
    assert load(path, needs_processor=False).task == "fill-mask"
    assert load(path, task="text2text-generation", needs_processor=False).task == "text2text-generation"


def test_tasks_that_do_not_exist(folder: Path) -> None:
    with pytest.raises(UsageError, match=r"--task juggling: no such task; name one such as .*causal-lm"):
        load(folder, task="juggling")
    with pytest.raises(UsageError, match="no bert for it; name another task"):
        load(folder, task="text2text-generation")


def test_tensors_without_a_place_are_noted(folder: Path) -> None:
    edit_weights(folder, lambda weights: weights.update(extra=torch.zeros(2)))
    assert load(folder).notes == (f"1 tensors of {folder} have no place in BertForSequenceClassification, e.g. extra",)


# What is wrong with a folder, how it is made so, and what the line says.


Break = Callable[[Path], object]


def _write(name: str, content: str | bytes) -> Break:
    data = content.encode() if isinstance(content, str) else content
    return lambda folder: (folder / name).write_bytes(data)


def _delete(*names: str) -> Break:
    def delete(folder: Path) -> None:
        for name in names:
            (folder / name).unlink()

    return delete


def _cut(name: str, share: float) -> Break:
    def cut(folder: Path) -> None:
        data = (folder / name).read_bytes()
        (folder / name).write_bytes(data[: int(share * len(data))])

    return cut


def _config(**entries: Any) -> Break:
    return lambda folder: edit_config(folder, **entries)


def _set(name: str, value: float) -> Break:
    return lambda folder: edit_weights(folder, lambda weights: weights[name].view(-1)[:1].fill_(value))


def _emptied(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.mkdir()


def _a_file(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.write_text("")


def _lost_head(folder: Path) -> None:
    edit_weights(folder, lambda weights: [weights.pop(f"classifier.{kind}") for kind in ("weight", "bias")])


def _pickled(folder: Path) -> None:
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def _lost_shard(folder: Path) -> None:
    model = hf.BertForSequenceClassification.from_pretrained(folder)
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder, max_shard_size="3KB")
    next(iter(sorted(folder.glob("*-of-*.safetensors")))).unlink()


FAULTS: dict[str, tuple[Break, str]] = {
    "missing": (shutil.rmtree, "no such folder"),
    "empty": (_emptied, "is empty"),
    "a file": (_a_file, "is a file"),
    "no configuration": (_delete("config.json"), "holds no config.json"),
    "configuration is no JSON": (_write("config.json", "{'model_type': bert"), "cannot be read as JSON"),
    "configuration is not text": (_write("config.json", b"\xff\xfe\x00"), "cannot be read as JSON"),
    "configuration is a list": (_write("config.json", "[1]"), "names no model_type"),
    "no model type": (_config(model_type=None), "names no model_type"),
    "unknown model type": (_config(model_type="no-such-family"), "cannot be used"),
    "unknown class": (_config(architectures=["BertForJuggling"]), "names the class 'BertForJuggling'"),
    "no class": (_config(architectures=None), "names no class"),
    "a class that is no model": (_config(architectures=["BertConfig"]), "names the class 'BertConfig'"),
    "sizes are not numbers": (_config(hidden_size="wide"), "cannot be used"),
    "sizes are others": (_config(hidden_size=32), "do not load as BertForSequenceClassification"),
    "heads do not divide": (_config(num_attention_heads=3), "do not load as BertForSequenceClassification"),
    "remote code": (_config(auto_map={"AutoModel": "modeling.Net"}), "brings its own Python code"),
    "no weights": (_delete("model.safetensors"), "no weights"),
    "pickled weights": (_pickled, "pickled weights can run code"),
    "weights cut short": (_cut("model.safetensors", 0.9), "is damaged or cut short"),
    "weights cut in the header": (_cut("model.safetensors", 0.01), "is damaged or cut short"),
    "weights are empty": (_cut("model.safetensors", 0), "is damaged or cut short"),
    "a shard is missing": (_lost_shard, "is missing, model.safetensors.index.json names it"),
    "NaN": (_set("classifier.weight", float("nan")), "1 of 32 numbers in classifier.weight are NaN or infinite"),
    "infinity": (_set("classifier.weight", float("-inf")), "in classifier.weight are NaN or infinite"),
    "no head": (_lost_head, "no weights for classifier.bias and 1 more"),
    "no tokenizer": (_delete("tokenizer.json", "tokenizer_config.json"), "no tokenizer"),
    "tokenizer is damaged": (_cut("tokenizer.json", 0.5), "does not load"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_every_fault_is_one_line(folder: Path, fault: str) -> None:
    make, says = FAULTS[fault]
    make(folder)
    assert says in refused(folder)


def test_a_shard_outside_the_folder_is_refused(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder.parent / "model.safetensors")
    index = {"weight_map": {"classifier.bias": "../model.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "outside the folder" in refused(folder)


def test_pickled_weights_load_when_allowed(folder: Path) -> None:
    expected = load(folder).fingerprint
    _pickled(folder)
    assert load(folder, allow_pickle=True).fingerprint == expected
    (folder / "pytorch_model.bin").write_bytes(b"no pickle")
    assert "do not load" in refused(folder, allow_pickle=True)


def test_a_pickle_never_runs_code(folder: Path) -> None:
    class Bomb:
        def __reduce__(self) -> tuple[Any, ...]:
            return Path.touch, (folder / "ran",)

    (folder / "model.safetensors").unlink()
    torch.save({"classifier.bias": Bomb()}, folder / "pytorch_model.bin")
    refused(folder, allow_pickle=True)
    assert not (folder / "ran").exists()


def test_remote_code_runs_only_when_asked(folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    (folder / "net.py").write_text(
        "from pathlib import Path\n"
        "from transformers import BertForSequenceClassification\n"
        f"Path({str(folder / 'ran')!r}).touch()\n"
        "class Net(BertForSequenceClassification):\n    pass\n"
    )
    edit_config(folder, architectures=["Net"], auto_map={"AutoModelForSequenceClassification": "net.Net"})
    refused(folder)
    assert not (folder / "ran").exists()
    found = load(folder, trust_remote_code=True)
    assert (type(found.model).__name__, found.task) == ("Net", "text-classification")


def test_a_missing_head_says_what_to_do(tmp_path: Path) -> None:
    path = folders.save(folders.bert_encoder(), tmp_path)
    assert load(path).task == "feature-extraction"
    assert "fine-tune and save that head first" in refused(path, task="text-classification")


def test_a_folder_without_tokenizer_can_still_be_looked_at(folder: Path) -> None:
    _delete("tokenizer.json", "tokenizer_config.json")(folder)
    assert load(folder, needs_processor=False).processor is None


@pytest.mark.parametrize("family", FAMILIES)
def test_example_inputs_run(family: str, tmp_path: Path) -> None:
    model, _ = FAMILIES[family](0)
    found = load(folders.save(model, tmp_path, with_tokenizer=False), needs_processor=False)
    inputs = example_inputs(found, 3, 8)
    assert all(value.shape[0] == 3 for value in inputs.values())
    for name, value in inputs.items():
        if name.endswith("ids"):
            assert (value.dtype, value.shape[1]) == (torch.int64, 8)
    if "attention_mask" in inputs:
        assert inputs["attention_mask"].sum(-1).tolist() == [8, 8, 6]
    with torch.no_grad():
        assert torch.isfinite(next(iter(found.model(**inputs).values()))).all()
    again, other = example_inputs(found, 3, 8), example_inputs(found, 3, 8, seed=1)
    assert all(torch.equal(inputs[name], again[name]) for name in inputs)
    assert any(not torch.equal(inputs[name], other[name]) for name in inputs)


def test_example_inputs_look_like_the_tokenizers(saved: Path) -> None:
    inputs = example_inputs(load(saved), 2, 8)
    assert list(inputs) == ["input_ids", "attention_mask", "token_type_ids"]
    ids = inputs["input_ids"]
    assert ids[:, 0].tolist() == [2, 2]
    assert ids[0, -1] == 3
    assert ids[1, 5:].tolist() == [3, 0, 0]
    assert ids[0, 1:-1].min() >= len(folders.MARKS)
    assert inputs["token_type_ids"].tolist() == [[0, 0, 0, 0, 1, 1, 1, 1], [0, 0, 0, 1, 1, 1, 0, 0]]


@pytest.mark.parametrize(("batch", "seq"), [(1, 1), (2, 1), (1, 2), (2, 2), (2, 3)])
def test_example_inputs_of_any_size(saved: Path, batch: int, seq: int) -> None:
    found = load(saved)
    inputs = example_inputs(found, batch, seq)
    assert inputs["input_ids"].shape == (batch, seq)
    assert inputs["attention_mask"].sum(-1).min() >= 1
    found.model(**inputs)


def test_a_language_model_that_classifies_is_told_its_padding(tmp_path: Path) -> None:
    path = folders.save(folders.gpt2(hf.GPT2ForSequenceClassification), tmp_path, with_tokenizer=False)
    found = load(path, needs_processor=False)
    assert found.config.pad_token_id == 3  # the end token
    assert found.model(**example_inputs(found, 3, 8)).logits.shape == (3, 2)


def test_too_long_inputs_are_refused(saved: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="takes at most 20 tokens, 21 were asked for"):
        example_inputs(load(saved), 1, 21)
    roberta, _ = FAMILIES["roberta"](0)
    found = load(folders.save(roberta, tmp_path, with_tokenizer=False), needs_processor=False)
    found.model(**example_inputs(found, 1, 69))
    with pytest.raises(InputError, match="at most 69 tokens"):
        example_inputs(found, 1, 70)


def test_companions_are_what_the_engine_needs(folder: Path, tmp_path: Path) -> None:
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
