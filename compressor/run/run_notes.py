"""The notes of a run, which tell the reader what its numbers depend on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from compressor.config.methods import METHODS
from compressor.results import EngineFacts, MissingTarget, Note, NoteCode, Speed, VariantName
from graph_passes import Plan
from graph_passes.errors import listed

if TYPE_CHECKING:
    from compressor.engines.build import ShrunkGraph
    from compressor.model_folder import ModelFolder
    from compressor.run.run_context import SelectedPlan
    from compressor.tasks import Data

WIDE = 1.5
"""Ratio of the ends of a speed's interval from which on a note says that the speed is uncertain."""


def missing_target_note(missing: MissingTarget) -> Note:
    """The substitute for a target that this machine lacks."""
    return Note(
        code=NoteCode.TARGET_MISSING,
        text=f"{missing.target}: {missing.reason}; all results are from ONNX Runtime on the CPU in fp32, none from"
        f" {missing.target}, and the run ends with exit code 6",
    )


def selection_notes(folder: ModelFolder, selected: SelectedPlan, data: Data | None) -> Iterator[Note]:
    """How the compressed model was made, and what its numbers leave out."""
    from compressor.models import SegmentConfig  # needs PyTorch, which the notes of a build do without

    names = (selected.plan.method or "").split("+")
    methods = [METHODS[name] for name in names if name in METHODS]
    refits = bool(methods) and methods[-1].kind == "budget" and not selected.plan.masks
    codes = {note.code for note in selected.notes}
    if selected.trained and refits:
        adjusted = "adjusted on training rows whose labels were not used" if methods[-1].reads_rows else "unchanged"
        adjusted += ", and then distilled" if NoteCode.DISTILLED in codes else ""
        yield Note(
            code=NoteCode.WEIGHTS_CHANGED,
            text=f"{names[-1]}: the weights of the compressed model are those of the kept units, {adjusted}; dense is"
            f" the {folder.kind} as it was",
        )
    distils = bool(codes & {NoteCode.DISTILLED, NoteCode.DISTILLED_IN_VAIN})
    trains = bool(selected.plan.masks) or (methods[0].trains_model if methods else not distils)
    if selected.trained and trains:
        selects_neurons = selected.plan.neurons_kept < selected.plan.neurons and not refits
        has_heads = bool(selected.plan.sites)
        units = [*(["heads"] if has_heads else []), *(["neurons"] if selects_neurons or not has_heads else [])]
        how = "with its masks" if selected.plan.masks else f"while its {' and '.join(units)} were selected"
        yield Note(
            code=NoteCode.TRAINED_ALONG,
            text=f"the compressed model was trained {how}; dense is the untrained {folder.kind} with every unit,"
            " through the same export, passes and runtime",
        )
    config = folder.config
    if isinstance(config, SegmentConfig) and config.memory_length:
        yield Note(
            code=NoteCode.SEGMENT_MEMORY,
            text="the graph reads a text segment by segment: its inputs include one memory per layer, empty at first"
            f" and up to {config.memory_length} positions long, and its outputs the memories for the next segment;"
            " times include memories at their full length",
        )
    if data is None or not len(data.test):
        missing = "there are no rows" if data is None else "no rows have labels"
        yield Note(
            code=NoteCode.NO_METRIC,
            text=f"no metric was measured, because {missing} (--data, --eval-data or --test-data)",
        )


def mask_notes(plan: Plan, lengths: Iterable[int | None], maximum_row: int | None = None) -> Iterator[Note]:
    """Lengths at which only the beginning of the masks applies.

    Args:
        plan: a plan, with masks or without.
        lengths: lengths that are measured, in tokens.
        maximum_row: longest row that the masks were learned on; None: as long as the masks.
    """
    if not plan.masks:
        return
    reach = min(size for mask in plan.masks.values() for size in (mask.queries, mask.keys))
    reach = reach if maximum_row is None else min(reach, maximum_row)
    shorter = sorted({seq for seq in lengths if seq is not None and seq < reach})
    if shorter:
        yield Note(
            code=NoteCode.MASKS_LONGER,
            text=f"the masks cover rows of up to {reach} tokens; at length {', '.join(map(str, shorter))} only the"
            " first positions of the masks apply",
        )


def thinned_product_notes(graph: ShrunkGraph) -> Iterator[Note]:
    """Products that compute only the positions that are read."""
    if graph.thinned:
        yield Note(
            code=NoteCode.POSITIONS_DROPPED,
            text=f"{len(graph.thinned)} matrix products and attentions compute only the positions that the outputs"
            " depend on (--keep-unread-positions computes all)",
        )


def shared_norm_notes(graph: ShrunkGraph) -> Iterator[Note]:
    """Norms that read queries or keys of dropped heads, which therefore stay in the graph."""
    sites = sorted(frozenset().union(*(norm.sites for norm in graph.shared)))
    if sites:
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
        yield Note(
            code=NoteCode.HEADS_EMPTIED,
            text=f"heads whose masks keep no block are dropped like any other: {'; '.join(emptied)}",
        )


def speed_notes(speeds: Iterable[Speed]) -> Iterator[Note]:
    """Speeds whose interval is too wide for the value to be quoted."""
    for speed in speeds:
        if speed.void is None and speed.high > WIDE * speed.low:
            yield Note(
                code=NoteCode.SPEED_UNCERTAIN,
                text=f"{speed.size_label}: the speed is uncertain, between {speed.low:.2f} and"
                f" {speed.high:.2f} times dense ({speed.confidence:.0%} interval); repeat the command on an idle"
                " machine, or time for longer (--seconds)",
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
