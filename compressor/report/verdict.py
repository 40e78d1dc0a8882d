"""The verdict: one honest sentence from the facts, with whatever went wrong in its first words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from compressor.report import formatting
from compressor.results import DropStatus, MissingTarget, EngineFacts, Proof, Refusal, Score, SiteBlocks, Speed
from graph_passes import Plan

Tone = Literal["good", "mixed", "bad"]


def verdict(
    *,
    plan: Plan,
    dense: EngineFacts,
    compressed: EngineFacts,
    speeds: Sequence[Speed] = (),
    scores: Sequence[Score] = (),
    proofs: Sequence[Proof] = (),
    drop_status: DropStatus = DropStatus.NOT_CHECKED,
    refused: Sequence[Refusal] = (),
    blocks: Sequence[SiteBlocks] = (),
    max_drop: float | None = None,
    missing: MissingTarget | None = None,
) -> str:
    """What was won, or that nothing was, in one sentence. The arguments are the report's fields of the same names.

    Args:
        missing: as in the report: another runtime stood in for the one asked for.
        max_drop: what `--max-drop` allowed, as it was given; named when the metric fell by more.
    """
    alarm = alarms(plan, speeds, proofs, drop_status)
    if missing is not None:
        alarm.insert(0, f"no {missing.target} engine was built, ONNX Runtime stood in for it")
    clauses = [
        _heads(plan, dense, compressed) + _blocks(blocks, len(plan.sites)),
        _speed(speeds),
        _metric(scores),
        _proof(proofs),
        _refusals(refused),
    ]
    if drop_status is DropStatus.FAILED:
        clauses.insert(0, _drop(clauses.pop(2), max_drop))
    if any(not proof.holds for proof in proofs):
        clauses.insert(0, clauses.pop(3))
    sentence = "; ".join(clause for clause in clauses if clause)
    sentence = f"{', '.join(alarm)}: {sentence}" if alarm else sentence
    return sentence[0].upper() + sentence[1:] + "."


def alarms(plan: Plan, speeds: Sequence[Speed], proofs: Sequence[Proof], drop_status: DropStatus) -> list[str]:
    """What a reader must hear first, worst first; empty when the run won what it set out for."""
    found = []
    if any(not proof.holds for proof in proofs):
        found.append("numbers differ")
    if drop_status is DropStatus.FAILED:
        found.append("the metric fell too far")
    if plan.heads_kept == plan.heads and not _masked(plan):
        return [*found, "nothing was learned" if plan.method is None else "nothing was dropped"]
    rows = readable(speeds)
    faster = sum(row.low > 1 for row in rows)
    if not rows:
        found.append("speed not known")
    elif all(row.high < 1 for row in rows):
        found.append("slower")
    elif not faster:
        found.append("not faster")
    elif faster < len(rows):
        found.append(f"faster at {faster} of {len(rows)} sizes only")
    if not proofs:
        found.append("not proven")
    return found


def tone(
    plan: Plan,
    speeds: Sequence[Speed],
    proofs: Sequence[Proof],
    drop_status: DropStatus,
    refused: Sequence[Refusal],
    missing: MissingTarget | None = None,
) -> Tone:
    """How the verdict is to be taken: `bad` if the result must not be used, `mixed` if it won less than asked."""
    if drop_status is DropStatus.FAILED or any(not proof.holds for proof in proofs):
        return "bad"
    return "mixed" if missing or refused or alarms(plan, speeds, proofs, drop_status) else "good"


def readable(speeds: Sequence[Speed]) -> list[Speed]:
    """The rows that may be read as a result."""
    return [speed for speed in speeds if speed.void is None]


def headline_scores(scores: Sequence[Score]) -> list[Score]:
    """The scores to quote: those on test rows, which nothing was chosen on, else those on evaluation rows."""
    return [score for score in scores if score.split == "test"] or list(scores)


def _heads(plan: Plan, dense: EngineFacts, compressed: EngineFacts) -> str:
    before, after = formatting.count(dense.parameters), formatting.count(compressed.parameters)
    moved = formatting.change(dense.parameters, compressed.parameters).lstrip("+−")
    if dense.parameters == compressed.parameters:
        parameters = f"the same {before} parameters"
    else:
        fewer = "fewer" if compressed.parameters < dense.parameters else "more"
        parameters = f"{moved} {fewer} parameters ({before} → {after})"
    if plan.heads_kept == plan.heads and _masked(plan):
        return f"all {plan.heads} heads and {parameters}"
    if plan.heads_kept == plan.heads:
        return f"the engine is the model as it is, all {plan.heads} heads and {parameters}"
    return f"{plan.heads_kept} of {plan.heads} heads kept, {parameters}"


def _masked(plan: Plan) -> bool:
    return any(site.mask is not None for site in plan.sites)


def _blocks(blocks: Sequence[SiteBlocks], layers: int) -> str:
    masked = [site for site in blocks if site.form != "whole"]
    if not masked:
        return ", every block of every attention map" if blocks else ""
    share = sum(site.share for site in masked) / len(masked)
    told = f", {100 * share:.0f}% of the blocks of {len(masked)} of {layers} attention layers kept"
    bias = sum(site.form == "masked" for site in masked)
    return told + (f" ({bias} of them by a mask that skips nothing)" if bias else "")


def _speed(speeds: Sequence[Speed]) -> str:
    rows = sorted(readable(speeds), key=lambda row: row.ratio)
    if not rows:
        return f"speed void ({speeds[0].void})" if speeds else "speed not measured"
    told = f"{rows[0].ratio:.2f}× as fast as dense at {_at(rows[0])}"
    if len(rows) > 1:
        told += f" {'and' if len(rows) == 2 else 'up to'} {rows[-1].ratio:.2f}× at {_at(rows[-1])}"
    void = len(speeds) - len(rows)
    return f"{told}, {void} of {len(speeds)} sizes void" if void else told


def _at(row: Speed) -> str:
    return f"{formatting.where(row)} ({formatting.interval(formatting.ends(row.low, row.high), row.confidence)})"


def _metric(scores: Sequence[Score]) -> str:
    told = [
        f"{formatting.metric(score)} on the {score.split} rows {formatting.level(score, score.dense)} → "
        f"{formatting.level(score, score.compressed)}, {formatting.difference(score)}"
        + ("" if score.higher_is_better else ", lower is better")
        for score in headline_scores(scores)
    ]
    return "; ".join(told) or "no metric measured"


def _drop(metric: str, max_drop: float | None) -> str:
    return f"{metric}, worse than --max-drop{'' if max_drop is None else f' {max_drop:g}'} allows"


def _proof(proofs: Sequence[Proof]) -> str:
    broken = [proof for proof in proofs if not proof.holds]
    if broken:
        worst = broken[0]
        return (
            f"{worst.stage} fails on the {worst.variant} model with relative error {formatting.error(worst.error)} "
            f"where {formatting.error(worst.tolerance)} is allowed ({len(broken)} of {len(proofs)} proofs fail)"
        )
    if not proofs:
        return "no proof was run"
    return f"all {len(proofs)} proofs hold" if len(proofs) > 1 else "the one proof holds"


def _refusals(refused: Sequence[Refusal]) -> str:
    if not refused:
        return ""
    return "one site was refused" if len(refused) == 1 else f"{len(refused)} sites were refused"
