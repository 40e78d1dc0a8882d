"""Multi-label classification: predict any number of classes from one or two texts."""

from __future__ import annotations

from compressor.config.sections import RowsConfig
from compressor.model_folder import ModelFolder
from compressor.model_folder.thresholds import read_thresholds
from compressor.tasks.encoding import LabelledTexts
from compressor.tasks.metrics import Metric
from compressor.tasks.several_classes import SeveralClasses


class MultiLabelClassification(SeveralClasses, LabelledTexts):
    """Classification by one logit for each class, scored by micro or macro F1, or mean average precision.

    Args:
        folder: its tokenizer encodes the texts; its configuration has the number of classes and their names, and the
            folder may declare thresholds.
        request: columns and maximum row length.
        metric: one of `metrics`.

    Raises:
        InputError: the thresholds are not one for each class, or the maximum row length leaves no room for text.
    """

    name = "multi-label-classification"

    def __init__(self, folder: ModelFolder, request: RowsConfig, metric: Metric) -> None:
        super().__init__(folder, request, metric)
        self.thresholds = read_thresholds(folder.path, folder.config)
