"""Measure the cost of the attention hook, or of a method that learns gates with the model, in a training step.

Training steps (forward, backward, clipping, AdamW) of a BERT of MiniLM's shape are timed bare and gated in turn, in one
process. Gated steps run under the hook with a learnable number for every head or, for a method, with its gate sampled,
penalised, clipped and learned, to keep half of the heads. The printed ratio is the median over pairs of neighbouring
steps, so that disturbances of the machine affect both steps of a pair; its interval is a bootstrap over the pairs.

    python -m benchmarks.hook_overhead --steps 40
    python -m benchmarks.hook_overhead --steps 40 --method dsp ste hard-concrete bin-concrete
"""

from __future__ import annotations

import argparse
import platform
import time
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch
from torch import Tensor, nn
from transformers import BertConfig, BertForSequenceClassification

from compressor.config.methods import METHODS
from compressor.training.gated_model import attach_gate
from compressor.units import Site, find_sites, hooked

LIMIT = {"hook": 1.10, **{name: 1.15 for name, method in METHODS.items() if method.trains_model}}


def make_model(batch: int, seq: int) -> tuple[BertForSequenceClassification, dict[str, Tensor]]:
    """A model of MiniLM's shape (6 layers, width 384, 12 heads of 32), and a padded batch `[batch, seq]`."""
    torch.manual_seed(0)
    config = BertConfig(hidden_size=384, num_hidden_layers=6, num_attention_heads=12, intermediate_size=1536)
    mask = torch.ones(batch, seq, dtype=torch.int64)
    mask[-1, seq // 2 :] = 0
    inputs = {"input_ids": torch.randint(0, config.vocab_size, (batch, seq)), "attention_mask": mask}
    return BertForSequenceClassification(config).train(), inputs


class HookedModel:
    """The model under the hook, with a learnable number for every head.

    Args:
        model: the model.
        sites: its attentions.
    """

    def __init__(self, model: BertForSequenceClassification, sites: list[Site]) -> None:
        self.gates = {site.name: nn.Parameter(torch.ones(site.heads, 1)) for site in sites}
        self.weights = list(self.gates.values())
        self.model = model

    def at(self, step: int) -> AbstractContextManager[None]:
        """The context in which a step runs the model."""
        return hooked(self.model, lambda name, out: out * self.gates[name])

    def penalty(self, step: int) -> Tensor | float:
        """The penalty that is added to the loss."""
        return 0.0


class GatedModel:
    """The model with the gate of a method, as in a run that keeps half of the heads.

    Args:
        name: name of the method.
        model: the model.
        sites: its attentions.
        steps: training steps of the run.
    """

    def __init__(self, name: str, model: BertForSequenceClassification, sites: list[Site], steps: int) -> None:
        layers = [site.heads for site in sites]
        self.gate = METHODS[name].load()(layers, sum(layers) // 2, steps, 0)
        self.weights = list(self.gate.parameters())
        self.model, self.sites = model, sites

    def at(self, step: int) -> AbstractContextManager[None]:
        """The context in which a step runs the model."""
        return attach_gate(self.model, self.gate, self.sites, lambda: step)

    def penalty(self, step: int) -> Tensor | float:
        """The penalty that is added to the loss."""
        return self.gate.penalty(step).float()


def measure(kind: str, steps: int, warm_up: int, batch: int, seq: int) -> tuple[np.ndarray, np.ndarray]:
    """Time bare and gated steps in alternating order; return the seconds of each, `[steps]` both.

    Args:
        kind: `hook`, or the name of a method.
        steps: timed steps of each kind.
        warm_up: untimed steps of each kind before them.
        batch: rows per step.
        seq: tokens per row.
    """
    model, inputs = make_model(batch, seq)
    sites = find_sites(model, inputs)
    gates = HookedModel(model, sites) if kind == "hook" else GatedModel(kind, model, sites, warm_up + steps)
    weights = list(model.parameters())
    optimizer = torch.optim.AdamW([*weights, *gates.weights], lr=1e-5)
    labels = torch.arange(batch) % 2

    def step(index: int, gated: bool) -> float:
        with gates.at(index) if gated else nullcontext():
            start = time.perf_counter()
            optimizer.zero_grad()
            loss = model(**inputs, labels=labels).loss
            (loss + gates.penalty(index) if gated else loss).backward()
            if gated:
                nn.utils.clip_grad_norm_(gates.weights, 1.0)
            nn.utils.clip_grad_norm_(weights, 1.0)
            optimizer.step()
            return time.perf_counter() - start

    times: dict[bool, list[float]] = {False: [], True: []}
    for index in range(warm_up + steps):
        for gated in (False, True) if index % 2 else (True, False):
            seconds = step(index, gated)
            if index >= warm_up:
                times[gated].append(seconds)
    return np.array(times[False]), np.array(times[True])


def median_ratio(times: np.ndarray, bare: np.ndarray) -> tuple[float, float, float]:
    """Median ratio of neighbouring steps, and its 95% interval by a bootstrap over the pairs."""
    ratios = times / bare
    draws = np.random.default_rng(0).integers(0, len(ratios), (2000, len(ratios)))
    low, high = np.quantile(np.median(ratios[draws], axis=1), (0.025, 0.975))
    return float(np.median(ratios)), float(low), float(high)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--method", nargs="+", default=["hook"], choices=LIMIT, help="what to compare with a bare step")
    parser.add_argument("--steps", type=int, default=40, help="timed steps of each kind")
    parser.add_argument("--warm-up", type=int, default=5, help="untimed steps of each kind")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--seq", type=int, default=64)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(f"machine       {platform.machine()}, {options.threads} threads, torch {torch.__version__}")
    print(f"step          batch {options.batch}, {options.seq} tokens, {options.steps} steps of each kind in turn")
    exceeded = []
    for kind in options.method:
        bare, gated = measure(kind, options.steps, options.warm_up, options.batch, options.seq)
        ratio, low, high = median_ratio(gated, bare)
        print(f"bare          {1e3 * np.median(bare):8.1f} ms median")
        print(f"{kind:13} {1e3 * np.median(gated):8.1f} ms median")
        print(f"ratio         {ratio:8.3f}   95% interval {low:.3f} to {high:.3f}   limit {LIMIT[kind]:.2f}")
        if ratio > LIMIT[kind]:
            exceeded.append(f"{kind} costs {ratio - 1:.1%} of a step; the limit is {LIMIT[kind] - 1:.0%}")
    if exceeded:
        raise SystemExit("; ".join(exceeded))


if __name__ == "__main__":
    main()
