"""Streams: every token is predicted once, from all that came before it as far as memory reaches."""

from __future__ import annotations

import itertools
import lzma
import math
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import Dataset
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from compressor.errors import InputError, UsageError
from compressor.tasks import Task, causal_lm, open_data
from compressor.tasks.registry import make_task
from compressor.tasks.segment_streams import FILLER, CharacterStreams, Streams, assign_streams, read, reader
from compressor.training.tokenizers import characters, words
from tests import folders, language
from tests.folders import Request

LETTERS = "abcdefghijklmnopqrstuvwxyz"


def streams(segment: int = 6) -> Streams:
    task = make_task(language.folder(), Request(max_length=segment))
    assert isinstance(task, Streams)
    return task


def encoded(task: Task, text: str) -> Dataset:
    return task.encode(Dataset.from_dict({"text": text.rstrip("\n").split("\n")}), "text")


@settings(max_examples=40, deadline=None)
@given(lines=st.integers(1, 9), segment=st.integers(1, 12), seed=st.integers(0, 99))
def test_every_token_but_the_first_is_a_target_once(lines: int, segment: int, seed: int) -> None:
    task = streams(segment)
    text = language.text(lines, seed)
    (ids,) = task._tokenizer([text])["input_ids"]
    rows = encoded(task, text)
    batches = [task.collate([row]) for row in rows]
    assert [token for batch in batches for token in batch["input_ids"][0].tolist()] == ids[:-1]
    assert [token for batch in batches for token in batch["shift_labels"][0].tolist()] == ids[1:]
    assert all(len(row["input_ids"]) == segment + 1 for row in list(rows)[:-1])


