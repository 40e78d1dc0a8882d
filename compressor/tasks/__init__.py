"""Tasks: they convert rows to batches, and outputs of the model to statistics of a metric."""

from compressor.results import MetricUnit
from compressor.tasks.base import Task, make_task, task_classes
from compressor.tasks.data import Data, open_data, training_texts
from compressor.tasks.encoding import LabelledTexts
from compressor.tasks.metrics import Metric
from compressor.tasks.scoring import batches, statistics

__all__ = [
    "Data",
    "LabelledTexts",
    "Metric",
    "MetricUnit",
    "Task",
    "batches",
    "make_task",
    "open_data",
    "statistics",
    "task_classes",
    "training_texts",
]
