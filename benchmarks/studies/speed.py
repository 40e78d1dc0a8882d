"""Speed and size against heads kept (Li et al. 2021, figures 4 and 5; Michel et al. 2019, table 4).

Every engine is timed in turn with the dense one. Run this study in one process: two processes that share the cells
disturb each other's timing.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

import graph_passes
from benchmarks.studies import figures
from benchmarks.studies.base import Study
from benchmarks.studies.cell_store import STAMP, Cell, Result, read_results
from benchmarks.studies.context import StudyContext
from benchmarks.studies.findings import Findings, Picture, Table
from benchmarks.studies.request import StudyRequest
from compressor.engines.build import require_complete, shrink
from compressor.engines.export import rehearsal_plan
from compressor.errors import ErrorCode, InputError, UsageError, suggestion
from compressor.export import export_reference
from compressor.measure import interleave
from compressor.model_folder import ModelFolder, example_feeds, example_inputs
from compressor.progress import ProgressCallback
from compressor.run.sizes import timed_lengths
from compressor.run.stages import build_options
from compressor.selection.options import heads_to_keep
from compressor.selection.search import Head
from compressor.targets import Engine, target
from compressor.tasks.base import task_classes
from compressor.tasks.metrics import Metric
from compressor.units import keep_all, keep_only

_BATCH = 8
_BATCHES = (1, 4, 16, 64)
_REPEATS = 3
_KINDS = ("mask", "batch", "grid")
_SPEED = "times the speed of dense"
_SMALLER = "file smaller by, %"


class SpeedStudy(Study):
    """Random masks of each number of heads, half of the heads at several batch sizes, and grid studies' selections."""

    description = "speed and size against heads kept, and against the metric"
    axes: ClassVar = {"keeps": (), "grids": ()}
    groups = ("Engine", "Measuring")
    needs_rows = False
    _dense: Engine | None = None

    @classmethod
    def check(cls, request: StudyRequest) -> None:
        request.recipe.engine.require_definite()
        for path in map(Path, cls.values(request, "grids")):
            read_grid(path)

    def cells(self) -> list[Cell]:
        masks = range(self.request.size.masks)
        half = heads_to_keep("50%", len(self.context.heads))
        return [
            Cell("dense", {"what": "dense"}),
            *(
                Cell(f"k{keep}-m{mask}", {"what": "mask", "keep": keep, "mask": mask, "batch": self._batch}, ("dense",))
                for keep in self.keeps()
                for mask in masks
            ),
            *(
                Cell(f"b{batch}-m{mask}", {"what": "batch", "keep": half, "mask": mask, "batch": batch}, ("dense",))
                for batch in self._batches
                for mask in range(min(_REPEATS, len(masks)))
            ),
            *(
                Cell(
                    f"grid-{_digest(metric, cell)}-{cell['cell']}",
                    {
                        "what": "grid",
                        **{name: cell["settings"][name] for name in ("method", "keep", "seed")},
                        "kept": cell["kept"],
                        "test": cell["test"],
                        "metric": metric,
                        "batch": self._batch,
                    },
                    ("dense",),
                )
                for metric, cells in self._grids
                for cell in cells
            ),
        ]

    @property
    def _batch(self) -> int:
        return self.request.recipe.measure.batch[0] if "batch" in self.request.recipe.fields_set else _BATCH

    @property
    def _batches(self) -> tuple[int, ...]:
        return self.request.recipe.measure.batch if "batch" in self.request.recipe.fields_set else _BATCHES

    @property
    def _seconds(self) -> float:
        request = self.request.recipe
        return request.measure.seconds if "seconds" in request.fields_set else self.request.size.seconds

    @property
    def _seq(self) -> int | None:
        return timed_lengths(self.request.recipe.measure, self.context.folder)[0]

    def settings(self) -> dict[str, Any]:
        batches = sorted({self._batch, *self._batches})
        return {"batch": batches, "seq": self._seq, "seconds": self._seconds}

    @cached_property
    def _grids(self) -> list[tuple[str, list[Result]]]:
        """Metric and cells, without the dense ones, of every grid study that is named."""
        collected = []
        for path in map(Path, self.axis("grids")):
            recipe, cells = read_grid(path)
            if recipe.get("kind") != "grid" or recipe.get("model") != self.context.folder.fingerprint:
                raise InputError(
                    f"{path}: no grid study of this model; name the folder of one (--grids)",
                    code=ErrorCode.FILE_MISMATCH,
                    path=path,
                )
            collected.append((recipe["metric"], [cell for cell in cells if cell["settings"]["method"] != "dense"]))
        metrics = sorted({metric for metric, _ in collected})
        if len(metrics) > 1:
            raise InputError(
                f"{', '.join(metrics)}: grids with different metrics; name grids with the same metric (--grids)",
                code=ErrorCode.CONTRADICTION,
                field="grids",
            )
        return collected

    def run(self, cell: Cell, work: Path, on_progress: ProgressCallback) -> Result:
        if cell.settings["what"] == "dense":
            return self._export()
        is_grid = cell.settings["what"] == "grid"
        kept = [(site, head) for site, head in cell.settings["kept"]] if is_grid else self._mask(cell)
        plan = keep_only(self.context.sites, dict.fromkeys(kept, 1.0))
        graph = work / "model.onnx"
        graph_passes.save(require_complete(shrink(self._reference, plan)).model, graph)
        if self._dense is None:  # the runtime keeps the file open when this cell's folder is removed
            self._dense = self._build(self.folder.scratch("dense.onnx"), work / "dense.onnx")
        engine = self._build(graph, work / "engine.onnx")
        seq = self._seq
        batch = cell.settings["batch"]
        feeds = example_feeds(self.context.folder, batch, seq)
        seed = self.request.recipe.selection.seed
        ratio = interleave(
            self._dense, engine, feeds, batch=batch, seq=seq, seconds=self._seconds, seed=seed, on_progress=on_progress
        )
        return {
            "heads": len(kept),
            "ratio": ratio.ratio,
            "low": ratio.low,
            "high": ratio.high,
            "dense_per_second": ratio.dense.throughput,
            "per_second": ratio.compressed.throughput,
            "seq": seq,
            "void": ratio.void,
            **_size(graph),
        }

    def _export(self) -> Result:
        context, recipe = self.context, self.request.recipe
        context.reset_model().to("cpu")  # type: ignore[arg-type]
        inputs = example_inputs(context.folder, batch=2, seq=8)
        dense = keep_all(context.sites)
        export_reference(
            context.model, dense, inputs, self._reference, opset=recipe.export.opset, attention=recipe.export.attention
        )
        # Sites that cannot be shrunk are refused here, before the first timing.
        require_complete(shrink(self._reference, rehearsal_plan(context.sites)))
        graph_passes.save(require_complete(shrink(self._reference, dense)).model, self.folder.scratch("dense.onnx"))
        return {"heads": len(context.heads), **_size(self.folder.scratch("dense.onnx"))}

    @property
    def _reference(self) -> Path:
        return self.folder.scratch("reference.onnx")

    def _build(self, graph: Path, out: Path) -> Engine:
        recipe = self.request.recipe
        lengths = timed_lengths(recipe.measure, self.context.folder)
        tuning = build_options(recipe.updated(batch=tuple(self.settings()["batch"])), lengths, ())
        tuning = replace(tuning, norm_seconds=0.0)  # masks are compared in the runtime's own form
        return target(recipe.engine.target)(
            graph,
            out,
            precision=recipe.engine.definite_precision,
            provider=recipe.engine.provider,
            threads=recipe.engine.threads,
            options=tuning,
        )

    def _mask(self, cell: Cell) -> list[Head]:
        keep, mask = cell.settings["keep"], cell.settings["mask"]
        drawn = np.random.default_rng([self.request.recipe.selection.seed, keep, mask]).permutation(
            len(self.context.heads)
        )
        return [self.context.heads[index] for index in sorted(drawn[:keep])]

    def findings(self, results: Sequence[Result]) -> Findings:
        grids = {cell.name for cell in self.cells() if cell.settings["what"] == "grid"}  # of the grids named now
        return SpeedFindings(results, self.context, grids).findings()


