"""A distributed search gives the numbers of a single process, with any number of workers and even if workers die."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from compressor.errors import CompressorError, ErrorCode, InputError, TargetMissingError
from compressor.selection.learn import run_search
from compressor.selection.plan_and_curves import SelectedPlan
from compressor.selection.ray_search.cluster import RayPool, ShareWorker, is_installed
from compressor.selection.ray_search.evaluator import evaluator_factory, factory_of
from compressor.selection.subset_evaluator import EvaluatorFactory, ModelSubsetEvaluator
from tests.faults import fails_with
from tests.selection import tiny

needs_ray = pytest.mark.skipif(not is_installed(), reason="ray is not installed")


class LocalPool(RayPool):
    """A pool whose workers are in this process.

    Args:
        count: number of workers.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self.contents: list[Any] = []
        self.released: list[int] = []
        self._started: dict[tuple[int, int], ShareWorker] = {}

    def start(self, shared_bytes: int, maximum: int, *, on_gpu: bool) -> int:
        return min(self.count, maximum)

    def share(self, content: Any) -> int:
        self.contents.append(content)
        return len(self.contents) - 1

    def release(self, handle: int) -> None:
        self.released.append(handle)

    def restart(self) -> None:
        """Replace every worker by one without records."""
        self._started.clear()

    def measure(self, requests: Sequence[tuple[Any, ...]]) -> list[tuple[Any, float]]:
        measured: list[tuple[Any, float]] = []
        for setup, rows, subsets, base, record in requests:
            key = (setup, rows)
            if key not in self._started:
                self._started[key] = ShareWorker(self.contents[setup](self.contents[rows]))
            measured.append(self._started[key].measure(subsets, base, record=record))
        return measured


def evaluator_of(make: EvaluatorFactory, task: tiny.Sign | None = None) -> ModelSubsetEvaluator:
    """An evaluator with three batches, the last of them short."""
    model = tiny.language_model()
    return make(model, tiny.sites_of(model), tiny.data(task or tiny.NextToken()), 5, 0)


def check_equal(distributed: ModelSubsetEvaluator, single: ModelSubsetEvaluator) -> None:
    """Compare evaluations to the last bit; the metric is a mean of losses."""
    all_heads = frozenset(single.heads)
    subsets = [frozenset(single.heads[::2]), all_heads, frozenset(single.heads[:1])]
    for kept in (all_heads, all_heads - {single.heads[0]}, all_heads - {single.heads[5]}):
        assert distributed.evaluate_without(kept, single.heads) == single.evaluate_without(kept, single.heads)
        assert distributed.evaluate_all(subsets) == single.evaluate_all(subsets)
        np.testing.assert_array_equal(distributed.statistics(kept), single.statistics(kept))
    assert distributed.sensitivity(all_heads, 6) == single.sensitivity(all_heads, 6)
    assert distributed.count == single.count
    assert distributed.forwards == pytest.approx(single.forwards)


@pytest.mark.parametrize(
    "workers", [pytest.param(1, marks=pytest.mark.zoo), 2, pytest.param(3, marks=pytest.mark.zoo), 7]
)
def test_every_number_equals_that_of_one_process(workers: int) -> None:
    check_equal(evaluator_of(factory_of(LocalPool(workers))), evaluator_of(ModelSubsetEvaluator))


def test_a_worker_that_is_replaced_gives_the_same_numbers() -> None:
    """It records the activations that the former worker had, or other subsets would share a forward."""
    pool = LocalPool(2)
    single, distributed = evaluator_of(ModelSubsetEvaluator), evaluator_of(factory_of(pool))
    all_heads, subsets = frozenset(single.heads), [frozenset(single.heads[::2]), frozenset(single.heads[:1])]
    assert distributed.evaluate_without(all_heads, single.heads) == single.evaluate_without(all_heads, single.heads)
    pool.restart()
    assert distributed.evaluate_all(subsets) == single.evaluate_all(subsets)


def test_shared_content_is_released_with_the_evaluator() -> None:
    pool = LocalPool(2)
    evaluator = evaluator_of(factory_of(pool))
    assert (len(pool.contents), pool.released) == (3, [])  # the model, and a share of the rows for each worker
    del evaluator
    assert sorted(pool.released) == [0, 1, 2]


