"""Streams: every token is predicted once, from all tokens before it that the memory holds."""

from __future__ import annotations

import itertools
import lzma
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from compressor.errors import ErrorCode
from compressor.models.forwards import reader
from compressor.results import MetricUnit, NoteCode
from compressor.tasks import Task, make_task, open_data
from compressor.tasks.causal_lm import FILLER, CharacterStreams, Streams, assign_streams, read
from compressor.training.tokenizers import characters, words
from tests import folders, language
from tests.faults import fails_with
from tests.folders import rows_config
from tests.tasks.rows import forward_of

LETTERS = "abcdefghijklmnopqrstuvwxyz"


def streams(segment: int = 6) -> Streams:
    task = make_task(language.folder(), rows_config(max_length=segment))
    assert isinstance(task, Streams)
    return task


def letter_streams(**fields: Any) -> CharacterStreams:
    task = make_task(language.folder(characters()), rows_config(**fields))
    assert isinstance(task, CharacterStreams)
    return task


def encode(task: Task, text: str) -> Dataset:
    return task.encode(Dataset.from_dict({"text": text.rstrip("\n").split("\n")}), "text")


@settings(max_examples=15, deadline=None)
@given(lines=st.integers(1, 9), segment=st.integers(1, 12), seed=st.integers(0, 99))
def test_every_token_but_the_first_is_a_target_once(lines: int, segment: int, seed: int) -> None:
    folder = language.folder()
    task = make_task(folder, rows_config(max_length=segment))
    text = language.text(lines, seed)
    (ids,) = folder.processor([text])["input_ids"]
    rows = encode(task, text)
    batches = [task.collate([row]) for row in rows]
    assert [token for batch in batches for token in batch["input_ids"][0].tolist()] == ids[:-1]
    assert [token for batch in batches for token in batch["shift_labels"][0].tolist()] == ids[1:]
    assert all(len(row["input_ids"]) == segment + 1 for row in list(rows)[:-1])


