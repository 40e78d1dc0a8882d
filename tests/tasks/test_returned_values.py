"""Methods of custom tasks that return something of another type or size are named."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from datasets.fingerprint import Hasher
from transformers import BatchEncoding

from compressor.errors import ErrorCode, UsageError
from compressor.model_folder import ModelFolder
from compressor.tasks import Metric, Task
from compressor.tasks.classification import TextClassification
from compressor.tasks.metrics import accuracy
from tests.faults import fails_with
from tests.folders import rows_config

ROWS = Dataset.from_dict({"text": ["good", "bad film", "very"], "label": [0, 1, 0]})
EXAMPLES: list[dict[str, Any]] = [{}, {}, {}]
LABELS = np.array([0, 1, 0])
LENGTHS = Dataset.from_dict({"length": [1, 2, 1]})
TABLE = np.zeros((3, 2))
INPUTS = {"input_ids": torch.zeros(3, 2)}


class Configured(TextClassification):
    """A task whose methods return what a test says."""

    name = "configured"
    returned: Any = None

    def encode(self, rows: Dataset, source: str) -> Dataset:
        return self.returned

    def encode_unlabelled(self, rows: Dataset, source: str) -> Dataset:
        return self.returned

    def encode_labels(self, rows: Dataset, column: str, source: str) -> list[int]:
        return self.returned

    def collate(self, examples: Any) -> dict[str, torch.Tensor]:
        return self.returned

    def measure(self, forward: Any, examples: Any) -> np.ndarray:
        return self.returned

    def per_example(self, logits: np.ndarray, labels: np.ndarray) -> np.ndarray:
        return self.returned

    def summarize(self, statistics: np.ndarray) -> np.ndarray:
        return self.returned

    def score(self, statistics: np.ndarray) -> float:
        return self.returned

    def answers(self, forward: Any, examples: Any) -> list[str]:
        return self.returned

    def answer_texts(self, logits: np.ndarray, labels: np.ndarray) -> list[str]:
        return self.returned

    def reference_text(self, example: Any) -> str:
        return self.returned


CALLS: dict[str, tuple[Any, ...]] = {
    "encode": (ROWS, "rows"),
    "encode_unlabelled": (ROWS, "rows"),
    "encode_labels": (ROWS, "label", "rows"),
    "collate": (EXAMPLES,),
    "measure": (None, EXAMPLES),
    "per_example": (TABLE, LABELS),
    "summarize": (TABLE,),
    "score": (TABLE,),
    "answers": (None, EXAMPLES),
    "answer_texts": (TABLE, LABELS),
    "reference_text": ({},),
}
"""Method -> its arguments."""

VALID: list[tuple[str, Any]] = [
    ("encode", LENGTHS),
    ("encode", LENGTHS.select([0, 0, 1, 2])),
    ("encode", LENGTHS.select([1])),
    ("encode_labels", [0, 1, 0]),
    ("encode_labels", np.eye(3)),
    ("collate", {**INPUTS, "labels": torch.zeros(3, 4)}),
    ("collate", INPUTS),
    ("encode", Dataset.from_dict({"length": [1, None, 2]}).select([0, 2])),
    ("score", np.array(0.5)),
    ("score", torch.tensor(0.5)),
    ("collate", BatchEncoding({**INPUTS, "labels": torch.zeros(3)})),
    ("measure", TABLE),
    ("per_example", TABLE),
    ("per_example", TABLE > 0),
    ("per_example", TABLE[:, :0]),
    ("summarize", TABLE[:1]),
    ("score", 0.5),
    ("score", np.float32(0.5)),
    ("score", np.float64("nan")),
    ("answers", ("a", "b", "c")),
    ("answer_texts", []),
    ("reference_text", ""),
]
INVALID: list[tuple[str, Any]] = [
    *((name, None) for name in CALLS),
    ("encode", {"length": [1, 2, 1]}),
    ("encode", ROWS),
    ("encode", LENGTHS.select([])),
    ("encode", Dataset.from_dict({"length": [1, None]})),
    ("encode", Dataset.from_dict({"length": ["1", "2"]})),
    ("encode_unlabelled", ROWS),
    ("encode_labels", [0, 1]),
    ("encode_labels", "abc"),
    ("collate", {"labels": torch.zeros(3)}),
    ("collate", {**INPUTS, "labels": [0, 1, 0]}),
    ("measure", TABLE[:2]),
    ("per_example", TABLE[:2]),
    ("per_example", TABLE[:, 0]),
    ("per_example", TABLE[..., None]),
    ("per_example", TABLE.astype(str)),
    ("per_example", TABLE.tolist()),
    ("summarize", TABLE[0]),
    ("score", TABLE),
    ("score", "0.5"),
    ("answers", ["a"]),
    ("answer_texts", ["a", "b"]),
    ("answer_texts", [1, 2, 3]),
    ("answer_texts", "abc"),
    ("reference_text", 3),
]


@pytest.fixture
def task(classifier: ModelFolder) -> Configured:
    return Configured(classifier, rows_config(), Configured.metrics[0])


@pytest.mark.parametrize(("method", "value"), VALID)
def test_a_valid_value_is_returned_as_it_is(method: str, value: Any, task: Configured) -> None:
    task.returned = value
    assert getattr(task, method)(*CALLS[method]) is value


@pytest.mark.parametrize(("method", "value"), INVALID)
def test_another_value_is_an_error_that_names_the_method(method: str, value: Any, task: Configured) -> None:
    task.returned = value
    with fails_with(ErrorCode.TASK_FAILED, UsageError, field="task", value=f"{__name__}:Configured.{method}"):
        getattr(task, method)(*CALLS[method])


@pytest.mark.parametrize("labels", [None, torch.zeros(2), torch.tensor(0)])
def test_labels_are_checked_where_they_are_read(labels: torch.Tensor | None, task: Configured) -> None:
    task.returned = {**INPUTS} if labels is None else {**INPUTS, "labels": labels}
    with fails_with(ErrorCode.TASK_FAILED, UsageError, field="task", value=f"{__name__}:Configured.collate"):
        TextClassification.measure(task, lambda batch: TABLE, EXAMPLES)


def test_methods_may_have_further_arguments(classifier: ModelFolder) -> None:
    class Padded(TextClassification):
        def collate(self, examples: Any, padded: bool = False) -> dict[str, torch.Tensor]:
            return {**INPUTS, "labels": torch.zeros(3)}

    task = Padded(classifier, rows_config(), Padded.metrics[0])
    assert task.collate(EXAMPLES, True).keys() == {"input_ids", "labels"}


def test_arguments_may_be_named_in_any_order(task: Configured) -> None:
    task.returned = TABLE
    assert task.per_example(labels=LABELS, logits=TABLE[:2]) is TABLE
    with fails_with(ErrorCode.TASK_FAILED, UsageError):
        task.per_example(labels=LABELS[:2], logits=TABLE)


def test_static_methods_are_checked(classifier: ModelFolder) -> None:
    class Static(TextClassification):
        per_example = staticmethod(lambda logits, labels: logits)

    task = Static(classifier, rows_config(), Static.metrics[0])
    assert task.per_example(TABLE, LABELS) is TABLE
    with fails_with(ErrorCode.TASK_FAILED, UsageError):
        task.per_example(TABLE[0], LABELS)


def test_classes_of_this_package_are_not_wrapped() -> None:
    assert not hasattr(TextClassification.per_example, "__wrapped__")
    assert hasattr(Configured.per_example, "__wrapped__")


def test_abstract_methods_stay_abstract() -> None:
    class Partial(Task):
        def encode(self, rows: Dataset, source: str) -> Dataset:
            return rows

    assert Partial.__abstractmethods__ == {"collate", "per_example"}


def test_methods_are_pickled_and_hashed_by_name(task: Configured) -> None:
    assert pickle.loads(pickle.dumps(Configured.collate)) is Configured.collate
    assert Hasher.hash(Configured.encode) == Hasher.hash(Configured.encode)
    assert Configured.encode.__doc__ == vars(Configured)["encode"].__wrapped__.__doc__


def nothing(statistics: np.ndarray) -> float:
    """A metric that lacks its `return`."""
    return None  # type: ignore[return-value]


def column_means(statistics: np.ndarray) -> float:
    """A metric that reduces one axis of two."""
    return statistics.mean(axis=0)


@pytest.mark.parametrize("compute", [nothing, column_means])
def test_a_metric_that_is_no_number_is_named(compute: Callable[[np.ndarray], float], classifier: ModelFolder) -> None:
    task = TextClassification(classifier, rows_config(), Metric("broken", compute))
    with fails_with(ErrorCode.TASK_FAILED, UsageError, field="task", value=f"{__name__}:{compute.__name__}"):
        task.score(TABLE)
    assert Metric("accuracy", accuracy).value(TABLE) == 1.0