def read_grid(path: Path) -> tuple[dict[str, Any], list[Result]]:
    """Recipe and cells of the study in a folder.

    Raises:
        InputError: the folder holds no readable study.
    """
    try:
        recipe = dict(json.loads((path / STAMP).read_text(encoding="utf-8")))
        return recipe, [*read_results(path)]
    except (OSError, ValueError, TypeError, InputError) as error:
        raise InputError(
            f"{path}: not a readable study ({error}); name the folder of a grid study (--grids)",
            code=ErrorCode.FILE_UNREADABLE,
            path=path,
        ) from error


def metric_named(name: str, folder: ModelFolder) -> Metric:
    """The metric with a name, for stored results without a unit; metrics of the same name have the same unit.

    Args:
        name: the name.
        folder: the model folder, which may have a custom task, whose metrics count first.

    Raises:
        UsageError: no task has a metric of this name.
    """
    classes = (*task_classes(), *([] if folder.own_task is None else [folder.own_task.task_class]))
    metrics = {metric.name: metric for task in classes for metric in task.metrics}
    if name not in metrics:
        raise UsageError(
            f"metric {name!r}: unknown; {suggestion(name, list(metrics))}",
            code=ErrorCode.UNKNOWN_NAME,
            field="metric",
            value=name,
            known=tuple(metrics),
        )
    return metrics[name]


