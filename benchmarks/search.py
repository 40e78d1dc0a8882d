"""A* on sentiment: the number of heads that can be removed, the metric on unseen rows, and the cost of the search.

It prints three tables as Markdown. `evaluator`: the time to remove random heads, with replay of the computations that
subsets share and with full forward passes, in turn. `loop`: the paper's A* without replay against lazy A* with replay,
on the same rows. `budgets`: heads removed at each budget on each data set, by both variants, with the metric on rows
that the search has not seen, and the best of random subsets of as many heads.

CPU seconds are those of this process; other work on the machine lengthens only the wall seconds.

    python -m benchmarks.search [evaluator] [loop] [budgets] [--rows 300] [--trials 100] [--data sst2 imdb amazon_md]

The model is `minilm-sst2`; with `--tune FOLDER` it is first trained on each data set for an epoch.
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
from compressor.config.values import MixedPrecision
from compressor.model_folder import ModelFolder, example_inputs, load
from compressor.selection.measure_subsets import SubsetMeasurer
from compressor.selection.options import read_options
from compressor.selection.search import Decision, Head
from compressor.selection.search.astar import AStarOptions, AStarSearch
from compressor.selection.subset_evaluator import ModelSubsetEvaluator
from compressor.tasks import Data, open_data
from compressor.units import find_sites

SHARED = Path(__file__).resolve().parents[2] / "shared"
MODEL = SHARED / "models" / "minilm-sst2"
POINTS = (0.01, 0.02, 0.03)
TABLES = ("evaluator", "loop", "budgets")
_CANDIDATES, _BATCH_SIZE = 24, 32
"""Heads that are each removed alone, and rows per batch."""
UNSEEN = 1500
"""Maximum number of unseen rows."""
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
    """`count` evaluation rows to search on, and test rows on which nothing is selected.

    Args:
        folder: the model folder.
        name: name of the data set.
        count: rows to search on.
        max_length: maximum length of a row in tokens.
    """
    file = str(SHARED / "data" / f"{name}.tsv.xz")
    data = open_data(RowsConfig(data=file, max_length=max_length), folder)
    drawn = list(range(len(data.eval)))
    random.Random(0).shuffle(drawn)
    unseen = data.test.select(range(min(UNSEEN, len(data.test))))
    return replace(data, eval=data.eval.select(sorted(drawn[:count])), test=unseen)


class CountingEvaluator:
    """A `SubsetEvaluator` that counts the subsets of one search, while earlier searches share its evaluations.

    Args:
        evaluator: evaluates subsets and caches the results.
    """

    def __init__(self, evaluator: ModelSubsetEvaluator) -> None:
        self.heads, self.forwards = evaluator.heads, 0.0
        self._evaluator, self._counted = evaluator, set[frozenset[Head]]()

    @property
    def count(self) -> int:
        return len(self._counted)

    def evaluate(self, kept: frozenset[Head]) -> float:
        return self.evaluate_all([kept])[0]

    def evaluate_without(self, kept: frozenset[Head], heads: Sequence[Head]) -> list[float]:
        self._counted.update(kept - {head} for head in heads)
        return self._evaluator.evaluate_without(kept, heads)

    def evaluate_all(self, subsets: Iterable[frozenset[Head]]) -> list[float]:
        requested = list(subsets)
        self._counted.update(requested)
        return self._evaluator.evaluate_all(requested)

    def sensitivity(self, kept: frozenset[Head], rows: int) -> Mapping[Head, float]:
        return self._evaluator.sensitivity(kept, rows)


class Bench:
    """One model on one data set.

    Args:
        model: the model folder.
        name: name of the data set.
        count: rows to search on.
        max_length: maximum length of a row in tokens.
        mixed_precision: precision of matrix products.
    """

    def __init__(self, model: Path, name: str, count: int, max_length: int, mixed_precision: MixedPrecision) -> None:
        self.name, self.folder, self.mixed_precision = name, load(model), mixed_precision
        self.max_length = max_length
        self.data = rows(self.folder, name, count, max_length)
        self.sites = find_sites(self.folder.model, example_inputs(self.folder, 2, 8))

    def evaluator(self, *, reuse: bool = True, unseen: bool = False, store: Path | None = None) -> ModelSubsetEvaluator:
        """An evaluator of subsets.

        Args:
            reuse: whether to replay the computations that subsets share, instead of full forward passes.
            unseen: whether to evaluate on the rows that no search sees.
            store: folder of stored evaluations; None: evaluations are not stored.
        """
        data = replace(self.data, eval=self.data.test) if unseen else self.data
        model, precision = self.folder.model, self.mixed_precision
        make_measurer = functools.partial(SubsetMeasurer, reuse=reuse)
        evaluator = ModelSubsetEvaluator(
            model, self.sites, data, _BATCH_SIZE, 0, precision, make_measurer=make_measurer
        )
        if store is not None:
            part = "unseen" if unseen else "searched"
            rows = f"{len(data.eval)}-{part}-{self.max_length}"
            weights = self.folder.fingerprint.removeprefix("sha256:")[:8]
            evaluator.store_in(store / f"{self.folder.path.name}-{weights}-{self.name}-{rows}-{precision}.npz")
        return evaluator

    def search(self, variant: str, budget: float, *, reuse: bool = True) -> tuple[list[Decision], ModelSubsetEvaluator]:
        """The steps of A*, and the evaluator that it used."""
        evaluator = self.evaluator(reuse=reuse)
        return list(astar(variant).choose(evaluator, None, budget)), evaluator


def astar(variant: str) -> AStarSearch:
    """A* in one of its variants."""
    return AStarSearch(read_options("astar", {"variant": variant}, AStarOptions))


def timed(work: Callable[[], T]) -> tuple[T, float, float]:
    """(result, CPU seconds, wall seconds) of a function."""
    cpu, wall = time.process_time(), time.perf_counter()
    return work(), time.process_time() - cpu, time.perf_counter() - wall


def compare_evaluation(bench: Bench, repeats: int) -> Iterator[str]:
    """The table `evaluator`: removal of random heads with and without replay, in turn."""
    yield "| rows | heads tried | plain, CPU s | with replay, CPU s | times faster (each pair) | same metrics |"
    yield "|---|---|---|---|---|---|"
    draw, is_same = random.Random(0), True
    seconds: dict[bool, list[float]] = {True: [], False: []}
    for number in range(repeats):
        metrics = {}
        everything = bench.evaluator().heads
        heads = draw.sample(everything, _CANDIDATES)
        for reuse in (False, True) if number % 2 else (True, False):
            evaluate = functools.partial(bench.evaluator(reuse=reuse).evaluate_without, frozenset(everything), heads)
            metrics[reuse], cpu, _ = timed(evaluate)
            seconds[reuse].append(cpu)
        is_same &= metrics[True] == metrics[False]
    ratios = [plain / replayed for plain, replayed in zip(seconds[False], seconds[True], strict=True)]
    ratio = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
    medians = f"{statistics.median(seconds[False]):.1f} | {statistics.median(seconds[True]):.1f}"
    yield f"| {len(bench.data.eval)} | {_CANDIDATES} x {repeats} | {medians} | {ratio} | {'yes' if is_same else 'NO'} |"


def compare_loops(bench: Bench, budget: float) -> Iterator[str]:
    """The table `loop`: the paper's A* without replay against lazy A* with replay."""
    yield "| search | evaluation | budget | heads dropped | evaluations | full forwards | CPU s | wall s |"
    yield "|---|---|---|---|---|---|---|---|"
    for variant, reuse in (("lazy", True), ("paper", False)):
        (steps, evaluator), cpu, wall = timed(functools.partial(bench.search, variant, budget, reuse=reuse))
        removed = len(evaluator.heads) - len(steps[-1].kept)
        evaluation = "replay" if reuse else "plain"
        yield (
            f"| {variant} | {evaluation} | {100 * budget:g} | {removed} | {evaluator.count} |"
            f" {evaluator.forwards:.0f} | {cpu:.0f} | {wall:.0f} |"
        )


