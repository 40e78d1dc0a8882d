"""Select heads by evaluation: run a search over subsets of a frozen model, and certify its decisions if requested."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from datasets import Dataset
from transformers import PreTrainedModel

from compressor.config.methods import METHODS
from compressor.config.steps import Heads
from compressor.errors import ErrorCode, UsageError
from compressor.model_folder import fingerprint
from compressor.progress import ProgressCallback
from compressor.results import CertificateScope, Note, NoteCode
from compressor.selection.certified_rows import check_rows_unseen, record_certificate
from compressor.selection.certify import Certificate, certify, removals, split_rows
from compressor.selection.options import (
    SearchOptions,
    check_option_names,
    option_models,
    option_names,
    read_options,
)
from compressor.selection.plan_and_curves import LearningResult, recorded, search_curves
from compressor.selection.pool import pool_of
from compressor.selection.search import Decision, Search, all_heads
from compressor.selection.subset_evaluator import EvaluatorFactory, ModelSubsetEvaluator
from compressor.tasks.data import Data, rows_hash
from compressor.units import Site, keep_only


def run_search(
    model: PreTrainedModel,
    sites: Sequence[Site],
    data: Data,
    selection: Heads,
    keep: int | None,
    checkpoint_dir: Path,
    on_progress: ProgressCallback,
    make_evaluator: EvaluatorFactory = ModelSubsetEvaluator,
) -> LearningResult:
    """Run the search of `selection.method` and keep the heads of its last decision, or of its last certified one.

    Args:
        model: the model, whose weights are not changed; it is moved to a GPU if there is one.
        sites: its sites, in call order.
        data: encoded rows, with the task by which heads are selected.
        selection: method, options, allowed loss, confidence of a certificate, seed.
        keep: number of heads to keep; None: as few as the allowed loss permits.
        checkpoint_dir: folder of stored evaluations, from which an interrupted search resumes.
        on_progress: called with (heads removed, maximum number of heads to remove).
        make_evaluator: constructs the evaluator of subsets.

    Raises:
        UsageError: an option does not exist or is out of range, or no head can be removed within the allowed loss.
        InputError: there are too few rows for a certificate, or they are training rows too.
    """
    search, shared = _read(selection)
    unseen, evaluated = None, data.eval
    if selection.certify is not None:
        budget = _certified_budget(selection, keep)
        searched, unseen = split_rows(data.eval, data.task, budget, selection.certify, selection.seed)
        check_rows_unseen(data)
        data = replace(data, eval=searched)
    if torch.cuda.is_available():
        model.to("cuda")  # type: ignore[arg-type]

    def evaluator_of(rows: Data, name: str) -> ModelSubsetEvaluator:
        evaluator = make_evaluator(model, sites, rows, selection.batch_size, selection.seed, shared.mixed_precision)
        evaluator.store_in(checkpoint_dir / f"checkpoint-{name}.npz")
        return evaluator

    evaluator = evaluator_of(data, "search")
    evaluator.search_among(all_heads(pool_of(sites, selection.options)))
    decisions, heads = [], len(evaluator.heads)
    with evaluator.stored_on_interrupt():
        for decision in search.choose(evaluator, keep, selection.max_drop):
            decisions.append(replace(decision, kept=decision.kept | evaluator.always_kept))
            on_progress(heads - len(decision.kept), heads - (keep or 0))
    last, certified, notes = decisions[-1], None, decisions[-1].notes
    if unseen is not None:
        decisions = removals(decisions)
        evaluator = evaluator_of(replace(data, eval=unseen), "unseen")
        certificate = _certify(decisions, evaluator, selection, len(data.eval))
        scope, kept = _scope(model, evaluated, selection, shared), [len(decision.kept) for decision in decisions]
        certified = certificate.result(kept, scope)
        notes = (*notes, certificate.note(kept, scope), _certification_cost(evaluator))
        last = decisions[certificate.certified - 1]
    elif keep is None and len(last.kept) == len(decisions[0].kept):
        raise _nothing_removed(last, selection)
    options = {**search.options.model_dump(), **shared.model_dump()}
    plan = recorded(keep_only(sites, dict.fromkeys(last.kept, 1.0)), selection, options, data)
    return LearningResult(plan, search_curves(decisions, data.task), trained=False, notes=notes, certificate=certified)


def _read(selection: Heads) -> tuple[Search, SearchOptions]:
    """The configured search, and the options of its evaluations."""
    method, options = selection.method, selection.options
    check_option_names(method, options, option_names(method))
    search_options = read_options(method, options, option_models(method)[0])
    if "seed" in type(search_options).model_fields and "seed" not in search_options.model_fields_set:
        search_options = search_options.model_copy(update={"seed": selection.seed})
    search: Search = METHODS[method].load()(search_options)
    return search, read_options(method, options, SearchOptions)


def _certified_budget(selection: Heads, keep: int | None) -> float:
    """The allowed loss; raise UsageError if it is missing or the number of heads is fixed."""
    if keep is not None or selection.max_drop is None:
        raise UsageError(
            f"--certify {selection.certify:g}: it certifies the loss of a search; set the loss allowed (--max-drop) and"
            " omit --keep",
            code=ErrorCode.CONTRADICTION,
            field="certify",
            fields=("certify", "max_drop", "keep"),
            value=selection.certify,
        )
    return selection.max_drop


def _certify(
    decisions: Sequence[Decision], evaluator: ModelSubsetEvaluator, selection: Heads, searched_rows: int
) -> Certificate:
    """Test the decisions of a search on the rows of `evaluator`, which the search has not seen."""
    assert selection.certify is not None
    assert selection.max_drop is not None

    def losses(decision: Decision) -> np.ndarray:
        predicted, labels = evaluator.statistics(decision.kept).T
        return (predicted != labels).astype(np.float64)

    return certify(decisions, losses, selection.max_drop, selection.certify, searched_rows)


def _scope(model: PreTrainedModel, rows: Dataset, selection: Heads, shared: SearchOptions) -> CertificateScope:
    """What the certificate of a search holds for; it is recorded for its evaluation rows."""
    names = ("method", "options", "max_drop", "certify", "seed")
    request = {**selection.model_dump(include=set(names)), "model": fingerprint(model)}
    return CertificateScope(
        rows=rows_hash(rows) or "",
        seed=selection.seed,
        precision="fp32" if shared.mixed_precision == "no" else "bf16",
        earlier=record_certificate(rows, request),
    )


def _certification_cost(evaluator: ModelSubsetEvaluator) -> Note:
    """The note on the cost of a certificate."""
    text = f"certifying took {evaluator.count} evaluations, {evaluator.forwards:.1f} forwards over the unseen rows"
    return Note(code=NoteCode.CERTIFICATION_COST, text=text)


def _nothing_removed(last: Decision, selection: Heads) -> UsageError:
    """The error for a search that removed no head, with the reason from the notes of its last decision."""
    reasons = (str(note) for note in last.notes if note.code is NoteCode.NOTHING_REMOVED)
    reason = next(reasons, "no head was removed: each one costs more of the metric than is allowed")
    return UsageError(
        f"{reason}; raise --max-drop",
        code=ErrorCode.NOTHING_REMOVED,
        field="max_drop",
        value=selection.max_drop,
        method=selection.method,
    )