@settings(max_examples=100, deadline=None)
@given(rows=st.integers(1, 200), side_by_side=st.integers(1, 20), whole=st.booleans())
def test_streams_are_sections_of_the_text(rows: int, side_by_side: int, whole: bool) -> None:
    if not whole and rows < side_by_side:
        with fails_with(ErrorCode.TOO_FEW_ROWS, rows=rows, minimum=side_by_side):
            assign_streams(rows, side_by_side, whole=whole)
        return
    numbers = assign_streams(rows, side_by_side, whole=whole)
    in_order = [row for row in numbers.T.ravel().tolist() if row != FILLER]
    assert in_order == list(range(len(in_order)))
    assert len(in_order) == (rows if whole else rows // side_by_side * side_by_side)
    for stream in numbers.T:  # fillers are at the end of a stream
        assert sorted(stream == FILLER) == list(stream == FILLER)


@pytest.mark.parametrize("family", ["all-attention", "transformer-xl"])
def test_reading_in_segments_equals_reading_whole_if_memory_holds_the_text(family: str) -> None:
    folder = language.folder(architecture=family, memory=400)
    task = make_task(folder, rows_config(max_length=7))
    assert isinstance(task, Streams)
    rows = encode(task, language.text(12))
    measured = read(task, rows, reader(folder.model), streams=1)
    ids = [token for row in rows for token in row["input_ids"][:-1]] + [rows[len(rows) - 1]["input_ids"][-1]]
    tokens = torch.tensor([ids])
    with torch.no_grad():
        loss = folder.model(input_ids=tokens, labels=tokens).loss
    assert task.score(measured) == pytest.approx(math.exp(loss.item()), rel=1e-4)
    assert measured[:, 1].sum() == len(ids) - 1


def test_memory_has_an_effect() -> None:
    folder, task = language.folder(), streams()
    rows = encode(task, language.text(12))
    with_memory = read(task, rows, reader(folder.model), streams=1)
    without = read(task, rows, reader(folder.model), streams=len(rows))
    assert with_memory[0] == pytest.approx(without[0])
    assert not np.allclose(with_memory[1:], without[1:])


def test_a_search_reads_the_same_targets_without_memory() -> None:
    folder, task = language.folder(), streams()
    rows = encode(task, language.text(12))
    independent = task.chooser
    assert not isinstance(independent, Streams)
    assert independent.metric == task.metric
    measured = independent.measure(forward_of(folder.model), list(rows))
    assert measured == pytest.approx(read(task, rows, reader(folder.model), streams=len(rows)), rel=1e-4)
    assert independent.score(measured) == pytest.approx(task.score(measured))


def test_the_last_rows_are_set_aside(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(language.text(60))
    data = open_data(rows_config(data=str(tmp_path / "text.txt"), max_length=6), language.folder())
    rows = [list(row["input_ids"]) for part in (data.train, data.eval, data.test) for row in part]
    assert all(before[-1] == after[0] for before, after in itertools.pairwise(rows))
    assert [note.code for note in data.notes] == [NoteCode.ROWS_SET_ASIDE] * 2


def test_bits_per_character_equal_the_logarithm_of_the_perplexity() -> None:
    folder, task = language.folder(characters()), letter_streams()
    assert (task.metric, task.metric_unit, task.higher_is_better) == ("bits-per-character", MetricUnit.RAW, False)
    measured = read(task, encode(task, "The cat.\nA dog!\n"), reader(folder.model))
    perplexity = letter_streams(metric="perplexity").score(measured)
    assert task.score(measured) == pytest.approx(math.log2(perplexity))
    assert task.chooser.score(measured) == task.score(measured)


@settings(max_examples=25, deadline=None)
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
    with fails_with(ErrorCode.INVALID_ROWS):
        words(["", " "])


def test_rows_of_a_column_end_like_lines(tmp_path: Path) -> None:
    folder = language.folder()
    (tmp_path / "a.txt.xz").write_bytes(lzma.compress(b"one two\nthree\nfour five\n"))
    (tmp_path / "b.tsv").write_text("id\ttext\n1\tone two\n2\tthree\n3\tfour five\n")
    lines, column = (
        open_data(rows_config(test_data=str(tmp_path / name), max_length=3), folder).test["input_ids"]
        for name in ("a.txt.xz", "b.tsv")
    )
    assert list(lines) == list(column)
    assert [len(row) for row in lines] == [4, 4, 2]


def test_segments_leave_room_for_the_memory() -> None:
    folder = language.folder(memory=8)
    folder.config.max_position_embeddings = 12
    task = make_task(folder, rows_config(max_length=6))
    assert max(encode(task, language.text(9))["length"]) == 4 + 1
    (note,) = task.notes
    assert note.code is NoteCode.SEGMENT_SHORTENED
    assert "4 tokens instead of the 6" in note.text
    assert not make_task(folder, rows_config(max_length=4)).notes
    folder.config.max_position_embeddings = 8
    with fails_with(ErrorCode.OUT_OF_RANGE, field="max_position_embeddings", value=8, minimum=9):
        make_task(folder, rows_config())


def test_a_text_of_unknown_words_is_refused() -> None:
    with fails_with(ErrorCode.FILE_MISMATCH, unit="tokens", path=Path("model")) as caught:
        encode(streams(), "drei vier\nfünf sechs\n")
    assert caught.value.details["share"] > 0.5
    assert "--vocabulary" in str(caught.value)


@pytest.mark.parametrize(("text", "share"), [("один два три\n" * 2500, 1.0), ("ab 012\n", 0.6)])
def test_a_text_of_unknown_letters_is_refused(text: str, share: float) -> None:
    with fails_with(ErrorCode.FILE_MISMATCH, unit="characters", share=share) as caught:
        encode(letter_streams(), text)
    assert "--vocabulary" not in str(caught.value)


def test_a_text_of_some_unknown_letters_is_read() -> None:
    assert len(encode(letter_streams(), "für, 1 2 3 Leute.\n" * 9))


@settings(max_examples=15, deadline=None)
@given(lines=st.lists(st.text(st.sampled_from("abZ .0"), max_size=4), min_size=1, max_size=12), chunk=st.integers(1, 4))
def test_chunks_of_letters_join_to_the_whole_text(lines: list[str], chunk: int) -> None:
    class SmallChunks(CharacterStreams):
        joined_rows = chunk

    folder = language.folder(characters())
    whole, chunked = (
        task(folder, rows_config(), task.metrics[0]).token_stream(lines, lines=True)
        for task in (CharacterStreams, SmallChunks)
    )
    text = "".join(f"{line}\n" for line in lines).lower()
    assert folder.processor.decode(chunked) == re.sub("[^a-z]+", " ", text)
    assert chunked.tolist() == whole.tolist()


def test_lines_and_texts_of_letters_are_read_alike() -> None:
    """Letters have no end token."""
    task = letter_streams()
    texts = ["a b", "", " z"]
    assert task.token_stream(texts, lines=True).tolist() == task.token_stream(texts, lines=False).tolist()


def test_a_row_holds_only_its_tokens() -> None:
    for task in (streams(), streams().chooser):
        rows = encode(task, language.text(12))
        assert (rows.column_names, rows.features["input_ids"].feature.dtype) == (["input_ids", "length"], "int32")


def test_a_tokenizer_of_another_size_is_refused() -> None:
    folder = replace(language.folder(), processor=folders.tokenizer())
    with fails_with(ErrorCode.FILE_MISMATCH, tokens=25, vocab_size=12):
        make_task(folder, rows_config())
