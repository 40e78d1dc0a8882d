"""The notes of a run, which tell the reader what its numbers depend on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from compressor.engines.build import ShrunkGraph
from compressor.report.formatting import ms
from compressor.results import EngineFacts, MissingTarget, Note, NoteCode, Speed, VariantName
from graph_passes import Plan
from graph_passes.errors import listed

WIDE = 1.5
"""Ratio of the ends of a speed's interval, or of two times of an engine, from which on a speed is uncertain."""


def missing_target_note(missing: MissingTarget) -> Note:
    """The substitute for a target that this machine lacks."""
    return Note(
        code=NoteCode.TARGET_MISSING,
        text=f"{missing.target}: {missing.reason}; all results are from ONNX Runtime on the CPU in fp32, none from"
        f" {missing.target}, and the run ends with exit code 6",
    )


def mask_notes(plan: Plan, lengths: Iterable[int | None], maximum_row: int | None = None) -> Iterator[Note]:
    """Lengths at which only the beginning of the masks applies, which were learned on rows up to `maximum_row`."""
    if not plan.masks:
        return
    reach = min(size for mask in plan.masks.values() for size in (mask.queries, mask.keys))
    reach = reach if maximum_row is None else min(reach, maximum_row)
    if shorter := ", ".join(map(str, sorted({seq for seq in lengths if seq is not None and seq < reach}))):
        text = f"at length {shorter} only the first positions of the masks apply"
        yield Note(code=NoteCode.MASKS_LONGER, text=f"the masks cover rows of up to {reach} tokens; {text}")


def graph_notes(graph: ShrunkGraph) -> Iterator[Note]:
    """Matmuls that compute only the positions that are read, and norms that keep queries or keys of dropped heads."""
    if graph.thinned:
        yield Note(
            code=NoteCode.POSITIONS_DROPPED,
            text=f"{len(graph.thinned)} matmuls and attentions compute only the positions that the outputs"
            " depend on (--keep-unread-positions computes all)",
        )
    if sites := sorted(frozenset().union(*(norm.sites for norm in graph.shared))):
        yield Note(
            code=NoteCode.NORM_OVER_ALL_HEADS,
            text=f"{listed(sites, 3)}: queries or keys of dropped heads are still computed, since {graph.shared[0].op}"
            " reads those of all heads",
        )


def emptied_head_notes(requested: Plan, carried_out: Plan) -> Iterator[Note]:
    """Heads that a plan keeps but that are dropped, because their masks keep no block."""
    emptied = [
        f"{site.name} {', '.join(str(head) for head in site.kept if head not in carried_out[site.name].kept)}"
        for site in requested.sites
        if site.kept != carried_out[site.name].kept
    ]
    if emptied:
        text = f"heads whose masks keep no block are removed: {'; '.join(emptied)}"
        yield Note(code=NoteCode.HEADS_EMPTIED, text=text)


def speed_notes(speeds: Iterable[Speed], again: Iterable[Speed] = ()) -> Iterator[Note]:
    """Speeds over dense that are too uncertain to be quoted; `again`: those over another engine, at the same sizes."""
    times = {speed.size_label: speed.compressed.p50 for speed in again}
    for speed in speeds:
        label, now = speed.size_label, speed.compressed.p50
        problem, later = None, times.get(speed.size_label, now)
        if speed.void is None and speed.high > WIDE * speed.low:
            problem = f"between {speed.low:.2f} and {speed.high:.2f} times dense ({speed.confidence:.0%} interval)"
        elif max(now, later) > WIDE * min(now, later):
            problem = f"since the compressed engine took {ms(now)} beside dense, and then {ms(later)}"
        if problem is not None:
            yield Note(
                code=NoteCode.SPEED_UNCERTAIN,
                text=f"{label}: the speed is uncertain, {problem}; repeat the command on an idle machine, or time for"
                " longer (--seconds)",
            )


def unmeasured_memory_notes(facts: Mapping[VariantName, EngineFacts]) -> Iterator[Note]:
    """Engines whose memory could not be measured."""
    for name, engine in facts.items():
        if engine.peak_memory_bytes is None:
            yield Note(
                code=NoteCode.MEMORY_UNMEASURED,
                text=f"{name}: memory was not measured: too little is free to load the engine once more, or the runtime"
                " does not report it",
            )
