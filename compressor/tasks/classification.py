"""Text classification: predict one of several classes, or any number of them, from one or two texts."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from compressor.tasks.encoding import LabelledTexts
from compressor.tasks.labelled_rows import ClassLabels, SeveralClasses
from compressor.tasks.metrics import ACCURACY, Metric, f1, matthews, share


class TextClassification(ClassLabels, LabelledTexts):
    """Classification of texts by the largest logit, scored by accuracy, F1 or Matthews correlation."""

    name = "text-classification"
    metrics: ClassVar[tuple[Metric, ...]] = (ACCURACY, share("f1", f1), Metric("matthews", matthews, maximum=1.0))
    label_type = np.int64


class MultiLabelClassification(SeveralClasses, LabelledTexts):
    """Classification of texts by a logit for each class, scored by micro or macro F1, or mean average precision."""

    name = "multi-label-classification"
