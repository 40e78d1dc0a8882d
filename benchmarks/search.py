"""A* on sentiment: how many heads are free, what unseen rows say of it, and what the search costs.

Three tables, printed as Markdown. `evaluator`: the metric of random heads' removal, by the evaluator that plays back
what a subset does not change and by plain runs of the whole model, in turn. `loop`: the paper's A* with plain
evaluation against lazy A* with the evaluator, on the same rows. `budgets`: heads dropped at each budget of each data
set, by both variants, with the metric on rows that the search has not seen, and the best of random trials of as many
heads.

Times are CPU seconds of this process beside wall seconds: other work on the machine lengthens the second alone.

    python -m benchmarks.search [evaluator] [loop] [budgets] [--rows 300] [--trials 100] [--data sst2 imdb amazon_md]

The model is `minilm-sst2` as it is; with `--tune FOLDER` it first learns the training rows of each for an epoch.
"""

from __future__ import annotations

import argparse
import functools
import random
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import torch

from benchmarks.grid import tune
from benchmarks.machine import machine
from compressor.config.sections import RowsConfig
from compressor.model_folder import ModelFolder, example_inputs, load
from compressor.selection.search import SEARCHES, Head, Step
from compressor.selection.subset_evaluator import ModelSubsetEvaluator
from compressor.tasks import Data, open_data
from compressor.training.schedule import MixedPrecision
from compressor.units import find_sites

SHARED = Path(__file__).resolve().parents[2] / "shared"
MODEL = SHARED / "models" / "minilm-sst2"
POINTS = (0.01, 0.02, 0.03)
TABLES = ("evaluator", "loop", "budgets")
_AT_ONCE = 24
UNSEEN = 1500
"""Rows of the unseen part, at most."""
T = TypeVar("T")


def model(name: str, tuned: Path | None, max_length: int) -> Path:
    """The model folder that is searched on data set `name`."""
    if tuned is None:
        return MODEL
    folder = tuned / f"minilm-{name}"
    if not folder.exists():
        tune(MODEL, name, folder, epochs=1, max_length=max_length)
    return folder


def rows(folder: ModelFolder, name: str, count: int, max_length: int) -> Data:
    """A data set whose evaluation rows are searched, `count` of them, and whose test rows nothing is chosen on."""
    file = str(SHARED / "data" / f"{name}.tsv.xz")
    data = open_data(RowsConfig(data=file, max_length=max_length), folder)
    drawn = list(range(len(data.eval)))
    random.Random(0).shuffle(drawn)
    unseen = data.test.select(range(min(UNSEEN, len(data.test))))
    return replace(data, eval=data.eval.select(sorted(drawn[:count])), test=unseen)


class Asked:
    """Trials that answer from what earlier searches measured, and count what this one asked for."""

    def __init__(self, trials: ModelSubsetEvaluator) -> None:
        self.heads, self.forwards = trials.heads, 0.0
        self._trials, self._asked = trials, set[frozenset[Head]]()

    @property
    def count(self) -> int:
        return len(self._asked)

    def evaluate(self, kept: frozenset[Head]) -> float:
        return self.evaluate_all([kept])[0]

    def evaluate_without(self, kept: frozenset[Head], heads: Sequence[Head]) -> list[float]:
        self._asked.update(kept - {head} for head in heads)
        return self._trials.evaluate_without(kept, heads)

    def evaluate_all(self, subsets: Iterable[frozenset[Head]]) -> list[float]:
        asked = list(subsets)
        self._asked.update(asked)
        return self._trials.evaluate_all(asked)

    def sensitivity(self, kept: frozenset[Head]) -> Mapping[Head, float]:
        return self._trials.sensitivity(kept)


class Bench:
    """One model on one data set."""

    def __init__(self, model: Path, name: str, count: int, max_length: int, mixed_precision: MixedPrecision) -> None:
        self.name, self.folder, self.mixed_precision = name, load(model), mixed_precision
        self.max_length = max_length
        self.data = rows(self.folder, name, count, max_length)
        self.sites = find_sites(self.folder.model, example_inputs(self.folder, 2, 8))

    def trials(self, *, plain: bool = False, unseen: bool = False, store: Path | None = None) -> ModelSubsetEvaluator:
        data = replace(self.data, eval=self.data.test) if unseen else self.data
        made = ModelSubsetEvaluator(self.folder.model, self.sites, data, 32, 1, 0, self.mixed_precision, plain=plain)
        if store is not None:
            part = "unseen" if unseen else "searched"
            rows = f"{len(data.eval)}-{part}-{self.max_length}"
            weights = self.folder.fingerprint.removeprefix("sha256:")[:8]
            made.remember(store / f"{self.folder.path.name}-{weights}-{self.name}-{rows}-{self.mixed_precision}.npz")
        return made

    def astar(self, variant: str, budget: float, *, plain: bool = False) -> tuple[list[Step], ModelSubsetEvaluator]:
        trials = self.trials(plain=plain)
        return list(SEARCHES["astar"](variant=variant).choose(trials, None, budget)), trials


def timed(work: Callable[[], T]) -> tuple[T, float, float]:
    """The result, CPU seconds, wall seconds."""
    cpu, wall = time.process_time(), time.perf_counter()
    return work(), time.process_time() - cpu, time.perf_counter() - wall


