"""The verdict: the result of a run in one sentence, which begins with warnings if anything went wrong."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Literal

from compressor.report import formatting
from compressor.results import (
    DropStatus,
    EngineFacts,
    Proof,
    Report,
    Score,
    SiteBlocks,
    Speed,
    headline_scores,
)
from graph_passes import Plan
from graph_passes.plan import GroupType

Tone = Literal["good", "mixed", "bad"]

_NOT_TIMED, _NOT_PROVEN = "speed not measured", "no proof was run"


class VerdictWarning(StrEnum):
    """A warning that a verdict begins with, for programs and tests: codes are stable, texts may change."""

    TARGET_MISSING = "target-missing"
    NUMBERS_DIFFER = "numbers-differ"
    METRIC_FELL = "metric-fell"
    BUDGET_MISSED = "budget-missed"
    NOTHING_LEARNED = "nothing-learned"
    NOTHING_DROPPED = "nothing-dropped"
    SPEED_VOID = "speed-void"
    NOT_TIMED = "not-timed"
    SLOWER = "slower"
    NOT_FASTER = "not-faster"
    FASTER_AT_SOME_SIZES = "faster-at-some-sizes"
    NOT_PROVEN = "not-proven"


@dataclass(frozen=True)
class UnitCount:
    """Number of units of a type in the whole model, and how many of them are kept."""

    type: GroupType
    units: int
    kept: int


def verdict(*, max_drop: float | None = None, **facts: Any) -> str:
    """The result of a run in one sentence: the gains, or that nothing was gained.

    Args:
        max_drop: the loss of the metric that the run allows.
        facts: the fields of its `Report` by name, of which `plan`, `dense` and `compressed` are required.
    """
    report = Report.model_construct(**facts)
    warnings = warnings_of(report).values()
    refused = len(report.refused)
    clauses = [
        _units(report.plan, report.dense, report.compressed) + _blocks(report.blocks, len(report.plan.sites)),
        _speed(report.speeds, report.speeds_over_rewritten),
        _metric(report.scores),
        _proof(report.proofs),
        "" if not refused else "one site was refused" if refused == 1 else f"{refused} sites were refused",
    ]
    if report.drop_status is DropStatus.FAILED:
        bound = "" if max_drop is None else f" {max_drop:g}"
        clauses.insert(0, f"{clauses.pop(2)}, more than --max-drop{bound} allows")
    if any(not proof.holds for proof in report.proofs):
        clauses.insert(0, clauses.pop(3))
    sentence = "; ".join(clause for clause in clauses if clause and clause not in warnings)
    sentence = f"{', '.join(warnings)}: {sentence}" if warnings else sentence
    return sentence[0].upper() + sentence[1:] + "."


def warnings_of(report: Report) -> dict[VerdictWarning, str]:
    """The warnings that the verdict begins with, as text, the worst first; empty if the run gained what it should."""
    plan, speeds, texts = report.plan, report.speeds, dict[VerdictWarning, str]()
    if report.missing is not None:
        text = f"no {report.missing.target} engine was built and ONNX Runtime was measured instead"
        texts[VerdictWarning.TARGET_MISSING] = text
    if any(not proof.holds for proof in report.proofs):
        texts[VerdictWarning.NUMBERS_DIFFER] = "numbers differ"
    if report.drop_status is DropStatus.FAILED:
        texts[VerdictWarning.METRIC_FELL] = "the metric fell too far"
    if missed := sum(not row.met for row in report.budget):
        of_several = f"{missed} of {len(report.budget)} budgets missed"
        texts[VerdictWarning.BUDGET_MISSED] = "the budget was missed" if len(report.budget) == 1 else of_several
    # An engine that computes in less than fp32 is a gain without removed units.
    if keeps_all_units(plan) and not _masked(plan) and not report.compressed.reduced_products:
        learned = plan.method is not None
        code = VerdictWarning.NOTHING_DROPPED if learned else VerdictWarning.NOTHING_LEARNED
        return texts | {code: "nothing was dropped" if learned else "nothing was learned"}
    rows = valid_rows(speeds)
    faster = sum(row.low > 1 for row in rows)
    if not speeds:
        texts[VerdictWarning.NOT_TIMED] = _NOT_TIMED
    elif not rows:
        texts[VerdictWarning.SPEED_VOID] = "speed unknown"
    elif all(row.high < 1 for row in rows):
        texts[VerdictWarning.SLOWER] = "slower"
    elif not faster:
        texts[VerdictWarning.NOT_FASTER] = "not faster"
    elif faster < len(rows):
        texts[VerdictWarning.FASTER_AT_SOME_SIZES] = f"faster at {faster} of {len(rows)} sizes only"
    if not report.proofs:
        texts[VerdictWarning.NOT_PROVEN] = _NOT_PROVEN
    return texts


def tone(report: Report) -> Tone:
    """The tone of the verdict: `bad` if the result must not be used, `mixed` if it gained less than requested."""
    if report.drop_status is DropStatus.FAILED or any(not proof.holds for proof in report.proofs):
        return "bad"
    return "mixed" if report.refused or warnings_of(report) else "good"


def valid_rows(speeds: Sequence[Speed]) -> list[Speed]:
    """The rows that are not void."""
    return [speed for speed in speeds if speed.void is None]


def _units(plan: Plan, dense: EngineFacts, compressed: EngineFacts) -> str:
    before, after = formatting.count(dense.parameters), formatting.count(compressed.parameters)
    change = formatting.change(dense.parameters, compressed.parameters).lstrip("+−")
    if dense.parameters == compressed.parameters:
        parameters = f"the same {before} parameters"
    else:
        fewer = "fewer" if compressed.parameters < dense.parameters else "more"
        parameters = f"{change} {fewer} parameters ({before} → {after})"
    kept = [
        f"{'all' if count.kept == count.units else f'{count.kept:,} of'} {count.units:,} {count.type}"
        for count in unit_counts(plan)
    ]
    if compressed.reduced_products:
        (first, count), *further = compressed.reduced_products.items()
        counts = [f"{number.partition(' ')[0]} in {name}" for name, number in further]
        return _joined([f"{count} matrix products in {first}", *counts, *kept, parameters])
    if not keeps_all_units(plan):
        return f"{_joined(kept)} kept, {parameters}"
    everything = _joined([*kept, parameters])
    return everything if _masked(plan) else f"no unit was removed: {everything}"


def unit_counts(plan: Plan) -> list[UnitCount]:
    """The units of a plan by type: its heads where it lists attentions, its neurons where it lists feed-forwards."""
    heads = UnitCount("heads", plan.heads, plan.heads_kept)
    neurons = UnitCount("neurons", plan.neurons, plan.neurons_kept)
    return [*([heads] if plan.sites else []), *([neurons] if plan.feed_forwards else [])]


def unit_names(plan: Plan) -> str:
    """The types of units that a plan lists: `head`, `neuron`, `head and neuron`, or `unit` for a plan without any."""
    return " and ".join(count.type.removesuffix("s") for count in unit_counts(plan)) or "unit"


def keeps_all_units(plan: Plan) -> bool:
    """Whether a plan keeps every head and every neuron."""
    return all(count.kept == count.units for count in unit_counts(plan))


def _joined(parts: Sequence[str]) -> str:
    """`a`, `a and b`, or `a, b and c`."""
    *first, last = parts
    return f"{', '.join(first)} and {last}" if first else last


def _masked(plan: Plan) -> bool:
    return any(site.mask is not None for site in plan.sites)


def _blocks(blocks: Sequence[SiteBlocks], layers: int) -> str:
    masked = [site for site in blocks if site.form != "whole"]
    if not masked:
        return ", every block of every attention map" if blocks else ""
    share = sum(site.share for site in masked) / len(masked)
    text = f", {100 * share:.0f}% of the blocks of {len(masked)} of {layers} attention layers kept"
    bias = sum(site.form == "masked" for site in masked)
    return text + (f" ({bias} of them by a mask that saves no computation)" if bias else "")


def _speed(speeds: Sequence[Speed], over_rewritten: Sequence[Speed]) -> str:
    """The speed over dense, and over a dense engine whose graph has the rewrites of the compressed graph."""
    rows, rewritten = (sorted(valid_rows(part), key=lambda row: row.ratio) for part in (speeds, over_rewritten))
    text = f"speed void ({speeds[0].void})" if speeds else _NOT_TIMED
    if rows:
        ends = [formatting.interval_text(formatting.range_text(row.low, row.high), row.confidence) for row in rows]
        at = [f"{row.size_label} ({interval})" for row, interval in zip(rows, ends, strict=True)]
        text = f"{rows[0].ratio:.2f}× as fast as dense at {at[0]}"
        if len(rows) > 1:
            text += f" {'and' if len(rows) == 2 else 'up to'} {rows[-1].ratio:.2f}× at {at[-1]}"
        if len(rows) < len(speeds):
            text += f", {len(speeds) - len(rows)} of {len(speeds)} sizes void"
    if rewritten:
        ratios = " to ".join(dict.fromkeys(f"{row.ratio:.2f}×" for row in (rewritten[0], rewritten[-1])))
        text += f" ({ratios} as fast as dense where its graph has the same rewrites)"
    return text


def _metric(scores: Sequence[Score]) -> str:
    texts = [
        f"{formatting.metric_name(score)} on the {score.split_name} rows {formatting.in_unit(score.dense, score.unit)}"
        f" → {formatting.in_unit(score.compressed, score.unit)}, {formatting.difference(score)}"
        + ("" if score.higher_is_better else ", lower is better")
        for score in headline_scores(scores)
    ]
    return "; ".join(texts) or "no metric measured"


def _proof(proofs: Sequence[Proof]) -> str:
    broken = [proof for proof in proofs if not proof.holds]
    if broken:
        first = broken[0]
        return (
            f"{first.stage} fails on the {first.variant} model with relative error {formatting.error(first.error)} "
            f"where {formatting.error(first.tolerance)} is allowed ({len(broken)} of {len(proofs)} proofs fail)"
        )
    if not proofs:
        return _NOT_PROVEN
    return f"all {len(proofs)} proofs hold" if len(proofs) > 1 else "the one proof holds"
