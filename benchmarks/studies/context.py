"""The model folder and the rows that all cells of a study share. Each cell starts from the folder's weights."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from datasets import Dataset
from transformers import PreTrainedModel

from benchmarks.studies.request import StudySize
from compressor.config.run import Recipe
from compressor.config.step_list import step_of_flags
from compressor.config.steps import Heads
from compressor.errors import ErrorCode, InputError
from compressor.model_folder import example_inputs
from compressor.models.forwards import reader
from compressor.progress import ProgressCallback
from compressor.run.load import load_folder
from compressor.selection.learn import learn
from compressor.selection.options import option_names
from compressor.selection.plan_and_curves import SelectedPlan
from compressor.selection.search import Head, all_heads
from compressor.selection.subset_evaluator import EvaluatorFactory, ModelSubsetEvaluator
from compressor.tasks import Data, open_data
from compressor.tasks.causal_lm import read
from compressor.tasks.data import rows_hash
from compressor.tasks.scoring import forward_of, statistics
from compressor.units import find_sites, gated
from graph_passes import Plan
from graph_passes.files import atomic_replace


class StudyContext:
    """The model, its sites, and as many rows as the size allows, drawn with the recipe's seed.

    Attributes:
        folder: the model folder; its model holds the weights of the cell that ran last, see `reset_model`.
        sites: attention sites, in call order.
        heads: all heads in (site, head) order.
        rows: the rows; None where the recipe names none.
        make_evaluator: constructs the evaluators; `evaluator_factory` has a distributed one.
    """

    write_seconds = 30.0
    """Minimum seconds between two writes of a search's evaluations."""

    def __init__(self, recipe: Recipe, size: StudySize) -> None:
        self.recipe, self.size = recipe, size
        self.folder = load_folder(recipe, recipe.source.model)
        self.sites = find_sites(self.folder.model, example_inputs(self.folder, 2, 8))
        self.heads: tuple[Head, ...] = all_heads(self.sites)
        self.rows = (
            limit_rows(open_data(recipe.rows, self.folder, recipe.selection.seed), size, recipe.selection.seed)
            if recipe.rows.sources
            else None
        )
        self.make_evaluator: EvaluatorFactory = ModelSubsetEvaluator
        self._start = {name: tensor.clone() for name, tensor in self.folder.model.state_dict().items()}

    @property
    def data(self) -> Data:
        """The rows.

        Raises:
            InputError: the recipe names none.
        """
        if self.rows is None:
            raise InputError(
                "there are no rows, and this study needs some; add them (--data)", code=ErrorCode.MISSING_VALUE
            )
        return self.rows

    @property
    def model(self) -> PreTrainedModel:
        return self.folder.model

    def reset_model(self, weights: Path | None = None) -> PreTrainedModel:
        """The model with the folder's weights or those of a file, in evaluation mode, on a GPU if there is one."""
        if weights is None:
            self.model.load_state_dict(self._start)
        else:
            safetensors.torch.load_model(self.model, str(weights))
        self.model.zero_grad(set_to_none=True)
        self.model.eval()
        self.model.to("cuda" if torch.cuda.is_available() else "cpu")  # type: ignore[arg-type]
        return self.model

    def save(self, weights: Path) -> None:
        """Write the model's weights for later cells, atomically."""
        with atomic_replace(weights) as index:
            safetensors.torch.save_model(self.model, str(index))

    def answers(self, plan: Plan, rows: Dataset) -> np.ndarray:
        """`Task.measure` of every row, `[examples, k]`, with heads gated and maps masked as `plan` says; a text for a
        model with memory is read in order."""
        task = self.data.task

        self.model.eval()
        with torch.no_grad(), gated(self.model, plan):
            if task.reads_streams:
                return read(task, rows, reader(self.model), self.recipe.selection.batch_size)
            return statistics(task, rows, forward_of(task, self.model))

    def evaluator(self, rows: Dataset, store: Path) -> ModelSubsetEvaluator:
        """Evaluates subsets of the heads of the model as it is now, on `rows`, by the task's metric for choosing heads.

        The evaluations are kept in the file `store`, see `ModelSubsetEvaluator.store_in`.
        """
        data = replace(self.data, eval=rows, task=self.data.task.chooser)
        recipe = self.recipe
        evaluator = self.make_evaluator(
            self.model, self.sites, data, recipe.selection.batch_size, recipe.selection.seed
        )
        evaluator.store_in(store, seconds=self.write_seconds)
        return evaluator

    def steps(self) -> int:
        """Training steps of a run: the recipe's, or else the size's."""
        selection = self.recipe.selection
        if selection.training_steps is not None:
            return selection.training_steps
        steps = int(np.ceil((selection.epochs or self.size.epochs) * len(self.data.train) / selection.batch_size))
        is_free = selection.epochs is not None or self.size.steps is None
        return steps if is_free else min(steps, int(self.size.steps or steps))

    def options_of(self, method: str) -> dict[str, Any]:
        """The options with which a study runs a method.

        They are the limits of the study's size, overridden by the options of the recipe (`name=value`), overridden by
        those that name the method (`method.name=value`). Options that the method does not have are left out.
        """
        size, options = self.size, self.recipe.selection.options
        size_options = {"evaluations": size.evaluations, "rows": size.sample, "trials": size.trials}
        prefix = f"{method}."
        of_method = {name.removeprefix(prefix): value for name, value in options.items() if name.startswith(prefix)}
        merged = {**size_options, **options, **of_method}
        known = option_names(method)
        return {name: value for name, value in merged.items() if name in known}

    def select_heads(
        self,
        method: str,
        keep: int | str,
        seed: int,
        work: Path,
        on_progress: ProgressCallback,
        *,
        steps: int | None = None,
        **options: Any,
    ) -> SelectedPlan:
        """Select heads of the model as it is now; an interrupted run resumes from the checkpoints in `work`.

        Args:
            method: method of selection.
            keep: number or share of the heads to keep.
            seed: seed of the run.
            work: working folder of the cell; checkpoints are written below it.
            on_progress: receives the finished and the total number of steps.
            steps: training steps; the default is `StudyContext.steps`.
            options: options of the method, which override those of the recipe.

        Returns:
            The plan, and the course of the selection.
        """
        step = step_of_flags(self.recipe.updated(method=method, keep=keep), Heads).model_copy(
            update={
                "max_drop": None,
                "options": {**self.options_of(method), **options},
                "training_steps": self.steps() if steps is None else steps,
                "seed": seed,
            }
        )
        return learn(self.model, self.sites, self.data, step, work / "checkpoints", on_progress)

    def map(self, values: Mapping[Head, float]) -> np.ndarray:
        """One number per head as `[sites, heads]`; NaN where a site has fewer heads."""
        matrix = np.full((len(self.sites), max(site.heads for site in self.sites)), np.nan)
        number = {site.name: index for index, site in enumerate(self.sites)}
        for (site, head), value in values.items():
            matrix[number[site], head] = value
        return matrix

    def describe_rows(self) -> str:
        """Number of rows of each split, as text."""
        if self.rows is None:
            return "no rows"
        train, evaluation, test = (len(rows) for rows in (self.rows.train, self.rows.eval, self.rows.test))
        return f"{train:,} training, {evaluation:,} evaluation, {test:,} test"


