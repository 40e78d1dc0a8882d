"""What pruned heads are worth in time and size (Li et al. 2021, figures 4 and 5; Michel et al. 2019, table 4).

Every engine is timed in turn with the dense one. One process at a time measures best: two that share the study's cells
disturb each other.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

import graph_passes
from compressor.config.study import StudyRequest
from compressor.errors import ErrorCode, InputError
from compressor.export import export_reference
from compressor.measure import interleave
from compressor.model_folder import example_inputs
from compressor.progress import ProgressCallback
from compressor.run.sizes import timed_lengths
from compressor.run.variant import rehearsal_plan, require_complete, shrink
from compressor.selection.pool import heads_to_keep
from compressor.selection.search import Head
from compressor.studies import figures
from compressor.studies.base import Result, Study
from compressor.studies.cell_store import STAMP, Cell
from compressor.studies.results import Findings, Picture, Table
from compressor.targets import BuildOptions, Engine, span, target
from compressor.tasks.registry import metric_named
from compressor.units import keep_all, keep_only

_BATCH = 8
_BATCHES = (1, 4, 16, 64)
_REPEATS = 3


class SpeedStudy(Study):
    """Random masks of each number of heads; half of the heads at several batch sizes; the choices of grid studies."""

    says = "speed and size against heads kept, and against the metric"
    axes: ClassVar = {"keeps": (), "grids": ()}
    groups = ("Engine", "Measuring")
    rows = False
    _dense: Engine | None = None

    @classmethod
    def check(cls, request: StudyRequest) -> None:
        for path in map(Path, cls.values(request, "grids")):
            _read_grid(path)

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
                        **{name: cell["asked"][name] for name in ("method", "keep", "seed")},
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
        """Metric and cells, dense ones left out, of every grid study that is named."""
        collected = []
        for path in map(Path, self.axis("grids")):
            recipe, cells = _read_grid(path)
            if recipe.get("kind") != "grid" or recipe.get("model") != self.context.folder.fingerprint:
                raise InputError(
                    f"{path}: no grid study of this model; name the folder of one (--grids)",
                    code=ErrorCode.FILE_MISMATCH,
                    path=path,
                )
            collected.append((recipe["metric"], [cell for cell in cells if cell["asked"]["method"] != "dense"]))
        metrics = sorted({metric for metric, _ in collected})
        if len(metrics) > 1:
            raise InputError(
                f"{', '.join(metrics)}: grids with different metrics; name grids with the same metric (--grids)",
                code=ErrorCode.CONTRADICTION,
                field="grids",
            )
        return collected

    def run(self, cell: Cell, work: Path, tell: ProgressCallback) -> Result:
        if cell.settings["what"] == "dense":
            return self._export()
        kept = (
            self._mask(cell)
            if cell.settings["what"] != "grid"
            else [(site, head) for site, head in cell.settings["kept"]]
        )
        plan = keep_only(self.context.sites, dict.fromkeys(kept, 1.0))
        graph = work / "model.onnx"
        graph_passes.save(require_complete(shrink(self._reference, plan)).model, graph)
        if self._dense is None:  # its file may go with this cell's folder: the runtime has it open
            self._dense = self._built(self.folder.scratch("dense.onnx"), work / "dense.onnx")
        engine = self._built(graph, work / "engine.onnx")
        seq = self._seq
        batch = cell.settings["batch"]
        feeds = {name: value.numpy() for name, value in example_inputs(self.context.folder, batch, seq or 1).items()}
        seed = self.request.recipe.selection.seed
        collected = interleave(
            self._dense, engine, feeds, batch=batch, seq=seq, seconds=self._seconds, seed=seed, on_progress=tell
        )
        return {
            "heads": len(kept),
            "ratio": collected.ratio,
            "low": collected.low,
            "high": collected.high,
            "dense_per_second": collected.dense.throughput,
            "per_second": collected.compressed.throughput,
            "seq": seq,
            "void": collected.void,
            **_size(graph),
        }

    def _export(self) -> Result:
        context, recipe = self.context, self.request.recipe
        context.fresh().to("cpu")  # type: ignore[arg-type]
        inputs = example_inputs(context.folder, batch=2, seq=8)
        dense = keep_all(context.sites)
        export_reference(
            context.model, dense, inputs, self._reference, opset=recipe.export.opset, attention=recipe.export.attention
        )
        require_complete(
            shrink(self._reference, rehearsal_plan(context.sites))
        )  # sites that cannot be shrunk are known now
        graph_passes.save(require_complete(shrink(self._reference, dense)).model, self.folder.scratch("dense.onnx"))
        return {"heads": len(context.heads), **_size(self.folder.scratch("dense.onnx"))}

    @property
    def _reference(self) -> Path:
        return self.folder.scratch("reference.onnx")

    def _built(self, graph: Path, out: Path) -> Engine:
        recipe = self.request.recipe
        lengths = timed_lengths(recipe.measure, self.context.folder)
        tuning = BuildOptions(
            batch=span(recipe.measure.batch), seq=span(seq or 1 for seq in lengths), kernel=recipe.engine.kernel
        )
        return target(recipe.engine.target)(
            graph,
            out,
            precision=recipe.engine.precision,
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
        dense = next(cell for cell in results if cell["asked"]["what"] == "dense")
        grids = {cell.name for cell in self.cells() if cell.settings["what"] == "grid"}  # of the grids named now
        timed = [cell for cell in results if cell["asked"]["what"] in ("mask", "batch") or cell["cell"] in grids]
        timed.sort(key=lambda cell: (_KINDS.index(cell["asked"]["what"]), cell["asked"]["batch"], -cell["heads"]))
        rows = [
            {
                **{name: value for name, value in cell["asked"].items() if name != "kept"},
                **{name: value for name, value in cell.items() if name not in ("asked", "cell")},
                "parameters_dense": dense["parameters"],
                "bytes_dense": dense["bytes"],
            }
            for cell in timed
        ]
        void = [cell for cell in timed if cell["void"]]
        fair = [cell for cell in timed if not cell["void"]]
        description = [f"{len(void)} of {len(timed)} timings are void and left out: {void[0]['void']}"] if void else []
        tables, pictures = [], []
        for part in (self._masks, self._at_batches, self._against_metric):
            table, drawn = part(fair, dense)
            tables += table
            pictures += drawn
        return Findings(rows, tables, pictures, description)

    def _masks(self, timed: Sequence[Result], dense: Result) -> tuple[list[Table], list[Picture]]:
        groups = _grouped(timed, "mask", "keep")
        faster = {keep: [cell["ratio"] for cell in cells] for keep, cells in groups.items()}
        smaller = {keep: [_smaller(cell, dense) for cell in cells] for keep, cells in groups.items()}
        lines = tuple(
            (
                str(keep),
                str(len(faster[keep])),
                f"{np.mean(faster[keep]):.2f}",
                f"{min(faster[keep]):.2f}-{max(faster[keep]):.2f}",
                f"{np.mean([cell['parameters'] for cell in cells]) / 1e6:.2f}M",
                f"{np.mean(smaller[keep]):.1f}%",
            )
            for keep, cells in groups.items()
        )
        if not groups:
            return [], []
        batch = next(iter(groups.values()))[0]["asked"]["batch"]
        title = f"Random masks at batch {batch}: times the speed of dense, and the file that they leave"
        columns = ("heads", "masks", "speed", "spread", "parameters", "file smaller by")
        description = "Mean over random masks; the band reaches from the least to the most."
        figures_ = [
            Picture(
                "speed_vs_heads",
                "Speed against heads kept",
                description,
                figures.spread({"speed": list(faster.items())}, "heads kept", "times the speed of dense", wide=False),
            ),
            Picture(
                "size_vs_heads",
                "Size against heads kept",
                description,
                figures.spread({"size": list(smaller.items())}, "heads kept", "file smaller by, %", wide=False),
            ),
        ]
        return [Table(title, columns, lines)], figures_

    def _at_batches(self, timed: Sequence[Result], dense: Result) -> tuple[list[Table], list[Picture]]:
        groups = _grouped(timed, "batch", "batch")
        if not groups:
            return [], []
        half = next(iter(groups.values()))[0]["heads"]
        lines = tuple(
            (
                str(batch),
                _mean_and_spread([cell["dense_per_second"] for cell in cells]),
                _mean_and_spread([cell["per_second"] for cell in cells]),
                f"{100 * (np.mean([cell['ratio'] for cell in cells]) - 1):+.1f}%",
            )
            for batch, cells in groups.items()
        )
        title = f"Examples per second with {half} of {len(self.context.heads)} heads (mean and deviation over masks)"
        sides = {
            "dense": [(batch, [cell["dense_per_second"] for cell in cells]) for batch, cells in groups.items()],
            f"{half} heads": [(batch, [cell["per_second"] for cell in cells]) for batch, cells in groups.items()],
        }
        figure = figures.spread(sides, "batch", "examples per second", log=True, wide=False)
        picture = Picture("speed_vs_batch", "Examples per second", "Dense, and with half of the heads.", figure)
        return [Table(title, ("batch", "dense", "pruned", "faster by"), lines)], [picture]

    def _against_metric(self, timed: Sequence[Result], dense: Result) -> tuple[list[Table], list[Picture]]:
        chosen = [cell for cell in timed if cell["asked"]["what"] == "grid"]
        if not chosen:
            return [], []
        metric = metric_named(chosen[0]["asked"]["metric"])
        by = metric.unit.scale
        lines = tuple(
            (
                cell["asked"]["method"],
                str(cell["heads"]),
                str(cell["asked"]["seed"]),
                f"{by * cell['asked']['test']:.2f}",
                f"{cell['ratio']:.2f}",
                f"{_smaller(cell, dense):.1f}%",
            )
            for cell in chosen
        )
        speed, size = dict[str, list[tuple[float, float]]](), dict[str, list[tuple[float, float]]]()
        for cell in chosen:
            method, test = cell["asked"]["method"], by * cell["asked"]["test"]
            speed.setdefault(method, []).append((test, cell["ratio"]))
            size.setdefault(method, []).append((test, _smaller(cell, dense)))
        name, description = f"test {metric.heading}", "Each choice of the grid."
        faster = figures.scatter(speed, name, "times the speed of dense")
        smaller = figures.scatter(size, name, "file smaller by, %")
        columns = ("method", "heads", "seed", f"test {metric.heading}", "speed", "file smaller by")
        table = Table("What the choices of a grid are worth", columns, lines)
        return [table], [
            Picture("speed_vs_metric", "Speed against the metric", description, faster),
            Picture("size_vs_metric", "Size against the metric", description, smaller),
        ]


_KINDS = ("mask", "batch", "grid")


def _read_grid(path: Path) -> tuple[dict[str, Any], list[Result]]:
    """Recipe and cells of the study in a folder."""
    try:
        recipe = json.loads((path / STAMP).read_text(encoding="utf-8"))
        return recipe, [json.loads(file.read_text(encoding="utf-8")) for file in sorted(path.glob("cells/*.json"))]
    except (OSError, ValueError) as error:
        raise InputError(
            f"{path}: not a readable study ({error}); name the folder of a grid study (--grids)",
            code=ErrorCode.FILE_UNREADABLE,
            path=path,
        ) from error


def _digest(metric: str, cell: Result) -> str:
    """What a choice of a grid is known by: another grid has cells of the same names."""
    description = json.dumps([metric, cell["asked"], cell["kept"], cell["test"]], sort_keys=True)
    return hashlib.sha256(description.encode()).hexdigest()[:12]


def _grouped(timed: Sequence[Result], what: str, by: str) -> dict[int, list[Result]]:
    collected: dict[int, list[Result]] = {}
    for cell in timed:
        if cell["asked"]["what"] == what:
            collected.setdefault(cell["asked"][by], []).append(cell)
    return collected


def _smaller(cell: Result, dense: Result) -> float:
    """By how many percent of dense's a cell's file is smaller."""
    return 100 * (1 - cell["bytes"] / dense["bytes"])


def _mean_and_spread(values: Sequence[float]) -> str:
    return f"{np.mean(values):.1f} ± {np.std(values, ddof=1) if len(values) > 1 else 0.0:.1f}"


def _size(graph: Path) -> dict[str, int]:
    """Parameters of a graph, and bytes of its files."""
    files = [graph, *graph.parent.glob(f"{graph.name}.data")]
    return {
        "parameters": graph_passes.count_parameters(graph_passes.load(graph)),
        "bytes": sum(file.stat().st_size for file in files),
    }
