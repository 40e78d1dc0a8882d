"""What the attention hook costs a training step.

Times one training step (forward, backward, AdamW) of a BERT of MiniLM's shape, bare and under the hook with a learnable
gate on every head, in turn in one process. The ratio printed is the median over pairs of neighbouring steps, so that a
machine that slows down for a while slows both sides; its interval is a bootstrap over the pairs.

    python benchmarks/hook_overhead.py --steps 40
"""

from __future__ import annotations

import argparse
import platform
import time
from contextlib import nullcontext

import numpy as np
import torch
from torch import Tensor, nn
from transformers import BertConfig, BertForSequenceClassification

from compressor.sites import find_sites, hooked

LIMIT = 1.10


def make(batch: int, seq: int) -> tuple[BertForSequenceClassification, dict[str, Tensor]]:
    """MiniLM's shape (6 layers, width 384, 12 heads of 32) with random weights, and a padded batch `[batch, seq]`."""
    torch.manual_seed(0)
    config = BertConfig(hidden_size=384, num_hidden_layers=6, num_attention_heads=12, intermediate_size=1536)
    mask = torch.ones(batch, seq, dtype=torch.int64)
    mask[-1, seq // 2 :] = 0
    inputs = {"input_ids": torch.randint(0, config.vocab_size, (batch, seq)), "attention_mask": mask}
    return BertForSequenceClassification(config).train(), inputs


def measure(steps: int, warm_up: int, batch: int, seq: int) -> tuple[np.ndarray, np.ndarray]:
    """Seconds of each bare and each hooked step, `[steps]` both; which goes first alternates."""
    model, inputs = make(batch, seq)
    sites = find_sites(model, inputs)
    gates = nn.ParameterDict({site.name.replace(".", "/"): torch.ones(site.heads, 1) for site in sites})
    by_site = {site.name: gates[site.name.replace(".", "/")] for site in sites}
    optimizer = torch.optim.AdamW([*model.parameters(), *gates.parameters()], lr=1e-5)
    labels = torch.arange(batch) % 2

    def step(gated: bool) -> float:
        with hooked(model, lambda name, out: out * by_site[name]) if gated else nullcontext():
            start = time.perf_counter()
            optimizer.zero_grad()
            model(**inputs, labels=labels).loss.backward()
            optimizer.step()
            return time.perf_counter() - start

    times: dict[bool, list[float]] = {False: [], True: []}
    for index in range(warm_up + steps):
        for gated in (False, True) if index % 2 else (True, False):
            seconds = step(gated)
            if index >= warm_up:
                times[gated].append(seconds)
    return np.array(times[False]), np.array(times[True])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=40, help="timed steps of each kind")
    parser.add_argument("--warm-up", type=int, default=5, help="untimed steps of each kind")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--seq", type=int, default=64)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    bare, gated = measure(options.steps, options.warm_up, options.batch, options.seq)
    ratios = gated / bare
    ratio = float(np.median(ratios))
    draws = np.random.default_rng(0).integers(0, options.steps, (2000, options.steps))
    low, high = np.quantile(np.median(ratios[draws], axis=1), (0.025, 0.975))
    print(f"machine       {platform.machine()}, {options.threads} threads, torch {torch.__version__}")
    print(f"step          batch {options.batch}, {options.seq} tokens, {options.steps} steps of each kind in turn")
    print(f"bare          {1e3 * np.median(bare):8.1f} ms median")
    print(f"under hook    {1e3 * np.median(gated):8.1f} ms median")
    print(f"ratio         {ratio:8.3f}   95% interval {low:.3f} to {high:.3f}   limit {LIMIT:.2f}")
    if ratio > LIMIT:
        raise SystemExit(f"the hook costs {ratio - 1:.1%} of a step; the limit is {LIMIT - 1:.0%}")


if __name__ == "__main__":
    main()