def site_numbers(kept: Iterable[Head], context: StudyContext) -> str:
    """Heads as `site.head`, sites numbered in call order."""
    number = {site.name: index for index, site in enumerate(context.sites)}
    return " ".join(f"{index}.{head}" for index, head in sorted((number[site], head) for site, head in kept))


def drawn(rows: Dataset, most: int | None, seed: int) -> Dataset:
    """At most `most` rows, drawn at random and in their order."""
    if most is None or len(rows) <= most:
        return rows
    return rows.select(np.sort(np.random.default_rng(seed).permutation(len(rows))[:most]))


def limit_rows(data: Data, size: StudySize, seed: int) -> Data:
    """At most as many rows of each split as the size allows: drawn at random, or the first rows of a text.

    Rows that belong together, such as the passages of a query, are all kept.
    """

    def some(rows: Dataset, most: int | None) -> Dataset:
        if data.task.set_aside_by is not None:
            return rows
        if data.task.in_order and most is not None and len(rows) > most:
            return rows.select(range(most))
        return drawn(rows, most, seed)

    train, chosen_on, test = (
        some(rows, most) for rows, most in ((data.train, size.train), (data.eval, size.eval), (data.test, size.test))
    )
    if train is data.train and chosen_on is data.eval and test is data.test:
        return data
    train_hash, eval_hash = rows_hash(train), rows_hash(chosen_on)
    return replace(data, train=train, eval=chosen_on, test=test, train_hash=train_hash, eval_hash=eval_hash)


def kept_heads(plan: Plan) -> list[list[Any]]:
    """The heads of a plan as JSON: `[site, head]` each."""
    return [[site.name, head] for site in plan.sites for head in site.kept]
