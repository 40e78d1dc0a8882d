"""Data sets of texts, and how the starting models of benchmarks are learned on them."""

from __future__ import annotations

import csv
import json
import lzma
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from transformers import AutoModelForQuestionAnswering, AutoModelForSequenceClassification

from compressor.config.values import MixedPrecision
from graph_passes.files import write_text

SHARED = Path(__file__).parents[2] / "shared"
ENCODER = SHARED / "models" / "minilm-sst2"
FURTHER_TEXTS = 64_000
"""Number of sentences of `further_texts`."""
_SENTENCE_ENDS, _SENTENCE_WORDS = re.compile(r"(?<=[.!?])\s+|(?<=[a-z][.!?])(?=[A-Z])"), range(4, 51)
"""Where sentences end, also where the line break after one is lost, and the numbers of words of those that are used."""


@dataclass(frozen=True)
class Set:
    """A data set and how its starting model is learned.

    Attributes:
        labels: number of classes; 1 for regression, 2 for the ends of a span.
        splits: name of each split in the file -> purpose; other splits are left out.
        dev: evaluation rows that are taken from the test rows.
        test: maximum number of test rows; None: all.
        epochs: passes over the training rows; 0: the model is learned already.
        batch: rows per step, of its distillation too.
        learning_rate: peak learning rate.
        mixed_precision: precision of matrix products while it is learned.
        max_length: maximum length of a row in tokens.
        metric: the metric that is printed; None: the main metric of the task.
        auto_class: the class that the starting model is loaded as.
        suffix: format of the file with rows.
        distill_steps: steps of a distillation. Long rows: more steps of fewer rows learn more in the same time.
        further: name of shared data with texts of the same domain; None: there are none.
    """

    labels: int
    splits: dict[str, str]
    dev: int = 0
    test: int | None = None
    epochs: float = 3
    batch: int = 32
    learning_rate: float = 5e-5
    mixed_precision: MixedPrecision = "no"
    max_length: int = 128
    metric: str | None = None
    auto_class: type = AutoModelForSequenceClassification
    suffix: str = "tsv"
    distill_steps: int = 1500
    further: str | None = None


SETS = {
    "sst2": Set(2, {"train": "train", "dev": "dev", "test": "test"}, epochs=0, further="imdb"),
    "cola": Set(2, {"train": "train", "dev": "test"}, dev=200, metric="matthews"),
    "stsb": Set(1, {"train": "train", "dev": "dev", "test": "test"}, epochs=4, mixed_precision="bf16"),
    "mnli": Set(3, {"train": "train", "dev_matched": "test"}, dev=1000, mixed_precision="bf16"),
    "squad": Set(
        2,
        {"train": "train", "dev": "test"},
        dev=200,
        test=1000,
        epochs=0.5,
        batch=16,
        learning_rate=1e-4,
        mixed_precision="bf16",
        max_length=384,
        auto_class=AutoModelForQuestionAnswering,
        suffix="jsonl",
        distill_steps=400,
    ),
}


def rows_file(name: str, folder: Path) -> Path:
    """The rows of a set with the splits `train`, `dev` and `test`, drawn from the shared data if they are not there."""
    chosen = SETS[name]
    path = folder / f"rows.{chosen.suffix}"
    if path.exists():
        return path
    with lzma.open(SHARED / "data" / f"{name}.{chosen.suffix}.xz", "rt", encoding="utf-8") as file:
        lines = file.read().rstrip("\n").split("\n")
    header = lines.pop(0) if chosen.suffix == "tsv" else None
    splits = [_split(line, header) for line in lines]
    purposes = [chosen.splits.get(split) for split in splits]
    tests = [index for index, purpose in enumerate(purposes) if purpose == "test"]
    drawn = np.random.default_rng(0).choice(tests, len(tests) if chosen.test else chosen.dev, replace=False).tolist()
    for index in drawn[: chosen.dev]:
        purposes[index] = "dev"
    if chosen.test:
        for index in drawn[chosen.dev + chosen.test :]:
            purposes[index] = None
    kept = [
        _with_split(line, header, purpose) for line, purpose in zip(lines, purposes, strict=True) if purpose is not None
    ]
    write_text(path, "\n".join([*([header] if header else []), *kept]) + "\n")
    return path


def further_texts(name: str, folder: Path) -> Path:
    """A text file of sentences of the domain of a set, without labels, drawn from its `further` data."""
    path = folder / "further.txt"
    if path.exists():
        return path
    with lzma.open(SHARED / "data" / f"{SETS[name].further}.tsv.xz", "rt", encoding="utf-8") as file:
        header, *lines = file.read().rstrip("\n").split("\n")
    texts = [line.split("\t")[header.split("\t").index("text")] for line in lines]
    sentences = {sentence.strip() for text in texts for sentence in _SENTENCE_ENDS.split(text)}
    usual = sorted(sentence for sentence in sentences if len(sentence.split()) in _SENTENCE_WORDS)
    drawn = np.random.default_rng(0).choice(len(usual), min(FURTHER_TEXTS, len(usual)), replace=False)
    write_text(path, "".join(f"{usual[index]}\n" for index in drawn))
    return path


def read_rows(path: Path, split: str) -> list[dict[str, str]]:
    """The rows of a split of a TSV file that `rows_file` wrote, by column."""
    with path.open(encoding="utf-8", newline="") as file:
        rows = csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE)
        return [row for row in rows if row["split"] == split]


def _split(line: str, header: str | None) -> str:
    if header is None:
        return str(json.loads(line)["split"])
    return line.split("\t")[header.split("\t").index("split")]


def _with_split(line: str, header: str | None, split: str) -> str:
    if header is None:
        return json.dumps({**json.loads(line), "split": split})
    cells = line.split("\t")
    cells[header.split("\t").index("split")] = split
    return "\t".join(cells)
