"""Pruning the All-attention Transformer: tables 1 to 3 and figures 1 and 3 of Shim et al. 2021, on WikiText-2.

A dense All-attention model is trained from nothing on words or on the letters a to z, then pruned by BinConcrete gates
at several penalties (tables 1 and 2), without each of the three techniques (table 3), and compared with narrower
Transformer-XLs that learnt for as many steps (figure 3). What heads are worth at the paper's own sizes (figure 1) is
computed. Checkpoints are chosen on the first half of the validation text, metrics are of the second.

    python -m benchmarks.all_attention word character --size tiny       # minutes
    python -m benchmarks.all_attention word --size small                # an hour on one core
    python -m benchmarks.all_attention word --size paper                # the paper's sizes, on a GPU

A cell that `--out` already holds is not run again, one that was interrupted resumes, and several processes started with
the same `--out` share the cells among them. Writes study.csv, study.html and figures beside the cells.
"""

from __future__ import annotations

import argparse
import contextlib
import lzma
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch

from benchmarks.all_attention_cost import figure1
from benchmarks.machine import machine
from compressor.cli.console import Console
from compressor.config.run import Recipe
from compressor.model_folder import load
from compressor.models import AllAttentionConfig, AllAttentionForCausalLM, TransformerXLConfig, TransformerXLForCausalLM
from compressor.models.shrink_model import pruned
from compressor.progress import ProgressCallback
from compressor.selection.learn import learn
from compressor.studies import figures, page
from compressor.studies.cell_store import Cell, StudyFolder, write
from compressor.studies.results import Findings, Picture, Table
from compressor.tasks import Data, open_data
from compressor.tasks.segment_streams import Streams, read, reader
from compressor.training.fit import fit
from compressor.training.schedule import Schedule
from compressor.training.tokenizers import characters, words
from compressor.units import find_sites, gated, keep_all
from graph_passes import Plan

SHARED = Path(__file__).resolve().parents[2] / "shared" / "data"
TRAIN, VALID = SHARED / "wikitext2_train.txt.xz", SHARED / "wikitext2_valid.txt.xz"
LEVELS = {"word": "perplexity", "character": "bits-per-character"}
ABLATIONS: dict[str, dict[str, Any]] = {
    "- penalty warm-up": {"penalty_warmup": 0.0},
    "- initial value 2": {"initial": 0.0},
    "- output scaling": {"output_scaling": False},
    "- all three": {"penalty_warmup": 0.0, "initial": 0.0, "output_scaling": False},
}
"""Table 3: what is left out, as options of bin-concrete."""

PACE = {
    "weight_decay": 0.0,
    "max_grad_norm": 0.25,
    "optimizer": "lamb",
    "scheduler": "cosine",
    "final_learning_rate": 1e-4,
    "evaluations": 4,
    "points": 60,
}
"""How every cell learns, with gates and without (section 4.1.2); `pace` adds the warm-up."""
PEAK, AGAIN = 1e-2, 1e-3
"""Peak learning rates: from nothing, and from the dense model."""


def pace(steps: int, precision: str) -> dict[str, Any]:
    """How a phase of so many steps learns: warmed up for 4K of them (section 4.1.2), or a twentieth where that is less.

    4K are 0.025 of the paper's 160K dense steps, and 0.05 of its 80K of pruning.
    """
    return {**PACE, "mixed_precision": precision, "warmup": min(0.05, 4_000 / steps)}


@dataclass(frozen=True)
class Size:
    """What is trained, for how long.

    Attributes:
        hidden, layers, heads, persistent: of the All-attention model; a Transformer-XL's feed-forward is 4 x hidden.
        segment: tokens of a segment, and of the memory.
        batch: streams side by side.
        vocabulary: words, at most.
        tokens: training tokens, at most; None: all.
        held: tokens of each of the two halves of the validation text, at most; None: all.
        steps: of the dense model.
        pruning: further steps, with gates or without.
        penalties: lambda; the largest is that of the ablation.
        widths: of the narrower Transformer-XLs.
        gate_rate: the gates' learning rate.
        dropout: of every kind; None: the paper's. `small` has none: it meets no token more than twice.
    """

    hidden: int
    layers: int
    heads: int
    persistent: int
    segment: int
    batch: int
    vocabulary: int | None
    tokens: int | None
    held: int | None
    steps: int
    pruning: int
    penalties: tuple[float, ...]
    widths: tuple[int, ...]
    seeds: tuple[int, ...]
    gate_rate: float = 0.1
    dropout: float | None = None
    precision: str = "bf16"


