"""Share of the blocks dropped x kinds of attention x where the masks come from x seeds (attention pruning, tables 3 to
10 and figure 6)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from compressor.blocks import AttentionMaps, cut, density, watch
from compressor.blocks.learn import reach, retrain, shares
from compressor.errors import UsageError, nearest
from compressor.progress import Tell
from compressor.recipe import Recipe
from compressor.sites import keep_all
from compressor.study import figures
from compressor.study.base import Result, Study
from compressor.study.cells import Cell
from compressor.study.findings import Findings, Picture, Table, difference
from compressor.study.grid import told_difference
from compressor.study.learner import check_options, choose
from compressor.tasks.data import rows_hash
from compressor.tasks.metrics import points, unit
from compressor.tasks.splits import named_splits, pick
from graph_passes import BlockMask, Plan

DENSE, RETRAINED = "dense", "retrained"
ALL = "all"
OWN, RANDOM = "own", "random"


class Blocks(Study):
    """Every share p of the blocks, from the maps of the dense run of the same seed.

    `dense` trains the folder's weights with every block; a run with masks goes on from there or, with `restart`, from
    the folder's weights again, for as many steps. `retrained`, the share 0, does so without masks: what the others are
    compared with, where it is asked for. Of further data sets the texts alone are watched, whatever their labels.
    """

    says = "share of blocks dropped x kinds of attention x where masks come from x seeds"
    axes: ClassVar = {
        "shares": (0.0, 0.2, 0.4, 0.5, 0.6, 0.8),
        "kinds": (ALL,),
        "masks": (OWN, RANDOM),
        "seeds": (),
    }
    groups: ClassVar[tuple[str, ...]] = ("Heads", "Blocks")
    several = True

    def cells(self) -> list[Cell]:
        check_options(self.asked.recipe.options, ["dsp"])
        kinds = (ALL, *dict.fromkeys(site.kind for site in self.subject.sites))
        for asked in self.axis("kinds"):
            for kind in asked.split("+"):
                if kind not in kinds:
                    raise UsageError(f"--kinds {asked}: the model has no {kind} attention; {nearest(kind, kinds)}")
        for masks in self.axis("masks"):
            if masks not in (OWN, RANDOM):
                raise UsageError(f"--masks {masks}: unknown; {nearest(masks, (OWN, RANDOM))}")
        others = [Path(name).name for name in self.asked.sources[1:]]
        taken = (OWN, RANDOM, DENSE, RETRAINED, Path(self.asked.sources[0]).name if self.asked.sources else "")
        for name in others:
            if name in taken or others.count(name) > 1:
                raise UsageError(f"--data {name}: two sources of one name, or a name that means something; rename it")
        made = []
        for seed in self.axis("seeds"):
            base = f"{DENSE}-s{seed}"
            made.append(Cell(base, {"masks": DENSE, "kind": ALL, "share": 0.0, "seed": seed}))
            for share in self.axis("shares"):
                if not share:
                    asked = {"masks": RETRAINED, "kind": ALL, "share": 0.0, "seed": seed}
                    made.append(Cell(f"{RETRAINED}-s{seed}", asked, (base,)))
                    continue
                for kind in self.axis("kinds"):
                    for masks in (*self.axis("masks"), *others):
                        asked = {"masks": masks, "kind": kind, "share": share, "seed": seed}
                        made.append(Cell(f"{masks}-{kind}-p{share:g}-s{seed}", asked, (base,)))
        return made

    def run(self, cell: Cell, work: Path, tell: Tell) -> Result:
        subject, data, seed = self.subject, self.subject.data, cell.asked["seed"]
        weights = self.folder.scratch(f"{DENSE}-s{seed}.safetensors")
        plan = keep_all(subject.sites)
        if cell.asked["masks"] == DENSE:
            subject.fresh()
            choose(subject, "dsp", "100%", seed, work, tell)
            subject.save(weights)
            return {**self._measured(plan), "density": None}
        asked = self.asked.recipe.model_copy(update=self._asked(cell.asked["kind"], cell.asked["share"]))
        kept: dict[str, list[float]] = {}
        if cell.asked["share"]:
            maps = self._maps(cell.asked["masks"], seed, plan)
            plan = plan.masked(self._cut(maps, plan, asked, seed if cell.asked["masks"] == RANDOM else None))
            kept = {name: density(mask, maps, name, plan[name].kept).tolist() for name, mask in plan.masks.items()}
        subject.fresh(None if asked.restart else weights)
        pace = asked.model_copy(update={"steps": subject.steps(), "seed": seed, "options": self._pace()})
        retrain(subject.model, data, pace, plan, work / "checkpoints", tell)
        return {**self._measured(plan), "density": kept}

    def _asked(self, kind: str, share: float) -> dict[str, Any]:
        if ALL in kind.split("+"):
            return {"blocks": share, "prune": {}}
        return {"blocks": None, "prune": dict.fromkeys(kind.split("+"), share)}

    def _cut(self, maps: AttentionMaps, plan: Plan, asked: Recipe, drawn: int | None = None) -> dict[str, BlockMask]:
        share, future = shares(asked, self.subject.sites), asked.count_causal_zeros
        return cut(maps, plan, share, asked.block_size, seed=drawn, count_causal_zeros=future)

    def _pace(self) -> dict[str, Any]:
        return {"evaluations": self.asked.size.evaluations, **self.asked.recipe.options}

    def _measured(self, plan: Plan) -> dict[str, Any]:
        data, subject = self.subject.data, self.subject
        chosen, test = (subject.answers(plan, rows) for rows in (data.eval, data.test))
        return {"eval": data.task.score(chosen), "test": data.task.score(test), "answers": test.tolist()}

    def _maps(self, source: str, seed: int, plan: Plan) -> AttentionMaps:
        """The maps of the dense run over the training rows, or over those of another data set; watched once."""
        other = source if source not in (OWN, RANDOM) else OWN
        path = self.folder.scratch(f"maps-{other}-s{seed}.safetensors")
        if path.exists():
            return AttentionMaps.load(path)
        subject, recipe = self.subject, self.asked.recipe
        data = subject.data
        if other != OWN:
            named = {Path(name).name: name for name in self.asked.sources}
            splits = named_splits(named[other])
            rows = splits[pick(splits, "train") or next(iter(splits))]
            texts = data.task.unlabelled(rows, named[other])
            data = replace(data, train=texts, train_hash=rows_hash(texts))
        subject.fresh(self.folder.scratch(f"{DENSE}-s{seed}.safetensors"))
        length = reach(subject.model, subject.data, recipe)
        most, batch = recipe.watch_rows, recipe.batch_size
        found = watch(subject.model, subject.sites, data, plan, length=length, batch_size=batch, rows=most, seed=seed)
        found.save(path)
        return found

    def findings(self, results: Sequence[Result]) -> Findings:
        task = self.subject.data.task
        found = sorted(results, key=_order)
        dense, retrained = (
            {cell["asked"]["seed"]: cell for cell in found if cell["asked"]["masks"] == name}
            for name in (DENSE, RETRAINED)
        )
        control, base = (retrained, RETRAINED) if retrained.keys() == dense.keys() else (dense, DENSE)
        by = points(task.metric)
        groups: dict[tuple[str, str, float], list[Result]] = {}
        for cell in found:
            asked = cell["asked"]
            groups.setdefault((asked["masks"], asked["kind"], asked["share"]), []).append(cell)
        lines, curves = [], dict[str, list[tuple[float, list[float]]]]()
        for (masks, kind, share), cells in groups.items():
            scores = [by * cell["test"] for cell in cells]
            bases = [control[cell["asked"]["seed"]] for cell in cells]
            left = [self._macs(cell) for cell in cells]
            lines.append(
                (
                    masks,
                    kind,
                    f"{share:g}",
                    str(len(cells)),
                    f"{by * float(np.mean([cell['eval'] for cell in cells])):.2f}",
                    f"{np.mean(scores):.2f}",
                    f"{min(scores):.2f}-{max(scores):.2f}" if len(scores) > 1 else "",
                    "" if masks in (DENSE, base) else told_difference(task, bases, cells),
                    f"{100 * (1 - float(np.mean(left))):.0f}%",
                )
            )
            if share:
                curves.setdefault(f"{masks}, {kind}", []).append((share, scores))
        columns = ("masks", "kind", "p", "n", "eval", "test", "spread", f"minus {base} (95%)", "pairs saved")
        level = [by * cell["test"] for cell in control.values()]
        told = f"Mean over seeds; the band reaches from the worst seed to the best. The grey line is {base}."
        tables, crossed = self._crossed(groups, control, base)
        label = "share of blocks dropped, p"
        return Findings(
            [self._row(cell, control) for cell in found],
            [Table(f"{unit(task.metric)}: mean over n seeds, test minus {base}", columns, tuple(lines)), *tables],
            [
                Picture(
                    "metric_vs_p",
                    "Metric against the share of blocks dropped",
                    told,
                    figures.spread(curves, label, f"test {unit(task.metric)}", level=level),
                    wide=True,
                ),
                *crossed,
                *self._pictures(found),
            ],
        )

    def _crossed(
        self, groups: Mapping[tuple[str, str, float], list[Result]], control: Mapping[int, Result], base: str
    ) -> tuple[list[Table], list[Picture]]:
        """Masks of every source on the rows of the first, p by p (figure 6): nothing where there is one source."""
        names = [Path(name).name for name in self.asked.sources]
        target, by = names[0] if names else "", points(self.subject.data.task.metric)
        shown = {OWN: target, **{name: name for name in names[1:]}, RANDOM: RANDOM}
        tables, pictures = list[Table](), list[Picture]()
        for kind in dict.fromkeys(kind for _, kind, share in groups if share):
            sources = [masks for masks in shown if any(key[:2] == (masks, kind) for key in groups)]
            levels = sorted({share for masks, each, share in groups if share and each == kind})
            if not set(names[1:]) & set(sources):
                continue
            values = np.full((len(sources), len(levels)), np.nan)
            for row, masks in enumerate(sources):
                for column, share in enumerate(levels):
                    if cells := groups.get((masks, kind, share)):
                        lost = [cell["test"] - control[cell["asked"]["seed"]]["test"] for cell in cells]
                        values[row, column] = by * float(np.mean(lost))
            heads = tuple(f"p = {share:g}" for share in levels)
            metric = unit(self.subject.data.task.metric)
            told = f"{metric} on {target}, minus {base}, by where the masks come from; {kind} attention"
            lines = tuple(
                (shown[masks], *("" if np.isnan(value) else f"{value:+.2f}" for value in line))
                for masks, line in zip(sources, values, strict=True)
            )
            tables.append(Table(told, ("masks from", *heads), lines))
            rows = "; ".join(f"{place} {shown[masks]}" for place, masks in enumerate(sources, 1))
            figure = figures.table_map(values, [f"{share:g}" for share in levels], "p", places=2, first=1)
            name = f"crossed_{kind.replace('+', '_')}"
            pictures.append(Picture(name, "Masks of one data set on another", f"{told}. {rows}.", figure))
        return tables, pictures

    def _pictures(self, found: Sequence[Result]) -> list[Picture]:
        """Average maps with their masks, and what is left of each head, at the middle share of the first seed: of each
        kind of attention from the cell that masks most layers, that kind's among them."""
        own = [cell for cell in found if cell["asked"]["masks"] == OWN]
        if not own:
            return []
        kinds = {site.name: site.kind for site in self.subject.sites}
        tried = sorted({cell["asked"]["share"] for cell in own})
        share, seed = tried[len(tried) // 2], min(cell["asked"]["seed"] for cell in own)
        of_kind: dict[str, Result] = {}
        for cell in sorted(own, key=lambda cell: -len(cell["density"])):
            if (cell["asked"]["share"], cell["asked"]["seed"]) == (share, seed):
                for site in cell["density"]:
                    of_kind.setdefault(kinds[site], cell)
        left = {
            (site, head): value
            for kind, cell in of_kind.items()
            for site, values in cell["density"].items()
            if kinds[site] == kind
            for head, value in enumerate(values)
        }
        says = f"p = {share:g}, seed {seed}"
        pictures = [
            Picture(
                "density",
                "Blocks left in each head",
                f"Share of the blocks that count; {says}. Rows are attention layers in call order, columns heads.",
                figures.maps([("share left", self.subject.map(left))], low=0.0, high=1.0),
            )
        ]
        path = self.folder.scratch(f"maps-{OWN}-s{seed}.safetensors")
        if not path.exists():
            return pictures
        maps, plan = AttentionMaps.load(path), keep_all(self.subject.sites)
        cuts = {
            asked: self._cut(maps, plan, self.asked.recipe.model_copy(update=self._asked(asked, share)))
            for asked in {cell["asked"]["kind"] for cell in of_kind.values()}
        }
        for kind, cell in sorted(of_kind.items()):
            masks = {site: mask for site, mask in cuts[cell["asked"]["kind"]].items() if kinds[site] == kind}
            pictures.append(
                Picture(
                    f"maps_{kind}",
                    f"Average map and mask, {kind} attention",
                    "Mean over heads: attention (left), share of heads that keep the pair (right), as far as rows go;"
                    f" {says}. Rows are query positions, columns key positions.",
                    figures.attention([(self._number(site), *_shown(maps, masks[site], site)) for site in masks]),
                    wide=True,
                )
            )
        return pictures

    def _number(self, name: str) -> str:
        return f"layer {[site.name for site in self.subject.sites].index(name)}"

    def _macs(self, cell: Result) -> float:
        """Share of all pairs of positions that are computed."""
        kept = cell["density"] or {}
        left = [np.mean(kept[site.name]) if site.name in kept else 1.0 for site in self.subject.sites]
        heads = [site.heads for site in self.subject.sites]
        return float(np.average(left, weights=heads))

    def _row(self, cell: Result, control: Mapping[int, Result]) -> dict[str, Any]:
        asked, task = cell["asked"], self.subject.data.task
        base = control[asked["seed"]]
        found = difference(task, [np.array(base["answers"])], [np.array(cell["answers"])])
        return {
            **asked,
            "metric": task.metric,
            "eval": cell["eval"],
            "test": cell["test"],
            "difference": found.difference,
            "low": found.low,
            "high": found.high,
            "pairs_left": self._macs(cell),
            "seconds": cell["seconds"],
        }


def _shown(maps: AttentionMaps, mask: Any, site: str) -> tuple[np.ndarray, np.ndarray]:
    """The map and the mask, each the mean over heads, up to the last positions that any row has."""
    counts = maps.counts[site]
    kept = np.where(counts > 0, mask.entries(*counts.shape, memory=maps.memory).mean(axis=0), np.nan)
    ends = tuple(slice(int(np.flatnonzero(counts.any(axis=1 - axis)).max()) + 1) for axis in (0, 1))
    return maps.maps[site].mean(axis=0)[ends], kept[ends]


def _order(cell: Result) -> tuple[Any, ...]:
    asked = cell["asked"]
    first = {DENSE: 0, RETRAINED: 1, OWN: 2, RANDOM: 3}.get(asked["masks"], 4)
    return first, asked["masks"], asked["kind"], asked["share"], asked["seed"]
