"""Reports of runs with different outcomes."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

from compressor.report import verdict
from compressor.results import (
    CurvePoint,
    DropStatus,
    MetricUnit,
    Note,
    Refusal,
    Report,
)
from graph_passes import Kind, Plan
from tests.report.reports import accuracy, bert_plan, dense, engine, proofs, report, site, speed


def nothing_learned() -> Report:
    """A run without data and plan, which leaves the model unchanged."""
    plan = dense(bert_plan()).model_copy(update={"seed": None, "data": None})
    facts = engine(22_713_602)
    notes = (Note(text="nothing was learned: add rows (--data) and the number of heads to keep (--keep)"),)
    speeds = (speed(1, 128, 6.32, 6.3), speed(8, 128, 47.9, 47.9))
    bare: dict[str, Any] = {
        "curves": (),
        "scores": (),
        "answers": (),
        "drop_status": DropStatus.NOT_CHECKED,
        "recipe": {"model": "minilm-sst2"},
    }
    return report(plan=plan, dense=facts, compressed=facts, notes=notes, speeds=speeds, **bare)


def not_faster() -> Report:
    """14 of 72 heads are dropped, and every interval of the speed includes 1."""
    return report(
        plan=bert_plan(58),
        speeds=(speed(1, 128, 6.32, 6.3), speed(8, 128, 47.9, 47.5)),
        drop_status=DropStatus.NOT_CHECKED,
    )


def metric_fell() -> Report:
    """Faster, but the metric dropped by more than allowed."""
    return report(drop_status=DropStatus.FAILED, scores=(accuracy(0.915, 0.871),), plan=bert_plan(6))


def numbers_differ() -> Report:
    """A proof failed with an infinite error."""
    return report(proofs=proofs(math.inf), drop_status=DropStatus.NOT_CHECKED)


def refused() -> Report:
    """Two sites could not be shrunk, and one size has no result."""
    refusals = tuple(
        Refusal(
            what=f"bert.encoder.layer.{layer}.attention.self",
            why="its head axis meets SplitToSequence (node split_7), which has no rule; fold it to Split first",
        )
        for layer in (0, 4)
    )
    void = "5 attentions fused in dense, 3 in compressed"
    return report(refused=refusals, speeds=(speed(1, 128, 6.32, 4.83), speed(8, 512, 260.0, 251.0, void=void)))


def encoder_decoder() -> Report:
    """Three kinds of attention, layers of different widths, grouped heads, and a metric of which lower is better."""
    rng = random.Random(5)
    widths = (16, 16, 12, 8, 16, 4)
    shapes: tuple[tuple[Kind, str], ...] = (
        ("bidirectional", "model.encoder.layers.{}.self_attn"),
        ("causal", "model.decoder.layers.{}.self_attn"),
        ("cross", "model.decoder.layers.{}.encoder_attn"),
    )
    sites = [
        site(
            name.format(layer),
            width,
            sorted(rng.sample(range(width), rng.randint(0, width))),
            kind,
            width // 4 if kind == "causal" else width,
        )
        for kind, name in shapes
        for layer, width in enumerate(widths)
    ]
    scores = (
        accuracy(18.21, 18.94, metric="perplexity", unit=MetricUnit.RAW, low=0.52, high=0.97, higher_is_better=False),
    )
    return report(model="wide-bart", family="bart", task="text2text", plan=Plan(sites=tuple(sites)), scores=scores)


def bare() -> Report:
    """The minimum that the schema allows: no scores, proofs, speeds or curves."""
    facts = engine(1234, peak_memory_bytes=None, macs=None, attentions=1, fused=0)
    return Report(
        verdict=verdict(plan=Plan(sites=(site("attn", 1, []),)), dense=facts, compressed=facts),
        model="m",
        family="bert",
        task=None,
        plan=Plan(sites=(site("attn", 1, []),)),
        dense=facts,
        compressed=facts,
        target="ort",
        precision="fp32",
    )


def wide() -> Report:
    """32 layers of 64 heads, four sizes, and several logged quantities, one of which is always NaN."""
    rng = random.Random(7)
    sites = tuple(
        site(f"model.layers.{layer}.self_attn", 64, sorted(rng.sample(range(64), 20)), "causal", 8)
        for layer in range(32)
    )
    points = tuple(
        CurvePoint(step=step, values={"loss": 9 / step, "grad_norm": math.nan, "learning_rate": 1e-5 * (1 - step / 99)})
        for step in range(1, 99)
    )
    sizes = [(batch, seq) for batch in (1, 8) for seq in (128, 512)]
    speeds = tuple(speed(batch, seq, batch + 0.023 * batch * seq, batch + 0.019 * batch * seq) for batch, seq in sizes)
    return report(model="llama", family="llama", plan=Plan(sites=sites, method="taylor"), curves=points, speeds=speeds)


REPORTS: dict[str, Callable[[], Report]] = {
    "won": report,
    "nothing learned": nothing_learned,
    "not faster": not_faster,
    "metric fell": metric_fell,
    "numbers differ": numbers_differ,
    "refused": refused,
    "encoder-decoder": encoder_decoder,
    "bare": bare,
    "wide": wide,
}
