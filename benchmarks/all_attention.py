"""Prune the All-attention Transformer: tables 1 to 3 and figures 1 and 3 of Shim et al. 2021, on WikiText-2.

A dense All-attention model is trained from scratch on words or on the letters a to z, then pruned by BinConcrete gates
at several penalties (tables 1 and 2), without each of the three techniques (table 3), and compared with narrower
Transformer-XLs trained for as many steps (figure 3). Figure 1 is computed at the sizes of the paper. Checkpoints are
chosen on the first half of the validation text, and metrics are computed on the second half.

    python -m benchmarks.all_attention word character --size tiny       # minutes
    python -m benchmarks.all_attention word --size small                # an hour on one core
    python -m benchmarks.all_attention word --size paper                # the paper's sizes, on a GPU

Finished cells in `--out` are not run again, an interrupted cell resumes, and several processes with the same `--out`
divide the cells among them. Writes study.csv, study.html and figures beside the cells.
"""

from __future__ import annotations

import argparse
import contextlib
import lzma
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from benchmarks.all_attention_findings import describe, describe_times, findings_of
from benchmarks.all_attention_sizes import ABLATIONS, AGAIN, LEVELS, PEAK, SIZES, Size, pace
from benchmarks.machine import machine
from benchmarks.studies.cell_store import Cell, CellStore
from compressor.cli.console import Console
from compressor.config.run import Recipe
from compressor.config.step_list import step_of_flags
from compressor.config.steps import Heads
from compressor.model_folder import load
from compressor.models import AllAttentionConfig, AllAttentionForCausalLM, TransformerXLConfig, TransformerXLForCausalLM
from compressor.models.forwards import reader
from compressor.models.segments import pruned
from compressor.progress import ProgressCallback
from compressor.selection.learn import learn
from compressor.tasks import Data, open_data
from compressor.tasks.causal_lm import read
from compressor.training.checkpoints import Checkpoints
from compressor.training.fit import fit
from compressor.training.schedule import Schedule
from compressor.training.tokenizers import characters, words
from compressor.units import find_sites, gated, keep_all
from graph_passes import Plan
from graph_passes.files import write_text

SHARED = Path(__file__).resolve().parents[2] / "shared" / "data"
TRAIN, VALID = SHARED / "wikitext2_train.txt.xz", SHARED / "wikitext2_valid.txt.xz"


