"""Tasks: they convert rows to batches, and outputs to statistics from which a metric is computed."""

from compressor.tasks.base import Data, Task
from compressor.tasks.data import open_data, training_texts
from compressor.tasks.registry import make_task, task_classes
from compressor.tasks.scoring import batches, statistics

__all__ = ["Data", "Task", "batches", "make_task", "open_data", "statistics", "task_classes", "training_texts"]
