"""Example reports as runs write them: a typical one and unusual ones, by name."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from compressor.report import verdict
from compressor.results import (
    AnsweredRow,
    CurvePoint,
    DropStatus,
    EngineFacts,
    Latency,
    MetricUnit,
    Note,
    Proof,
    ProofStage,
    Report,
    RowRates,
    Score,
    Speed,
    Throughput,
)
from graph_passes import Kind, Plan, SitePlan

FLOAT_STAGES = (ProofStage.EXPORT, ProofStage.SHRINK, ProofStage.BUILD)
"""The proofs of an engine in floats, in order."""


def latency(p50: float, batch: int, calls: int = 200, seed: int = 0) -> Latency:
    """`calls` log-normal times around `p50` milliseconds, with occasional stalls."""
    rng = random.Random(seed)
    samples = [p50 * rng.lognormvariate(0, 0.035) * (2.2 if rng.random() < 0.006 else 1) for _ in range(calls)]
    ordered = sorted(samples)
    p50, p90, p99 = (ordered[int(share * (calls - 1))] for share in (0.5, 0.9, 0.99))
    return Latency(p50=p50, p90=p90, p99=p99, throughput=1000 * batch / p50, samples=tuple(samples))


def speed(batch: int, seq: int, dense: float, compressed: float, *, void: str | None = None) -> Speed:
    """A row of two engines with these p50 times in milliseconds."""
    slow, fast = latency(dense, batch, seed=batch * seq), latency(compressed, batch, seed=batch * seq + 1)
    ratio = slow.p50 / fast.p50
    return Speed(
        batch=batch,
        seq=seq,
        dense=slow,
        compressed=fast,
        ratio=ratio,
        low=ratio - 0.03,
        high=ratio + 0.03,
        void=void,
    )


def throughput(batch: int, seq: int, dense: tuple[float, float], compressed: tuple[float, float]) -> Throughput:
    """A row of rates with one caller and with two."""
    before, after = (RowRates(one_caller=single, all_callers=several) for single, several in (dense, compressed))
    return Throughput(batch=batch, seq=seq, callers=2, dense=before, compressed=after)


def site(
    name: str, heads: int, kept: Sequence[int], kind: Kind = "bidirectional", kv_heads: int | None = None
) -> SitePlan:
    """A site whose heads have width 32."""
    return SitePlan(name, kind, heads, kv_heads or heads, 32, tuple(kept))


def bert_plan(kept: int = 36, layers: int = 6, heads: int = 12) -> Plan:
    """The sites of a BERT with `kept` heads drawn at random; the second layer keeps none."""
    candidates = [(layer, head) for layer in range(layers) if layer != 1 for head in range(heads)]
    chosen = set(random.Random(3).sample(candidates, kept))
    return Plan(
        sites=tuple(
            site(
                f"bert.encoder.layer.{layer}.attention.self",
                heads,
                [head for head in range(heads) if (layer, head) in chosen],
            )
            for layer in range(layers)
        ),
        model="sha256:5f0c8f1b6f0a4f2d8f4f6f9f0c1d2e3f4a5b6c7d8e9f00112233445566778899",
        method="dsp",
        options={"tau_ini": 1000.0, "tau_end": 1e-8, "cooldown": 0.67, "lr": 0.5},
        seed=1,
        data="sha256:0d1e2f30415263748596a7b8c9daebfc0d1e2f30415263748596a7b8c9daebfc",
        evidence={"eval": {"dense": {"accuracy": 0.9266}, "compressed": {"accuracy": 0.922}}},
    )


def curves(steps: int = 1200, every: int = 20) -> tuple[CurvePoint, ...]:
    """A decreasing loss, a temperature from 1000 to 1e-8, and an evaluation every 200 steps."""
    rng = random.Random(0)
    points = []
    for step in range(every, steps + 1, every):
        share = min(1.0, step / (0.67 * steps))
        values = {
            "loss": 0.12 + 0.5 * math.exp(-step / 300) + 0.03 * rng.random(),
            "temperature": 10 ** (3 - 11 * share),
        }
        if not step % 200:
            values["eval_accuracy"] = 0.922 - 0.09 * math.exp(-step / 350)
        points.append(CurvePoint(step=step, values=values))
    return tuple(points)


def proofs(error: float = 3.1e-7) -> tuple[Proof, ...]:
    """All stages for both variants, with this error in the second stage of the compressed variant."""
    cases = ("batch 1, length 8", "batch 2, length 17, padded", "batch 8, length 128, padded")
    return tuple(
        Proof(
            stage=stage,
            variant=variant,
            error=error if (stage, variant) == (FLOAT_STAGES[1], "compressed") else 2.4e-7,
            tolerance=1e-4,
            cases=cases,
        )
        for variant in ("dense", "compressed")
        for stage in FLOAT_STAGES
    )


def accuracy(dense: float = 0.915, compressed: float = 0.909, **fields: Any) -> Score:
    """A score on test rows with an interval of one point to either side."""
    difference = compressed - dense
    defaults = {"metric": "accuracy", "split": "test", "rows": 1821, "unit": MetricUnit.POINTS}
    measured = {
        "dense": dense,
        "compressed": compressed,
        "difference": difference,
        "low": difference - 0.01,
        "high": difference + 0.01,
    }
    return Score(**{**defaults, **measured, **fields})


def answers() -> tuple[AnsweredRow, ...]:
    """Two rows, of which the first changed."""
    return (
        AnsweredRow(
            number=7, texts=("a charming and often affecting journey",), dense="pos", compressed="neg", changed=True
        ),
        AnsweredRow(number=1, texts=("unflinchingly bleak", "and desperate"), dense="neg", compressed="neg"),
    )


def engine(parameters: int, **fields: Any) -> EngineFacts:
    """An engine with fp32 weights."""
    defaults: dict[str, Any] = {
        "file": "model.onnx",
        "parameters": parameters,
        "file_bytes": 4 * parameters + 180_000,
        "peak_memory_bytes": 4 * parameters + 61_000_000,
        "macs": 128 * parameters // 2,
        "attentions": 6,
        "fused": 6,
        "optimization": "onnxscript ort_fusions, proven equal to the graph it came from",
    }
    return EngineFacts(**{**defaults, **fields})


def report(**fields: Any) -> Report:
    """A successful run with some fields replaced; the verdict is derived from the facts unless it is given."""
    facts: dict[str, Any] = {
        "model": "minilm-sst2",
        "family": "bert",
        "task": "text-classification",
        "plan": bert_plan(),
        "notes": (
            Note(text="Test rows: 1,821 of the evaluation data were set aside with seed 1."),
            Note(text="The scales of the kept heads are folded into the output projections."),
        ),
        "curves": curves(),
        "scores": (accuracy(), accuracy(0.9266, 0.922, split="eval", rows=872)),
        "answers": answers(),
        "proofs": proofs(),
        "speeds": (speed(1, 128, 6.32, 4.83), speed(8, 128, 47.9, 35.1)),
        "dense": engine(22_713_602, file=None),
        "compressed": engine(20_936_834, attentions=5, fused=5),
        "target": "ort",
        "precision": "fp32",
        "drop_status": DropStatus.PASSED,
        "session": {"runtime": "onnxruntime 1.31.0", "provider": "CPUExecutionProvider", "intra_op_num_threads": 2},
        "machine": {
            "processor": "Intel(R) Xeon(R) Platinum 8481C",
            "cores": "2",
            "memory": "24 GiB",
            "python": "3.11.7",
            "torch": "2.13.0",
            "transformers": "5.23.0",
        },
        "recipe": {
            "model": "minilm-sst2",
            "data": "sst2.tsv.xz",
            "method": "dsp",
            "keep": 36,
            "max_drop": 0.02,
            "batch": [1, 8],
            "seq": [128],
            "seed": 1,
            "plan": None,
        },
        "command": "compress minilm-sst2 --data sst2.tsv.xz --method dsp --keep 36 --max-drop 0.02 --seed 1",
        "seconds": {"learn": 812.4, "export": 9.7, "shrink": 1.2, "build": 4.1, "prove": 11.9, "measure": 95.3},
    }
    facts |= fields
    verdict_fields = ("plan", "dense", "compressed", "speeds", "scores", "proofs", "drop_status", "refused", "budget")
    verdict_facts = {name: facts[name] for name in verdict_fields if name in facts}
    facts.setdefault("verdict", verdict(**verdict_facts, max_drop=facts["recipe"].get("max_drop")))
    return Report(**facts)


def dense(plan: Plan) -> Plan:
    """A plan of these sites that keeps every head at scale one, as if nothing had been learned."""
    sites = tuple(replace(site, kept=tuple(range(site.heads)), scale=(), mask=None) for site in plan.sites)
    return plan.replace_groups(sites).model_copy(update={"method": None, "options": {}, "evidence": {}})