_TINY = Size(32, 2, 4, 128, 16, 8, 500, 20_000, 2_000, 40, 80, (0.1,), (24,), (1,), gate_rate=0.3)
_SMALL = Size(
    128,
    4,
    8,
    512,
    64,
    8,
    4_000,
    None,
    25_000,
    500,
    250,
    (0.003, 0.006, 0.012),
    (112, 96, 80),
    (1, 2, 3),
    gate_rate=0.3,
    dropout=0.0,
)
_PAPER = Size(
    512, 16, 8, 2048, 192, 96, None, None, None, 160_000, 80_000, (0.01, 0.015, 0.02), (480, 448, 416), (1, 2, 3)
)
SIZES: dict[str, dict[str, Size]] = {
    "tiny": {"word": _TINY, "character": _TINY},
    "small": {"word": _SMALL, "character": _SMALL},
    "paper": {"word": _PAPER, "character": replace(_PAPER, layers=12, segment=512, batch=64)},
}


class Study:
    """One level at one size, in one folder."""

    def __init__(self, level: str, size: Size, out: Path) -> None:
        self.level, self.size, self.metric = level, size, LEVELS[level]
        self.folder = StudyFolder(out, {"level": level, **asdict(size)})
        self.recipe = Recipe(
            model=self._begin(out / "start"),
            data=str(_cut(TRAIN, size.tokens, level, out)),
            eval_data=str(_cut(VALID, size.held and 2 * size.held, level, out)),
            keep="100%",
            max_length=size.segment,
            batch_size=size.batch,
        )
        self.opened = load(self.recipe.model)
        self.data: Data = open_data(self.recipe, self.opened)
        assert isinstance(self.data.task, Streams)
        self.device = "cuda" if torch.cuda.is_available() else "cpu"

    def _begin(self, folder: Path) -> Path:
        """A folder with the tokenizer and the dense configuration, for the rows to be read by."""
        if not folder.exists():
            beside = folder.with_name(f".{folder.name}.{os.getpid()}")
            with lzma.open(TRAIN, "rt", encoding="utf-8") as text:
                tokenizer = words(text, self.size.vocabulary) if self.level == "word" else characters()
            AllAttentionForCausalLM(self._config(len(tokenizer))).save_pretrained(beside)
            tokenizer.save_pretrained(beside)
            with contextlib.suppress(OSError):  # another process was first
                beside.rename(folder)
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
        made = []
        for seed in seeds:
            base = f"dense-s{seed}"
            made.append(Cell(base, {"kind": "dense", "name": "dense", "seed": seed}))
            made.append(Cell(f"longer-s{seed}", {"kind": "longer", "name": "dense, longer", "seed": seed}, (base,)))
            for penalty in self.size.penalties:
                asked = {"kind": "pruned", "name": f"lambda {penalty:g}", "penalty": penalty, "seed": seed}
                made.append(Cell(f"lambda{penalty:g}-s{seed}", asked, (base,)))
            for number, name in enumerate(ABLATIONS):
                asked = {"kind": "ablated", "name": name, "penalty": max(self.size.penalties), "seed": seed}
                made.append(Cell(f"ablated{number}-s{seed}", asked, (base,)))
            for width in (self.size.hidden, *self.size.widths):
                asked = {"kind": "transformer-xl", "name": f"Transformer-XL {width}", "width": width, "seed": seed}
                made.append(Cell(f"xl{width}-s{seed}", asked))
        return made

    def run(self, cell: Cell, work: Path, tell: ProgressCallback) -> dict[str, Any]:
        """Train or prune one model, and measure it on the test text.

        `seconds` is how long that took, None where it went on after an interruption.
        """
        began, whole = time.monotonic(), not any(work.iterdir())
        kind, seed = cell.asked["kind"], cell.asked["seed"]
        weights = self.folder.scratch(f"dense-s{seed}.safetensors")
        torch.manual_seed(seed)
        config = self._config(self.opened.config.vocab_size)
        model: Any
        if kind == "transformer-xl":
            fields = {name: getattr(config, name) for name in ("vocab_size", "num_hidden_layers", "memory_length")}
            width = cell.asked["width"]
            narrow = TransformerXLConfig(
                hidden_size=width, num_attention_heads=self.size.heads, **fields, **self._dropouts()
            )
            model = TransformerXLForCausalLM(narrow)
        else:
            model = AllAttentionForCausalLM(config)
            if kind != "dense":
                safetensors.torch.load_model(model, str(weights))
        model.to(self.device)
        sites = find_sites(model, {"input_ids": torch.zeros(2, 8, dtype=torch.int64, device=self.device)})
        plan, notes = keep_all(sites), list[str]()
        if kind in ("pruned", "ablated"):
            options = {
                "penalty": cell.asked["penalty"],
                "gate_learning_rate": self.size.gate_rate,
                **pace(self.size.pruning, self.size.precision),
            }
            recipe = self.recipe.model_copy(
                update={
                    "method": "bin-concrete",
                    "keep": None,
                    "options": {**options, **ABLATIONS.get(cell.asked["name"], {})},
                    "steps": self.size.pruning,
                    "learning_rate": AGAIN,
                    "seed": seed,
                }
            )
            found = learn(model, sites, self.data, recipe, work / "checkpoints", tell)
            plan, notes = found.plan, list(found.notes)
        else:
            # A Transformer-XL learns as long as dense and what comes of it do together, at the same rates.
            phases = {"dense": (PEAK,), "longer": (AGAIN,)}.get(kind, (PEAK, AGAIN))
            for rate in phases:
                steps = self.size.steps if rate == PEAK else self.size.pruning
                schedule = Schedule(steps, self.size.batch, rate, seed, **pace(steps, self.size.precision))
                fit(model, self.data, schedule, {"cell": cell.name}, work / f"checkpoints-{rate:g}", tell)
            if kind == "dense":
                beside = weights.with_suffix(".writing")
                safetensors.torch.save_model(model, str(beside))
                beside.replace(weights)
        smaller = pruned(model, plan)
        return {
            "heads": plan.heads_kept,
            "of": sum(site.heads for site in sites),
            "parameters": sum(weight.numel() for weight in smaller.model.layers.parameters()),
            "scores": {split: self._score(model, plan, rows) for split, rows in self._held()},
            "notes": notes,
            "seconds": round(time.monotonic() - began, 1) if whole else None,
        }

    def _held(self) -> list[tuple[str, Any]]:
        return [("eval", self.data.eval), ("test", self.data.test)]

    def _score(self, model: Any, plan: Plan, rows: Any) -> float:
        task = self.data.task
        assert isinstance(task, Streams)
        model.eval()
        with gated(model, plan):
            return task.score(read(task, rows, reader(model), self.size.batch))

    def told(self, name: str, cells: list[dict[str, Any]]) -> str:
        """What every table and figure says of how it came about."""
        size, seeds = self.size, sorted({cell["asked"]["seed"] for cell in cells})
        text = sum(self.data.train["length"]) - len(self.data.train) + 1
        dense, again = (f"{steps * size.batch * size.segment:,}" for steps in (size.steps, size.pruning))
        return (
            f"size {name}: width {size.hidden}, {size.layers} layers of {size.heads} heads, {size.persistent} vectors,"
            f" {self.opened.config.vocab_size:,} tokens, segment and memory {size.segment}, {size.batch} streams,"
            f" {size.steps} and then {size.pruning} steps, which meet {dense} and, from the beginning again, {again}"
            f" tokens of a text of {text:,}, gates' learning rate {size.gate_rate:g}, {size.precision},"
            f" seeds {', '.join(map(str, seeds))}"
        )

    def findings(self, cells: list[dict[str, Any]], told: str) -> Findings:
        """Tables 1 or 2 and 3, figures 1 and 3."""
        order = [cell.asked["name"] for cell in self.cells((0,))]
        groups: dict[str, list[dict[str, Any]]] = {}
        for cell in sorted(cells, key=lambda cell: (order.index(cell["asked"]["name"]), cell["asked"]["seed"])):
            groups.setdefault(cell["asked"]["name"], []).append(cell)
        largest = f"lambda {max(self.size.penalties):g}"
        columns = (
            "model",
            "seeds",
            "heads kept",
            "sparsity, %",
            "parameters, M",
            f"test {self.metric}",
            "each seed",
            f"minus {largest}, each seed",
        )
        sections = {
            "Pruning by lambda (tables 1 and 2)": ("dense", "longer", "pruned"),
            "Without each technique, at the largest lambda (table 3)": ("pruned", "ablated"),
            "Narrower Transformer-XLs (figure 3)": ("transformer-xl",),
        }
        tables = []
        for title, kinds in sections.items():
            told_rows = [
                _row(name, same, groups[largest])
                for name, same in groups.items()
                if same[0]["asked"]["kind"] in kinds
                and ("ablated" not in kinds or name == largest or name in ABLATIONS)
            ]
            tables.append(Table(f"{title}; {told}", columns, tuple(told_rows)))
        counts = ("heads", "parameters", "seconds")
        rows = [{**cell["asked"], **{name: cell.get(name) for name in counts}, **cell["scores"]} for cell in cells]
        return Findings(rows, tables, [self._figure3(groups, told), figure1()], ())

    def _figure3(self, groups: dict[str, list[dict[str, Any]]], told: str) -> Picture:
        lines: dict[str, list[tuple[float, list[float]]]] = {}
        for same in groups.values():
            kind = same[0]["asked"]["kind"]
            if kind not in ("longer", "pruned", "transformer-xl"):
                continue
            name = "Transformer-XL" if kind == "transformer-xl" else "All-attention, whole and pruned"
            size = float(np.mean([cell["parameters"] for cell in same])) / 1e6
            lines.setdefault(name, []).append((size, [cell["scores"]["test"] for cell in same]))
        figure = figures.spread(lines, "parameters without embedding, millions", f"test {self.metric}")
        return Picture(
            "figure3", "Metric against parameters", f"Mean over seeds and their spread; {told}.", figure, True
        )


