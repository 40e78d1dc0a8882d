"""Question answering: SQuAD's metrics, windows that lose nothing of a context, the best span of all of them."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from datasets import Dataset
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedModel, PreTrainedTokenizerFast

import compressor
from compressor.config.run import Recipe
from compressor.errors import InputError, UsageError
from compressor.model_folder import ModelFolder, example_inputs, load
from compressor.report import Report
from compressor.selection.gradient_importance import sensitivity
from compressor.tasks import Data, batches, open_data, statistics
from compressor.tasks.data import rows_hash
from compressor.tasks.question_answering import QuestionAnswering, best_span
from compressor.tasks.squad import Answer, exact_match, f1
from compressor.units import find_sites
from tests import folders
from tests.folders import Request

LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789.,'é"
WORDS = "paris rome river tall the of in built tower who city 1889".split()
WORD = st.one_of(st.sampled_from([*WORDS, "Tower.", "d'été"]), st.text(LETTERS, min_size=1, max_size=8))
CONTEXTS = st.lists(WORD, min_size=1).map(" ".join)


def wordpieces() -> PreTrainedTokenizerFast:
    """BERT's: whole words and letters."""
    marks = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")
    pieces = (*marks, *WORDS, *LETTERS, *(f"##{letter}" for letter in LETTERS))
    made = Tokenizer(models.WordPiece({piece: at for at, piece in enumerate(dict.fromkeys(pieces))}, unk_token="[UNK]"))
    made.normalizer = normalizers.BertNormalizer(strip_accents=False)
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    names = ["input_ids", "token_type_ids", "attention_mask"]
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        model_input_names=names,
    )