class Study:
    """The cells of one level at one size.

    Args:
        level: `word` or `character`.
        size: models and schedules.
        out: folder of the study.
    """

    def __init__(self, level: str, size: Size, out: Path) -> None:
        self.level, self.size, self.metric = level, size, LEVELS[level]
        self.folder = CellStore(out, {"level": level, **asdict(size)})
        self.recipe = Recipe(
            model=self._begin(out / "start"),
            data=str(_cut(TRAIN, size.tokens, level, out)),
            eval_data=str(_cut(VALID, size.held and 2 * size.held, level, out)),
            keep="100%",
            max_length=size.segment,
            batch_size=size.batch,
        )
        self.model_folder = load(self.recipe.source.model)
        self.data: Data = open_data(self.recipe.rows, self.model_folder, self.recipe.selection.seed)
        self.device = "cuda" if torch.cuda.is_available() else "cpu"

    def _begin(self, folder: Path) -> Path:
        """Write a model folder with the tokenizer and an untrained dense model, with which rows are read."""
        if not folder.exists():
            partial = folder.with_name(f".{folder.name}.{os.getpid()}")
            with lzma.open(TRAIN, "rt", encoding="utf-8") as text:
                tokenizer = words(text, self.size.vocabulary) if self.level == "word" else characters()
            AllAttentionForCausalLM(self._config(len(tokenizer))).save_pretrained(partial)
            tokenizer.save_pretrained(partial)
            with contextlib.suppress(OSError):  # another process was first
                partial.rename(folder)
        return folder

    def _config(self, vocabulary: int) -> AllAttentionConfig:
        size = self.size
        return AllAttentionConfig(
            vocab_size=vocabulary,
            hidden_size=size.hidden,
            num_hidden_layers=size.layers,
            num_attention_heads=size.heads,
            num_persistent=size.persistent,
            memory_length=size.segment,
            **self._dropouts(),
        )

    def _dropouts(self) -> dict[str, Any]:
        kinds = ("attention_dropout", "embedding_dropout", "hidden_dropout")
        return {} if self.size.dropout is None else dict.fromkeys(kinds, self.size.dropout)

    def cells(self, seeds: Sequence[int]) -> list[Cell]:
        """Every model to train or to prune; a pruned one needs the dense model of its seed."""
        cells = []
        for seed in seeds:
            base = f"dense-s{seed}"
            cells.append(Cell(base, {"kind": "dense", "name": "dense", "seed": seed}))
            cells.append(Cell(f"longer-s{seed}", {"kind": "longer", "name": "dense, longer", "seed": seed}, (base,)))
            for penalty in self.size.penalties:
                settings = {"kind": "pruned", "name": f"lambda {penalty:g}", "penalty": penalty, "seed": seed}
                cells.append(Cell(f"lambda{penalty:g}-s{seed}", settings, (base,)))
            for number, name in enumerate(ABLATIONS):
                settings = {"kind": "ablated", "name": name, "penalty": max(self.size.penalties), "seed": seed}
                cells.append(Cell(f"ablated{number}-s{seed}", settings, (base,)))
            for width in (self.size.hidden, *self.size.widths):
                settings = {"kind": "transformer-xl", "name": f"Transformer-XL {width}", "width": width, "seed": seed}
                cells.append(Cell(f"xl{width}-s{seed}", settings))
        return cells

    def run(self, cell: Cell, work: Path, on_progress: ProgressCallback) -> dict[str, Any]:
        """Train or prune one model, and score it on the test text.

        `seconds` in the result is the duration, or None if an interrupted run was resumed.
        """
        start, uninterrupted = time.monotonic(), not any(work.iterdir())
        torch.manual_seed(cell.settings["seed"])
        model = self._model(cell).to(self.device)
        sites = find_sites(model, {"input_ids": torch.zeros(2, 8, dtype=torch.int64, device=self.device)})
        plan, notes = keep_all(sites), list[str]()
        if cell.settings["kind"] in ("pruned", "ablated"):
            selection = self._selection(cell)
            learned = learn(model, sites, self.data, selection, work / "checkpoints", on_progress)
            plan, notes = learned.plan, [str(note) for note in learned.notes]
        else:
            self._train(model, cell, work, on_progress)
        smaller = pruned(model, plan)
        return {
            "heads": plan.heads_kept,
            "of": sum(site.heads for site in sites),
            "parameters": sum(weight.numel() for weight in smaller.model.layers.parameters()),
            "scores": {
                "eval": self._score(model, plan, self.data.eval),
                "test": self._score(model, plan, self.data.test),
            },
            "notes": notes,
            "seconds": round(time.monotonic() - start, 1) if uninterrupted else None,
        }

    def _model(self, cell: Cell) -> Any:
        """The model of a cell before its training: random weights, or those of the dense model of its seed."""
        config = self._config(self.model_folder.config.vocab_size)
        if cell.settings["kind"] == "transformer-xl":
            fields = {name: getattr(config, name) for name in ("vocab_size", "num_hidden_layers", "memory_length")}
            width, heads = cell.settings["width"], self.size.heads
            return TransformerXLForCausalLM(
                TransformerXLConfig(hidden_size=width, num_attention_heads=heads, **fields, **self._dropouts())
            )
        model = AllAttentionForCausalLM(config)
        if cell.settings["kind"] != "dense":
            safetensors.torch.load_model(model, str(self._dense_weights(cell)))
        return model

    def _dense_weights(self, cell: Cell) -> Path:
        return self.folder.scratch(f"dense-s{cell.settings['seed']}.safetensors")

    def _selection(self, cell: Cell) -> Heads:
        """The settings of a cell's gates and their training."""
        options = {
            "penalty": cell.settings["penalty"],
            "gate_learning_rate": self.size.gate_rate,
            **pace(self.size.pruning, self.size.precision),
        }
        return step_of_flags(self.recipe.updated(method="bin-concrete"), Heads).model_copy(
            update={
                "method": "bin-concrete",
                "keep": None,
                "options": {**options, **ABLATIONS.get(cell.settings["name"], {})},
                "training_steps": self.size.pruning,
                "learning_rate": AGAIN,
                "seed": cell.settings["seed"],
            }
        )

    def _train(self, model: Any, cell: Cell, work: Path, on_progress: ProgressCallback) -> None:
        """Train a model without gates. A Transformer-XL takes the steps of the dense and of the pruned model."""
        phases = {"dense": (PEAK,), "longer": (AGAIN,)}.get(cell.settings["kind"], (PEAK, AGAIN))
        for rate in phases:
            steps = self.size.steps if rate == PEAK else self.size.pruning
            seed, precision = cell.settings["seed"], self.size.precision
            schedule = Schedule(steps, self.size.batch, rate, seed, **pace(steps, precision))
            checkpoints = Checkpoints(work / f"checkpoints-{rate:g}", {"cell": cell.name})
            fit(model, self.data, schedule, checkpoints, on_progress=on_progress)
        if cell.settings["kind"] == "dense":
            weights = self._dense_weights(cell)
            partial = weights.with_suffix(".writing")
            safetensors.torch.save_model(model, str(partial))
            partial.replace(weights)

    def _score(self, model: Any, plan: Plan, rows: Any) -> float:
        task = self.data.task
        model.eval()
        with gated(model, plan):
            return task.score(read(task, rows, reader(model), self.size.batch))


