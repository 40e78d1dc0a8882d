"""Advice of `tasks`: see `tests.advice.world`."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from tests import folders
from tests.advice.world import World, advice
from tests.tasks import pictures, questions, tags, translations
from tests.tasks.own_tasks import task_of_the_page, write_module, write_tagged_inputs
from tests.tasks.rows import jsonl

SHORT = ("--batch", "1", "--macs", "50%", "-o", "out")
TEXTS = [f"{n % 2}\tthe {'good' if n % 2 else 'bad'} {folders.WORDS[n % 20]} film" for n in range(40)]


def write(model: Any, tokenizer: Any, folder: Path) -> str:
    """A folder of a model with a tokenizer."""
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder.name


def tagger(w: World, tags_of_model: tuple[str, ...] = tags.TAGS) -> str:
    return write(tags.bert(tags_of_model), questions.wordpieces(), w.file("tagger"))


def sentences(w: World, *change: str) -> str:
    """A file of tagged words; `change` is a column and its new name."""
    rows: list[dict[str, Any]] = [tags.sentence(seed) for seed in range(24)]
    if change:
        rows = [{change[1] if name == change[0] else name: cell for name, cell in row.items()} for row in rows]
    return jsonl(w.file("tags.jsonl"), *rows)


def model_of_questions(w: World) -> str:
    return write(questions.bert(), questions.wordpieces(), w.file("reader"))


def question_rows(w: World) -> str:
    rows = [questions.row(f"paris tower {word} in rome built 1889", f"who {word}") for word in questions.WORDS]
    return jsonl(w.file("questions.jsonl"), *rows)


@advice("tasks.causal_lm CausalLM.__init__ text")
def _(w: World) -> None:
    folders.save(folders.gpt2(), w.file("gpt2"))
    w.rows("text.txt", *("the good film was very good and not at all bad ever" for _ in range(40)))
    command = ("gpt2", "--data", "text.txt", *SHORT, "--max-length")
    w.fails(*command, "1")
    w.right(*command, "8")


@advice("tasks.columns TextColumns._check_count text")
@advice("tasks.columns TextColumns._check_count text #2")
def _(w: World) -> None:
    command = w.keep_one("--text-columns")
    w.fails(*command, "text,text,label")
    w.right(*command, "text")


@advice("tasks.columns TextColumns._check_count text #3")
def _(w: World) -> None:
    folders.save(folders.gpt2(), w.file("gpt2"))
    w.rows("pairs.tsv", "premise\thypothesis", *(f"the good film {n}\tit is good {n}" for n in range(40)))
    command = ("gpt2", "--data", "pairs.tsv", *SHORT)
    error = w.fails(*command)
    w.right(*command, *advised(str(error)))


def advised(message: str) -> list[str]:
    """The flags in parentheses at the end of a message."""
    import shlex

    return shlex.split(message.rpartition("(")[2].rstrip(")"))


@advice("tasks.columns TextColumns._check_count text #4")
def _(w: World) -> None:
    w.rows("named.tsv", "label\tremark", *TEXTS)
    command = ("model", "--data", "named.tsv", *SHORT)
    error = w.fails(*command)
    w.right(*command, *advised(str(error)))


@advice("tasks.columns TextColumns.find text")
def _(w: World) -> None:
    w.file("rows.jsonl").write_text(
        "".join(f'{{"label": {n % 2}, "text": {n}, "body": "good {n}"}}\n' for n in range(40))
    )
    command = ("model", "--data", "rows.jsonl", *SHORT)
    w.fails(*command)
    w.right(*command, "--text-columns", "body")


@advice("tasks.columns LabelColumn.find text")
def _(w: World) -> None:
    w.rows("named.tsv", "verdict\ttext", *TEXTS)
    command = ("model", "--keep", "1", "--training-steps", "2", "--data", "named.tsv", "-o", "out")
    w.fails(*command)
    w.right(*command, "--label-column", "verdict")
    w.rows("named.tsv", "label\ttext", *TEXTS)
    w.right(*command)


@advice("tasks.data _Reading._open_further text")
def _(w: World) -> None:
    from compressor.model_folder import load
    from compressor.tasks import open_data

    w.rows("more.txt", *(f"the {word} film" for word in folders.WORDS))
    folder = load(w.model)
    w.fails(open_data, folders.rows_config("rows.tsv", unlabelled_data="more.txt"), folder)
    w.right(open_data, folders.rows_config("rows.tsv"), folder)


@advice("tasks.encoding TextTokenizer.__init__ text", zoo=True)
def _(w: World) -> None:
    translations.save(translations.marian(), w.file("marian"))
    pairs = translations.tsv(w.file("pairs.tsv"), *("\t".join(translations.sentence(seed)) for seed in range(40)))
    for command, short, long in (
        (("model", "--data", "rows.tsv"), "3", "6"),
        ((model_of_questions(w), "--data", question_rows(w)), "6", "24"),
        (("marian", "--task", "translation", "--data", pairs), "1", "8"),
    ):
        w.fails(*command, *SHORT, "--max-length", short)
        w.right(*command, *SHORT, "--max-length", long)


@advice("tasks.encoding TextTokenizer.cut_notes text")
def _(w: World) -> None:
    command = ("model", "--data", "rows.tsv", *SHORT, "--max-length")
    w.notes(*command, "6")
    w.right(*command, "16")


@advice("tasks.token_labels FillMask.__init__ text")
def _(w: World) -> None:
    import transformers as hf

    config = hf.BartConfig(
        vocab_size=25, d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=20, decoder_ffn_dim=20, max_position_embeddings=24,
        pad_token_id=0, bos_token_id=2, eos_token_id=3, decoder_start_token_id=3, forced_eos_token_id=3,
    )  # fmt: skip
    folders.save(hf.BartForConditionalGeneration(config), w.file("bart"))
    w.rows("text.txt", *("the good film is very bad" for _ in range(40)))
    w.rows("pairs.tsv", "source\ttarget", *(f"the {word} film\ta {word} plot" for word in folders.WORDS))
    w.fails("bart", "--task", "fill-mask", "--data", "text.txt", *SHORT)
    w.right("bart", "--task", "translation", "--data", "pairs.tsv", *SHORT)


@advice("tasks.images ImageClassification.__init__ text")
def _(w: World) -> None:
    pictures.write_folder(w.file("images"), 12)
    pictures.save_classifier(w.file("vit"))
    command = ("vit", "--data", "images", *SHORT)
    w.fails(*command, "--metric", "top5")
    w.right(*command, "--metric", "accuracy")


def picture_rows(w: World, **columns: list[Any]) -> tuple[str, ...]:
    pictures.write_folder(w.file("images"), 12)
    pictures.save_classifier(w.file("vit"))
    files = sorted(str(path) for path in w.file("images").rglob("*.png"))
    labels = [Path(file).parent.name for file in files]
    rows = [{"label": label, "photo": file, "size": 3} for label, file in zip(labels, files, strict=True)]
    jsonl(w.file("images.jsonl"), *rows)
    return ("vit", "--data", "images.jsonl", *SHORT)


@advice("tasks.images image_column text")
def _(w: World) -> None:
    command = picture_rows(w)
    w.fails(*command)
    w.right(*command, "--image-column", "photo")


@advice("tasks.images image_column text #2")
def _(w: World) -> None:
    command = picture_rows(w)
    w.fails(*command, "--image-column", "size")
    w.right(*command, "--image-column", "photo")


@advice("tasks.labels RowLabels._check_new_names text")
def _(w: World) -> None:
    words = ("red", "green", "blue")
    w.rows("many.tsv", "label\tkind\ttext", *(f"{words[n % 3]}\t{row}" for n, row in enumerate(TEXTS)))
    command = ("model", "--data", "many.tsv", "--keep", "1", "--training-steps", "2", "-o", "out")
    w.fails(*command)
    w.right(*command, "--label-column", "kind")


@advice("tasks.data _require_metric text", zoo=True)
def _(w: World) -> None:
    folders.save(folders.bert(num_labels=1), w.file("scorer"))
    w.rows("scores.tsv", "score\ttext", *(f"{n / 40}\tthe {word} film" for n, word in enumerate(folders.WORDS * 2)))
    w.rows("equal.tsv", "score\ttext", *(f"1.0\tthe {word} film" for word in folders.WORDS))
    command = ("scorer", "--task", "regression", "--data", "scores.tsv", "--metric", "pearson", *SHORT)
    for split in ("eval", "test"):
        w.fails(*command, f"--{split}-data", "equal.tsv")
        w.right(*command, f"--{split}-data", "scores.tsv")


@advice("tasks.question_answering QuestionAnswering.encode text")
def _(w: World) -> None:
    from tests.tasks.questions import Answer

    rows = [questions.row("tall " * 6 + "paris tower rome river city in of built", "who") for _ in range(12)]
    for row in rows:
        answer = "paris tower rome river city in of built"
        row["answers"] = [Answer(answer, row["context"].index(answer))._asdict()]
    file = jsonl(w.file("questions.jsonl"), *rows)
    command = (model_of_questions(w), "--data", file, *SHORT, "--stride", "0", "--max-length")
    w.notes(*command, "12")
    w.right(*command, "32")
    w.right(*command[:-3], "--stride", "8", "--max-length", "24")


@advice("tasks.base make_task text #2")
def _(w: World) -> None:
    import transformers as hf

    folders.save(hf.BertForMultipleChoice(hf.BertConfig(**folders.SIZES)), w.file("chooser"))
    w.fails("chooser", "--data", "rows.tsv", *SHORT)
    w.clear("file-mismatch", "chooser", "--task", "text-classification", "--data", "rows.tsv", *SHORT)


@advice("tasks.base make_task text #3")
def _(w: World) -> None:
    w.fails(*w.keep_one("--metric", "bleu"))
    w.right(*w.keep_one("--metric", "f1"))


def own_task(w: World, **changes: tuple[str, str]) -> tuple[str, ...]:
    write_tagged_inputs(w.path)
    w.patch.syspath_prepend(w.path)
    module = task_of_the_page()
    name = f"tags_{len(changes)}_{w.path.parent.name}"
    for old, new in changes.values():
        assert old in module, old
        module = module.replace(old, new)
    write_module(w.path, module, name)
    return ("model", "--data", "rows.tsv", *SHORT, "--task", f"{name}:Tags")


@advice("tasks.base make_task text #4")
def _(w: World) -> None:
    command = own_task(w, init=("    def _names(", "    def __init__(self):\n        pass\n\n    def _names("))
    w.fails(*command)
    w.right(*own_task(w))


@advice("tasks.base make_task text")
def _(w: World) -> None:
    refusing = "    @classmethod\n    def accepts(cls, folder):\n        return False\n\n    def _names("
    w.fails(*own_task(w, accepts=("    def _names(", refusing)))
    folders.save(folders.bert(), w.file("plain"))
    w.right("plain", "--task", "text-classification", "--data", w.rows("rows.tsv", "label\ttext", *TEXTS), *SHORT)


@advice("tasks.base Task.returns_wrong text")
def _(w: World) -> None:
    w.fails(*own_task(w, rows=("    def _names(", "    def encode(self, *rows):\n        return 3\n\n    def _names(")))
    w.right(*own_task(w))


@advice("tasks.metrics Metric.value task-failed")
def _(w: World) -> None:
    from compressor.tasks import Metric

    compute: Any = list
    w.fails(Metric("rows", compute).value, torch.zeros(3, 2).numpy())
    w.right(Metric("count", len).value, torch.zeros(3, 2).numpy())


@advice("tasks.data read_splits text")
def _(w: World) -> None:
    from compressor.model_folder import load
    from compressor.tasks import open_data

    folder = load(w.model)
    w.fails(open_data, folders.rows_config(), folder)
    w.right(open_data, folders.rows_config("rows.tsv"), folder)


@advice("tasks.causal_lm assign_streams text")
def _(w: World) -> None:
    from compressor.tasks.causal_lm import assign_streams

    w.fails(lambda: assign_streams(3, 4, whole=False))
    w.right(lambda: assign_streams(3, 3, whole=False))
    w.right(lambda: assign_streams(4, 4, whole=False))


@advice("tasks.token_labels TokenClassification.__init__ text", zoo=True)
def _(w: World) -> None:
    command = (tagger(w, ("O", "place", "I-LOC", "B-LOC")), "--data", sentences(w), *SHORT)
    w.fails(*command)
    w.clear("label-mismatch", *command, "--metric", "accuracy")
    rows = [{"words": ["who", "rome"], "tags": ["O", "place"]} for _ in range(12)]
    w.right(*command[:2], jsonl(w.file("places.jsonl"), *rows), *SHORT, "--metric", "accuracy")
    w.right(tagger(w), *command[1:])


@advice("tasks.token_labels TokenClassification.encode text #2")
def _(w: World) -> None:
    plain = [{"words": ["who", "built", "the"], "tags": ["O", "O", "O"]} for _ in range(12)]
    late = [{"words": ["who"] * 6 + ["rome"], "tags": ["O"] * 6 + ["B-LOC"]} for _ in range(12)]
    command = (tagger(w), *SHORT, "--data")
    w.fails(*command, jsonl(w.file("plain.jsonl"), *plain))
    w.right(*command, sentences(w))
    w.right(*command, jsonl(w.file("plain.jsonl"), *plain), "--metric", "accuracy")
    w.fails(*command, jsonl(w.file("late.jsonl"), *late), "--max-length", "6")
    w.right(*command, "late.jsonl", "--max-length", "16")


@advice("tasks.token_labels TokenClassification.encode text")
def _(w: World) -> None:
    command = (tagger(w), *SHORT, "--data")
    w.fails(*command, sentences(w, "words", "pieces"))
    w.right(*command, "tags.jsonl", "--text-columns", "pieces")
    w.right(*command, tags.conll(w.file("rows.conll"), *(tags.sentence(seed) for seed in range(24))))


@advice("tasks.data _Reading._open_further text #2")
def _(w: World) -> None:
    rows = [f"the {word} film\tit is {word}" for word in folders.WORDS]
    w.rows("pairs.tsv", "text_a\ttext_b", *rows)
    w.rows("single.tsv", "text", *(row.partition("\t")[0] for row in rows))
    command = ("model", "--data", "rows.tsv", *SHORT, "--unlabelled-data")
    w.fails(*command, "pairs.tsv")
    w.right(*command, "single.tsv")
    w.rows("renamed.tsv", "text\ttext_b", *rows)
    w.right(*command, "renamed.tsv", "--text-columns", "text")


@advice("tasks.data _Reading._open_further text #3")
def _(w: World) -> None:
    from compressor.tasks import Task
    from compressor.tasks.question_answering import QuestionAnswering

    w.patch.setattr(QuestionAnswering, "encode_unlabelled", Task.encode_unlabelled)  # as in a custom task
    command = (model_of_questions(w), "--data", question_rows(w), *SHORT)
    w.rows("more.tsv", "question\tcontext", *(f"who\tparis {word}" for word in questions.WORDS))
    w.fails(*command, "--unlabelled-data", "more.tsv")
    w.right(*command)
    w.right(*command, "--unlabelled-data", question_rows(w))


@advice("tasks.columns check_present text", zoo=True)
def _(w: World) -> None:
    w.fails(*w.keep_one("--label-column", "nothing"))
    w.right(*w.keep_one("--label-column", "label"))
    w.fails(*w.keep_one("--text-columns", "nothing"))
    w.right(*w.keep_one("--text-columns", "text"))


@advice("tasks.data _Reading._note_repeated text", zoo=True)
def _(w: World) -> None:
    words = folders.WORDS
    rows = [f"{n % 2}\t{words[n % 20]} {words[n // 20]} film" for n in range(400)]
    w.rows("train.tsv", "label\ttext", *rows[:200])
    w.rows("new.tsv", "label\ttext", *rows[200:])
    command = ("model", "--data", "train.tsv", "--keep", "1", "--training-steps", "2", "-o", "out")
    for split in ("eval", "test"):
        w.notes(*command, f"--{split}-data", "train.tsv")
        w.right(*command, f"--{split}-data", "new.tsv")


@advice("tasks.data _Reading._set_aside text")
def _(w: World) -> None:
    folders.save(folders.gpt2(), w.file("gpt2"))
    w.rows("one.txt", "the good film")
    w.rows("more.txt", *("the good film was very good and not at all bad ever" for _ in range(40)))
    command = ("gpt2", "--keep", "1", "--training-steps", "2", "-o", "out", "--data")
    w.fails(*command, "one.txt")
    w.right(*command, "more.txt")
    w.right(*command, "one.txt", "--eval-data", "more.txt", "--test-data", "more.txt")


def several(w: World, **fields: Any) -> str:
    """A model that assigns several of three classes to a row, and rows of the classes."""
    kinds = {"problem_type": "multi_label_classification", **fields}
    names = {"id2label": dict(enumerate(CLASSES)), "label2id": {name: index for index, name in enumerate(CLASSES)}}
    folders.save(folders.bert(**kinds, **names), w.file("several"))
    rows = [f"{n % 2}\t{n // 2 % 2}\t{1 - n % 2}\tthe {folders.WORDS[n % 20]} film" for n in range(40)]
    w.rows("classes.tsv", "loud\tlong\tsad\ttext", *rows)
    return "several"


CLASSES = ("loud", "long", "sad")


@advice("tasks.id_tables IdTables._check_batch text")
def _(w: World) -> None:
    from datasets import Dataset

    from compressor.tasks.id_tables import IdTables

    tables: Any = IdTables.__new__(IdTables)
    object.__setattr__(tables, "sizes", {})
    object.__setattr__(tables, "positions", {"input_ids": 8})

    def check(length: int) -> None:
        rows = Dataset.from_dict({"input_ids": [[1] * length], "length": [length]})
        task: Any = SimpleNamespace(
            collate=lambda rows: {"input_ids": torch.tensor([row["input_ids"] for row in rows])}
        )
        tables._check_batch(task, rows, "rows.tsv")

    w.fails(check, 9)
    w.right(check, 8)


@advice("tasks.labels columns_of_classes text")
def _(w: World) -> None:
    command = (several(w), "--data", "classes.tsv", *SHORT, "--label-column")
    w.fails(*command, "loud,sad")
    w.right(*command, "loud,long,sad")


@advice("tasks.labels no_columns text")
def _(w: World) -> None:
    folder = several(w)
    lines = w.file("classes.tsv").read_text().splitlines()[1:]
    w.rows("others.tsv", "first\tsecond\tthird\ttext", *lines)
    w.rows("texts.tsv", "tags\ttext", *(f"{CLASSES[n % 3]}\tthe {folders.WORDS[n % 20]} film" for n in range(40)))
    command = (folder, "--keep", "1", "--training-steps", "2", "--batch", "1", "-o", "out", "--data")
    w.fails(*command, "others.tsv")
    w.right(*command, "classes.tsv")
    w.right(*command, "texts.tsv", "--label-column", "tags")
    w.rows("texts.tsv", "labels\ttext", *(f"{CLASSES[n % 3]}\tthe {folders.WORDS[n % 20]} film" for n in range(40)))
    w.right(*command, "texts.tsv")


@advice("tasks.labels number_lists text")
def _(w: World) -> None:
    folder = several(w, problem_type="regression")
    words = folders.WORDS
    w.rows("two.tsv", "labels\ttext", *(f"0.5,{n / 40}\tthe {words[n % 20]} film" for n in range(40)))
    w.rows("three.tsv", "labels\ttext", *(f"{n},{n / 40},{40 - n}\tthe {words[n % 20]} film" for n in range(40)))
    command = (folder, "--keep", "1", "--training-steps", "2", "--batch", "1", "-o", "out", "--data")
    w.fails(*command, "two.tsv")
    w.right(*command, "three.tsv")
    w.rows(
        "columns.tsv",
        "loud\tlong\tsad\ttext",
        *(f"{n}\t{n / 40}\t{40 - n}\tthe {words[n % 20]} film" for n in range(40)),
    )
    w.right(*command, "columns.tsv", "--label-column", "loud,long,sad")


@advice("tasks.labelled_rows ClassLabels.__init__ text")
def _(w: World) -> None:
    from compressor.model_folder import load
    from compressor.tasks.classification import TextClassification

    folder = several(w)
    w.fails(TextClassification, load(w.file(folder)), folders.rows_config(), TextClassification.metrics[0])
    w.right(folder, "--task", "multi-label-classification", "--data", "classes.tsv", *SHORT)


@advice("tasks.regression Reranking.learn_labels text")
def _(w: World) -> None:
    folders.save(folders.bert(num_labels=1), w.file("scorer"))
    words = folders.WORDS
    pairs = (f"{n % 3}\tthe {words[n // 5]}\tthe {words[n % 20]} film {words[n // 20]}" for n in range(60))
    w.rows("pairs.tsv", "label\tquery\tpassage", *pairs)
    command = ("scorer", "--data", "pairs.tsv", *SHORT)
    w.notes(*command)
    w.right(*command, "--metric", "spearman")


@advice("tasks.data _Reading._answer text")
def _(w: World) -> None:
    words = ("good", "bad", "film", "plot")
    w.rows("verdicts.tsv", "verdict\ttext", *(f"{n % 2}\tthe {words[n % 4]} {words[n % 3]} film" for n in range(40)))
    command = ("model", "--data", "verdicts.tsv", "--macs", "60%", "--max-drop", "0.1", "-o", "out")
    w.notes(*command)
    w.right(*command, "--label-column", "verdict")