def _digest(metric: str, cell: Result) -> str:
    """Identifies a selection of a grid; another grid has cells of the same names."""
    description = json.dumps([metric, cell["settings"], cell["kept"], cell["test"]], sort_keys=True)
    return hashlib.sha256(description.encode()).hexdigest()[:12]


def _size(graph: Path) -> dict[str, int]:
    """Parameters of a graph, and bytes of its files."""
    files = [graph, *graph.parent.glob(f"{graph.name}.data")]
    return {
        "parameters": graph_passes.count_parameters(graph_passes.load(graph)),
        "bytes": sum(file.stat().st_size for file in files),
    }


class SpeedFindings:
    """The findings of the cells that are finished. Void timings are left out of tables and figures.

    Args:
        results: results of the cells.
        context: the model.
        grid_cells: names of the cells of the grid studies that are named now; other selections are left out.
    """

    def __init__(self, results: Sequence[Result], context: StudyContext, grid_cells: Collection[str]) -> None:
        self.context = context
        self.dense = next(cell for cell in results if cell["settings"]["what"] == "dense")
        timed = [
            cell for cell in results if cell["settings"]["what"] in ("mask", "batch") or cell["cell"] in grid_cells
        ]
        self.timed = sorted(timed, key=_order)
        self.valid = [cell for cell in self.timed if not cell["void"]]

    def findings(self) -> Findings:
        """Rows, tables, figures, and a summary."""
        tables: list[Table] = []
        pictures: list[Picture] = []
        for section in (self._masks, self._batches, self._selections):
            section_tables, section_pictures = section()
            tables += section_tables
            pictures += section_pictures
        return Findings([self._row(cell) for cell in self.timed], tables, pictures, self._void_timings())

    def _row(self, cell: Result) -> dict[str, Any]:
        return {
            **{name: value for name, value in cell["settings"].items() if name != "kept"},
            **{name: value for name, value in cell.items() if name not in ("settings", "cell")},
            "parameters_dense": self.dense["parameters"],
            "bytes_dense": self.dense["bytes"],
        }

    def _void_timings(self) -> list[str]:
        void = [cell["void"] for cell in self.timed if cell["void"]]
        return [f"{len(void)} of {len(self.timed)} timings are void and left out: {void[0]}"] if void else []

    def _grouped(self, kind: str, setting: str) -> dict[int, list[Result]]:
        groups: dict[int, list[Result]] = {}
        for cell in self.valid:
            if cell["settings"]["what"] == kind:
                groups.setdefault(cell["settings"][setting], []).append(cell)
        return groups

    def _smaller(self, cell: Result) -> float:
        """Reduction of the file's size against dense, in percent."""
        return 100 * (1 - cell["bytes"] / self.dense["bytes"])

    def _masks(self) -> tuple[list[Table], list[Picture]]:
        groups = self._grouped("mask", "keep")
        if not groups:
            return [], []
        speed = {keep: [cell["ratio"] for cell in cells] for keep, cells in groups.items()}
        smaller = {keep: [self._smaller(cell) for cell in cells] for keep, cells in groups.items()}
        lines = tuple(
            (
                str(keep),
                str(len(speed[keep])),
                f"{np.mean(speed[keep]):.2f}",
                f"{min(speed[keep]):.2f}-{max(speed[keep]):.2f}",
                f"{np.mean([cell['parameters'] for cell in cells]) / 1e6:.2f}M",
                f"{np.mean(smaller[keep]):.1f}%",
            )
            for keep, cells in groups.items()
        )
        batch = next(iter(groups.values()))[0]["settings"]["batch"]
        title = f"Random masks at batch {batch}: times the speed of dense, and the file that they leave"
        columns = ("heads", "masks", "speed", "spread", "parameters", "file smaller by")
        description = "Mean over random masks; the band reaches from the least to the most."
        of_speed = figures.lines_with_ranges({"speed": list(speed.items())}, "heads kept", _SPEED, wide=False)
        of_size = figures.lines_with_ranges({"size": list(smaller.items())}, "heads kept", _SMALLER, wide=False)
        return [Table(title, columns, lines)], [
            Picture("speed_vs_heads", "Speed against heads kept", description, of_speed),
            Picture("size_vs_heads", "Size against heads kept", description, of_size),
        ]

    def _batches(self) -> tuple[list[Table], list[Picture]]:
        groups = self._grouped("batch", "batch")
        if not groups:
            return [], []
        half = next(iter(groups.values()))[0]["heads"]
        lines = tuple(
            (
                str(batch),
                _mean_and_deviation([cell["dense_per_second"] for cell in cells]),
                _mean_and_deviation([cell["per_second"] for cell in cells]),
                f"{100 * (np.mean([cell['ratio'] for cell in cells]) - 1):+.1f}%",
            )
            for batch, cells in groups.items()
        )
        title = f"Examples per second with {half} of {len(self.context.heads)} heads (mean and deviation over masks)"
        curves = {
            name: [(batch, [cell[key] for cell in cells]) for batch, cells in groups.items()]
            for name, key in (("dense", "dense_per_second"), (f"{half} heads", "per_second"))
        }
        figure = figures.lines_with_ranges(curves, "batch", "examples per second", log=True, wide=False)
        picture = Picture("speed_vs_batch", "Examples per second", "Dense, and with half of the heads.", figure)
        return [Table(title, ("batch", "dense", "pruned", "faster by"), lines)], [picture]

    def _selections(self) -> tuple[list[Table], list[Picture]]:
        cells = [cell for cell in self.valid if cell["settings"]["what"] == "grid"]
        if not cells:
            return [], []
        metric = metric_named(cells[0]["settings"]["metric"], self.context.folder)
        test = [metric.unit.scale * cell["settings"]["test"] for cell in cells]
        lines = tuple(
            (
                cell["settings"]["method"],
                str(cell["heads"]),
                str(cell["settings"]["seed"]),
                f"{score:.2f}",
                f"{cell['ratio']:.2f}",
                f"{self._smaller(cell):.1f}%",
            )
            for cell, score in zip(cells, test, strict=True)
        )
        speed: dict[str, list[tuple[float, float]]] = {}
        size: dict[str, list[tuple[float, float]]] = {}
        for cell, score in zip(cells, test, strict=True):
            method = cell["settings"]["method"]
            speed.setdefault(method, []).append((score, cell["ratio"]))
            size.setdefault(method, []).append((score, self._smaller(cell)))
        name, description = f"test {metric.heading}", "Each choice of the grid."
        columns = ("method", "heads", "seed", name, "speed", "file smaller by")
        table = Table("What the choices of a grid are worth", columns, lines)
        return [table], [
            Picture("speed_vs_metric", "Speed against the metric", description, figures.scatter(speed, name, _SPEED)),
            Picture("size_vs_metric", "Size against the metric", description, figures.scatter(size, name, _SMALLER)),
        ]


def _order(cell: Result) -> tuple[Any, ...]:
    return (_KINDS.index(cell["settings"]["what"]), cell["settings"]["batch"], -cell["heads"])


def _mean_and_deviation(values: Sequence[float]) -> str:
    return f"{np.mean(values):.1f} ± {np.std(values, ddof=1) if len(values) > 1 else 0.0:.1f}"