def _cut(path: Path, tokens: int | None, level: str, out: Path) -> Path:
    """A file with the first `tokens` words or characters of a text, up to the end of a line; None: the whole file."""
    if tokens is None:
        return path
    short = out / f"{path.name.partition('.')[0]}-{tokens}.txt"
    if not short.exists():
        lines, left = [], tokens
        with lzma.open(path, "rt", encoding="utf-8") as text:
            while left > 0 and (line := text.readline()):
                lines.append(line)
                left -= len(line.split()) + 1 if level == "word" else len(line)
        short.parent.mkdir(parents=True, exist_ok=True)
        write_text(short, "".join(lines))
    return short


def main() -> None:
    """Run the cells that are missing, print the tables and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("levels", nargs="*", choices=LEVELS, default=["word"])
    parser.add_argument("--size", choices=SIZES, default="tiny")
    parser.add_argument("--seeds", type=int, nargs="+", help="default: those of the size")
    parser.add_argument("--times", type=int, default=1, help="factor of the steps of every phase")
    parser.add_argument(
        "--out", type=Path, default=Path("build/all_attention"), help="parent of a folder per level and size"
    )
    args = parser.parse_args()
    if not TRAIN.exists():
        print(f"skipped: {TRAIN} is not on this machine")
        return
    print(f"machine: {machine('torch', 'transformers')}; {torch.get_num_threads()} threads")
    for level in args.levels:
        size = SIZES[args.size][level]
        size = replace(size, steps=args.times * size.steps, pruning=args.times * size.pruning)
        seeds = args.seeds or size.seeds
        out = args.out / (f"{level}-{args.size}" + (f"-{args.times}-times" if args.times > 1 else ""))
        study = Study(level, size, out)
        study.folder.run(study.cells(seeds), study.run, Console())
        results = study.folder.results()
        description = describe(study, args.size, results)
        findings = findings_of(study, results, description)
        findings.save(
            out,
            kind="all-attention",
            description="heads that take their persistent vectors along",
            model=f"WikiText-2, {level}s",
            tiles=[("size", args.size, description), ("cells", str(len(findings.rows)), "models trained or pruned")],
            facts=[
                ("machine", str(machine("torch", "transformers"))),
                ("size", description),
                ("time", describe_times(results)),
            ],
        )
        print(f"\n{level}, {description}; {describe_times(results)}\n")
        for table in findings.tables:
            print(f"{table.title}\n\n| {' | '.join(table.columns)} |\n|{'---|' * len(table.columns)}")
            print("\n".join(f"| {' | '.join(row)} |" for row in table.rows), end="\n\n", flush=True)


if __name__ == "__main__":
    main()
