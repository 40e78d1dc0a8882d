"""Which sites are worth a mask where the model will run, by what each form of their attention takes there."""

from __future__ import annotations

import itertools
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import numpy as np

from compressor.block_masks.attention_timer import AttentionExtras, AttentionTimer, SiteTimes
from compressor.config.run import Recipe
from compressor.results import SiteBlocks
from graph_passes import BlockMask, Plan, SitePlan

PAYS = 1.1
"""A site is masked where block-sparse attention is at least so many times as fast as whole attention."""
_SHARES = (0.5, 0.75, 1.0)
"""Of the longest row: lengths that are timed whatever is asked for, for rows may be shorter than those."""


class MaskSelector:
    """Times the forms of sites on this machine, as the recipe's engine will run.

    Args:
        recipe: batch sizes, provider, precision, threads, kernel, and whether every site is masked whatever it costs.
        lengths: to time, beside some up to the longest row.
        longest: positions of the longest row; None: the longest of `lengths`.
        beside: what sites read beside positions.
    """

    def __init__(
        self,
        recipe: Recipe,
        lengths: Sequence[int],
        longest: int | None = None,
        beside: Mapping[str, AttentionExtras] | None = None,
    ) -> None:
        self.recipe, self.longest = recipe, longest or max(lengths, default=1)
        self.lengths = tuple(sorted({*lengths, *(max(1, round(share * self.longest)) for share in _SHARES)}))
        self._clock = AttentionTimer(recipe, beside or {})
        self._times: dict[str, tuple[SiteTimes, ...]] = {}

    def times(self, site: SitePlan, mask: BlockMask) -> tuple[SiteTimes, ...]:
        """The forms of a site with the heads that it keeps, at every length and batch size."""
        if site.name not in self._times:
            kept = BlockMask(mask.kept[list(site.kept)], mask.block, mask.memory)
            first, sizes = self.recipe.measure.batch[0], itertools.product(self.lengths, self.recipe.measure.batch)
            self._times[site.name] = tuple(
                self._clock.times(site, kept, length, batch, masked=batch == first) for length, batch in sizes
            )
        return self._times[site.name]

    @property
    def timed(self) -> dict[str, list[dict[str, Any]]]:
        """All that was timed, as JSON."""
        return {site: [asdict(time) for time in times] for site, times in self._times.items()}

    def recall(self, planned: Path) -> None:
        """Take over what an interrupted run timed, from the file of `learn_blocks`, where there is one."""
        if planned.is_file():
            for site, times in json.loads(planned.read_text(encoding="utf-8"))["times"].items():
                self._times.setdefault(site, tuple(SiteTimes(**time) for time in times))

    def _longest(self, times: Sequence[SiteTimes]) -> list[SiteTimes]:
        """Those at the longest length, in the order of the recipe's batch sizes."""
        return [time for time in times if time.length == max(each.length for each in times)]

    def __call__(self, plan: Plan, masks: Mapping[str, BlockMask]) -> tuple[dict[str, BlockMask], tuple[str, ...]]:
        """Before the model learns with its masks: those that pay, and what a reader must know of the choice.

        A mask pays where block-sparse attention is `PAYS` times as fast at the longest length, and not slower at any
        other.
        """
        if self.recipe.blocks.mask_all_sites or self.recipe.blocks.block_size == 1:
            return dict(masks), ()
        chosen, whole = {}, []
        for site in plan.sites:
            if site.name not in masks:
                continue
            if lack := self._lack(self.times(site, masks[site.name])):
                whole.append(f"{site.name} ({lack})")
            else:
                chosen[site.name] = masks[site.name]
        if not whole:
            return chosen, ()
        listed = ", ".join(whole[:3]) + (", ..." if len(whole) > 3 else "")
        return chosen, (
            f"{len(whole)} of {len(masks)} sites keep every block: block-sparse attention would not pay there on this"
            f" machine: {listed}; --everywhere masks them all the same",
        )

    def _lack(self, times: Sequence[SiteTimes]) -> str:
        """Where block-sparse attention is least fast, if that is too little for a mask to pay; else empty."""
        most = self._longest(times)
        lacking = [time for time in times if time.gain < (PAYS if time in most else 1.0)]
        if not lacking:
            return ""
        least = min(lacking, key=lambda time: time.gain)
        size = f"length {least.length}" + (f", batch {least.batch}" if least.batch > 1 else "")
        return f"{least.gain:.2f} times as fast at {size}"

    def lowered(self, plan: Plan) -> frozenset[str]:
        """Of a plan whose masks stay: the sites where block-sparse attention is faster than a mask as a bias."""
        found = set()
        for site in plan.sites:
            if site.name in plan.masks and site.kept:
                times = self._longest(self.times(site, plan.masks[site.name]))[0].milliseconds
                if times.get("block-sparse", np.inf) < times["masked"]:
                    found.add(site.name)
        return frozenset(found)

    def told(
        self,
        plan: Plan,
        asked: Collection[str],
        lowered: Collection[str],
        dense: Mapping[str, str],
        unprojected: Mapping[str, int] | None = None,
    ) -> tuple[SiteBlocks, ...]:
        """What became of the blocks of each site that was asked for or has a mask.

        Args:
            plan: with the masks that the model learned with.
            asked: sites whose kind was to lose blocks.
            lowered: sites that are block-sparse in the graph.
            dense: site -> why it could not be made block-sparse.
            unprojected: site -> key blocks whose keys and values are not projected.
        """
        found = []
        for site in plan.sites:
            mask = plan.masks.get(site.name)
            if (site.name not in asked and mask is None) or not site.kept:
                continue
            times = self._times.get(site.name, ())
            form, why = self._form(site, mask, times, lowered, dense)
            unused = (unprojected or {}).get(site.name, 0)
            if unused:
                why += f"; {unused} key blocks, which no query looks at, are not projected"
            share = 1.0 if mask is None else _share(mask, site, self.longest)
            found.append(
                SiteBlocks(
                    site=site.name,
                    kind=site.kind,
                    block=self.recipe.blocks.block_size if mask is None else mask.block,
                    share=share,
                    form=form,
                    why=why,
                    unprojected=unused,
                    milliseconds={
                        time.length: dict(time.milliseconds) for time in times if time.batch == times[0].batch
                    },
                )
            )
        return tuple(found)

    def _form(
        self,
        site: SitePlan,
        mask: BlockMask | None,
        times: Sequence[SiteTimes],
        lowered: Collection[str],
        dense: Mapping[str, str],
    ) -> tuple[Literal["whole", "masked", "block-sparse"], str]:
        if mask is None:
            rule = f"{PAYS:g} at the longest length and 1 at the others would pay"
            return "whole", f"block-sparse attention is {self._lack(times) or 'not faster'}; {rule}"
        if site.name in lowered:
            return "block-sparse", "faster here than the mask as a bias"
        if mask.block == 1:
            return "masked", "of single entries nothing can be skipped"
        return "masked", dense.get(site.name, "the mask as a bias is faster here than block-sparse attention")


def _share(mask: BlockMask, site: SitePlan, length: int) -> float:
    """Share of the kept heads' blocks that the mask keeps over rows of a length; of causal attention, of those that are
    not the future's."""
    rows, columns = -(-length // mask.block), -(-(length + mask.memory) // mask.block)
    kept = mask.kept[list(site.kept), :rows, :columns]
    if site.kind != "causal":
        return float(kept.mean())
    row, column = (np.arange(size) * mask.block for size in kept.shape[1:])
    past = column[None, :] - mask.memory < row[:, None] + mask.block
    return float(kept[:, past].mean())
