"""Tasks: rows to batches, outputs to a metric that can be resampled."""

from compressor.tasks.base import Data, DataRequest, Task
from compressor.tasks.data import open_data, training_texts
from compressor.tasks.registry import TASKS
from compressor.tasks.scoring import batches, statistics

__all__ = ["TASKS", "Data", "DataRequest", "Task", "batches", "open_data", "statistics", "training_texts"]
