"""From average maps to masks: the share p of a layer's blocks that get least attention go (attention pruning, 3.2)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from compressor.block_masks.attention_maps import AttentionMaps
from graph_passes import BlockMask, Kind, Plan


def build_masks(
    maps: AttentionMaps,
    plan: Plan,
    shares: Mapping[Kind, float],
    block: int,
    *,
    seed: int | None = None,
    count_causal_zeros: bool = False,
    weigh_by_rows: bool = False,
    empty_rows: bool = False,
) -> dict[str, BlockMask]:
    """Masks of every site whose kind loses a share of its blocks.

    Of a layer's n blocks, over all its kept heads together, exactly `round(p n)` go: those of least mean attention,
    ties by index. Every row of blocks keeps its strongest, unless `empty_rows` lets it go too, so fewer go where p
    leaves less than one a row. Blocks that no example reaches are not counted and stay; nor are a causal site's blocks
    of the future, which are never computed. A block's score is the mean over its entries that count.

    Args:
        maps: of this model.
        plan: the heads that are there.
        shares: kind -> p, from 0 to 1; a kind that is not named loses nothing.
        block: positions along a block's side; 1 cuts single entries.
        seed: draw the order in which blocks go instead (the paper's baseline).
        count_causal_zeros: count the future, too, as the paper's own code does.
        weigh_by_rows: a pair's attention counts as many times as there are examples that have it. What goes is then
            what all examples together look at least, so that texts shorter than the maps keep more of what they use.
        empty_rows: a row may lose every block: in that head its queries attend to nothing and give zero. A row's
            strongest block can be weaker than any that another head has to do without for it.

    Raises:
        ValueError: a share outside 0 to 1.
    """
    for kind, share in shares.items():
        if not 0.0 <= share <= 1.0:
            raise ValueError(f"{kind} loses a share of {share:g} of its blocks; give 0 to 1")
    return {
        site.name: _site(
            maps.maps[site.name] * _weights(maps, site.name) if weigh_by_rows else maps.maps[site.name],
            _counted(maps, site.name, count_causal_zeros),
            site.kept,
            shares[site.kind],
            block,
            _past(maps, site.name),
            maps.memory,
            None if seed is None else np.random.default_rng([seed, number]),
            empty_rows,
        )
        for number, site in enumerate(plan.sites)
        if shares.get(site.kind, 0.0) > 0.0 and site.kept
    }


def density(mask: BlockMask, maps: AttentionMaps, site: str, kept: tuple[int, ...]) -> np.ndarray:
    """Share `[kept head]` of the blocks that count which the mask keeps."""
    counted = _blocks(_counted(maps, site, False).astype(np.float64), mask.block) > 0
    found: np.ndarray = (mask.kept[list(kept)] & counted).sum((1, 2)) / max(1, counted.sum())
    return found


def unreached(maps: AttentionMaps, sites: Iterable[str], block: int) -> float:
    """Share of the blocks which no example reaches, of those that attention can use: no share is taken of them, and
    they stay."""
    usable, reached = 0, 0
    for site in sites:
        usable += int((_blocks(_past(maps, site).astype(np.float64), block) > 0).sum())
        reached += int((_blocks(_counted(maps, site, False).astype(np.float64), block) > 0).sum())
    return 1.0 - reached / usable if usable else 0.0


def _counted(maps: AttentionMaps, site: str, causal_zeros: bool) -> np.ndarray:
    """Bool `[query, key]`: pairs that the attention can use and some example has."""
    reached = maps.counts[site] > 0
    return reached if causal_zeros else reached & _past(maps, site)


def _weights(maps: AttentionMaps, site: str) -> np.ndarray:
    """Share `[query, key]` of the examples that have a pair, of the most that have any."""
    counts = maps.counts[site]
    found: np.ndarray = counts / max(1.0, float(counts.max(initial=0.0)))
    return found


def _past(maps: AttentionMaps, site: str) -> np.ndarray:
    """Bool `[query, key]`: pairs that causality leaves, all of them where there is none."""
    queries, keys = maps.counts[site].shape
    if maps.kinds[site] != "causal":
        return np.ones((queries, keys), dtype=np.bool_)
    past: np.ndarray = np.arange(keys)[None, :] - maps.memory <= np.arange(queries)[:, None]
    return past


def _site(
    attention: np.ndarray,
    counted: np.ndarray,
    heads: tuple[int, ...],
    share: float,
    block: int,
    past: np.ndarray,
    memory: int,
    draw: np.random.Generator | None,
    empty_rows: bool,
) -> BlockMask:
    entries = _blocks(counted.astype(np.float64), block)
    scores = np.stack([_blocks(attention[head] * counted, block) for head in heads]) / np.maximum(entries, 1.0)
    order = scores if draw is None else draw.random(scores.shape)
    population = np.broadcast_to(entries > 0, scores.shape)
    present = _blocks(past.astype(np.float64), block) > 0
    seen = population & present
    free = population.copy()
    if not empty_rows:
        # Of equals the last is the strongest, as the first goes first.
        strongest = seen.shape[2] - 1 - np.where(seen, order, -1.0)[..., ::-1].argmax(axis=2)
        head, row = np.nonzero(seen.any(axis=2))
        free[head, row, strongest[head, row]] = False
    places = np.flatnonzero(free)
    least = places[np.argsort(order.ravel()[places], kind="stable")]
    kept = np.ones(scores.shape, dtype=np.bool_)
    kept.ravel()[least[: round(share * population.sum())]] = False
    whole = np.zeros((len(attention), *kept.shape[1:]), dtype=np.bool_)
    whole[list(heads)] = kept & present
    return BlockMask(whole, block, memory)


def _blocks(entries: np.ndarray, block: int) -> np.ndarray:
    """Sums over blocks of `[query, key]`, the last ones shorter."""
    queries, keys = entries.shape
    rows, columns = np.arange(0, queries, block), np.arange(0, keys, block)
    found: np.ndarray = np.add.reduceat(np.add.reduceat(entries, rows, axis=0), columns, axis=1)
    return found