@pytest.mark.parametrize("workers", [pytest.param(1, marks=pytest.mark.zoo), 2])
@pytest.mark.parametrize(("method", "options"), [("astar", {"variant": "lazy"}), ("random", {"trials": 8})])
def test_the_plan_equals_that_of_one_process(workers: int, method: str, options: Any, tmp_path: Path) -> None:
    def search(make: EvaluatorFactory, folder: Path) -> SelectedPlan:
        model, data = tiny.language_model(), tiny.data(tiny.NextToken())
        config = tiny.selection(method=method, keep=4, options=options)
        return run_search(model, tiny.sites_of(model), data, config, 4, folder, lambda done, total: None, make)

    single = search(ModelSubsetEvaluator, tmp_path / "alone")
    distributed = search(factory_of(LocalPool(workers)), tmp_path / "distributed")
    assert distributed.plan == single.plan
    assert [point.step for point in distributed.curves] == [point.step for point in single.curves]
    for point, expected in zip(distributed.curves, single.curves, strict=True):
        assert point.values == pytest.approx(expected.values)


@pytest.fixture(scope="module")
def make() -> Iterator[EvaluatorFactory]:
    """Evaluators on two workers of Ray, each of which is restarted once at most."""
    with evaluator_factory("local:2", restarts=1) as factory:
        yield factory


@needs_ray
@pytest.mark.zoo
def test_ray_gives_the_numbers_of_one_process(make: EvaluatorFactory, capfd: pytest.CaptureFixture[str]) -> None:
    check_equal(evaluator_of(make), evaluator_of(ModelSubsetEvaluator))
    assert capfd.readouterr() == ("", "")


class EndsProcessOnce(tiny.NextToken):
    """A task that ends the first process that finds a file, during a measurement.

    Args:
        trigger: the file.
    """

    def __init__(self, trigger: Path) -> None:
        super().__init__()
        self.trigger = trigger

    def per_example(self, logits: np.ndarray, labels: np.ndarray) -> np.ndarray:
        with suppress(FileNotFoundError):
            self.trigger.unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().per_example(logits, labels)


@needs_ray
@pytest.mark.zoo
def test_a_worker_that_dies_is_replaced(
    make: EvaluatorFactory, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    trigger = tmp_path / "trigger"
    single, distributed = evaluator_of(ModelSubsetEvaluator), evaluator_of(make, EndsProcessOnce(trigger))
    all_heads, subsets = frozenset(single.heads), [frozenset(single.heads[::2]), frozenset(single.heads[:1])]
    assert distributed.evaluate_without(all_heads, single.heads) == single.evaluate_without(all_heads, single.heads)
    trigger.touch()
    assert distributed.evaluate_all(subsets) == single.evaluate_all(subsets)
    assert not trigger.exists()
    assert distributed.count == single.count
    assert capfd.readouterr() == ("", "")


class Fails(tiny.Sign):
    """A task that refuses its rows."""

    def per_example(self, logits: np.ndarray, labels: np.ndarray) -> np.ndarray:
        raise InputError("rows.tsv: row 3 has no label; add one", code=ErrorCode.INVALID_ROWS, row=3)


class EndsProcess(tiny.Sign):
    """A task that ends its process, as a system without free memory does."""

    def per_example(self, logits: np.ndarray, labels: np.ndarray) -> np.ndarray:
        os._exit(1)


@needs_ray
@pytest.mark.parametrize(
    ("task", "error", "code", "details"),
    [
        (Fails, InputError, ErrorCode.INVALID_ROWS, {"row": 3}),
        (EndsProcess, TargetMissingError, ErrorCode.PROCESS_ENDED, {"field": "ray", "value": "local:2", "restarts": 1}),
    ],
)
@pytest.mark.zoo
def test_errors_of_workers_are_raised_here(
    make: EvaluatorFactory,
    task: Callable[[], tiny.Sign],
    error: type[CompressorError],
    code: ErrorCode,
    details: dict[str, Any],
) -> None:
    """This is the last test of the module, because it ends the workers for good."""
    distributed = evaluator_of(make, task())
    with fails_with(code, error, **details) as caught:
        distributed.evaluate(frozenset(distributed.heads))
    assert type(caught.value) is error