def took(cells: list[dict[str, Any]]) -> str:
    """How long the cells took of which it is known."""
    seconds = [cell["seconds"] for cell in cells if cell.get("seconds") is not None]
    if not seconds:
        return "no cell has told how long it took"
    each = f"{min(seconds):.0f} to {max(seconds):.0f} s each"
    return f"{len(seconds)} of {len(cells)} cells took {sum(seconds) / 60:.1f} minutes, {each}"


def _row(name: str, cells: list[dict[str, Any]], against: list[dict[str, Any]]) -> tuple[str, ...]:
    scores = [cell["scores"]["test"] for cell in cells]
    bases = {cell["asked"]["seed"]: cell["scores"]["test"] for cell in against}
    apart = [cell["scores"]["test"] - bases[cell["asked"]["seed"]] for cell in cells]
    kept, of = (float(np.mean([cell[field] for cell in cells])) for field in ("heads", "of"))
    return (
        name,
        str(len(cells)),
        f"{kept:.1f} of {of:.0f}",
        f"{100 * (1 - kept / of):.1f}",
        f"{np.mean([cell['parameters'] for cell in cells]) / 1e6:.3f}",
        f"{np.mean(scores):.3f}",
        ", ".join(f"{score:.3f}" for score in scores),
        f"{np.mean(apart):+.3f} ({', '.join(f'{one:+.3f}' for one in apart)})",
    )


