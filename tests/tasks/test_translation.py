"""Translation: pairs become batches, and beam search gives BLEU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sacrebleu
import torch
from transformers import PreTrainedModel

from compressor.errors import ErrorCode, UsageError
from compressor.model_folder import ModelFolder, load
from compressor.models.beam_search import beam_search
from compressor.models.forwards import tensors_of
from compressor.results import MetricUnit, NoteCode
from compressor.tasks import statistics
from compressor.tasks.data import rows_hash
from compressor.tasks.metrics import bleu, bleu_counts
from compressor.units import hooked
from tests import folders
from tests.faults import fails_with
from tests.tasks.rows import forward_of
from tests.tasks.translations import marian, open_pairs, save, sentence, t5, tokenizer, tsv

# Rows


def test_the_hash_depends_on_reference_texts(translator: ModelFolder, tmp_path: Path) -> None:
    """BLEU compares texts: rows with the same tokens can have different reference texts."""
    first, same, different = (
        open_pairs(translator, tsv(tmp_path / f"{number}.tsv", "ein hund\tone dog", f"katze\tred {word}"))
        for number, word in enumerate(("cow", "cow", "owl"))
    )
    assert first.test["labels"][:] == different.test["labels"][:]
    assert rows_hash(first.test) == rows_hash(same.test) != rows_hash(different.test)


def test_pairs_become_batches(translator: ModelFolder, tmp_path: Path) -> None:
    data = open_pairs(translator, tsv(tmp_path / "a.tsv", "ein hund\tone dog", "katze\tbig red cat"))
    batch = data.task.collate(list(data.train))
    assert {name: tensor.tolist() for name, tensor in batch.items()} == {
        "input_ids": [[3, 5, 1], [6, 1, 0]],
        "attention_mask": [[1, 1, 1], [1, 1, 0]],
        "labels": [[11, 13, 1, -100], [18, 16, 14, 1]],
        "decoder_input_ids": [[0, 11, 13, 1], [0, 18, 16, 14]],
    }
    assert list(data.train["length"]) == [3, 4]
    tensors = tensors_of(batch)
    loss = translator.model(**tensors).loss
    tensors.pop("decoder_input_ids")
    assert translator.model(**tensors).loss == loss


@pytest.mark.parametrize(
    ("header", "requested", "source"),
    [
        ("de\ten", (), "ein"),
        ("en\tde", (), "ein"),
        ("note\ttarget\tsource", (), "one"),
        ("src\ttgt", (), "ein"),
        ("a\tb\tc", ("c", "a"), "hund"),
        ("id\tde\ten", ("de", "en"), "one"),
    ],
)
def test_columns_are_recognized_by_name(
    header: str, requested: tuple[str, ...], source: str, translator: ModelFolder, tmp_path: Path
) -> None:
    row = "\t".join(("ein", "one", "hund")[: header.count("\t") + 1])
    if header == "note\ttarget\tsource":
        row = "ein\thund\tone"
    data = open_pairs(translator, tsv(tmp_path / "a.tsv", row, header=header), text_columns=requested)
    assert tokenizer().decode(data.train[0]["input_ids"], skip_special_tokens=True) == source


def test_texts_are_truncated_and_references_are_not(translator: ModelFolder, tmp_path: Path) -> None:
    row = "\t".join((" ".join(["hund"] * 30), " ".join(["dog"] * 30)))
    data = open_pairs(translator, tsv(tmp_path / "a.tsv", row), max_length=6)
    assert [len(data.test[0][name]) for name in ("input_ids", "labels")] == [6, 6]
    assert data.test[0]["reference"].split() == ["dog"] * 30


def test_notes_name_columns_and_metric(translator: ModelFolder, tmp_path: Path) -> None:
    rows = tsv(tmp_path / "a.tsv", "ein\tone", "zwei\ttwo")
    columns, settings = open_pairs(translator, rows).notes
    assert columns.text == "each row is translated from its 'de' to its 'en'"
    assert (columns.code, settings.code) == (NoteCode.TEXT_COLUMNS, NoteCode.METRIC_SETTINGS)
    assert "5 beams, at most 16 tokens" in settings.text
    (note,) = open_pairs(translator, rows, metric="loss").notes
    assert note.code is NoteCode.TEXT_COLUMNS


# The metric


def test_bleu_of_the_references_is_100(translator: ModelFolder, trained_translator: Path) -> None:
    data = open_pairs(translator, str(trained_translator / "rows.tsv"))
    assert bleu(np.stack([bleu_counts(row, row) for row in data.test["reference"]])) == pytest.approx(100)
    assert (data.task.metric, data.task.metric_unit, data.task.higher_is_better) == ("bleu", MetricUnit.RAW, True)


@pytest.mark.parametrize("make", [marian, t5])
def test_translations_equal_those_of_the_model(make: Callable[[], PreTrainedModel], tmp_path: Path) -> None:
    """Translations without a cache, with the encoder run at every step, equal those of `generate` in the same order."""
    folder = load(save(make(), tmp_path / "model"), task="translation")
    data = open_pairs(folder, tsv(tmp_path / "a.tsv", *("\t".join(sentence(seed)) for seed in range(3))))
    model: Any = folder.model
    expected = []
    for row in data.test:
        ids = torch.tensor([row["input_ids"]])
        settings = {"num_beams": 5, "do_sample": False, "max_new_tokens": 16}
        generated = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **settings)
        expected.append(str(tokenizer().decode(generated[0], skip_special_tokens=True)))
    counts = statistics(data.task, data.test, forward_of(folder.model), 4)
    assert counts.shape == (3, 10)
    assert data.task.score(counts) == sacrebleu.corpus_bleu(expected, [list(data.test["reference"])]).score
    assert np.array_equal(counts[:, 0], [bleu_counts(text, "")[0] for text in expected])


def test_the_length_penalty_of_the_model_applies(translator: ModelFolder, trained_translator: Path) -> None:
    data = open_pairs(translator, str(trained_translator / "rows.tsv"))
    batch = {name: data.task.collate(list(data.test))[name] for name in ("input_ids", "attention_mask")}
    lengths = []
    for penalty in (-4.0, 4.0):
        translator.model.generation_config.length_penalty = penalty
        ids = beam_search(translator.model, forward_of(translator.model), batch, 5, 16)
        lengths.append(int((ids > 1).sum()))
    translator.model.generation_config.length_penalty = 1.0
    assert lengths[0] < lengths[1]


def test_gated_heads_change_the_translations(translator: ModelFolder, trained_translator: Path) -> None:
    data = open_pairs(translator, str(trained_translator / "rows.tsv"))
    forward = forward_of(translator.model)
    rows = data.test.select(range(6))
    dense = statistics(data.task, rows, forward)
    assert data.task.score(dense) > 30
    with hooked(translator.model, lambda name, out: out * 0):
        gated = statistics(data.task, rows, forward)
    assert not np.array_equal(dense, gated)
    assert np.array_equal(dense, statistics(data.task, rows, forward))


def test_the_loss_equals_that_of_the_model(translator: ModelFolder, trained_translator: Path) -> None:
    rows = str(trained_translator / "rows.tsv")
    data = open_pairs(translator, rows, metric="loss")
    assert not data.task.higher_is_better
    measured = statistics(data.task, data.test, forward_of(translator.model), 9)
    assert measured.shape == (40, 2)
    loss = translator.model(**tensors_of(data.task.collate(list(data.test)))).loss.item()
    assert data.task.score(measured) == pytest.approx(loss)
    chooser = open_pairs(translator, rows).task.chooser
    assert (chooser.metric, chooser.score(measured)) == ("loss", data.task.score(measured))


# Faults


@pytest.mark.parametrize(
    ("header", "row", "requested", "code", "details"),
    [
        ("text\tlabel", "ein\t1", (), ErrorCode.COLUMN_MISSING, {"field": "text_columns"}),
        ("id\tde\ten", "1\tein\tone", (), ErrorCode.COLUMN_MISSING, {"columns": ("id", "de", "en")}),
        ("de\ten", "ein\tone", ("de",), ErrorCode.INVALID_VALUE, {"field": "text_columns", "value": ("de",)}),
        ("de\ten", "ein\tone", ("de", "fr"), ErrorCode.COLUMN_MISSING, {"value": "fr", "columns": ("de", "en")}),
        ("de\ten", "ein\t ", (), ErrorCode.INVALID_ROWS, {"row": 2, "column": "en"}),
        ("de\ten", "\tone", (), ErrorCode.INVALID_ROWS, {"row": 2, "column": "de"}),
    ],
)
def test_faults_of_pairs(
    header: str,
    row: str,
    requested: tuple[str, ...],
    code: ErrorCode,
    details: dict[str, Any],
    translator: ModelFolder,
    tmp_path: Path,
) -> None:
    first = "\t".join(["ein"] * (header.count("\t") + 1))
    with fails_with(code, **details):
        open_pairs(translator, tsv(tmp_path / "a.tsv", first, row, header=header), text_columns=requested)


def test_a_decoder_alone_cannot_translate(tmp_path: Path) -> None:
    gpt2 = folders.save(folders.gpt2(), tmp_path / "gpt2")
    with fails_with(ErrorCode.UNSUPPORTED_MODEL, UsageError, field="task", value="translation", family="gpt2"):
        load(gpt2, task="translation")


def test_an_encoder_decoder_reads_pairs_without_the_name_of_the_task(trained_translator: Path) -> None:
    folder = load(trained_translator / "model")
    assert folder.task != "translation"
    assert open_pairs(folder, str(trained_translator / "rows.tsv")).task.name == "translation"


def test_a_model_without_start_token_is_refused(trained_translator: Path, tmp_path: Path) -> None:
    model: Any = t5()
    del model.config.decoder_start_token_id
    folder = load(save(model, tmp_path / "t5"), task="translation")
    with fails_with(ErrorCode.MISSING_VALUE, field="decoder_start_token_id"):
        open_pairs(folder, str(trained_translator / "rows.tsv"))


def test_rows_without_room_for_text_are_refused(translator: ModelFolder, trained_translator: Path) -> None:
    with fails_with(ErrorCode.OUT_OF_RANGE, field="max_length", value=1, minimum=2):
        open_pairs(translator, str(trained_translator / "rows.tsv"), max_length=1)
