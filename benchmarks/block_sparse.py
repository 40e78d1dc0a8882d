"""Time block-sparse attention against ONNX Runtime's fused dense attention, in turn in one process.

    python -m benchmarks.block_sparse                            # 384 to 4096 tokens, uniform and ragged, block 64
    python -m benchmarks.block_sparse --length 2048 --block 32 128 --memory
    python -m benchmarks.block_sparse --maps work/maps.safetensors --share 0.9
    python -m benchmarks.block_sparse --plan --density 0.1 0.3 0.5 --block 16 32 64 128

Both graphs take projected queries, keys and values `[batch, length, heads * head_dim]`; the dense one is a single
`MultiHeadAttention` of com.microsoft, which is flash attention on a CPU. Uniform rows keep equally many blocks each;
ragged rows keep heavy-tailed numbers of blocks (Pareto, exponent 1.2); learned masks come from attention maps. `--plan`
lets `compress` choose between dense and block-sparse attention at each length, density and block size, and times its
choice three more times, to detect choices that are slower than dense attention.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import onnx_ir as ir

from benchmarks.machine import machine
from benchmarks.speed import table
from compressor.block_masks.attention_maps import AttentionMaps, build_masks
from compressor.block_masks.mask_selector import MaskSelector, dense, sparse
from compressor.config.run import Recipe
from compressor.measure import interleave
from compressor.targets.base import Engine, Feeds
from compressor.targets.onnxruntime import ort_session
from compressor.targets.onnxruntime.ort_session import open_session, run_session, session_settings
from compressor.targets.peak_memory import peak_growth
from graph_passes import BlockMask, Plan, SitePlan, save
from graph_passes.block_sparse.row_buckets import buckets, dense_heads

TAIL = 1.2
"""Exponent of the Pareto distribution of the numbers of blocks in ragged rows."""
GOALS = {("uniform", 1024): 4, ("uniform", 2048): 5, ("uniform", 4096): 6} | {
    ("ragged", length): 5 for length in (1024, 2048, 4096)
}
"""Minimum speedup at a density of 0.1 and blocks of 64, by kind of rows and length."""


class LoadedAttention:
    """A graph of one attention in ONNX Runtime, with the attributes of an engine that timing needs.

    Args:
        model: the graph.
        path: the file to write it to.
        threads: threads of the session.
        kernel: library of `compress kernel`; None: plain ONNX.
    """

    precision = "fp32"
    attentions = fused = 0
    built = device_seconds = None

    def __init__(self, model: ir.Model, path: Path, threads: int, kernel: Path | None = None) -> None:
        save(model, path)
        self.path, self.session = path, session_settings("cpu", threads, kernel)
        self._session = open_session(path, self.session)

    def run(self, feeds: Feeds) -> dict[str, np.ndarray]:
        """Outputs by name."""
        return run_session(self._session, feeds)

    def memory(self, feeds: Feeds) -> int | None:
        """Peak memory in bytes."""
        return peak_growth(ort_session.__name__, self.path, self.session, feeds)


def uniform(heads: int, blocks: int, density: float, rng: np.random.Generator) -> np.ndarray:
    """Rows with numbers of blocks that differ by one at most, at random positions, bool `[head, row, block]`."""
    total = round(density * heads * blocks * blocks)
    counts = np.full(heads * blocks, total // (heads * blocks))
    counts[rng.permutation(len(counts))[: total - counts.sum()]] += 1
    return _random_blocks(counts, heads, blocks, rng)


def ragged(heads: int, blocks: int, density: float, rng: np.random.Generator) -> np.ndarray:
    """Rows with heavy-tailed numbers of blocks, from none to all, at random positions, bool `[head, row, block]`."""
    weights = rng.pareto(TAIL, heads * blocks) + 0.2
    low, high = 0.0, float(blocks)
    for _ in range(60):
        scale = (low + high) / 2
        enough = np.clip(np.round(weights * scale), 0, blocks).sum() >= density * heads * blocks * blocks
        low, high = (low, scale) if enough else (scale, high)
    return _random_blocks(np.clip(np.round(weights * high), 0, blocks).astype(int), heads, blocks, rng)


def _random_blocks(counts: np.ndarray, heads: int, blocks: int, rng: np.random.Generator) -> np.ndarray:
    kept = np.zeros((heads * blocks, blocks), np.bool_)
    for row, count in zip(kept, counts, strict=True):
        row[rng.permutation(blocks)[:count]] = True
    return kept.reshape(heads, blocks, blocks)


def learned(path: Path, share: float, block: int, dim: int) -> Iterator[tuple[str, bool, BlockMask]]:
    """Name, causality and mask of each site with attention maps."""
    maps = AttentionMaps.load(path)
    sites = [
        SitePlan(name, maps.kinds[name], len(heads), len(heads), dim, tuple(range(len(heads))))
        for name, heads in maps.maps.items()
    ]
    masks = build_masks(
        maps, Plan(sites=tuple(sites)), dict.fromkeys(("bidirectional", "causal", "cross"), share), block
    )
    for site in sites:
        if site.name in masks and not masks[site.name].memory:
            yield site.name, site.kind == "causal", masks[site.name]


def measure(
    name: str, length: int, mask: BlockMask, options: argparse.Namespace, *, causal: bool = False
) -> dict[str, Any]:
    """One row of the table.

    Args:
        name: kind of rows, or name of the site.
        length: number of tokens.
        mask: the blocks to keep.
        options: options of the command line.
        causal: whether keys after the query are hidden.
    """
    heads, dim = len(mask.kept), options.dim
    rng = np.random.default_rng(options.seed)
    shape = (options.batch, length, heads * dim)
    feeds = {side: rng.standard_normal(shape, dtype=np.float32) for side in ("query", "key", "value")}
    forms = {"dense": dense(heads, dim, causal=causal), "sparse": sparse(mask, dim, causal=causal)}
    (function,) = forms["sparse"].functions.values()
    with tempfile.TemporaryDirectory() as folder:
        pair = [
            LoadedAttention(model, Path(folder) / f"{side}.onnx", options.threads, options.kernel)
            for side, model in forms.items()
        ]
        first, second = cast("list[Engine]", pair)
        speed = interleave(
            first, second, feeds, batch=options.batch, seq=length, seconds=options.seconds, seed=options.seed
        )
        widths = mask.kept.sum(2)
        row = {
            "rows": name,
            "tokens": length,
            "block": mask.block,
            "density": f"{mask.density:.3f}",
            "blocks a row": f"{widths.min()} to {widths.max()}, mean {widths.mean():.1f}",
            "dense p50, ms": f"{speed.dense.p50:.2f}",
            "block-sparse p50, ms": f"{speed.compressed.p50:.2f}",
            "times faster": f"{speed.ratio:.2f} ({speed.low:.2f} to {speed.high:.2f})",
            "goal": GOALS.get((name, length), ""),
        }
        if not options.kernel:
            needed = int(mask.kept.sum())
            computed = sum(bucket.columns.size for bucket in buckets(mask, dim, causal=causal))
            computed += int(mask.kept[dense_heads(mask, causal=causal)].sum())
            row["nodes"] = sum(node.op_type != "Constant" for node in function)
            row["padding"] = f"{computed / max(1, needed) - 1:.0%}"
        if options.memory:
            peaks = [engine.memory(feeds) or 0 for engine in pair]
            row["peak memory, MiB"] = " / ".join(f"{peak / 2**20:.0f}" for peak in peaks)
    return row


def planned(name: str, length: int, mask: BlockMask, options: argparse.Namespace) -> dict[str, Any]:
    """One row of the table of `--plan`: the form chosen for a site, and its speedup when timed three more times.

    Args:
        name: kind of rows.
        length: number of tokens.
        mask: the blocks to keep.
        options: options of the command line.
    """
    heads = len(mask.kept)
    site = SitePlan("site", "bidirectional", heads, heads, options.dim, tuple(range(heads)))
    recipe = Recipe(
        model=Path("model"),
        data="rows",
        drop_blocks=0.5,
        block_size=mask.block,
        batch=(options.batch,),
        threads=options.threads,
        kernel=options.kernel,
        provider="cpu",
    )
    selector, *repeats = (MaskSelector(recipe, (length,)) for _ in range(4))
    chosen, _ = selector.select(Plan(sites=(site,)), {site.name: mask})
    gains = np.median([[time.gain for time in each.times(site, mask)] for each in repeats], axis=0).tolist()
    return {
        "rows": name,
        "tokens": length,
        "block": mask.block,
        "density": f"{mask.density:.2f}",
        "form": "block-sparse" if chosen else "whole",
        **{
            f"{form}, ms": " / ".join(f"{time.milliseconds[form]:.2f}" for time in selector.times(site, mask))
            for form in ("whole", "block-sparse")
        },
        "lengths": " / ".join(map(str, selector.lengths)),
        "times faster, repeated": " / ".join(f"{gain:.2f}" for gain in gains),
        "slower than dense": "yes" if chosen and min(gains) < 1.0 else "no",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", nargs="+", type=int, default=[384, 1024, 2048, 4096])
    parser.add_argument("--block", nargs="+", type=int, default=[64])
    parser.add_argument("--rows", nargs="+", choices=("uniform", "ragged"), default=["uniform", "ragged"])
    parser.add_argument("--density", nargs="+", type=float, default=[0.1])
    parser.add_argument("--plan", action="store_true", help="let compress choose the form, instead of comparing both")
    parser.add_argument("--maps", type=Path, help="attention maps to derive masks from, instead of drawing them")
    parser.add_argument("--share", type=float, default=0.9, help="share of the blocks that learned masks drop")
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--kernel", type=Path, help="library of compress kernel; default: plain ONNX")
    parser.add_argument("--seconds", type=float, default=20.0, help="approximate duration of each row")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--memory", action="store_true", help="compare peak memory too, dense / block-sparse")
    options = parser.parse_args()
    rows = []
    for block in options.block:
        if options.maps:
            for name, causal, mask in learned(options.maps, options.share, block, options.dim):
                rows.append(measure(name, mask.queries, mask, options, causal=causal))
            continue
        for length, kind, density in itertools.product(options.length, options.rows, options.density):
            draw = uniform if kind == "uniform" else ragged
            kept = draw(options.heads, -(-length // block), density, np.random.default_rng(options.seed))
            row_of = planned if options.plan else measure
            rows.append(row_of(kind, length, BlockMask(kept, block), options))
            print(rows[-1], file=sys.stderr)
    print(f"command: python -m benchmarks.block_sparse {' '.join(sys.argv[1:])}".rstrip())
    print(f"machine: {machine('onnxruntime')}; {options.threads} threads, batch {options.batch}, fp32")
    print(f"dense: MultiHeadAttention of com.microsoft, {options.heads} heads of {options.dim}. Intervals are 95%.")
    print(f"block-sparse: {'the compiled kernel' if options.kernel else 'the function of plain ONNX'}\n")
    print(table(rows))
    if options.plan:
        slower = sum(row["slower than dense"] == "yes" for row in rows)
        print(f"\nslower than dense at some length: {slower} of {len(rows)} plans")


if __name__ == "__main__":
    main()
