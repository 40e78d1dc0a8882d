"""Ids outside of a model's tables end in one line that names the row, the token and the table, in every task."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from datasets import Dataset

from compressor.errors import ErrorCode, InputError
from compressor.model_folder import ModelFolder, load
from compressor.model_folder.text_limits import token_limit
from compressor.tasks import open_data
from compressor.tasks.id_tables import IdTables
from tests import folders
from tests.faults import fails_with
from tests.tasks.rows import jsonl, tsv

USER = "<user>"
SIZE = 25
"""Tokens of the tokenizer of `folders`, and rows of the tables of its models."""
SMALL: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}


def with_token(model: Any, path: Path, **special: Any) -> Path:
    """A folder whose tokenizer has one token more than its model."""
    folders.save(model, path)
    tokenizer = folders.tokenizer()
    if special:
        tokenizer.add_special_tokens(special)
    else:
        tokenizer.add_tokens([USER])
    tokenizer.save_pretrained(path)
    return path


def rows_of(task: str, path: Path) -> str:
    """Rows of a task, of which the third has a token that the model lacks."""
    texts = [f"the film {'bad' if n % 2 else 'good'} {USER if n == 2 else 'very'}" for n in range(12)]
    if task == "token-classification":
        rows: list[Any] = [
            {"words": text.split(), "tags": ["LABEL_1", "LABEL_0", "LABEL_0", "LABEL_0"]} for text in texts
        ]
        return jsonl(path / "rows.jsonl", *rows)
    if task == "question-answering":
        rows = [{"question": "the film", "context": text, "answers": [{"text": "film", "start": 4}]} for text in texts]
        return jsonl(path / "rows.jsonl", *rows)
    if task in ("causal-lm", "fill-mask"):
        return tsv(path / "rows.tsv", *texts, header="text")
    label = (lambda n: n % 2) if task == "text-classification" else (lambda n: n / 4)
    return tsv(path / "rows.tsv", *(f"{label(n)}\t{text}" for n, text in enumerate(texts)))


TASKS = {
    "text-classification": folders.bert,
    "regression": lambda: folders.bert(num_labels=1),
    "token-classification": lambda: hf.BertForTokenClassification(hf.BertConfig(vocab_size=SIZE, **SMALL)),
    "question-answering": lambda: hf.BertForQuestionAnswering(hf.BertConfig(vocab_size=SIZE, **SMALL)),
    "fill-mask": lambda: hf.BertForMaskedLM(hf.BertConfig(vocab_size=SIZE, **SMALL)),
    "causal-lm": folders.gpt2,
}


@pytest.mark.parametrize("task", TASKS)
def test_a_token_outside_of_the_table_is_named(tmp_path: Path, task: str) -> None:
    folder = load(with_token(TASKS[task](), tmp_path / "model"), task=task)
    rows = rows_of(task, tmp_path)
    request = folders.rows_config(rows, metric="accuracy" if task == "token-classification" else None)
    with fails_with(ErrorCode.ID_OUTSIDE_TABLE, row=3, id=SIZE, size=SIZE, file=Path(rows)) as caught:
        open_data(request, folder)
    assert USER in str(caught.value)


def test_targets_are_compared_with_the_table_of_the_decoder(tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2}
    sizes |= {"decoder_attention_heads": 2, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16}
    ids: dict[str, Any] = {
        "pad_token_id": 0,
        "bos_token_id": 2,
        "eos_token_id": 3,
        "decoder_start_token_id": 3,
        "forced_eos_token_id": 3,
    }
    model = hf.BartForConditionalGeneration(hf.BartConfig(vocab_size=SIZE, **sizes, **ids))
    folder = load(with_token(model, tmp_path / "model"), task="translation")
    rows = tsv(tmp_path / "rows.tsv", *(f"good\tbad{f' {USER}' * (n == 4)}" for n in range(9)), header="de\ten")
    with fails_with(ErrorCode.ID_OUTSIDE_TABLE, row=5, input="labels"):
        open_data(folders.rows_config(rows), folder)


def test_the_advice_leads_to_a_run(tmp_path: Path) -> None:
    path = with_token(folders.bert(), tmp_path / "model")
    model = hf.BertForSequenceClassification.from_pretrained(path)
    model.resize_token_embeddings(len(hf.AutoTokenizer.from_pretrained(path)))
    model.save_pretrained(path)
    data = open_data(folders.rows_config(rows_of("text-classification", tmp_path)), load(path))
    assert any(SIZE in row["input_ids"] for part in (data.train, data.eval, data.test) for row in part)


def test_padding_outside_of_the_table_is_named(tmp_path: Path) -> None:
    path = with_token(folders.bert(), tmp_path / "model", pad_token="[FILL]")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"pad_token_id": None}))
    rows = tsv(tmp_path / "rows.tsv", *(f"{n % 2}\tthe film{' good' * (n % 3)}" for n in range(12)))
    with fails_with(ErrorCode.ID_OUTSIDE_TABLE, id=SIZE, size=SIZE, input="input_ids"):
        open_data(folders.rows_config(rows), load(path))


def check(folder: ModelFolder, **columns: Any) -> None:
    """Check rows that were encoded elsewhere, as custom tasks do."""
    encoded = Dataset.from_dict(columns)
    task = open_data_task(folder)
    IdTables.of(folder.model, folder.processor).check(task, encoded, encoded, "f")


def open_data_task(folder: ModelFolder) -> Any:
    from compressor.tasks.base import make_task

    return make_task(folder, folders.rows_config("f"))


@pytest.mark.parametrize(
    ("changed", "code", "details"),
    [
        ({}, None, {}),
        (
            {"token_type_ids": [[0, 0], [0, 2]]},
            ErrorCode.ID_OUTSIDE_TABLE,
            {"row": 2, "input": "token_type_ids", "id": 2},
        ),
        ({"input_ids": [[1, -1], [1, 1]]}, ErrorCode.ID_OUTSIDE_TABLE, {"row": 1, "id": -1}),
        (
            {name: [[0, 0], [0] * 70] for name in ("input_ids", "attention_mask", "token_type_ids")}
            | {"length": [2, 70]},
            ErrorCode.TOO_LONG,
            {"row": 2, "value": 70},
        ),
    ],
)
def test_encoded_rows_are_compared_with_all_tables(
    classifier: ModelFolder, changed: dict[str, Any], code: ErrorCode | None, details: dict[str, Any]
) -> None:
    ones = [[1, 1], [1, 1]]
    columns = {"input_ids": ones, "attention_mask": ones, "token_type_ids": ones, "labels": [0, 1], "length": [2, 2]}
    if code is None:
        check(classifier, **columns)
        return
    with fails_with(code, **details) as caught:
        check(classifier, **(columns | changed))
    assert isinstance(caught.value, InputError)


def test_tables_are_those_of_the_modules() -> None:
    def limits(model: Any) -> tuple[dict[str, int], dict[str, int]]:
        tables = IdTables.of(model, None)
        return dict(tables.sizes), dict(tables.positions)

    torch.manual_seed(0)
    roberta = hf.RobertaConfig(vocab_size=30, max_position_embeddings=40, pad_token_id=1, **SMALL)
    assert limits(hf.RobertaForSequenceClassification(roberta))[1] == {"input_ids": 38}
    # Its tables are modules of its own.
    ibert = hf.IBertForSequenceClassification(hf.IBertConfig(**{**roberta.to_dict(), "model_type": "ibert"}))
    assert limits(ibert) == ({"input_ids": 30, "token_type_ids": 2}, {"input_ids": 38})
    assert token_limit(ibert) == 38
    opt = hf.OPTConfig(
        vocab_size=30, max_position_embeddings=40, hidden_size=16, num_hidden_layers=1, ffn_dim=16,
        num_attention_heads=2, word_embed_proj_dim=16,
    )  # fmt: skip
    assert limits(hf.OPTForCausalLM(opt)) == ({"input_ids": 30, "labels": 30}, {"input_ids": 40})
    sizes: dict[str, Any] = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2}
    sizes |= {"decoder_attention_heads": 2, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16}
    led = hf.LEDConfig(
        vocab_size=30,
        max_encoder_position_embeddings=64,
        max_decoder_position_embeddings=40,
        attention_window=8,
        **sizes,
    )
    assert limits(hf.LEDForConditionalGeneration(led))[1] == {"input_ids": 64, "decoder_input_ids": 40}