def bytes_() -> PreTrainedTokenizerFast:
    """GPT-2's, of bytes: a space belongs to the word behind it, a letter may be two tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({piece: at for at, piece in enumerate(["<s>", *alphabet])}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.post_processor = processors.TemplateProcessing(
        single="<s> $A <s>", pair="<s> $A <s> $B <s>", special_tokens=[("<s>", 0)]
    )
    names = ["input_ids", "attention_mask"]
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<s>", eos_token="<s>", model_input_names=names)


def bert() -> PreTrainedModel:
    """A BERT of one layer, two heads of 8."""
    return hf.BertForQuestionAnswering(
        hf.BertConfig(
            vocab_size=len(wordpieces()),
            hidden_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=20,
            max_position_embeddings=64,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
    )


def folder_of(tokenizer: Any) -> ModelFolder:
    model = bert()
    return ModelFolder(Path("model"), model, tokenizer, model.config, "sha256:1", "question-answering", "bert")


def task_of(tokenizer: Any, max_length: int = 24, stride: int = 5, metric: str = "f1") -> QuestionAnswering:
    return QuestionAnswering(folder_of(tokenizer), Request(max_length=max_length, stride=stride), metric)


TASKS = {make: task_of(make()) for make in (wordpieces, bytes_)}


def row(context: str, question: str = "who", *answers: Answer) -> dict[str, Any]:
    given_ = answers or (Answer(context.split()[0], context.index(context.split()[0])),)
    return {"id": "1", "context": context, "question": question, "answers": [answer._asdict() for answer in given_]}


def jsonl(path: Path, *rows: dict[str, Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def encoded(task: QuestionAnswering, *rows: dict[str, Any]) -> Any:
    made = Dataset.from_list(list(rows))
    task.learn_labels(made, "rows")
    return task.encode(made, "rows")


# The metrics


@pytest.mark.parametrize(
    ("said", "answers", "f1_", "exact"),
    [
        ("Paris", ["Paris"], 1, 1),
        ("the Paris!", ["paris"], 1, 1),
        ("in Paris", ["Paris"], 2 / 3, 0),  # one word of two is right, and the only one is found
        ("Paris, France", ["London", "Paris in France"], 4 / 5, 0),  # 2 of 2, and 2 of 3
        ("the the cat", ["cat cat"], 2 / 3, 0),  # a word counts as often as it is in both
        ("Rome", ["Paris"], 0, 0),
        ("", ["Paris"], 0, 0),
        ("the", ["a"], 1, 1),
    ],
)
def test_metrics_worked_by_hand(said: str, answers: list[str], f1_: float, exact: float) -> None:
    assert f1(said, answers) == pytest.approx(f1_)
    assert exact_match(said, answers) == exact


@settings(deadline=None)
@given(*(st.text("abtheAn .,-é'", max_size=30),) * 3)
def test_metrics_of_any_texts(said: str, answer: str, other: str) -> None:
    found = f1(said, [answer])
    assert 0 <= found <= 1
    assert found == f1(answer, [said])
    assert found == 1 or not exact_match(said, [answer])
    assert f1(f"The {said.upper()}.", [answer]) == found
    assert f1(said, [answer, other]) == max(found, f1(said, [other]))
    assert exact_match(said, [other, said]) == 1


def test_the_metric_is_a_mean_over_questions() -> None:
    found = np.array([[1.0, 1.0], [0.5, 0.0]])
    assert TASKS[wordpieces].score(found) == 0.75
    assert task_of(wordpieces(), metric="exact-match").score(found) == 0.5


# Windows and spans


@pytest.mark.parametrize("tokenizer", [wordpieces, bytes_])
@settings(max_examples=40, deadline=None)
@given(CONTEXTS, st.text("ab ", min_size=1, max_size=40).filter(str.strip))
def test_windows_lose_nothing_of_a_context(tokenizer: Any, context: str, question: str) -> None:
    task = TASKS[tokenizer]
    example = encoded(task, row(context, question))[0]
    windows = task._asked[example["number"]].windows
    seen = np.zeros(len(context), bool)
    for window in windows:
        for begin, end in window.characters:
            seen[begin:end] = True
    assert all(there or letter.isspace() for letter, there in zip(context, seen, strict=True))
    assert all(len(ids) <= 24 for ids in example["input_ids"])
    for one, next_ in itertools.pairwise(windows):
        assert np.array_equal(one.characters[-5:], next_.characters[:5])


@pytest.mark.parametrize("tokenizer", [wordpieces, bytes_])
@settings(max_examples=40, deadline=None)
@given(CONTEXTS, st.data())
def test_an_answer_comes_back_from_its_tokens(tokenizer: Any, context: str, draw: st.DataObject) -> None:
    """Wherever all of it is in a window; elsewhere the label is the first token."""
    words = context.split(" ")
    one = draw.draw(st.integers(0, len(words) - 1))
    last = draw.draw(st.integers(one, min(one + 2, len(words) - 1)))
    answer = " ".join(words[one : last + 1])
    start = len(" ".join(words[:one])) + (one > 0)
    task = TASKS[tokenizer]
    example = encoded(task, row(context, "who", Answer(answer, start)))[0]
    asked = task._asked[example["number"]]
    for window, (begin, end) in zip(asked.windows, example["labels"], strict=True):
        inside = window.characters[0, 0] <= start and window.characters[-1, 1] >= start + len(answer)
        assert (begin, end) == (0, 0) or inside
        if inside:
            span = window.characters[begin - window.first][0], window.characters[end - window.first][1]
            assert context[slice(*span)].strip() == answer


@given(st.lists(st.tuples(*(st.integers(-4, 4),) * 2), min_size=1, max_size=12), st.integers(1, 5))
def test_the_best_span_is_the_best_of_all(logits: list[tuple[int, int]], longest: int) -> None:
    start, end = np.array(logits, float).T
    spans = [(i, j) for i in range(len(logits)) for j in range(i, min(i + longest, len(logits)))]
    score, one, last = best_span(start, end, longest)
    assert (one, last) in spans
    assert score == start[one] + end[last] == max(start[i] + end[j] for i, j in spans)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 60), st.integers(0, 999))
def test_the_answer_is_the_best_span_of_any_window(words: int, seed: int) -> None:
    """Against brute force over windows and spans; neither question, marks nor padding answer."""
    rng = np.random.default_rng(seed)
    task = TASKS[wordpieces]
    context = " ".join(f"{WORDS[rng.integers(len(WORDS))]}" for _ in range(words))
    asked = task._asked[encoded(task, row(context))[0]["number"]]
    logits = rng.normal(size=(len(asked.windows), 24, 2))
    logits[:, :3] += 9
    spans = [
        (logits[at, window.first + i, 0] + logits[at, window.first + j, 1], window.characters[i, 0], characters[j, 1])
        for at, window in enumerate(asked.windows)
        for characters in [window.characters]
        for i in range(len(characters))
        for j in range(i, min(i + 30, len(characters)))
    ]
    _, begin, end = max(spans)
    assert asked.predicted(logits) == context[begin:end]


def test_questions_are_scored_apart_whatever_batch_they_are_in() -> None:
    task = task_of(wordpieces())
    long = " ".join(["river"] * 40)
    rows = encoded(task, row("rome paris"), row(f"{long} paris", "who", Answer("paris", len(long) + 1)), row("tower"))
    assert [len(ids) for ids in rows["input_ids"]] == [1, 3, 1]

    def first_of_context(batch: dict[str, torch.Tensor]) -> np.ndarray:
        """Points at the city where there is one, with more confidence than elsewhere."""
        ids = batch["input_ids"].numpy()
        city = wordpieces().convert_tokens_to_ids("paris")
        return np.repeat((9.0 * (ids == city) + (batch["token_type_ids"].numpy() == 1))[..., None], 2, axis=-1)

    for size in (1, 2, 3):
        assert statistics(task, rows, first_of_context, size).tolist() == [[0, 0], [1, 1], [1, 1]]


def test_long_questions_are_cut_and_leave_room() -> None:
    task = task_of(wordpieces())
    rows = encoded(task, row("rome paris", " ".join(["river"] * 50)))
    (window,) = task._asked[rows[0]["number"]].windows
    assert (window.first, len(window.characters), rows["length"][0]) == (12, 2, 15)


# Rows


def test_answers_come_in_several_forms(tmp_path: Path) -> None:
    context = "the tower in paris"
    texts, starts = ["paris", "in paris"], [13, 10]
    as_list = [{"text": text, "start": start} for text, start in zip(texts, starts, strict=True)]
    forms: list[Any] = [
        as_list,
        [{"text": text, "answer_start": start} for text, start in zip(texts, starts, strict=True)],
        {"text": texts, "answer_start": starts},
        json.dumps(as_list),
        json.dumps({"text": texts, "answer_start": starts}),
    ]
    files = [
        jsonl(tmp_path / f"{at}.jsonl", {"context": context, "question": "who", "answers": form})
        for at, form in enumerate(forms)
    ]
    tsv = tmp_path / "rows.tsv"
    tsv.write_text(f"passage\tquestion\tanswer\n{context}\twho\t{json.dumps(as_list)}\n")
    found = [open_data(Request(name, name, name), folder_of(wordpieces())).test for name in (*files, str(tsv))]
    assert found[0]["reference"][0] == texts
    assert len({rows_hash(rows) for rows in found}) == 1


def test_columns_are_named(tmp_path: Path) -> None:
    rows = jsonl(tmp_path / "a.jsonl", {"q": "who", "c": "in rome", "gold": [{"text": "rome", "start": 3}]})
    request = Request(rows, rows, rows, text_columns=("q", "c"), label_column="gold")
    data = open_data(request, folder_of(wordpieces()))
    assert data.test["labels"][0] == [[4, 4]]
    assert "each 'q' is answered by a stretch of its 'c'" in data.notes[0]


def test_batches_hold_windows(tmp_path: Path) -> None:
    task = task_of(wordpieces(), max_length=12, stride=2)
    rows = encoded(task, row("in rome"), row("the tower of the city of paris", "who", Answer("paris", 25)))
    batch = task.collate(list(rows))
    assert batch["input_ids"].shape == batch["token_type_ids"].shape == batch["attention_mask"].shape == (2, 11)
    assert batch["attention_mask"].sum(1).tolist() == [6, 11]
    assert batch["spans"].tolist() == [[[3, 3, 0]], [[9, 9, 1]]]
    long = encoded(task, row("in rome"), row("who built the tower of the city of paris", "who", Answer("paris", 35)))
    spans = task.collate(list(long))["spans"]
    assert spans.tolist() == [[[3, 3, 2], [-100] * 3], [[0, 0, 3], [5, 5, 3]]]


def test_the_loss_is_the_models_over_windows() -> None:
    task = task_of(wordpieces(), max_length=12, stride=2)
    model = task_model()
    rows = encoded(task, row("in rome"), row("who built the tower of the city of paris", "who", Answer("paris", 35)))
    batch = task.collate(list(rows))
    out = model(**task.labelled(batch))
    places = torch.tensor([3, 0, 5])
    losses = [torch.nn.functional.cross_entropy(logits, places) for logits in (out.start_logits, out.end_logits)]
    torch.testing.assert_close(out.loss, torch.stack(losses).mean())


def test_sensitivity_weighs_every_window_alike() -> None:
    """All of them full, as the model's loss is over padding, too."""
    task, model = task_of(wordpieces(), max_length=12, stride=2), task_model()
    rows = encoded(task, *(row(" ".join((WORDS * 3)[at : at + count])) for at, count in enumerate((8, 20, 14))))
    sites = find_sites(model, {"input_ids": torch.ones(2, 4, dtype=torch.int64)})
    every = torch.ones(2, dtype=torch.bool)
    together, alone = (
        sensitivity(model, sites, every, [task.labelled(batch) for _, batch in batches(task, rows, size)])
        for size in (3, 1)
    )
    assert (together > 0).all()
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-6)


