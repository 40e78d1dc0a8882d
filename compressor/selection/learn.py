"""Learn a plan from a model and rows: select the heads to keep by the configured method."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from transformers import PreTrainedModel

from compressor.config.methods import METHODS
from compressor.config.steps import Heads
from compressor.errors import ErrorCode, UsageError
from compressor.progress import ProgressCallback, ignore_progress
from compressor.selection.plan_and_curves import LearningResult
from compressor.selection.pool import heads_to_keep, pool_of
from compressor.selection.ray_search.evaluator import evaluator_factory
from compressor.selection.run_search import run_search
from compressor.selection.train_gate import train_gate
from compressor.tasks.data import Data
from compressor.units import Site

logger = logging.getLogger(__name__)


def learn(
    model: PreTrainedModel,
    sites: Sequence[Site],
    data: Data,
    selection: Heads,
    checkpoint_dir: Path,
    on_progress: ProgressCallback = ignore_progress,
) -> LearningResult:
    """Select the heads of `model` to keep.

    A joint method (a gate) trains the model with its gates and leaves the trained weights in `model`; a pipelined
    method and a search leave the model unchanged. The same seed on the same machine gives the same plan, byte for byte,
    and so does a run that was interrupted and started again with the same `checkpoint_dir`.

    Args:
        model: a float32 model.
        sites: its sites, in call order.
        data: encoded rows; heads are selected by `Task.chooser`.
        selection: method, options, number of heads, schedule, seed.
        checkpoint_dir: where checkpoints are written; those of another run are discarded.
        on_progress: called with (steps finished, steps in total).

    Raises:
        UsageError: an option does not exist or is out of range, the number of heads is missing or out of range, or the
            metric cannot end a search.
    """
    method = METHODS[selection.method]
    heads = sum(site.heads for site in pool_of(sites, selection.options))
    keep = None if selection.keep is None else heads_to_keep(selection.keep, heads)
    reported = data.eval_task
    if selection.searches or not reported.reads_streams:  # training on streams uses the reported metric
        data = data.of_chooser()
    if method.kind == "gate":
        learned = train_gate(model, sites, data, selection, keep, checkpoint_dir, on_progress)
    else:
        if keep is None and data.task.metric != reported.metric:
            raise UsageError(
                f"{reported.metric}: heads are selected by the {data.task.metric}, so a loss of {reported.metric}"
                f" cannot end a search; set the number of heads (--keep), or score by {data.task.metric} (--metric"
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