def compare_budgets(bench: Bench, variants: Sequence[str], trials: int, store: Path | None) -> Iterator[str]:
    """The table `budgets`: heads removed at each budget, and the metric on searched and on unseen rows.

    Args:
        bench: the model and the data set.
        variants: variants of A*.
        trials: random subsets to compare with.
        store: folder of stored evaluations.
    """
    yield (
        "| data | budget, points | variant | heads dropped | of them at no loss | searched rows, dense to pruned |"
        " unseen rows, dense to pruned | evaluations | cost fell | best of random, searched |"
    )
    yield "|---|---|---|---|---|---|---|---|---|---|"
    unseen, searched = bench.evaluator(unseen=True, store=store), bench.evaluator(store=store)
    for budget in POINTS:
        for variant in variants:
            counting = CountingEvaluator(searched)
            steps = list(astar(variant).choose(counting, None, budget))
            kept, everything = steps[-1].kept, frozenset(counting.heads)
            dense = searched.evaluate(everything)
            free = len(everything) - min(len(step.kept) for step in steps if searched.evaluate(step.kept) >= dense)
            on_searched = f"{100 * dense:.1f} to {100 * searched.evaluate(kept):.1f}"
            on_unseen = f"{100 * unseen.evaluate(everything):.1f} to {100 * unseen.evaluate(kept):.1f}"
            decreases = f"{steps[-1].values.get('fell', float('nan')):g}" if variant == "lazy" else ""
            best = ""
            if variant == variants[0] and trials:
                draw = random.Random(0)
                subsets = [frozenset(draw.sample(counting.heads, len(kept))) for _ in range(trials)]
                best = f"{100 * max(searched.evaluate_all(subsets)):.1f} of {trials}"
            yield (
                f"| {bench.name} | {100 * budget:g} | {variant} | {len(everything) - len(kept)} of {len(everything)} |"
                f" {free} | {on_searched} | {on_unseen} | {counting.count} | {decreases} | {best} |"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("tables", nargs="*", choices=TABLES, default=TABLES)
    parser.add_argument("--rows", type=int, default=300, help="rows to search on")
    parser.add_argument("--max-length", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--trials", type=int, default=100, help="random subsets to compare with")
    parser.add_argument("--variants", nargs="*", default=["paper", "lazy"], help="variants of A* for budgets")
    parser.add_argument("--budget", type=float, default=0.02, help="budget of the loop")
    parser.add_argument("--data", nargs="*", default=["sst2"])
    parser.add_argument("--bf16", action="store_true", help="products in bfloat16; default: float32")
    parser.add_argument("--tune", type=Path, help="folder of models trained on each data set")
    parser.add_argument("--store", type=Path, help="folder of evaluations; an interrupted table resumes")
    options = parser.parse_args()
    print(f"machine: {machine('torch', 'transformers')}; {torch.get_num_threads()} threads")
    numbers = "bfloat16" if options.bf16 else "float32"
    tuned = ", tuned on each data set" if options.tune else ""
    length = options.max_length
    mixed_precision: MixedPrecision = "bf16" if options.bf16 else "no"
    print(f"minilm-sst2{tuned}, at most {length} tokens, {numbers}", flush=True)
    benches = {
        name: Bench(model(name, options.tune, length), name, options.rows, length, mixed_precision)
        for name in options.data
    }
    for bench in benches.values():
        print(f"{bench.name}: {len(bench.data.eval)} rows searched, {len(bench.data.test)} unseen", flush=True)
    print()
    for table in options.tables:
        for bench in benches.values():
            if table == "evaluator":
                lines = compare_evaluation(bench, options.repeats)
            elif table == "loop":
                lines = compare_loops(bench, options.budget)
            else:
                lines = compare_budgets(bench, options.variants, options.trials, options.store)
            for line in lines:
                print(line, flush=True)
            print(flush=True)


if __name__ == "__main__":
    main()
