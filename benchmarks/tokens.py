"""Prune MiniLM as a tagger of words and as a filler of masks on WikiText-2, and print what it loses.

    python -m benchmarks.tokens names masks              # two thirds and half of the multiply-accumulates
    python -m benchmarks.tokens names --shares 0.5 --distill

Rows are the sentences of WikiText-2 without unknown words. `names`: the model, which reads lower-case text, tags the
names, which are the words that begin with a capital, other than the first of a sentence; F1 of names. `masks`: 15% of
the tokens are masked; accuracy. The dense models are learned first, from the encoder of `../shared/models`. Labels are
not used to prune. Each row of a table is one run of `compress`, a folder under `--out`; finished runs are not repeated.
The metric is that of the engines on the test rows, with a paired 95% interval.
"""

from __future__ import annotations

import argparse
import lzma
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForMaskedLM, AutoModelForTokenClassification, AutoTokenizer, set_seed

from benchmarks.machine import machine
from benchmarks.quantization import ENCODER, SHARED, run
from benchmarks.speed import table
from compressor.cli.console import Console
from compressor.config.run import Recipe
from compressor.config.sections import RowsConfig
from compressor.model_folder import load
from compressor.results import Report
from compressor.silence_libraries import quiet_transformers
from compressor.tasks import open_data
from compressor.training.checkpoints import Checkpoints
from compressor.training.fit import fit
from compressor.training.schedule import Schedule

TAGS = ("O", "B-NAME", "I-NAME")
LENGTH = 64
ROWS = {"train": 12_000, "dev": 400, "test": 1_500}
SHARES = (2 / 3, 0.5)


@dataclass(frozen=True)
class Set:
    """A task on the sentences, and how its dense model is learned.

    Attributes:
        suffix: format of the rows.
        auto_class: the class of the model.
        options: further arguments of the class.
        learning_rate: peak learning rate.
    """

    suffix: str
    auto_class: Any
    options: dict[str, Any]
    learning_rate: float


SETS = {
    "names": Set(
        "conll",
        AutoModelForTokenClassification,
        {"id2label": dict(enumerate(TAGS)), "label2id": {name: index for index, name in enumerate(TAGS)}},
        1e-4,
    ),
    "masks": Set("txt", AutoModelForMaskedLM, {}, 3e-4),
}


def sentences(split: str) -> Iterator[list[str]]:
    """The sentences of a split of WikiText-2 as words, without those with unknown words."""
    with lzma.open(SHARED / "data" / f"wikitext2_{split}.txt.xz", "rt", encoding="utf-8") as file:
        for line in file:
            if line.startswith(" ="):
                continue
            for sentence in re.split(r"(?<= [.?!]) ", re.sub(r" @(\W)@ ", r"\1", line)):
                words = sentence.split()
                if 5 <= len(words) <= 50 and "<unk>" not in words:
                    yield words


def tags_of(words: Sequence[str]) -> list[str]:
    """The tag of each word."""
    named = [number > 0 and word[0].isupper() for number, word in enumerate(words)]
    pairs = zip([False, *named], named, strict=False)
    return [TAGS[0] if not is_name else TAGS[2 if continues else 1] for continues, is_name in pairs]


def write_rows(name: str, folder: Path) -> Path:
    """The folder of rows of a set, written if it is not there yet."""
    path = folder / "rows"
    path.mkdir(parents=True, exist_ok=True)
    held_out = list(sentences("valid"))
    splits = {"train": list(sentences("train")), "dev": held_out[: ROWS["dev"]], "test": held_out[ROWS["dev"] :]}
    for split, rows in splits.items():
        blocks = rows[: ROWS[split]]
        if SETS[name].suffix == "txt":
            lines = [f"{' '.join(words)}\n" for words in blocks]
        else:
            pairs = [zip(words, tags_of(words), strict=True) for words in blocks]
            lines = ["".join(f"{word.lower()} {tag}\n" for word, tag in sentence) + "\n" for sentence in pairs]
        (path / f"{split}.{SETS[name].suffix}").write_text("".join(lines), encoding="utf-8")
    return path


def dense_model(name: str, folder: Path, steps: int) -> Path:
    """The dense model of a set, learned from the encoder if it is not there yet."""
    chosen, path, partial = SETS[name], folder / "model", folder / "partial"
    rows = write_rows(name, folder)
    if path.exists():
        return path
    set_seed(0)
    with quiet_transformers():
        model = chosen.auto_class.from_pretrained(
            ENCODER, ignore_mismatched_sizes=True, dtype=torch.float32, **chosen.options
        )
        model.save_pretrained(partial)
        AutoTokenizer.from_pretrained(ENCODER).save_pretrained(partial)
    loaded = load(partial)
    data = open_data(RowsConfig(data=str(rows), max_length=LENGTH), loaded)
    schedule = Schedule(
        steps=steps,
        batch_size=32,
        learning_rate=chosen.learning_rate,
        seed=0,
        warmup=0.1,
        weight_decay=0.01,
        max_grad_norm=1.0,
        evaluations=2,
        points=2,
        mixed_precision="bf16",
    )
    checkpoints = Checkpoints(folder / "checkpoints", {"set": name})
    with Console().stage(f"learning {name}") as on_progress:
        fit(loaded.model.train(), data, schedule, checkpoints, on_progress=on_progress)
    with quiet_transformers():
        loaded.model.save_pretrained(partial)
    partial.rename(path)
    return path


def columns(name: str, share: float, report: Report) -> dict[str, str]:
    """What a run lost and won."""
    score, plan, speed = report.scores[0], report.plan, report.speeds[0]
    return {
        "set (test rows)": f"{name}, {score.metric} ({score.rows})",
        "budget": f"{share:.0%} of MACs",
        "heads, neurons": f"{plan.heads_kept}, {plan.neurons_kept}",
        "dense": f"{100 * score.dense:.2f}",
        "compressed": f"{100 * score.compressed:.2f}",
        "difference (95%)": f"{100 * (score.compressed - score.dense):+.2f}"
        f" ({100 * score.low:+.2f} to {100 * score.high:+.2f})",
        "speed": f"{speed.ratio:.2f}",
    }


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sets", nargs="+", choices=list(SETS))
    parser.add_argument("--shares", type=float, nargs="+", default=SHARES, help="shares of multiply-accumulates")
    parser.add_argument("--distill", action="store_true", help="train what is left on the answers of the dense model")
    parser.add_argument("--steps", type=int, default=600, help="steps in which the dense model is learned")
    parser.add_argument("--out", type=Path, default=Path("build/tokens"))
    args = parser.parse_args()
    print(f"machine: {machine('torch', 'onnxruntime')}", flush=True)
    rows = []
    for name in args.sets:
        folder = args.out / name
        model = dense_model(name, folder, args.steps)
        for share in args.shares:
            fields = {"distill": True, "distill_steps": 400} if args.distill else {}
            out = folder / f"macs{share:.3g}{'-distilled' if args.distill else ''}"
            common = {"model": model, "data": str(folder / "rows"), "max_length": LENGTH, "seq": (LENGTH,)}
            report = run(Recipe(**common, **fields, macs=share, batch=(1,), seconds=3.0, out=out))
            rows.append(columns(name, share, report))
            print(table(rows[-1:]), flush=True)
    print(f"\n{table(rows)}", flush=True)


if __name__ == "__main__":
    main()
