"""Learn a plan from a model and rows: select the heads to keep by training gates, or by a search over subsets."""

from __future__ import annotations

import itertools
import logging
import math
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
from compressor.progress import ProgressCallback, ignore_progress
from compressor.results import CertificateScope, CurvePoint, Note, NoteCode
from compressor.selection.certify import Certificate, certify, record_certificate, split_rows
from compressor.selection.options import (
    SearchOptions,
    check_option_names,
    heads_to_keep,
    option_names,
    pool_of,
    read_method_options,
)
from compressor.selection.plan_and_curves import SelectedPlan, recorded
from compressor.selection.ray_search.evaluator import evaluator_factory
from compressor.selection.search import Decision, Search, all_heads
from compressor.selection.subset_evaluator import EvaluatorFactory, ModelSubsetEvaluator
from compressor.selection.train_gate import train_gate
from compressor.tasks.base import Task
from compressor.tasks.data import Data, rows_hash
from compressor.units import Site, keep_only

logger = logging.getLogger(__name__)


def learn(
    model: PreTrainedModel,
    sites: Sequence[Site],
    data: Data,
    selection: Heads,
    checkpoint_dir: Path,
    on_progress: ProgressCallback = ignore_progress,
) -> SelectedPlan:
    """Select the heads of `model` to keep.

    A joint method (a gate) trains the model with its gates and leaves the trained weights in `model`; a pipelined
    method and a search leave the model unchanged. The same seed on the same machine gives the same plan, byte for byte,
    and so does a run that was interrupted and started again with the same `checkpoint_dir`.

    Args:
        data: encoded rows; heads are selected by `Task.chooser`.
        checkpoint_dir: where checkpoints are written; those of another run are discarded.

    Raises:
        UsageError: an option does not exist or is out of range, the number of heads is missing or out of range, or the
            metric cannot end a search.
    """
    heads = sum(site.heads for site in pool_of(sites, selection.options))
    keep = None if selection.keep is None else heads_to_keep(selection.keep, heads)
    reported = data.eval_task
    if selection.searches or not reported.reads_streams:  # training on streams uses the reported metric
        data = data.of_chooser()
    if METHODS[selection.method].kind == "gate":
        learned = train_gate(model, sites, data, selection, keep, checkpoint_dir, on_progress)
    else:
        if keep is None and data.task.metric != reported.metric:
            raise UsageError(
                f"{reported.metric}: heads are selected by {data.task.metric}, so a loss of {reported.metric} cannot "
                f"end a search; set the number of heads (--keep), or score by {data.task.metric} (--metric"
                f" {data.task.metric})",
                code=ErrorCode.CONTRADICTION,
                field="keep",
                fields=("keep", "metric"),
                metric=reported.metric,
            )
        with evaluator_factory(selection.ray) as make_evaluator:
            learned = run_search(model, sites, data, selection, keep, checkpoint_dir, on_progress, make_evaluator)
    logger.debug("%s keeps %d heads", selection.method, learned.plan.heads_kept)
    return learned


