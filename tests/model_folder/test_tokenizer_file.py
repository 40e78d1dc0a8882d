"""A tokenizer that is read without transformers encodes texts as transformers does."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import transformers as hf
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from compressor.errors import ErrorCode, TargetMissingError
from compressor.model_folder import processor as processors
from compressor.model_folder.tokenizer_file import TokenizerFile
from compressor.training import tokenizers as trained
from tests import folders
from tests.faults import fails_with
from tests.tasks import questions, tags, translations

KINDS = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
LINES = ["the good film was not bad at all", "Ünïcode and 東京, naïve cafés!", "isn't it 3.14 <b>bold</b>?"] * 20


def byte_pairs(special: Sequence[str]) -> Tokenizer:
    """A byte-level BPE of a few lines."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=list(special), initial_alphabet=alphabet)
    tokenizer.train_from_iterator(LINES, trainer)
    return tokenizer


def bpe_files(special: Sequence[str]) -> tuple[Any, Any]:
    """The vocabulary and the merges of `byte_pairs`."""
    model = json.loads(byte_pairs(special).to_str())["model"]
    return model["vocab"], [tuple(pair) for pair in model["merges"]]


def bert() -> Any:
    """The class of BERT, with a vocabulary of pieces."""
    pieces = [*folders.SPECIAL_TOKENS, *"abcdefghijklmnopqrstuvwxyz.,!?'", "the", "##s", "film", "good", "##ly"]
    pieces += [f"##{letter}" for letter in "abcdefghijklmnopqrtuvwxyz"]
    return hf.BertTokenizer(vocab={piece: number for number, piece in enumerate(pieces)})


def gpt2() -> Any:
    return hf.GPT2Tokenizer(*bpe_files(["<|endoftext|>"]))


def roberta() -> Any:
    return hf.RobertaTokenizer(*bpe_files(["<s>", "<pad>", "</s>", "<unk>", "<mask>"]))


def with_ends() -> Any:
    """A tokenizer whose configuration adds the tokens at both ends, on the left side of padding."""
    tokenizer = byte_pairs(["<s>", "</s>", "<pad>"])
    ends = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    sides = {"padding_side": "left", "truncation_side": "left", "model_max_length": 9}
    return hf.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        add_bos_token=True,
        add_eos_token=True,
        extra_special_tokens=["<x>"],
        **ends,
        **sides,
    )


MAKERS: dict[str, Callable[[], Any]] = {
    "words": folders.tokenizer,
    "pieces": questions.wordpieces,
    "unigrams": tags.metaspace,
    "bytes": questions.byte_pieces,
    "translation": translations.tokenizer,
    "text": lambda: trained.words(LINES),
    "letters": trained.characters,
    "bert": bert,
    "gpt2": gpt2,
    "roberta": roberta,
    "ends": with_ends,
}


class Pair(NamedTuple):
    """A tokenizer as transformers loads it from a folder, and as it is read without."""

    whole: Any
    light: TokenizerFile


QUICK = ("words", "bert", "roberta", "ends")


@pytest.fixture(
    scope="module", params=[name if name in QUICK else pytest.param(name, marks=pytest.mark.zoo) for name in MAKERS]
)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    path = tmp_path_factory.mktemp("tokenizer")
    MAKERS[request.param]().save_pretrained(path)
    return Pair(hf.AutoTokenizer.from_pretrained(path), TokenizerFile(path))


WORDS = st.one_of(
    st.text(max_size=6),
    st.sampled_from(["the", "Good", "film", "[MASK]", "<mask>", "<s>", "</s>", "[SEP]", "<x>", " "]),
)
TEXTS = st.lists(WORDS, max_size=6).map(" ".join)


def assert_equal(light: Any, whole: Any) -> None:
    assert {name: list(values) for name, values in light.items()} == {name: list(v) for name, v in whole.items()}