def task_model() -> PreTrainedModel:
    torch.manual_seed(0)
    model = bert()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.4)
    return model.eval()


# The whole way


def city(seed: int) -> dict[str, Any]:
    """Who built what is asked; the answer is the city, wherever it stands."""
    rng = np.random.default_rng(seed)
    words = [WORDS[at] for at in rng.integers(2, 7, rng.integers(2, 24))]
    words[at := int(rng.integers(len(words)))] = str(rng.choice(["paris", "rome"]))
    return row(" ".join(words), "who built", Answer(words[at], len(" ".join(words[:at])) + (at > 0)))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A BERT that finds the city."""
    path = tmp_path_factory.mktemp("answers")
    rows = jsonl(path / "rows.jsonl", *(city(seed) for seed in range(48)))
    torch.manual_seed(0)
    bert().save_pretrained(path / "model")
    wordpieces().save_pretrained(path / "model")
    made = load(path / "model")
    data = open_data(Request(rows, rows, rows, max_length=16, stride=3), made)
    batch = data.task.labelled(data.task.collate(list(data.train)))
    optimizer = torch.optim.Adam(made.model.parameters(), lr=0.02)
    for _ in range(80):
        optimizer.zero_grad()
        made.model(**batch).loss.backward()
        optimizer.step()
    made.model.save_pretrained(path / "model")
    return path


def test_the_task_follows_from_the_class(place: Path) -> None:
    folder = load(place / "model")
    assert folder.task == "question-answering"
    assert set(example_inputs(folder, 2, 8)) == {"input_ids", "attention_mask", "token_type_ids"}


@pytest.fixture(scope="module", params=["dsp", pytest.param("taylor", marks=pytest.mark.zoo)])
def report(request: pytest.FixtureRequest, place: Path, tmp_path_factory: pytest.TempPathFactory) -> Report:
    return compressor.compress(
        Recipe(
            model=place / "model",
            data=str(place / "rows.jsonl"),
            method=request.param,
            keep="50%",
            steps=4,
            batch_size=8,
            max_length=16,
            stride=3,
            batch=(1,),
            seq=(8,),
            seconds=0.01,
            options={"evaluations": 2} if request.param == "dsp" else {},
            out=tmp_path_factory.mktemp("out") / "out",
        )
    )


def test_the_report_compares_f1_on_the_engines(report: Report, place: Path) -> None:
    folder = load(place / "model")
    data = open_data(Request(str(place / "rows.jsonl"), max_length=16, stride=3), folder)
    (score,) = report.scores
    assert score.dense == data.task.score(statistics(data.task, data.test, runs(data, folder.model)))
    assert (report.task, score.metric, score.rows) == ("question-answering", "f1", len(data.test))
    assert score.dense > 0.8
    assert report.plan.heads_kept == 1
    assert len(report.proofs) == 6
    assert all(proof.holds for proof in report.proofs)
    assert any("windows that share 3 tokens" in note for note in report.notes)
    assert any("eval_f1" in point.values for point in report.curves)


def runs(data: Data, model: PreTrainedModel) -> Any:
    def forward(batch: dict[str, torch.Tensor]) -> np.ndarray:
        with torch.no_grad():
            return data.task.scored(model(**batch))

    return forward


# Bad input


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"answers": [{"text": "rome", "start": 2}]}, "row 2: the answer 'rome' does not stand at character 2"),
        ({"answers": [{"text": "rome", "start": -4}]}, "row 2: the answer 'rome' does not stand at character -4"),
        ({"answers": [{"text": "rome", "start": 99}]}, "row 2: the answer 'rome' does not stand at character 99"),
        ({"answers": [{"text": " ", "start": 2}]}, "row 2: the answer ' ' does not stand"),
        ({"answers": []}, "row 2 has no answer; leave out the questions"),
        ({"answers": None}, r"row 2: 'answers' does not hold answers; write \["),
        ({"context": " "}, "row 2 has an empty 'context'"),
        ({"question": None}, "row 2 has no 'question'"),
    ],
)
def test_bad_rows(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    good = row("in rome", "who", Answer("rome", 3))
    rows = jsonl(tmp_path / "a.jsonl", good, {**good, **change})
    with pytest.raises(InputError, match=message):
        open_data(Request(rows, rows, rows), folder_of(wordpieces()))


@pytest.mark.parametrize("cell", ["rome", '{"text": "rome"}', '{"text": ["rome"], "answer_start": []}', "[1]", "["])
def test_answers_that_are_none(cell: str, tmp_path: Path) -> None:
    rows = jsonl(tmp_path / "a.jsonl", {"context": "in rome", "question": "who", "answers": cell})
    with pytest.raises(InputError, match="row 1: 'answers' does not hold answers; write"):
        open_data(Request(rows, rows, rows), folder_of(wordpieces()))


@pytest.mark.parametrize(
    ("names", "more", "message"),
    [
        (("text", "label"), {}, r"no question and context among text, label; name both \(--text-columns"),
        (("question", "context"), {}, r"no answers among question, context; add `answers` or name them"),
        (("question", "context"), {"text_columns": ("question",)}, "--text-columns question: name two"),
        (("question", "context"), {"label_column": "gold"}, "no column 'gold' among question, context"),
    ],
)
def test_bad_columns(names: tuple[str, ...], more: dict[str, Any], message: str, tmp_path: Path) -> None:
    rows = jsonl(tmp_path / "a.jsonl", dict.fromkeys(names, "who"))
    with pytest.raises(InputError, match=message):
        open_data(Request(rows, rows, rows, **more), folder_of(wordpieces()))


class Slow:
    """A tokenizer in Python."""

    is_fast = False


def test_bad_folders(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"its tokenizer \(Slow\) does not say where in the text a token stands"):
        task_of(Slow())
    with pytest.raises(InputError, match="6 tokens a window leave no room for a question and its context"):
        task_of(wordpieces(), max_length=6)
    rows = jsonl(tmp_path / "a.jsonl", row("in rome"))
    with pytest.raises(UsageError, match="--metric bleu: question-answering is scored by f1, exact-match"):
        open_data(Request(rows, metric="bleu"), folder_of(wordpieces()))
    with pytest.raises(InputError, match="the model gives no start_logits, which question-answering is scored by"):
        TASKS[wordpieces].scored(folders.bert()(input_ids=torch.ones(1, 2, dtype=torch.int64)))