def evaluator(bench: Bench, repeats: int) -> Iterator[str]:
    """Both ways of measuring the removal of random heads, in turn."""
    yield "| rows | heads tried | plain, CPU s | with playback, CPU s | times faster (each pair) | same metrics |"
    yield "|---|---|---|---|---|---|"
    draw, same = random.Random(0), True
    spent: dict[bool, list[float]] = {True: [], False: []}
    for number in range(repeats):
        found = {}
        everything = bench.trials().heads
        heads = draw.sample(everything, _AT_ONCE)
        for plain in (True, False) if number % 2 else (False, True):
            trials = bench.trials(plain=plain)
            removed = functools.partial(trials.evaluate_without, frozenset(everything), heads)
            found[plain], cpu, _ = timed(removed)
            spent[plain].append(cpu)
        same &= found[True] == found[False]
    ratios = [one / other for one, other in zip(spent[True], spent[False], strict=True)]
    told = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
    medians = f"{statistics.median(spent[True]):.1f} | {statistics.median(spent[False]):.1f}"
    yield f"| {len(bench.data.eval)} | {_AT_ONCE} x {repeats} | {medians} | {told} | {'yes' if same else 'NO'} |"


def loop(bench: Bench, budget: float) -> Iterator[str]:
    """The paper's loop, plainly evaluated, against the lazy one with playback."""
    yield "| search | evaluation | budget | heads dropped | evaluations | full forwards | CPU s | wall s |"
    yield "|---|---|---|---|---|---|---|---|"
    for variant, plain in (("lazy", False), ("paper", True)):
        (steps, trials), cpu, wall = timed(functools.partial(bench.astar, variant, budget, plain=plain))
        dropped = len(trials.heads) - len(steps[-1].kept)
        way = "plain" if plain else "playback"
        yield (
            f"| {variant} | {way} | {100 * budget:g} | {dropped} | {trials.count} | {trials.forwards:.0f} | {cpu:.0f} |"
            f" {wall:.0f} |"
        )


def budgets(bench: Bench, variants: Sequence[str], trials: int, store: Path | None) -> Iterator[str]:
    """Heads dropped at each budget, on the rows searched and on unseen ones."""
    yield (
        "| data | budget, points | variant | heads dropped | of them at no loss | searched rows, dense to pruned |"
        " unseen rows, dense to pruned | evaluations | cost fell | best of random, searched |"
    )
    yield "|---|---|---|---|---|---|---|---|---|---|"
    unseen, measured = bench.trials(unseen=True, store=store), bench.trials(store=store)
    for budget in POINTS:
        for variant in variants:
            asked = Asked(measured)
            steps = list(SEARCHES["astar"](variant=variant).choose(asked, None, budget))
            kept, everything = steps[-1].kept, frozenset(asked.heads)
            dense = measured.evaluate(everything)
            free = len(everything) - min(len(step.kept) for step in steps if measured.evaluate(step.kept) >= dense)
            searched = f"{100 * measured.evaluate(everything):.1f} to {100 * measured.evaluate(kept):.1f}"
            new = f"{100 * unseen.evaluate(everything):.1f} to {100 * unseen.evaluate(kept):.1f}"
            fell = f"{steps[-1].values.get('fell', float('nan')):g}" if variant == "lazy" else ""
            best = ""
            if variant == variants[0] and trials:
                draw = random.Random(0)
                drawn = [frozenset(draw.sample(asked.heads, len(kept))) for _ in range(trials)]
                best = f"{100 * max(measured.evaluate_all(drawn)):.1f} of {trials}"
            yield (
                f"| {bench.name} | {100 * budget:g} | {variant} | {len(everything) - len(kept)} of {len(everything)} |"
                f" {free} | {searched} | {new} | {asked.count} | {fell} | {best} |"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("tables", nargs="*", choices=TABLES, default=TABLES)
    parser.add_argument("--rows", type=int, default=300, help="rows searched")
    parser.add_argument("--max-length", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--trials", type=int, default=100, help="random subsets to compare with")
    parser.add_argument("--variants", nargs="*", default=["paper", "lazy"], help="of A*, in the table of budgets")
    parser.add_argument("--budget", type=float, default=0.02, help="of the loop")
    parser.add_argument("--data", nargs="*", default=["sst2"])
    parser.add_argument("--bf16", action="store_true", help="multiply matrices in bfloat16; else in float32")
    parser.add_argument("--tune", type=Path, help="folder of the models that have learned their own data set first")
    parser.add_argument("--store", type=Path, help="folder to keep measured subsets in: an interrupted table goes on")
    options = parser.parse_args()
    print(f"machine: {machine('torch', 'transformers')}; {torch.get_num_threads()} threads")
    numbers = "bfloat16" if options.bf16 else "float32"
    tuned = ", tuned on each data set" if options.tune else ""
    length = options.max_length
    mixed_precision: MixedPrecision = "bf16" if options.bf16 else "no"
    print(f"minilm-sst2{tuned}, at most {length} tokens, {numbers}", flush=True)
    made = {
        name: Bench(model(name, options.tune, length), name, options.rows, length, mixed_precision)
        for name in options.data
    }
    for bench in made.values():
        print(f"{bench.name}: {len(bench.data.eval)} rows searched, {len(bench.data.test)} unseen", flush=True)
    print()
    for table in options.tables:
        for bench in made.values():
            if table == "evaluator":
                lines = evaluator(bench, options.repeats)
            elif table == "loop":
                lines = loop(bench, options.budget)
            else:
                lines = budgets(bench, options.variants, options.trials, options.store)
            for line in lines:
                print(line, flush=True)
            print(flush=True)


if __name__ == "__main__":
    main()