@settings(max_examples=12, deadline=None)
@given(texts=st.lists(st.tuples(TEXTS, TEXTS), min_size=1, max_size=3), longest=st.integers(5, 12))
def test_texts_and_pairs_have_equal_tokens(pair: Pair, texts: list[tuple[str, str]], longest: int) -> None:
    first, second = (list(column) for column in zip(*texts, strict=True))
    options: dict[str, Any] = {"truncation": True, "max_length": longest, "return_token_type_ids": True}
    for columns in ([first], [first, second]):
        light, whole = (tokenizer(*columns, **options) for tokenizer in (pair.light, pair.whole))
        assert_equal(light, whole)
        assert [[len(rest.ids) for rest in encoding.overflowing] for encoding in light.encodings] == [
            [len(rest.ids) for rest in encoding.overflowing] for encoding in whole.encodings
        ]
    light, whole = (tokenizer(first, add_special_tokens=False, verbose=False) for tokenizer in pair)
    assert_equal(light, whole)
    assert_equal(*(tokenizer(first[0], return_special_tokens_mask=True) for tokenizer in pair))
    for ids in light["input_ids"]:
        assert pair.light.decode(ids) == pair.whole.decode(ids)
        assert pair.light.decode(ids, True) == pair.whole.decode(ids, skip_special_tokens=True)
        assert pair.light.convert_ids_to_tokens(ids) == pair.whole.convert_ids_to_tokens(ids)


@settings(max_examples=12, deadline=None)
@given(question=TEXTS, context=TEXTS, stride=st.integers(0, 2))
def test_windows_have_equal_tokens(pair: Pair, question: str, context: str, stride: int) -> None:
    assume(len(pair.whole(question, add_special_tokens=False)["input_ids"]) < 6)
    options: dict[str, Any] = {"truncation": "only_second", "max_length": 12, "stride": stride}
    options |= {"return_overflowing_tokens": True, "return_offsets_mapping": True}
    light, whole = (tokenizer([question], [context], **options) for tokenizer in (pair.light, pair.whole))
    assert_equal(light, whole)
    windows = range(len(light["input_ids"]))
    assert [light.sequence_ids(number) for number in windows] == [whole.sequence_ids(number) for number in windows]


@settings(max_examples=12, deadline=None)
@given(sentences=st.lists(st.lists(WORDS, min_size=1, max_size=5), min_size=1, max_size=3))
def test_words_have_equal_tokens(pair: Pair, sentences: list[list[str]]) -> None:
    light, whole = (tokenizer(sentences, is_split_into_words=True) for tokenizer in (pair.light, pair.whole))
    assert_equal(light, whole)
    assert [encoding.word_ids for encoding in light.encodings] == [encoding.word_ids for encoding in whole.encodings]


def test_special_tokens_are_equal(pair: Pair) -> None:
    light, whole = pair
    for kind in KINDS:
        assert getattr(light, f"{kind}_token") == getattr(whole, f"{kind}_token"), kind
        assert getattr(light, f"{kind}_token_id") == getattr(whole, f"{kind}_token_id"), kind
    assert light.all_special_tokens == whole.all_special_tokens
    assert light.all_special_ids == whole.all_special_ids
    assert (len(light), light.get_vocab()) == (len(whole), whole.get_vocab())
    assert light.added_tokens_decoder.keys() == whole.added_tokens_decoder.keys()
    assert (light.padding_side, light.model_max_length) == (whole.padding_side, whole.model_max_length)
    assert [light.num_special_tokens_to_add(two) for two in (False, True)] == [
        whole.num_special_tokens_to_add(two) for two in (False, True)
    ]


@pytest.mark.parametrize("side", ["right", "left"])
def test_texts_are_padded_as_by_transformers(side: str, tmp_path: Path) -> None:
    folders.tokenizer().save_pretrained(tmp_path)
    light, whole = TokenizerFile(tmp_path), hf.AutoTokenizer.from_pretrained(tmp_path)
    padded = []
    for tokenizer in (light, whole):
        tokenizer.padding_side = side
        padded.append(tokenizer.pad(tokenizer(["good film", "bad"]), padding="max_length", max_length=7))
    assert_equal(*padded)


def test_a_tokenizer_of_other_files_needs_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processors, "find_spec", lambda name: None)
    (tmp_path / "vocab.txt").write_text("[UNK]\n")
    with fails_with(ErrorCode.PACKAGE_MISSING, TargetMissingError, package="transformers"):
        processors.load_processor(tmp_path)
    folders.tokenizer().save_pretrained(tmp_path)
    assert isinstance(processors.load_processor(tmp_path), TokenizerFile)
    (tmp_path / "tokenizer.json").write_text("{")
    with fails_with(ErrorCode.FILE_UNREADABLE):
        processors.load_processor(tmp_path)


def test_a_folder_that_names_no_special_token_has_the_usual_ones(tmp_path: Path) -> None:
    bert().save_pretrained(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "BertTokenizer"}')
    light, whole = TokenizerFile(tmp_path), hf.AutoTokenizer.from_pretrained(tmp_path)
    assert light.all_special_tokens == whole.all_special_tokens
    assert light("good film", "the")["input_ids"] == whole("good film", "the")["input_ids"]
