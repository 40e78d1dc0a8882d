"""Engines of other tools that the page of a ladder shows, with metrics that the task of the model can have."""

from __future__ import annotations

from compressor.config.run import Recipe
from compressor.errors import ErrorCode, InputError
from compressor.report.comparison_points import ComparisonPoint, read_points
from compressor.run.load import load_folder
from compressor.tasks import make_task


def points_of(recipe: Recipe) -> tuple[ComparisonPoint, ...]:
    """The points of a recipe (`--compare-points`); empty where it names none.

    Raises:
        InputError: the file is missing or has a bad field, or the metric of a point is above the maximum.
    """
    path = recipe.budget.compare_points
    if path is None:
        return ()
    points = read_points(path)
    task = make_task(load_folder(recipe, recipe.source.model, needs_processor=True), recipe.rows)
    for number, point in enumerate(points, 1):
        if point.metric > task.metric_maximum:
            raise InputError(
                f"{path}: point {number}: metric: {point.metric:g} is above the maximum of {task.metric},"
                f" {task.metric_maximum:g}; give {ComparisonPoint.model_fields['metric'].description}",
                code=ErrorCode.OUT_OF_RANGE,
                path=path,
                point=number,
                field="metric",
                value=point.metric,
            )
    return points
