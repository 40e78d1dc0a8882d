"""Select the sites that are faster with a mask on this machine, by the times of the forms of attention."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from compressor.block_masks.attention_timer import BLOCK_SPARSE, MASKED, AttentionExtras, AttentionTimer, SiteTimes
from compressor.config.run import Recipe
from compressor.config.steps import Blocks
from compressor.results import Note, NoteCode, SiteBlocks
from compressor.store import Json, Store
from graph_passes import BlockMask, Plan, SitePlan

MIN_GAIN = 1.1
"""A site is masked if block-sparse attention is at least this many times as fast as whole attention."""
_LENGTH_SHARES = (0.5, 0.75, 1.0)
"""Lengths that are always timed, as shares of the longest row: rows may be shorter than the requested lengths."""
_BLOCK_SIZE: int = Blocks.model_fields["block_size"].default
_LISTED = 3
"""Maximum number of sites that a note names."""
Form = Literal["whole", "masked", "block-sparse"]
MASKS = "masks"
"""Name of the selected masks in the store of a step."""


@dataclass(frozen=True)
class SelectedMasks:
    """The masks to train with.

    Attributes:
        sites: names of the sites that are masked.
        notes: facts for a reader of the plan.
        times: the times by which they were selected, by site.
    """

    sites: tuple[str, ...]
    notes: tuple[Note, ...]
    times: Mapping[str, tuple[SiteTimes, ...]]


MASKS_FILE = Json[SelectedMasks](SelectedMasks)


class MaskSelector:
    """Selects the masks that make attention faster on this machine, in the engine that a recipe describes.

    Args:
        recipe: batch sizes, provider, precision, threads and kernel.
        lengths: lengths to time, in addition to some up to the longest row.
        longest: number of positions of the longest row; None: the largest of `lengths`.
        extras: inputs of each site besides positions, padding and causality.
        timer: times the forms; None: an `AttentionTimer` of the recipe.
        blocks: the step that drops blocks; None: the masks are those of a plan.
    """

    def __init__(
        self,
        recipe: Recipe,
        lengths: Sequence[int],
        longest: int | None = None,
        extras: Mapping[str, AttentionExtras] | None = None,
        timer: AttentionTimer | None = None,
        blocks: Blocks | None = None,
    ) -> None:
        self._masks_all = blocks is not None and (blocks.mask_all_sites or blocks.block_size == 1)
        self._block_size = _BLOCK_SIZE if blocks is None else blocks.block_size
        self.recipe, self.longest = recipe, longest or max(lengths, default=1)
        self.lengths = tuple(sorted({*lengths, *(max(1, round(share * self.longest)) for share in _LENGTH_SHARES)}))
        self._timer = timer or AttentionTimer(recipe, extras)
        self._times: dict[str, tuple[SiteTimes, ...]] = {}

    def times(self, site: SitePlan, mask: BlockMask) -> tuple[SiteTimes, ...]:
        """Times of a site with the heads that it keeps, at every length and batch size; each site is timed once.

        Args:
            site: the site.
            mask: the mask of all its heads.
        """
        if site.name not in self._times:
            kept = BlockMask(mask.kept[list(site.kept)], mask.block, mask.memory)
            batches = self.recipe.measure.batch
            self._times[site.name] = tuple(
                self._timer.times(site, kept, length, batch, masked=batch == batches[0])
                for length, batch in itertools.product(self.lengths, batches)
            )
        return self._times[site.name]

    @property
    def timed(self) -> dict[str, tuple[SiteTimes, ...]]:
        """All times so far, by site."""
        return dict(self._times)

    def recall(self, store: Store) -> None:
        """Take the times by which an interrupted run selected the masks in the store of a step, if it has some."""
        if (selected := store.load(MASKS, MASKS_FILE)) is not None:
            self._times = {**selected.times, **self._times}

    def select(self, plan: Plan, masks: Mapping[str, BlockMask]) -> tuple[dict[str, BlockMask], tuple[Note, ...]]:
        """The masks with which to train the model, and notes on the selection.

        A mask is selected if block-sparse attention is `MIN_GAIN` times as fast at the longest length, and not slower
        at any other.

        Args:
            plan: the heads that are kept.
            masks: mask of all heads of each site.
        """
        if self._masks_all:
            return dict(masks), ()
        selected, reasons = {}, []
        for site in plan.sites:
            if site.name not in masks:
                continue
            if reason := self._slow_size(self.times(site, masks[site.name])):
                reasons.append(f"{site.name} ({reason})")
            else:
                selected[site.name] = masks[site.name]
        if not reasons:
            return selected, ()
        listed = ", ".join(reasons[:_LISTED]) + (", ..." if len(reasons) > _LISTED else "")
        text = (
            f"{len(reasons)} of {len(masks)} sites keep every block, because block-sparse attention would not be faster"
            f" there on this machine: {listed}; --mask-all-sites masks them nevertheless"
        )
        return selected, (Note(code=NoteCode.SITES_UNMASKED, text=text),)

    def lowered(self, plan: Plan) -> frozenset[str]:
        """The masked sites of a plan at which block-sparse attention is faster than the mask as a bias."""
        sites = set()
        for site in plan.sites:
            if site.name in plan.masks and site.kept:
                times = _at_longest(self.times(site, plan.masks[site.name]))[0].milliseconds
                if times.get(BLOCK_SPARSE, np.inf) < times[MASKED]:
                    sites.add(site.name)
        return frozenset(sites)

    def site_blocks(
        self,
        plan: Plan,
        requested: Collection[str],
        lowered: Collection[str],
        dense: Mapping[str, str],
        unprojected: Mapping[str, int] | None = None,
    ) -> tuple[SiteBlocks, ...]:
        """The result for each site that has a mask or from which blocks were to be dropped.

        Args:
            plan: the plan with the masks with which the model was trained.
            requested: sites from whose kind of attention blocks were to be dropped.
            lowered: sites that are block-sparse in the graph.
            dense: for sites that could not be made block-sparse, the reason.
            unprojected: for each site the number of key blocks whose keys and values are not projected.
        """
        results = []
        for site in plan.sites:
            mask = plan.masks.get(site.name)
            if (site.name not in requested and mask is None) or not site.kept:
                continue
            times = self._times.get(site.name, ())
            form, reason = self._form(site, mask, times, lowered, dense)
            unused = (unprojected or {}).get(site.name, 0)
            if unused:
                reason += f"; {unused} key blocks, to which no query attends, are not projected"
            results.append(
                SiteBlocks(
                    site=site.name,
                    kind=site.kind,
                    block=self._block_size if mask is None else mask.block,
                    share=1.0 if mask is None else _kept_share(mask, site, self.longest),
                    form=form,
                    why=reason,
                    unprojected=unused,
                    milliseconds={
                        time.length: dict(time.milliseconds) for time in times if time.batch == times[0].batch
                    },
                )
            )
        return tuple(results)

    def _slow_size(self, times: Sequence[SiteTimes]) -> str:
        """A description of the size at which block-sparse attention gains least, if that is too little; else empty."""
        longest = _at_longest(times)
        slow = [time for time in times if time.gain < (MIN_GAIN if time in longest else 1.0)]
        if not slow:
            return ""
        slowest = min(slow, key=lambda time: time.gain)
        batch = f", batch {slowest.batch}" if slowest.batch > 1 else ""
        return f"{slowest.gain:.2f} times as fast at length {slowest.length}{batch}"

    def _form(
        self,
        site: SitePlan,
        mask: BlockMask | None,
        times: Sequence[SiteTimes],
        lowered: Collection[str],
        dense: Mapping[str, str],
    ) -> tuple[Form, str]:
        """The form in which the engine computes the attention of a site, and the reason."""
        if mask is None:
            rule = f"it has to be {MIN_GAIN:g} times as fast at the longest length and as fast at the others"
            return "whole", f"block-sparse attention is {self._slow_size(times) or 'not faster'}; {rule}"
        if site.name in lowered:
            return "block-sparse", "faster on this machine than the mask as a bias"
        if mask.block == 1:
            return "masked", "a mask of single entries skips no computation"
        return "masked", dense.get(site.name, "the mask as a bias is faster on this machine")


def _at_longest(times: Sequence[SiteTimes]) -> list[SiteTimes]:
    """The times at the longest length, in the order of the batch sizes."""
    longest = max(time.length for time in times)
    return [time for time in times if time.length == longest]


def _kept_share(mask: BlockMask, site: SitePlan, length: int) -> float:
    """Share of the blocks of the kept heads that a mask of all keeps; future blocks of causal sites are not counted."""
    rows, columns = -(-length // mask.block), -(-(length + mask.memory) // mask.block)
    kept = mask.kept[list(site.kept), :rows, :columns]
    if site.kind != "causal":
        return float(kept.mean())
    row, column = (np.arange(size) * mask.block for size in kept.shape[1:])
    past = column[None, :] - mask.memory < row[:, None] + mask.block
    return float(kept[:, past].mean())