def run_search(
    model: PreTrainedModel,
    sites: Sequence[Site],
    data: Data,
    selection: Heads,
    keep: int | None,
    checkpoint_dir: Path,
    on_progress: ProgressCallback,
    make_evaluator: EvaluatorFactory = ModelSubsetEvaluator,
) -> SelectedPlan:
    """Run the search of `selection.method` and keep the heads of its last decision, or of its last certified one.

    Args:
        model: the model, whose weights are not changed; it is moved to a GPU if there is one.
        keep: number of heads to keep; None: as few as the allowed loss permits.

    Raises:
        UsageError: an option does not exist or is out of range, or no head can be removed within the allowed loss.
        InputError: there are too few rows for a certificate.
    """
    search, shared = _read(selection)
    searched, unseen = data, None
    if selection.certify is not None:
        assert selection.max_drop is not None
        rows, unseen_rows = split_rows(data.eval, data.task, selection.max_drop, selection.certify, selection.seed)
        searched, unseen = replace(data, eval=rows), replace(data, eval=unseen_rows)
    if torch.cuda.is_available():
        model.to("cuda")  # type: ignore[arg-type]

    def evaluator_of(rows: Data, name: str) -> ModelSubsetEvaluator:
        evaluator = make_evaluator(model, sites, rows, selection.batch_size, selection.seed, shared.mixed_precision)
        evaluator.store_in(checkpoint_dir / f"checkpoint-{name}.npz")
        return evaluator

    evaluator = evaluator_of(searched, "search")
    evaluator.search_among(all_heads(pool_of(sites, selection.options)))
    decisions, heads = [], len(evaluator.heads)
    with evaluator.stored_on_interrupt():
        budget = math.inf if selection.max_drop is None else selection.max_drop
        for decision in search.choose(evaluator, keep, budget):
            decisions.append(replace(decision, kept=decision.kept | evaluator.always_kept))
            on_progress(heads - len(decision.kept), heads - (keep or 0))
    last, certified, notes = decisions[-1], None, decisions[-1].notes
    if unseen is not None:
        # The first decision, and those that remove heads.
        decisions = [next(group) for _, group in itertools.groupby(decisions, key=lambda decision: decision.kept)]
        evaluator = evaluator_of(unseen, "unseen")
        certificate = _certify(decisions, evaluator, selection, len(searched.eval))
        scope, kept = _scope(model, data.eval, selection, shared), [len(decision.kept) for decision in decisions]
        text = f"certifying took {evaluator.count} evaluations, {evaluator.forwards:.1f} forwards over the unseen rows"
        notes = (*notes, certificate.note(kept, scope), Note(code=NoteCode.CERTIFICATION_COST, text=text))
        certified, last = certificate.result(kept, scope), decisions[certificate.certified - 1]
    elif keep is None and len(last.kept) == len(decisions[0].kept):
        raise _nothing_removed(last, selection)
    options = {**search.options.model_dump(), **shared.model_dump()}
    plan = recorded(keep_only(sites, dict.fromkeys(last.kept, 1.0)), selection, options, data)
    return SelectedPlan(plan, _curves(decisions, data.task), trained=False, notes=notes, certificate=certified)


def _read(selection: Heads) -> tuple[Search, SearchOptions]:
    """The configured search, and the options of its evaluations."""
    method, options = selection.method, selection.options
    check_option_names(method, options, option_names(method))
    of_method, shared = read_method_options(method, options)
    if "seed" in type(of_method).model_fields and "seed" not in of_method.model_fields_set:
        of_method = of_method.model_copy(update={"seed": selection.seed})
    return METHODS[method].load()(of_method), shared


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


def _nothing_removed(last: Decision, selection: Heads) -> UsageError:
    """The error for a search that removed no head, with the reason from the notes of its last decision."""
    reasons = (str(note) for note in last.notes if note.code is NoteCode.NOTHING_REMOVED)
    reason = next(reasons, "no head was removed: each head costs more of the metric than is allowed")
    return UsageError(
        f"{reason}; raise --max-drop",
        code=ErrorCode.NOTHING_REMOVED,
        field="max_drop",
        value=selection.max_drop,
        method=selection.method,
    )


def _curves(decisions: Sequence[Decision], task: Task) -> tuple[CurvePoint, ...]:
    """The decisions of a search as points: the number of heads that remain, and the metric with its original sign."""
    sign = 1.0 if task.higher_is_better else -1.0
    points = []
    for number, decision in enumerate(decisions):
        values = {name: value for name, value in decision.values.items() if name != "metric"}
        values[f"eval_{task.metric}"] = decision.values["metric"] * sign
        points.append(CurvePoint(step=number, values={**values, "heads": float(len(decision.kept))}))
    return tuple(points)
