"""Proofs on both sides of every length at which a model changes, also of lengths that exceed what is served."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from transformers import PreTrainedModel

from compressor.config.sections import ExportConfig
from compressor.engines.build import ExportedGraph
from compressor.engines.prove import Case, both_sides, case_name, require
from compressor.engines.prove_export import prove_export, prove_with_ties
from compressor.errors import CompressorError
from compressor.export import export_reference
from compressor.model_folder import ModelFolder, copy_of, example_inputs, fresh_model
from compressor.model_folder.text_limits import token_limit
from compressor.models.block_sparse import attend_by_masks
from compressor.models.forward_changes import (
    Change,
    FirstOfEqual,
    changes_of_forward,
    chosen_keys,
    configured_switches,
    switch_of_changes,
)
from compressor.models.tiny_model import tiny_model
from compressor.results import Note, NoteCode, Proof
from compressor.units import keep_all
from compressor.units.find import find_units
from graph_passes import Plan

logger = logging.getLogger(__name__)

_SHORTEST = 5
"""Tokens of the shortest text that is run to notice a change: those of the shortest case of a proof."""
_LONGEST = 4200
"""Tokens of the longest text on which a model is proven that nothing of this length is served."""
_WORK = 5e10
"""Largest product of parameters and tokens for which the model itself is run, a second or two on one core; beyond, it
is a tiny model of its configuration."""


def switch_lengths(folder: ModelFolder, longest: int, limit: int | None) -> tuple[int, ...]:
    """The lengths in tokens after which a model may compute something else, ascending.

    They follow from the configuration, and from what forwards of a model that nothing has run on change in it. The
    model runs on nothing longer than what is served (`longest`), and takes `limit` tokens; None: any number.
    """
    lengths = set(configured_switches(folder.config))
    if not folder.example:  # of which the length is fixed
        fresh = fresh_model(folder)

        def changes_at(length: int) -> tuple[Change, ...]:
            return changes_of_forward(copy_of(fresh), example_inputs(folder, 1, length))

        try:
            changed = switch_of_changes(changes_at, _SHORTEST, longest if limit is None else min(longest, limit))
            lengths |= {changed} if changed is not None else set()
        except Exception as error:  # a model may not run at each length; where a proof needs one, the proof says so
            logger.debug("%s: no forward to notice changes: %s", folder.path, error)
    return tuple(sorted(length for length in lengths if limit is None or length < limit))


def prove_beyond(
    folder: ModelFolder, exported: ExportedGraph, switches: Sequence[int], config: ExportConfig, longest: int
) -> tuple[ExportedGraph, tuple[Note, ...]]:
    """Prove the export of a model on both sides of lengths that are longer than what is served.

    Returns:
        The graph, whose proof has further cases, and a note on lengths that nothing proves.

    Raises:
        MismatchError: the graph computes something else than the model.
    """
    limit = token_limit(folder.network)
    bound = _LONGEST if limit is None else min(limit, _LONGEST)
    lengths = both_sides(switches, longest, bound)
    unproven = [switch for switch in switches if switch + 1 > bound]
    proof, tied = None, None
    if lengths:
        parameters = sum(parameter.numel() for parameter in folder.network.parameters())
        if parameters * lengths[-1] <= _WORK:
            proof, tied = _prove(folder, fresh_model(folder), exported.plan, exported.path, lengths, config)
        else:
            proof, tied = _prove_tiny(folder, lengths, config)
            unproven = sorted({*unproven, *switches}) if proof is None else unproven
    if proof is not None:
        before = exported.proof
        errors = {"error": max(before.error, proof.error), "cases": (*before.cases, *proof.cases)}
        exported = replace(exported, proof=before.model_copy(update=errors))
    notes = _unproven_note(unproven[:1])
    return exported, tuple(notes if tied is None else [_tied_note(tied), *notes])


def _prove(
    folder: ModelFolder,
    model: PreTrainedModel,
    plan: Plan,
    graph: Path,
    lengths: Sequence[int],
    config: ExportConfig,
    prefix: str = "",
) -> tuple[Proof, int | None]:
    """The proof of a graph on texts of some lengths, which holds; `prefix` begins the names of its cases.

    Where it holds only if the model chooses the first of equal scores, the cases say so, and the number of chosen keys
    is returned beside it.
    """
    cases = []
    for length in lengths:
        feeds = {name: value.numpy() for name, value in example_inputs(folder, 1, length).items()}
        cases.append(Case(feeds, f"{prefix}{case_name(feeds)}"))
    prove = partial(prove_export, model, plan, graph, cases, "dense", attention=config.attention)
    with FirstOfEqual(watches=True) as choices:
        proof = prove()
    if not proof.holds or (choices.tied is not None and choices.tied == chosen_keys(model.config)):
        ordered, tied = prove_with_ties(prove)
        if tied is not None:
            names = tuple(f"{name}, the first of equal scores" for name in ordered.cases)
            return ordered.model_copy(update={"cases": names}), tied
    return require(proof), None


def _prove_tiny(folder: ModelFolder, lengths: Sequence[int], config: ExportConfig) -> tuple[Proof | None, int | None]:
    """As `_prove`, of a tiny model of the same configuration; no proof: it cannot be made or exported."""
    model = tiny_model(folder.network)
    if model is None:
        return None, None
    exported_model = copy_of(model)
    attend_by_masks(exported_model)
    tiny = replace(folder, model=exported_model, config=model.config, load_again=None, sentence=None, example={})
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "tiny.onnx"
        try:
            inputs = example_inputs(tiny, 2, 8)
            plan = keep_all(find_units(exported_model, inputs, attention=config.attention).sites)
            export_reference(exported_model, plan, inputs, path, opset=config.opset, attention=config.attention)
        except CompressorError:
            return None, None
        return _prove(tiny, model, plan, path, lengths, config, "tiny model of the same configuration: ")


def _tied_note(tied: int) -> Note:
    return Note(
        code=NoteCode.LENGTHS_UNPROVEN,
        text=f"the graph is proven up to {tied} tokens: above, the model chooses {tied} keys by scores, and where"
        " several are equal PyTorch chooses others than ONNX does; time a longer text to prove it"
        f" (--seq {tied + 1})",
    )


def _unproven_note(switches: Sequence[int]) -> list[Note]:
    return [
        Note(
            code=NoteCode.LENGTHS_UNPROVEN,
            text=f"above {switch} tokens the model may compute something else (a window, or rotary embeddings), and no"
            f" proof covers it, since nothing as long is served; time that length to prove it (--seq {switch + 1})",
        )
        for switch in switches
    ]
