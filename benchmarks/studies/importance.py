"""Importance of heads by domain of the rows and by epoch of training (Michel et al. 2019, sections 4 and 6)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from datasets import Dataset
from scipy.stats import pearsonr, spearmanr

from benchmarks.studies import figures
from benchmarks.studies.base import Study, check_options
from benchmarks.studies.cell_store import Cell, Result
from benchmarks.studies.findings import Findings, Picture, Table
from benchmarks.studies.request import StudyRequest
from compressor.models.forwards import tensors_of
from compressor.progress import ProgressCallback
from compressor.selection.subset_evaluator import sensitivity
from compressor.tasks.base import Task, make_task
from compressor.tasks.data import SourceRows, encode_rows
from compressor.tasks.id_tables import IdTables
from compressor.tasks.scoring import batches
from compressor.tasks.splits import named_splits, pick_any

_COLUMN = "domain"
_RESERVED = {"evaluations": "study importance trains one epoch at a time and evaluates at its end only; omit it"}


class Importance(Study):
    """I_h = E_x |Att_h(x) . dL/dAtt_h(x)| of every head: on each data set or domain, and after each epoch.

    Each epoch is a separate run from the weights of the previous epoch, so the learning rate rises and falls in each.
    """

    description = "importance of heads across domains and over training epochs"
    axes: ClassVar = {}
    compares_data_sets = True

    @classmethod
    def check(cls, request: StudyRequest) -> None:
        check_options(request.recipe.selection.options, ["dsp"], _RESERVED)

    def cells(self) -> list[Cell]:
        epochs = int(np.ceil(self.request.recipe.selection.epochs or self.request.size.epochs))
        return [
            *(Cell(f"domain-{number}", {"domain": name}) for number, (name, _, _) in enumerate(self._domains)),
            *(
                Cell(f"epoch-{epoch}", {"epoch": epoch}, (f"epoch-{epoch - 1}",) if epoch else ())
                for epoch in range(epochs + 1)
            ),
        ]

    @cached_property
    def _domains(self) -> list[tuple[str, Dataset, Task]]:
        """Name, encoded rows and task of every data set, or of every value of its column `domain`."""
        sampled, tables = [], IdTables.of(self.context.folder.model, self.context.folder.processor)
        for source in self.request.sources:
            splits = named_splits(source)
            split = pick_any(splits, "train")
            rows, origin = splits[split], splits.origins[split]
            task = make_task(self.context.folder, self.request.recipe.rows)
            with origin.located():
                task.learn_labels(rows, source)
            names = (
                [str(name) for name in rows[_COLUMN]]
                if _COLUMN in rows.column_names
                else [Path(source).name] * len(rows)
            )
            for name in dict.fromkeys(names):
                indices = np.flatnonzero(np.array(names) == name)
                drawn = np.random.default_rng(self.request.recipe.selection.seed).permutation(indices)[
                    : self.request.size.sample
                ]
                chosen = SourceRows(rows.select(np.sort(drawn)), source, origin.select(partial(np.sort, drawn)))
                sampled.append((name, encode_rows(task, chosen, tables, is_labelled=True), task.chooser))
        return sampled

    def run(self, cell: Cell, work: Path, on_progress: ProgressCallback) -> Result:
        if "domain" in cell.settings:
            self.context.reset_model()
            _, rows, task = self._domains[int(cell.name.rpartition("-")[2])]
            return self._importance(rows, task)
        data, epoch = self.context.data, cell.settings["epoch"]
        self.context.reset_model(self._weights(epoch - 1) if epoch > 1 else None)
        if epoch:
            steps = int(np.ceil(len(data.train) / self.request.recipe.selection.batch_size))
            seed = self.request.recipe.selection.seed + epoch
            self.context.select_heads("dsp", "100%", seed, work, on_progress, steps=steps, evaluations=1)
            self.context.save(self._weights(epoch))
        drawn = np.random.default_rng(self.request.recipe.selection.seed).permutation(len(data.train))[
            : self.request.size.sample
        ]
        return self._importance(data.train.select(np.sort(drawn)), data.task.chooser)

    def _weights(self, epoch: int) -> Path:
        return self.folder.scratch(f"epoch-{epoch}.safetensors")

    def _importance(self, rows: Dataset, task: Task) -> Result:
        context = self.context
        sampled = sensitivity(
            context.model,
            context.sites,
            torch.ones(len(context.heads), dtype=torch.bool),
            (
                tensors_of(task.loss_inputs(batch))
                for _, batch in batches(task, rows, self.request.recipe.selection.batch_size)
            ),
        )
        return {"rows": len(rows), "importance": sampled.tolist()}

    def findings(self, results: Sequence[Result]) -> Findings:
        rows: list[dict[str, Any]] = []
        tables: list[Table] = []
        pictures: list[Picture] = []
        for axis in ("domain", "epoch"):
            cells = sorted((cell for cell in results if axis in cell["settings"]), key=_number)
            rows += self._rows(axis, cells)
            numbers = [str(index + (axis == "domain")) for index in range(len(cells))]
            names = [str(cell["settings"][axis]) for cell in cells]
            labels = [
                f"{number} {name}" if name != number else name for number, name in zip(numbers, names, strict=True)
            ]
            values = [cell["importance"] for cell in cells]
            correlations = _matrix(values, lambda a, b: float(pearsonr(a, b).statistic))
            rank_correlations = _matrix(values, lambda a, b: float(spearmanr(a, b).statistic))
            tables.append(_table(f"Correlation of the heads' importance by {axis}", labels, numbers, correlations))
            tables.append(_table(f"Correlation of their ranks by {axis}", labels, numbers, rank_correlations))
            description = "; ".join(labels) if axis == "domain" else "0 is the model before training"
            pictures.append(_correlation_picture(axis, description, numbers, correlations))
            pictures.append(self._importance_picture(axis, description, numbers, values))
        return Findings(rows, tables, pictures)

    def _rows(self, axis: str, cells: Sequence[Result]) -> list[dict[str, Any]]:
        """One row per cell and head, for the CSV file."""
        return [
            {
                "what": axis,
                "which": cell["settings"][axis],
                "site": site,
                "head": head,
                "importance": value,
                "rows": cell["rows"],
                "seconds": cell["seconds"],
            }
            for cell in cells
            for (site, head), value in zip(self.context.heads, cell["importance"], strict=True)
        ]

    def _importance_picture(
        self, axis: str, description: str, numbers: Sequence[str], values: Sequence[Sequence[float]]
    ) -> Picture:
        """A map of the heads for each domain or epoch.

        Args:
            axis: `domain` or `epoch`.
            description: what the numbers stand for.
            numbers: numbers of the domains or epochs.
            values: importance of every head, for each number.
        """
        maps = [
            (f"{axis} {number}", self.context.map(dict(zip(self.context.heads, value / np.max(value), strict=True))))
            for number, value in zip(numbers, map(np.array, values), strict=True)
        ]
        return Picture(
            f"{axis}_importance",
            f"Importance of each head by {axis}",
            f"As a share of the largest. {description}. Rows: attention layers in call order; columns: heads.",
            figures.maps(maps, low=0.0, high=1.0),
            wide=len(maps) > 1,
        )


def _correlation_picture(axis: str, description: str, numbers: Sequence[str], correlations: np.ndarray) -> Picture:
    return Picture(
        f"{axis}_correlation",
        f"Correlation of importance by {axis}",
        f"Pearson's, over the heads. {description}.",
        figures.table_map(correlations, numbers, axis, places=2, first=int(numbers[0])),
    )


def _number(cell: Result) -> int:
    return int(cell["cell"].rpartition("-")[2])


def _matrix(values: Sequence[Sequence[float]], correlation: Any) -> np.ndarray:
    return np.array([[correlation(first, second) for second in values] for first in values])


def _table(title: str, labels: Sequence[str], numbers: Sequence[str], matrix: np.ndarray) -> Table:
    lines = tuple(
        (label, *(f"{value:.2f}" for value in line)) for label, line in zip(labels, matrix.tolist(), strict=True)
    )
    return Table(title, ("", *numbers), lines)
