"""The rows of a finished run, read again with PyTorch, and the metric of engines that are built from its folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from compressor.config.run import Recipe
from compressor.config.step_list import steps_of
from compressor.engines.build import Variant
from compressor.engines.score import EvaluationScorer
from compressor.progress import RunLog
from compressor.run.evaluate import evaluate
from compressor.run.finished_run import FinishedRun
from compressor.run.load import drawn_rows, load_folder
from compressor.run.report_fields import EvaluationResult
from compressor.tasks import Data, open_data


def read_rows(run: FinishedRun, scratch: Path, log: RunLog) -> Data | None:
    """The rows that a run learned from and was scored on; None where they have changed since.

    Args:
        run: the run, whose recipe names its rows.
        scratch: an empty folder, in place of the output folder of the run.
        log: receives the stage.

    Raises:
        CompressorError: the rows or the model folder cannot be used.
    """
    # The precision of an engine built since would contradict how the run trained, or what it certified.
    of_engine = {"quantized_share": 0.0, "certify": None}
    # What a report allows to run is not run by those who build from it.
    refused = {"allow_pickle": False, "trust_remote_code": False}
    stored = {**run.report.recipe, **of_engine, **refused, "inputs": None, "out": scratch}
    if (tables := stored.get("steps")) is not None:
        stored["steps"] = [
            {name: {key: value for key, value in options.items() if key not in of_engine}}
            for table in tables
            for name, options in table.items()
        ]
    recipe = Recipe(**stored)
    steps = steps_of(recipe)
    with log.stage("reading the rows"):
        folder = load_folder(recipe, recipe.source.model, needs_processor=True)
        drawn = drawn_rows(recipe, steps)
        bounds_loss = recipe.selection.max_drop is not None and drawn is not None
        data = open_data(recipe.rows, folder, recipe.selection.seed, drawn_rows=drawn, scores_answers=bounds_loss)
    follows = any(step.follows for step in steps) and not any(step.blocks for step in steps)
    return data if follows or run.report.plan.data in (None, data.train_hash) else None


def evaluate_engines(run: FinishedRun, compared: Sequence[Variant], data: Data, log: RunLog) -> EvaluationResult:
    """The metric of engines on test rows, and on evaluation rows where the run bounds its loss.

    Args:
        run: the run, with the recipe of the build.
        compared: the dense variant, and the compressed one.
        data: the rows of the run.
        log: receives stages and notes.
    """
    evaluated = evaluate(compared, data, run.recipe, log)
    if run.report.recipe.get("max_drop") is None:
        return evaluated
    selection = run.recipe.selection
    scorer = EvaluationScorer(
        compared[0],
        data.with_task(data.eval_task),
        log,
        selection.seed,
        selection.batch_size,
        max_drop=selection.max_drop,
    )
    return evaluated.with_scores(scorer.scores(compared[-1]))
