"""Share of the blocks dropped x kinds of attention x source of the masks x seeds (attention pruning, tables 3 to 10 and
figure 6)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, get_args

import numpy as np

from benchmarks.studies import figures
from benchmarks.studies.base import Study, check_options
from benchmarks.studies.cell_store import Cell, Result
from benchmarks.studies.context import StudyContext
from benchmarks.studies.findings import Findings, Picture, Table, difference, difference_text
from benchmarks.studies.request import StudyRequest
from compressor.block_masks.attention_maps import (
    AttentionMaps,
    build_masks,
    collect_attention_maps,
    density,
    mask_length,
    shares_by_kind,
)
from compressor.block_masks.train_masked import train_with_masks
from compressor.config import steps
from compressor.config.step_list import step_of_flags
from compressor.errors import ErrorCode, UsageError, suggestion
from compressor.progress import ProgressCallback
from compressor.tasks.data import SourceRows, encode_rows, rows_hash
from compressor.tasks.id_tables import IdTables
from compressor.tasks.splits import named_splits, pick_any
from compressor.units import keep_all
from graph_passes import BlockMask, Kind, Plan

DENSE, RETRAINED = "dense", "retrained"
ALL = "all"
FROM_THIS_DATA, RANDOM = "own", "random"
_SHARE = "share of blocks dropped, p"
_SAVED = (
    "the share of attention's multiply-accumulates that is skipped (scores and weighted sums, not projections): the"
    " share of dropped blocks among those that rows reach and causality permits, mean over the heads of all layers"
)

Group = tuple[str, str, float]
"""Source of the masks, kinds of attention, and share of blocks; the cells of a group differ in their seeds."""


class Blocks(Study):
    """Masks of every share p, built from the attention maps of the dense run of the same seed.

    `dense` trains the folder's weights with every block. A run with masks continues from there, or from the folder's
    weights with `from_original_weights`, for as many steps. `retrained`, the share 0, does the same without masks; the
    others are compared with it if it is part of the request. Further data sets contribute maps of their texts; their
    labels are ignored.
    """

    description = "share of blocks dropped x kinds of attention x source of the masks x seeds"
    axes: ClassVar = {
        "shares": (0.0, 0.2, 0.4, 0.5, 0.6, 0.8),
        "kinds": (ALL,),
        "masks": (FROM_THIS_DATA, RANDOM),
        "seeds": (),
    }
    groups: ClassVar[tuple[str, ...]] = ("Heads", "Blocks")
    compares_data_sets = True

    @classmethod
    def check(cls, request: StudyRequest) -> None:
        check_options(request.recipe.selection.options, ["dsp"])
        known = (ALL, *get_args(Kind))
        for kinds in cls.values(request, "kinds"):
            for kind in kinds.split("+"):
                if kind not in known:
                    raise UsageError(
                        f"--kinds {kinds}: there is no {kind} attention; {suggestion(kind, known)}",
                        code=ErrorCode.UNKNOWN_NAME,
                        field="kinds",
                        value=kind,
                    )
        for masks in cls.values(request, "masks"):
            if masks not in (FROM_THIS_DATA, RANDOM):
                raise UsageError(
                    f"--masks {masks}: unknown; {suggestion(masks, (FROM_THIS_DATA, RANDOM))}; another data set is"
                    " named with a further --data",
                    code=ErrorCode.UNKNOWN_NAME,
                    field="masks",
                    value=masks,
                )
        first, *further = [Path(name).name for name in request.sources] or [""]
        for name in further:
            if name in (FROM_THIS_DATA, RANDOM, DENSE, RETRAINED, first) or further.count(name) > 1:
                raise UsageError(
                    f"--data {name}: two sources with this name, or a reserved name; rename the file",
                    code=ErrorCode.CONTRADICTION,
                    field="data",
                    value=name,
                )

    def cells(self) -> list[Cell]:
        known = (ALL, *dict.fromkeys(site.kind for site in self.context.sites))
        for kinds in self.axis("kinds"):
            for kind in kinds.split("+"):
                if kind not in known:
                    raise UsageError(
                        f"--kinds {kinds}: the model has no {kind} attention; {suggestion(kind, known)}",
                        code=ErrorCode.UNKNOWN_NAME,
                        field="kinds",
                        value=kind,
                    )
        further = [Path(name).name for name in self.request.sources[1:]]
        cells = []
        for seed in self.axis("seeds"):
            base = f"{DENSE}-s{seed}"
            cells.append(Cell(base, {"masks": DENSE, "kind": ALL, "share": 0.0, "seed": seed}))
            for share in self.axis("shares"):
                if not share:
                    settings = {"masks": RETRAINED, "kind": ALL, "share": 0.0, "seed": seed}
                    cells.append(Cell(f"{RETRAINED}-s{seed}", settings, (base,)))
                    continue
                for kind in self.axis("kinds"):
                    for masks in (*self.axis("masks"), *further):
                        settings = {"masks": masks, "kind": kind, "share": share, "seed": seed}
                        cells.append(Cell(f"{masks}-{kind}-p{share:g}-s{seed}", settings, (base,)))
        return cells

    def run(self, cell: Cell, work: Path, on_progress: ProgressCallback) -> Result:
        context, data, seed = self.context, self.context.data, cell.settings["seed"]
        weights = self.folder.scratch(f"{DENSE}-s{seed}.safetensors")
        plan = keep_all(context.sites)
        if cell.settings["masks"] == DENSE:
            context.reset_model()
            context.select_heads("dsp", "100%", seed, work, on_progress)
            context.save(weights)
            return {**self._measured(plan), "density": None}
        step = self.step_for(cell.settings["kind"], cell.settings["share"])
        kept: dict[str, list[float]] = {}
        if cell.settings["share"]:
            maps = self._maps(cell.settings["masks"], seed, plan, on_progress)
            plan = plan.masked(self._masks(maps, plan, step, seed if cell.settings["masks"] == RANDOM else None))
            kept = {name: density(mask, maps, name, plan[name].kept).tolist() for name, mask in plan.masks.items()}
        context.reset_model(None if step.from_original_weights else weights)
        pace = {"training_steps": context.steps(), "seed": seed, "options": self._pace()}
        train_with_masks(context.model, data, step.model_copy(update=pace), plan, work / "checkpoints", on_progress)
        return {**self._measured(plan), "density": kept}

    def step_for(self, kind: str, share: float) -> steps.Blocks:
        """The step of a cell: its share of blocks for its kinds of attention, joined by `+`."""
        kinds = kind.split("+")
        every = ALL in kinds
        shares = {
            "share": share if every else 0.0,
            "share_by_kind": {} if every else dict.fromkeys(kinds, share),
        }
        # A step drops some share; cells without masks train by the same settings.
        return step_of_flags(self.request.recipe.updated(drop_blocks=1.0), steps.Blocks).model_copy(update=shares)

    def _masks(
        self, maps: AttentionMaps, plan: Plan, step: steps.Blocks, drawn: int | None = None
    ) -> dict[str, BlockMask]:
        share = shares_by_kind(step, self.context.sites)
        return build_masks(
            maps,
            plan,
            share,
            step.block_size,
            seed=drawn,
            count_causal_zeros=step.count_causal_zeros,
            weight_by_count=step.weight_by_count,
            allow_empty_rows=step.allow_empty_rows,
        )

    def _pace(self) -> dict[str, Any]:
        return {"evaluations": self.request.size.evaluations, **self.request.recipe.selection.options}

    def _measured(self, plan: Plan) -> dict[str, Any]:
        data, context = self.context.data, self.context
        chosen, test = (context.answers(plan, rows) for rows in (data.eval, data.test))
        return {"eval": data.task.score(chosen), "test": data.task.score(test), "answers": test.tolist()}

    def _maps(self, source: str, seed: int, plan: Plan, on_progress: ProgressCallback) -> AttentionMaps:
        """Attention maps of the dense run over the training rows, or over those of another data set; collected once."""
        maps_source = source if source not in (FROM_THIS_DATA, RANDOM) else FROM_THIS_DATA
        path = self.folder.scratch(f"maps-{maps_source}-s{seed}.safetensors")
        if path.exists():
            return AttentionMaps.load(path)
        context, recipe = self.context, self.request.recipe
        data = context.data
        if maps_source != FROM_THIS_DATA:
            named = {Path(name).name: name for name in self.request.sources}
            splits = named_splits(named[maps_source])
            split = pick_any(splits, "train")
            rows = SourceRows(splits[split], named[maps_source], splits.origins[split])
            tables = IdTables.of(context.folder.model, context.folder.processor)
            texts = encode_rows(data.task, rows, tables, is_labelled=False)
            data = replace(data, train=texts, train_hash=rows_hash(texts))
        context.reset_model(self.folder.scratch(f"{DENSE}-s{seed}.safetensors"))
        length = mask_length(context.model, context.data, recipe.rows.max_length)
        results = collect_attention_maps(
            context.model,
            context.sites,
            data,
            plan,
            length=length,
            batch_size=recipe.selection.batch_size,
            rows=recipe.blocks.map_rows,
            seed=seed,
            on_progress=on_progress,
        )
        results.save(path)
        return results

    def findings(self, results: Sequence[Result]) -> Findings:
        names = [Path(name).name for name in self.request.sources]
        collected = BlocksFindings(results, self.context, names)
        findings = collected.findings()
        return replace(findings, pictures=[*findings.pictures, *self._pictures(collected.results)])

    def _pictures(self, results: Sequence[Result]) -> list[Picture]:
        """Average maps with their masks, and the share of blocks left in each head; middle share, first seed.

        Each kind of attention is shown from the cell that masks its layers and the most layers in all."""
        own_cells = [cell for cell in results if cell["settings"]["masks"] == FROM_THIS_DATA]
        if not own_cells:
            return []
        kinds = {site.name: site.kind for site in self.context.sites}
        shares_run = sorted({cell["settings"]["share"] for cell in own_cells})
        share, seed = shares_run[len(shares_run) // 2], min(cell["settings"]["seed"] for cell in own_cells)
        of_kind: dict[str, Result] = {}
        for cell in sorted(own_cells, key=lambda cell: -len(cell["density"])):
            if (cell["settings"]["share"], cell["settings"]["seed"]) == (share, seed):
                for site in cell["density"]:
                    of_kind.setdefault(kinds[site], cell)
        left = {
            (site, head): value
            for kind, cell in of_kind.items()
            for site, values in cell["density"].items()
            if kinds[site] == kind
            for head, value in enumerate(values)
        }
        subject = f"p = {share:g}, seed {seed}"
        pictures = [
            Picture(
                "density",
                "Blocks left in each head",
                f"Share of the blocks that count; {subject}. Rows are attention layers in call order, columns heads.",
                figures.maps([("share left", self.context.map(left))], low=0.0, high=1.0),
            )
        ]
        path = self.folder.scratch(f"maps-{FROM_THIS_DATA}-s{seed}.safetensors")
        if not path.exists():
            return pictures
        maps, plan = AttentionMaps.load(path), keep_all(self.context.sites)
        cuts = {
            settings: self._masks(maps, plan, self.step_for(settings, share))
            for settings in {cell["settings"]["kind"] for cell in of_kind.values()}
        }
        for kind, cell in sorted(of_kind.items()):
            masks = {site: mask for site, mask in cuts[cell["settings"]["kind"]].items() if kinds[site] == kind}
            pictures.append(
                Picture(
                    f"maps_{kind}",
                    f"Average map and mask, {kind} attention",
                    "Mean over heads: attention (left), share of heads that keep the pair (right), as far as rows go;"
                    f" {subject}. Rows are query positions, columns key positions.",
                    figures.attention_maps([(self._number(site), *_shown(maps, masks[site], site)) for site in masks]),
                    wide=True,
                )
            )
        return pictures

    def _number(self, name: str) -> str:
        return f"layer {[site.name for site in self.context.sites].index(name)}"


class BlocksFindings:
    """The findings of the cells that are finished.

    Args:
        results: results of the cells.
        context: model and rows.
        names: names of the data sets that masks come from; the first is that of the rows.

    Attributes:
        results: the results in order of source of the masks, kind, share and seed.
    """

    def __init__(self, results: Sequence[Result], context: StudyContext, names: Sequence[str]) -> None:
        self.results, self.context, self.names = sorted(results, key=_order), context, names
        self.task = context.data.task
        self.points = self.task.metric_unit.scale
        dense, retrained = (
            {cell["settings"]["seed"]: cell for cell in self.results if cell["settings"]["masks"] == name}
            for name in (DENSE, RETRAINED)
        )
        # The baseline of the differences.
        self.control, self.base = (retrained, RETRAINED) if retrained.keys() == dense.keys() else (dense, DENSE)
        self.groups: dict[Group, list[Result]] = {}
        for cell in self.results:
            settings = cell["settings"]
            self.groups.setdefault((settings["masks"], settings["kind"], settings["share"]), []).append(cell)

    def findings(self) -> Findings:
        """Rows, tables, and the curves."""
        columns = ("masks", "kind", "p", "n", "eval", "test", "spread", f"minus {self.base} (95%)", "MACs saved")
        lines = tuple(self._line(group, cells) for group, cells in self.groups.items())
        measure = self.task.metric_heading
        tables, crossed = self._crossed()
        return Findings(
            [self._row(cell) for cell in self.results],
            [Table(f"{measure}: mean over n seeds, test minus {self.base}", columns, lines), *tables],
            [self._curves(), self._saved(), *crossed],
            (f"MACs saved: {_SAVED}",),
        )

    def _line(self, group: Group, cells: Sequence[Result]) -> tuple[str, ...]:
        masks, kind, share = group
        scores = [self.points * cell["test"] for cell in cells]
        bases = [self.control[cell["settings"]["seed"]] for cell in cells]
        return (
            masks,
            kind,
            f"{share:g}",
            str(len(cells)),
            f"{self.points * float(np.mean([cell['eval'] for cell in cells])):.2f}",
            f"{np.mean(scores):.2f}",
            f"{min(scores):.2f}-{max(scores):.2f}" if len(scores) > 1 else "",
            "" if masks in (DENSE, self.base) else difference_text(self.task, bases, cells),
            f"{100 * (1 - float(np.mean([self._macs_left(cell) for cell in cells]))):.0f}%",
        )

    def _curves(self) -> Picture:
        scores = self._against_share(lambda cell: self.points * cell["test"])
        level = (self.base, [self.points * cell["test"] for cell in self.control.values()])
        return Picture(
            "metric_vs_p",
            "Metric against the share of blocks dropped",
            f"Mean over seeds; the band reaches from the worst seed to the best. The grey line is {self.base}.",
            figures.lines_with_ranges(scores, _SHARE, f"test {self.task.metric_heading}", level=level),
            wide=True,
        )

    def _saved(self) -> Picture:
        saved = self._against_share(lambda cell: 100 * (1 - self._macs_left(cell)))
        return Picture(
            "macs_saved",
            "Multiply-accumulates of attention saved",
            f"Here {_SAVED}.",
            figures.lines_with_ranges(saved, _SHARE, "saved, %"),
            wide=True,
        )

    def _against_share(self, value: Callable[[Result], float]) -> dict[str, list[tuple[float, list[float]]]]:
        """Source of masks and kind of attention -> (share of blocks dropped, values of the seeds)."""
        lines: dict[str, list[tuple[float, list[float]]]] = {}
        for (masks, kind, share), cells in self.groups.items():
            if share:
                lines.setdefault(f"{masks}, {kind}", []).append((share, [value(cell) for cell in cells]))
        return lines

    def _crossed(self) -> tuple[list[Table], list[Picture]]:
        """Masks of every source on the rows of the first data set, by share (figure 6); empty for a single source."""
        target = self.names[0] if self.names else ""
        shown = {FROM_THIS_DATA: target, **{name: name for name in self.names[1:]}, RANDOM: RANDOM}
        tables, pictures = list[Table](), list[Picture]()
        for kind in dict.fromkeys(kind for _, kind, share in self.groups if share):
            sources = [masks for masks in shown if any(key[:2] == (masks, kind) for key in self.groups)]
            levels = sorted({share for _, each, share in self.groups if share and each == kind})
            if not set(self.names[1:]) & set(sources):
                continue
            values = np.full((len(sources), len(levels)), np.nan)
            for row, masks in enumerate(sources):
                for column, share in enumerate(levels):
                    if cells := self.groups.get((masks, kind, share)):
                        lost = [cell["test"] - self.control[cell["settings"]["seed"]]["test"] for cell in cells]
                        values[row, column] = self.points * float(np.mean(lost))
            heads = tuple(f"p = {share:g}" for share in levels)
            measure = f"{self.task.metric_heading} on {target}, minus {self.base}"
            description = f"{measure}, by source of the masks; {kind} attention"
            lines = tuple(
                (shown[masks], *("" if np.isnan(value) else f"{value:+.2f}" for value in line))
                for masks, line in zip(sources, values, strict=True)
            )
            tables.append(Table(description, ("masks from", *heads), lines))
            rows = "; ".join(f"{index} {shown[masks]}" for index, masks in enumerate(sources, 1))
            figure = figures.table_map(values, [f"{share:g}" for share in levels], "p", places=2, first=1)
            name = f"crossed_{kind.replace('+', '_')}"
            pictures.append(Picture(name, "Masks of one data set on another", f"{description}. {rows}.", figure))
        return tables, pictures

    def _macs_left(self, cell: Result) -> float:
        """Share of the blocks that is computed, mean over the heads of all layers; 1 without a mask."""
        kept = cell["density"] or {}
        left = [np.mean(kept[site.name]) if site.name in kept else 1.0 for site in self.context.sites]
        heads = [site.heads for site in self.context.sites]
        return float(np.average(left, weights=heads))

    def _row(self, cell: Result) -> dict[str, Any]:
        base = self.control[cell["settings"]["seed"]]
        interval = difference(self.task, [np.array(base["answers"])], [np.array(cell["answers"])])
        return {
            **cell["settings"],
            "metric": self.task.metric,
            "eval": cell["eval"],
            "test": cell["test"],
            "difference": interval.difference,
            "low": interval.low,
            "high": interval.high,
            "macs_left": self._macs_left(cell),
            "seconds": cell["seconds"],
        }


def _shown(maps: AttentionMaps, mask: Any, site: str) -> tuple[np.ndarray, np.ndarray]:
    """Map and mask, each the mean over heads, up to the last positions that any row has."""
    counts = maps.counts[site]
    kept = np.where(counts > 0, mask.entries(*counts.shape, memory=maps.memory).mean(axis=0), np.nan)
    ends = tuple(slice(int(np.flatnonzero(counts.any(axis=1 - axis)).max()) + 1) for axis in (0, 1))
    return maps.maps[site].mean(axis=0)[ends], kept[ends]


def _order(cell: Result) -> tuple[Any, ...]:
    settings = cell["settings"]
    first = {DENSE: 0, RETRAINED: 1, FROM_THIS_DATA: 2, RANDOM: 3}.get(settings["masks"], 4)
    return first, settings["masks"], settings["kind"], settings["share"], settings["seed"]
