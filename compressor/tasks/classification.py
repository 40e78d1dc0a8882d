"""Text classification: predict one of several classes, or any number of them, from one or two texts."""

from __future__ import annotations

from typing import ClassVar

import torch

from compressor.results import MetricUnit
from compressor.tasks.encoding import LabelledTexts
from compressor.tasks.labelled_rows import ClassLabels
from compressor.tasks.metrics import Metric, accuracy, f1, matthews
from compressor.tasks.several_classes import SeveralClasses


class TextClassification(ClassLabels, LabelledTexts):
    """Classification of texts by the largest logit, scored by accuracy, F1 or Matthews correlation.

    Raises:
        InputError: the model assigns several classes to a row, or the maximum length leaves no room for text.
    """

    name = "text-classification"
    metrics: ClassVar[tuple[Metric, ...]] = (
        Metric("accuracy", accuracy, MetricUnit.POINTS, maximum=1.0),
        Metric("f1", f1, MetricUnit.POINTS, maximum=1.0),
        Metric("matthews", matthews, maximum=1.0),
    )
    label_type = torch.int64


class MultiLabelClassification(SeveralClasses, LabelledTexts):
    """Classification of texts by a logit for each class, scored by micro or macro F1, or mean average precision.

    Raises:
        InputError: there is not a threshold for each class, or the maximum length leaves no room for text.
    """

    name = "multi-label-classification"
