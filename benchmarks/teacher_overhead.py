"""Measure what the teacher of a distillation costs in a training step.

Steps of a compacted BERT of MiniLM's shape (forward, loss, backward, clipping, AdamW) are timed in turn, in one
process: on labels, on outputs of the teacher that are computed in the step, and on kept ones, in the precision of a
training and in float32. The printed ratios are medians over neighbouring steps, with a bootstrap interval.

    python -m benchmarks.teacher_overhead --shares 1 0.5 0.25 0.125
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.hook_overhead import make_model, median_ratio
from benchmarks.machine import machine
from benchmarks.speed import table
from compressor.training.distillation import Distillation
from compressor.training.precision import native_precision
from compressor.units import compacted, find_groups
from graph_passes import Plan

LIMITS = {"computed": 1.5, "kept": 1.1, "kept, float32": 1.1}
"""Times as long as a step on labels."""


def measure(share: float, steps: int, warm_up: int, batch: int, seq: int, folder: Path) -> dict[str, np.ndarray]:
    """Seconds of the steps of each kind, `[steps]`.

    Args:
        share: share of the heads and neurons of each layer that the student keeps.
        steps: timed steps of each kind.
        warm_up: untimed steps of each kind before them, which store the kept outputs.
        batch: rows per step.
        seq: tokens per row.
        folder: folder of the kept outputs.
    """
    model, inputs = make_model(batch, seq)
    groups = find_groups(model, inputs)
    plan = Plan(groups=tuple(group.plan(range(max(1, round(share * group.units)))) for group in groups))
    computed = Distillation.of(model, ("logits",), precision=native_precision())
    kept = computed.keep_outputs(folder, batch, batch * seq)
    exact = replace(computed, precision="no").keep_outputs(folder, batch, batch * seq)
    labels = torch.arange(batch) % 2
    losses: Mapping[str, Callable[[], Tensor]] = {
        "labels": lambda: model(**inputs, labels=labels).loss,
        "computed": lambda: computed.loss(model, inputs),
        "kept": lambda: kept.loss(model, inputs),
        "kept, float32": lambda: exact.loss(model, inputs),
    }
    times: dict[str, list[float]] = {kind: [] for kind in losses}
    with compacted(model, plan, inputs):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
        for index in range(warm_up + steps):
            for kind in list(losses)[:: 1 if index % 2 else -1]:
                seconds = _step(model, optimizer, losses[kind])
                if index >= warm_up:
                    times[kind].append(seconds)
    return {kind: np.array(seconds) for kind, seconds in times.items()}


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, loss: Callable[[], Tensor]) -> float:
    """Seconds of a training step."""
    start = time.perf_counter()
    optimizer.zero_grad()
    loss().backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return time.perf_counter() - start


def main() -> None:
    """Print a row for each share."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shares", type=float, nargs="+", default=[1.0, 0.5, 0.25, 0.125], help="units kept")
    parser.add_argument("--steps", type=int, default=30, help="timed steps of each kind")
    parser.add_argument("--warm-up", type=int, default=5, help="untimed steps of each kind")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--seq", type=int, default=32)
    args = parser.parse_args()
    print(
        f"machine: {machine('torch')}; {torch.get_num_threads()} threads; mixed precision: {native_precision()}",
        flush=True,
    )
    print(f"limits: {', '.join(f'{kind} {limit}' for kind, limit in LIMITS.items())}", flush=True)
    rows = []
    for share in args.shares:
        with tempfile.TemporaryDirectory() as folder:
            times = measure(share, args.steps, args.warm_up, args.batch, args.seq, Path(folder))
        row = {"units kept": f"{share:g}", "labels, ms": f"{1e3 * np.median(times['labels']):.0f}"}
        for kind in LIMITS:
            row[kind] = "{:.2f} ({:.2f} to {:.2f})".format(*median_ratio(times[kind], times["labels"]))
        rows.append(row)
    print(table(rows))


if __name__ == "__main__":
    main()
