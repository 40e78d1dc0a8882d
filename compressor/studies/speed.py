"""Speed and size against heads kept (Li et al. 2021, figures 4 and 5; Michel et al. 2019, table 4).

Every engine is timed in turn with the dense one. Run this study in one process: two processes that share the cells
disturb each other's timing.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

import graph_passes
from compressor.config.study import StudyRequest
from compressor.errors import ErrorCode, InputError
from compressor.export import export_reference
from compressor.measure import interleave
from compressor.model_folder import example_feeds, example_inputs
from compressor.progress import ProgressCallback
from compressor.run.build_options import build_options
from compressor.run.sizes import timed_lengths
from compressor.run.variant import rehearsal_plan, require_complete, shrink
from compressor.selection.pool import heads_to_keep
from compressor.selection.search import Head
from compressor.studies.base import Result, Study
from compressor.studies.cell_store import STAMP, Cell, read_results
from compressor.studies.results import Findings
from compressor.studies.speed_findings import SpeedFindings
from compressor.targets import Engine, target
from compressor.units import keep_all, keep_only

_BATCH = 8
_BATCHES = (1, 4, 16, 64)
_REPEATS = 3


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
