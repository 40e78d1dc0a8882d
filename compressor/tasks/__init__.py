"""Tasks: rows to batches, and outputs to a metric that can be resampled."""

from compressor.tasks.base import Data, Task
from compressor.tasks.data import open_data, training_texts
from compressor.tasks.registry import TASKS, make_task
from compressor.tasks.scoring import batches, statistics

__all__ = ["TASKS", "Data", "Task", "batches", "make_task", "open_data", "statistics", "training_texts"]