@settings(max_examples=200, deadline=None)
@given(rows=st.integers(1, 200), side_by_side=st.integers(1, 20), whole=st.booleans())
def test_streams_are_stretches_of_the_text(rows: int, side_by_side: int, whole: bool) -> None:
    if not whole and rows < side_by_side:
        with pytest.raises(InputError, match=f"{side_by_side} streams side by side need as many segments"):
            assign_streams(rows, side_by_side, whole=whole)
        return
    laid = assign_streams(rows, side_by_side, whole=whole)
    read_in_order = [row for row in laid.T.ravel().tolist() if row != FILLER]
    assert read_in_order == list(range(len(read_in_order)))
    assert len(read_in_order) == (rows if whole else rows // side_by_side * side_by_side)
    for stream in laid.T:  # once a stream is at its end it stays there
        assert sorted(stream == FILLER) == list(stream == FILLER)


@pytest.mark.parametrize("family", ["all-attention", "transformer-xl"])
def test_reading_in_segments_is_reading_whole_where_memory_holds_the_text(family: str) -> None:
    held = language.folder(architecture=family, memory=400)
    task = make_task(held, Request(max_length=7))
    assert isinstance(task, Streams)
    rows = encoded(task, language.text(12))
    found = read(task, rows, reader(held.model), streams=1)
    ids = [row["input_ids"][0] for row in rows]
    whole = [token for row in rows for token in row["input_ids"][:-1]] + [rows[len(rows) - 1]["input_ids"][-1]]
    assert ids[0] == whole[0]
    tokens = torch.tensor([whole])
    with torch.no_grad():
        loss = held.model(input_ids=tokens, labels=tokens).loss
    assert task.score(found) == pytest.approx(math.exp(loss.item()), rel=1e-4)
    assert found[:, 1].sum() == len(whole) - 1


def test_what_is_remembered_matters() -> None:
    held = language.folder()
    task = streams()
    rows = encoded(task, language.text(12))
    with_memory = read(task, rows, reader(held.model), streams=1)
    without = read(task, rows, reader(held.model), streams=len(rows))
    assert with_memory[0] == pytest.approx(without[0])
    assert not np.allclose(with_memory[1:], without[1:])


def test_a_search_reads_the_same_targets_without_memory() -> None:
    held = language.folder()
    task = streams()
    rows = encoded(task, language.text(12))
    alone = task.chooser
    assert not isinstance(alone, Streams)
    assert alone.metric == task.metric
    forward = reader(held.model)

    def logits(batch: dict[str, torch.Tensor]) -> np.ndarray:
        with torch.no_grad():
            return np.asarray(held.model(**batch).logits)

    each = alone.measure(logits, list(rows))
    assert each == pytest.approx(read(task, rows, forward, streams=len(rows)), rel=1e-4)
    assert alone.score(each) == pytest.approx(task.score(each))


def test_the_rows_set_aside_are_the_last_ones(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(language.text(60))
    found = open_data(Request(data=str(tmp_path / "text.txt"), max_length=6), language.folder())
    rows = [list(row["input_ids"]) for part in (found.train, found.eval, found.test) for row in part]
    assert all(before[-1] == after[0] for before, after in itertools.pairwise(rows))
    assert "the last ones, were set aside" in found.notes[0]


def test_bits_per_character_are_the_logarithm_of_the_perplexity() -> None:
    held = language.folder(characters())
    task = make_task(held, Request())
    assert isinstance(task, CharacterStreams)
    assert task.metric == "bits-per-character"
    rows = encoded(task, "The cat.\nA dog!\n")
    found = read(task, rows, reader(held.model))
    perplexity = make_task(held, Request(metric="perplexity")).score(found)
    assert task.score(found) == pytest.approx(math.log2(perplexity))
    assert task.chooser.score(found) == task.score(found)


@settings(max_examples=60, deadline=None)
@given(text=st.text(st.sampled_from(LETTERS + LETTERS.upper() + " \n.,0é"), max_size=40))
def test_characters_are_a_to_z_and_the_space(text: str) -> None:
    tokenizer = characters()
    ids = tokenizer([text], add_special_tokens=False)["input_ids"][0]
    assert len(tokenizer) == 27
    assert tokenizer.decode(ids) == re.sub("[^a-z]+", " ", text.lower())


def test_words_are_ranked_and_lines_end(tmp_path: Path) -> None:
    words(["the cat", "the dog <unk>"], 5).save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer.convert_ids_to_tokens(list(range(5))) == ["<unk>", "<eos>", "the", "cat", "dog"]
    assert tokenizer(["the bird <unk>\n\nthe"])["input_ids"] == [[2, 0, 0, 1, 1, 2]]
    assert len(words(["the cat", "the dog <unk>"], 3)) == 3
    with pytest.raises(InputError, match="the text holds no word"):
        words(["", " "])


def test_rows_of_a_column_end_as_lines_do(tmp_path: Path) -> None:
    held = language.folder()
    (tmp_path / "a.txt.xz").write_bytes(lzma.compress(b"one two\nthree\nfour five\n"))
    (tmp_path / "b.tsv").write_text("id\ttext\n1\tone two\n2\tthree\n3\tfour five\n")
    found = [
        open_data(Request(test_data=str(tmp_path / name), max_length=3), held).test["input_ids"]
        for name in ("a.txt.xz", "b.tsv")
    ]
    assert list(found[0]) == list(found[1])
    assert [len(row) for row in found[0]] == [4, 4, 2]


def test_segments_leave_room_for_the_memory() -> None:
    held = language.folder(memory=8)
    held.config.max_position_embeddings = 12
    task = make_task(held, Request(max_length=6))
    assert max(encoded(task, language.text(9))["length"]) == 4 + 1
    assert task.notes == (
        "segments are of 4 tokens, not the 6 of --max-length: a memory of 8 leaves no more room in 12 positions",
    )
    assert not make_task(held, Request(max_length=4)).notes
    held.config.max_position_embeddings = 8
    with pytest.raises(InputError, match="a memory of 8 leaves no room for a segment in 8 positions; raise"):
        make_task(held, Request())


def test_a_text_of_other_words_is_refused() -> None:
    with pytest.raises(
        InputError,
        match=r"text: \d+% of its tokens are unknown to the tokenizer of model; give a text like .* \(--vocabulary\)$",
    ):
        encoded(streams(), "drei vier\nfünf sechs\n")


def test_a_text_of_other_letters_is_refused() -> None:
    task = make_task(language.folder(characters()), Request())
    with pytest.raises(InputError, match=r"text: 100% of its characters are unknown to the tokenizer of model; give"):
        encoded(task, "один два три\n" * 2500)
    with pytest.raises(InputError, match=r"text: 60% of its characters .* made from$"):
        encoded(task, "ab 012\n")
    assert len(encoded(task, "für, 1 2 3 Leute.\n" * 9))


@settings(max_examples=30, deadline=None)
@given(lines=st.lists(st.text(st.sampled_from("abZ .0"), max_size=4), min_size=1, max_size=12), chunk=st.integers(1, 4))
def test_chunks_of_letters_are_joined_as_the_whole_text_reads(lines: list[str], chunk: int) -> None:
    task = make_task(language.folder(characters()), Request())
    assert isinstance(task, CharacterStreams)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(causal_lm, "_CHUNK", chunk)
        found = task._stream(lines, lines=True)
    assert task._tokenizer.decode(found) == re.sub("[^a-z]+", " ", "".join(f"{line}\n" for line in lines).lower())
    assert found.tolist() == task._stream(lines, lines=False).tolist()  # letters have no end token


def test_a_row_is_kept_as_its_tokens_alone() -> None:
    for task in (streams(), make_task(language.folder(), Request(max_length=6)).chooser):
        rows = encoded(task, language.text(12))
        assert (rows.column_names, rows.features["input_ids"].feature.dtype) == (["input_ids", "length"], "int32")


def test_a_tokenizer_of_another_size_is_refused() -> None:
    held = replace(language.folder(), processor=folders.tokenizer())
    with pytest.raises(InputError, match="model: the tokenizer has 25 tokens, the model 12; save the tokenizer"):
        make_task(held, Request())


def test_words_have_no_bits_per_character() -> None:
    with pytest.raises(UsageError, match="--metric bits-per-character: causal-lm is scored by perplexity"):
        make_task(language.folder(), Request(metric="bits-per-character"))
