"""Fill-mask: rows of text get masks that depend on the row alone, and the masked tokens are scored."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from datasets import Dataset
from hypothesis import given, settings
from hypothesis import strategies as st

from compressor.errors import ErrorCode, UsageError
from compressor.model_folder import ModelFolder, load
from compressor.models.forwards import tensors_of
from compressor.results import NoteCode
from compressor.tasks import open_data, statistics
from compressor.tasks.token_labels import FillMask
from tests import folders
from tests.faults import fails_with
from tests.folders import SIZES, WORDS, rows_config
from tests.tasks.rows import forward_of, jsonl, text

MASK, PADDING = 4, 0
TEXTS = st.lists(st.sampled_from(WORDS), min_size=1, max_size=20).map(" ".join)


@pytest.fixture(scope="module")
def filler(tmp_path_factory: pytest.TempPathFactory) -> ModelFolder:
    """A BERT that fills masks, without dropout."""
    torch.manual_seed(0)
    model = hf.BertForMaskedLM(hf.BertConfig(**SIZES))
    return load(folders.save(model, tmp_path_factory.mktemp("filler")))


def task_of(filler: ModelFolder, metric: str = "accuracy", **fields: Any) -> FillMask:
    metrics = {known.name: known for known in FillMask.metrics}
    return FillMask(filler, rows_config(**fields), metrics[metric])


def encode(task: FillMask, *texts: str) -> Dataset:
    return task.encode(Dataset.from_dict({"text": list(texts)}), "rows")


@settings(max_examples=15, deadline=None)
@given(texts=st.lists(TEXTS, min_size=1, max_size=4))
def test_masks_depend_on_the_row_alone(filler: ModelFolder, texts: list[str]) -> None:
    task = task_of(filler)
    rows = encode(task, *texts)
    for number, (row, content) in enumerate(zip(rows, texts, strict=True)):
        assert row == encode(task_of(filler, "pseudo_perplexity"), content)[0], number
        ids = filler.processor(content, truncation=True, max_length=16)["input_ids"]
        masked = [position for position, label in enumerate(row["labels"]) if label != -100]
        assert len(masked) == max(1, round(0.15 * (len(ids) - 2)))
        restored = [ids[i] if i in masked else token for i, token in enumerate(row["input_ids"])]
        assert restored == ids
        assert all(row["input_ids"][i] == MASK and row["labels"][i] == ids[i] for i in masked)
        assert not set(masked) & {0, len(ids) - 1}, "special tokens are not masked"


def test_masks_differ_between_rows(filler: ModelFolder) -> None:
    rows = encode(task_of(filler), *(f"{word} good film the very bad plot" for word in WORDS))
    assert len({tuple(label != -100 for label in labels) for labels in rows["labels"]}) > 3


def test_batches_are_padded(filler: ModelFolder) -> None:
    task = task_of(filler)
    batch = task.collate(list(encode(task, "good film", "bad")))
    assert batch["labels"][1].tolist() == [-100, 6, -100, -100]
    assert batch["input_ids"][1].tolist() == [2, MASK, 3, PADDING]
    assert batch["attention_mask"][1].tolist() == [1, 1, 1, 0]


def test_masked_tokens_are_scored(filler: ModelFolder, tmp_path: Path) -> None:
    lines = text(tmp_path / "a.txt", *(f"{word} good film the very bad plot" for word in WORDS))
    measured = {}
    for metric in ("accuracy", "pseudo_perplexity"):
        data = open_data(rows_config(lines, lines, lines, metric=metric), filler)
        parts = [statistics(data.task, data.test, forward_of(filler.model), size) for size in (1, 7)]
        assert parts[0] == pytest.approx(parts[1], rel=1e-5)
        measured[metric] = parts[0]
        batch = tensors_of(data.task.collate(list(data.test)))
    labels = batch["labels"]
    with torch.no_grad():
        output = filler.model(**batch)
    right = (output.logits.argmax(-1) == labels).sum().item()
    assert measured["accuracy"].sum(0).tolist() == [right, (labels != -100).sum().item()]
    assert data.task.score(measured["pseudo_perplexity"]) == pytest.approx(math.exp(output.loss.item()), rel=1e-5)
    assert not data.task.higher_is_better


def test_rows_without_text_are_left_out(filler: ModelFolder, tmp_path: Path) -> None:
    lines = text(tmp_path / "a.txt", "good film", "", "  ", "bad plot")
    data = open_data(rows_config(lines, lines, lines), filler)
    assert len(data.test) == 2
    (note, *_) = (note for note in data.notes if note.code is NoteCode.ROWS_LEFT_OUT)
    assert "2 of 4 rows" in note.text


def test_text_columns_are_named(filler: ModelFolder, tmp_path: Path) -> None:
    file = jsonl(tmp_path / "a.jsonl", *({"body": f"good {word}", "id": word} for word in WORDS))
    data = open_data(rows_config(file, file, file, text_columns=("body",)), filler)
    assert len(data.train) == len(WORDS)
    with fails_with(ErrorCode.COLUMN_MISSING, field="text_columns"):
        open_data(rows_config(file), filler)


def test_text_is_needed(filler: ModelFolder) -> None:
    with fails_with(ErrorCode.TOO_FEW_ROWS, column="text"):
        encode(task_of(filler), "", " ")


def test_a_tokenizer_without_mask_is_refused(filler: ModelFolder, tmp_path: Path) -> None:
    path = folders.save(filler.model, tmp_path)
    tokenizer = folders.tokenizer()
    tokenizer.mask_token = None
    tokenizer.save_pretrained(path)
    with fails_with(ErrorCode.UNSUPPORTED_MODEL, field="mask_token"):
        task_of(load(path))


def test_an_encoder_decoder_is_refused(filler: ModelFolder) -> None:
    sizes: dict[str, Any] = {
        "d_model": 16,
        "encoder_layers": 1,
        "decoder_layers": 1,
        "encoder_ffn_dim": 8,
        "decoder_ffn_dim": 8,
    }
    model = hf.BartForConditionalGeneration(hf.BartConfig(vocab_size=25, max_position_embeddings=32, **sizes))
    folder = ModelFolder(Path("bart"), model, filler.processor, model.config, "sha256:1", "fill-mask", "bart")
    with fails_with(ErrorCode.UNSUPPORTED_MODEL, field="task"):
        task_of(folder)


def test_unknown_metrics_are_refused(filler: ModelFolder, tmp_path: Path) -> None:
    lines = text(tmp_path / "a.txt", "good film", "bad plot")
    with fails_with(ErrorCode.UNKNOWN_NAME, UsageError, value="f1", known=("accuracy", "pseudo_perplexity")):
        open_data(rows_config(lines, metric="f1"), filler)
