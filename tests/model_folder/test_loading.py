"""Model folders load in full precision with unchanged weights, and every fault has a code."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor

from compressor.config.sections import ExportConfig
from compressor.engines.export import export_graph
from compressor.engines.prove import make_cases
from compressor.errors import ErrorCode
from compressor.model_folder import copy_of, example_inputs, fingerprint, fresh_model, load, loading
from compressor.models.export_forms import frequencies_by_length
from compressor.models.forward_changes import changes_of_forward, configured_switches, switch_of_changes
from compressor.results import NoteCode
from compressor.units import find_sites, keep_all
from tests import folders
from tests.faults import fails_with
from tests.marks import mostly_zoo
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
from tests.run.length_models import SWITCHES, spread, text_model


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
        " BertForSequenceClassification needs; these are the weights of BertModel, so name its task"
        " (--task feature-extraction), or fine-tune and save that head first"
    )
    shutil.rmtree(folder)
    with fails_with(ErrorCode.FILE_MISSING) as caught:
        load(folder)
    assert str(caught.value) == f"{folder}: no such folder; give the folder that save_pretrained wrote, or an ONNX file"


BLOCKS = "bigbird"
"""The family that changes at the first short text, and its length of that."""


def text(length: int, rows: int = 2) -> dict[str, Tensor]:
    """Ids `[row, position]` and a mask whose last row is padded."""
    ids = torch.randint(5, 25, (rows, length), generator=torch.Generator().manual_seed(length))
    mask = torch.ones_like(ids)
    mask[-1, -max(1, length // 4) :] = 0
    return {"input_ids": ids, "attention_mask": mask}


def logits(model: Any, length: int) -> Tensor:
    with torch.no_grad():
        output: Tensor = model(**text(length)).logits
    return output


@pytest.fixture(scope="module")
def blocks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folders.save(text_model(BLOCKS), tmp_path_factory.mktemp("blocks"))


def test_a_fresh_model_has_the_function_of_the_folder_whatever_ran_before(blocks: Path) -> None:
    folder = load(blocks)
    expected = logits(hf.BigBirdForSequenceClassification.from_pretrained(blocks).eval(), 40)
    for length in (2, 40, 3):
        logits(folder.model, length)
        torch.testing.assert_close(logits(fresh_model(folder), 40), expected)


def test_a_copy_shares_weights_and_nothing_that_a_forward_changes(blocks: Path) -> None:
    model: Any = loading.load_unchanged(blocks).model
    copy: Any = copy_of(model)
    logits(copy, 2)
    assert copy.bert.attention_type != model.bert.attention_type == "block_sparse"
    weights = dict(model.named_parameters())
    assert all(weights[name] is weight for name, weight in copy.named_parameters())


def test_a_fresh_model_has_trained_weights_only_where_these_are_the_reference(tmp_path: Path) -> None:
    folder = load(folders.save(folders.bert(), tmp_path))
    before = logits(folder.model, 8)
    model: Any = folder.model
    model.classifier.weight = torch.nn.Parameter(model.classifier.weight + 1)
    torch.testing.assert_close(logits(fresh_model(folder), 8), before)
    torch.testing.assert_close(logits(fresh_model(folder, trained=True), 8), logits(folder.model, 8))
    assert not torch.equal(logits(folder.model, 8), before)


def test_a_weight_that_a_run_changed_in_place_before_the_proof_is_not_the_reference(tmp_path: Path) -> None:
    folder = load(folders.save(folders.bert(), tmp_path))
    before = logits(folder.model, 8)
    model: Any = folder.model
    with torch.no_grad():
        model.classifier.weight.add_(1.0)
    torch.testing.assert_close(logits(fresh_model(folder), 8), before)


def add_one(model: Any) -> None:
    with torch.no_grad():
        model.classifier.weight.add_(1.0)


def write_data(model: Any) -> None:
    model.classifier.weight.data.copy_(model.classifier.weight.data + 1.0)


def load_others(model: Any) -> None:
    model.load_state_dict({name: value + 1 for name, value in model.state_dict().items()}, strict=False)


def take_a_training_step(model: Any) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    model(**text(8), labels=torch.tensor([0, 1])).loss.backward()
    optimizer.step()


def permute_units(model: Any) -> None:
    with torch.no_grad():
        model.classifier.weight.copy_(model.classifier.weight.roll(1, dims=1))


@pytest.mark.parametrize("is_saved", [True, False], ids=["files", "memory"])
@pytest.mark.parametrize(
    "change", mostly_zoo([add_one, write_data, load_others, take_a_training_step, permute_units], write_data)
)
def test_a_weight_that_a_run_changes_in_place_after_a_proof_is_not_the_reference_of_the_next(
    change: Callable[[Any], None], is_saved: bool, tmp_path: Path
) -> None:
    folder = load(folders.save(folders.bert(), tmp_path))
    folder = folder if is_saved else replace(folder, load_again=None)
    before = logits(folder.model, 8)
    torch.testing.assert_close(logits(fresh_model(folder), 8), before)
    for _ in range(2):
        change(folder.model)
        assert not torch.allclose(logits(folder.model, 8), before)
        torch.testing.assert_close(logits(fresh_model(folder, trained=True), 8), logits(folder.model, 8))
        torch.testing.assert_close(logits(fresh_model(folder), 8), before)


def test_weights_that_are_not_trained_are_in_memory_once(tmp_path: Path) -> None:
    folder = load(folders.save(folders.bert(), tmp_path))
    fresh_model(folder)
    add_one(folder.model)
    weights = dict(folder.model.named_parameters())
    unshared = {name for name, weight in fresh_model(folder).named_parameters() if weight is not weights[name]}
    assert unshared == {"classifier.weight"}


@pytest.mark.parametrize("drawn", mostly_zoo([1, 3], 3))
@pytest.mark.parametrize("pegasus", mostly_zoo([False, True], False))
def test_block_sparse_attention_as_a_mask_is_the_function_of_the_folder(
    drawn: int, pegasus: bool, tmp_path: Path
) -> None:
    sizes: dict[str, Any] = {"vocab_size": 25, "block_size": 2, "num_random_blocks": drawn}
    if pegasus:
        heads: dict[str, Any] = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 20}
        layers: dict[str, Any] = {"encoder_layers": 2, "decoder_layers": 1, "decoder_ffn_dim": 20, "d_model": 16}
        family: Any = hf.BigBirdPegasusForSequenceClassification
        config: Any = hf.BigBirdPegasusConfig(
            **sizes, **heads, **layers, max_position_embeddings=64, pad_token_id=0, eos_token_id=3
        )
    else:
        family = hf.BigBirdForSequenceClassification
        config = hf.BigBirdConfig(**{**folders.SIZES, **sizes, "num_hidden_layers": 2, "max_position_embeddings": 64})
    folders.save(spread(family(config)), tmp_path)
    folder = load(tmp_path)
    assert NoteCode.BLOCKS_AS_MASK in {note.code for note in folder.notes}
    switch = (5 + 2 * drawn) * 2
    for length in (3, switch, switch + 1, switch + 2, 2 * switch - 1):
        inputs = text(length)
        inputs["input_ids"][range(2), inputs["attention_mask"].sum(-1) - 1] = 3  # Pegasus classifies by the end token
        with torch.no_grad():
            expected = family.from_pretrained(tmp_path).eval()(**inputs).logits
            torch.testing.assert_close(folder.model(**inputs).logits, expected, rtol=1e-4, atol=1e-4)


def test_dynamic_frequencies_depend_on_the_present_text_alone() -> None:
    model = text_model("dynamic").eval()
    expected = {length: logits(copy_of(model), length) for length in (16, 17, 30, 20, 8)}
    frequencies = model.model.rotary_emb.inv_freq
    with frequencies_by_length(model):
        for length, value in expected.items():
            torch.testing.assert_close(logits(model, length), value, rtol=1e-4, atol=1e-5)
    assert model.model.rotary_emb.inv_freq is frequencies
    assert model.model.rotary_emb.rope_type == "dynamic"
    logits(model, 30)
    assert not torch.allclose(logits(model, 20), expected[20], atol=1e-3), "without the form it remembers"


@pytest.mark.parametrize("name", ["dynamic", "longrope", BLOCKS])
def test_the_length_at_which_a_forward_changes_other_attributes_is_noticed(name: str) -> None:
    model = text_model(name).eval()
    switch = switch_of_changes(lambda length: changes_of_forward(copy_of(model), text(length, 1)), 2, 40)
    assert switch == SWITCHES[name]


def test_a_forward_that_changes_nothing_has_no_switch() -> None:
    model = text_model("sliding").eval()
    assert changes_of_forward(copy_of(model), text(40)) == ()
    assert switch_of_changes(lambda length: changes_of_forward(copy_of(model), text(length)), 2, 40) is None


@pytest.mark.parametrize("name", sorted(SWITCHES))
def test_the_configuration_lists_the_lengths_at_which_the_model_changes(name: str) -> None:
    assert SWITCHES[name] in configured_switches(text_model(name).config)


@pytest.mark.zoo
def test_models_of_the_same_configuration_and_other_modules_share_no_export(blocks: Path, tmp_path: Path) -> None:
    """As a mask, block-sparse attention has a right graph; without the form, one that is refused."""
    folder = load(blocks)
    plan = keep_all(find_sites(copy_of(folder.model), text(8)))
    cases = make_cases(lambda *size: example_inputs(folder, *size), shapes=[(2, 40)])
    assert export_graph("dense", folder, plan, ExportConfig(), cases, tmp_path / "graph.onnx").proof.holds
    refuse_without_the_form(blocks, tmp_path)


@pytest.mark.zoo
def test_a_model_that_changes_for_good_without_a_form_is_refused_with_what_changed(
    blocks: Path, tmp_path: Path
) -> None:
    refuse_without_the_form(blocks, tmp_path)


def refuse_without_the_form(blocks: Path, tmp_path: Path) -> None:
    folder = loading.load_unchanged(blocks)  # the model as transformers loads it
    plan = keep_all(find_sites(copy_of(folder.model), text(8)))
    cases = make_cases(lambda *size: example_inputs(folder, *size), shapes=[(2, 40)])
    with fails_with(ErrorCode.UNSUPPORTED_MODEL, field="attention_type", before="block_sparse", after="original_full"):
        export_graph("dense", folder, plan, ExportConfig(), cases, tmp_path / "graph.onnx")
