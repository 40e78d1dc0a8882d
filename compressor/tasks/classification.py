"""Text classification: predict one of several classes from one or two texts."""

from __future__ import annotations

from typing import ClassVar

import torch

from compressor.config.sections import RowsConfig
from compressor.model_folder import ModelFolder
from compressor.results import MetricUnit
from compressor.tasks.encoding import LabelledTexts
from compressor.tasks.labelled_rows import ClassLabels
from compressor.tasks.metrics import Metric, accuracy, f1, matthews


class TextClassification(ClassLabels, LabelledTexts):
    """Classification by the largest logit, scored by accuracy, F1 or Matthews correlation.

    Args:
        folder: its tokenizer encodes the texts; its configuration has the number of classes and their names.
        request: columns and maximum row length.
        metric: one of `metrics`.

    Raises:
        InputError: the model assigns several classes to a row, or the maximum row length leaves no room for text.
    """

    name = "text-classification"
    metrics: ClassVar[tuple[Metric, ...]] = (
        Metric("accuracy", accuracy, MetricUnit.POINTS, maximum=1.0),
        Metric("f1", f1, MetricUnit.POINTS, maximum=1.0),
        Metric("matthews", matthews, maximum=1.0),
    )
    label_type = torch.int64

    def __init__(self, folder: ModelFolder, request: RowsConfig, metric: Metric) -> None:
        self.require_one_class(folder)
        super().__init__(folder, request, metric)