def _cut(path: Path, tokens: int | None, level: str, out: Path) -> Path:
    """The beginning of a text: so many words or, about, characters."""
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
        write(short, "".join(lines))
    return short


def main() -> None:
    """Run the cells that are missing, print the tables and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("levels", nargs="*", choices=LEVELS, default=["word"])
    parser.add_argument("--size", choices=SIZES, default="tiny")
    parser.add_argument("--seeds", type=int, nargs="+", help="default: those of the size")
    parser.add_argument("--times", type=int, default=1, help="as many times the steps of the size, of every phase")
    parser.add_argument(
        "--out", type=Path, default=Path("build/all_attention"), help="a folder for each level and size"
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
        told = study.told(args.size, results)
        found = study.findings(results, told)
        page.save(
            found,
            out,
            kind="all-attention",
            says="heads that take their persistent vectors along",
            model=f"WikiText-2, {level}s",
            tiles=[("size", args.size, told), ("cells", str(len(found.rows)), "models trained or pruned")],
            facts=[("machine", str(machine("torch", "transformers"))), ("size", told), ("time", took(results))],
        )
        print(f"\n{level}, {told}; {took(results)}\n")
        for table in found.tables:
            print(f"{table.title}\n\n| {' | '.join(table.columns)} |\n|{'---|' * len(table.columns)}")
            print("\n".join(f"| {' | '.join(row)} |" for row in table.rows), end="\n\n", flush=True)


if __name__ == "__main__":
    main()
