"""A search over processes: the same plan as in one, however many there are and whichever of them die."""

from __future__ import annotations

import copy
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from compressor.config.run import Recipe
from compressor.config.run import make as make_recipe
from compressor.errors import InputError, TargetMissingError, UsageError
from compressor.selection import learn as learner
from compressor.selection import ray_cluster, ray_evaluator
from compressor.selection.ray_evaluator import EvaluatorFactory, RaySubsetEvaluator, evaluator_factory
from compressor.selection.subset_evaluator import ModelSubsetEvaluator
from tests import learning
from tests.command import heed_ctrl_c

needs_ray = pytest.mark.skipif(not ray_cluster.installed(), reason="ray is not installed")
pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")


@pytest.fixture(scope="module")
def make() -> Iterator[EvaluatorFactory]:
    with evaluator_factory("local:2") as found:
        yield found


def limited(make: Any, count: int) -> EvaluatorFactory:
    """The same with a part of its workers."""
    trials(make)  # the first trials start the workers
    workers = copy.copy(make.args[0])
    workers._actors = workers._actors[:count]
    return lambda *given: RaySubsetEvaluator(workers, *given)


# Three batches, the last of them short: two workers have shares of different sizes.
def trials(make: EvaluatorFactory, task: learning.Sign | None = None) -> ModelSubsetEvaluator:
    model = learning.language_model()
    return make(model, learning.sites(model), learning.data(task or learning.NextToken()), 5, 6, 0)


@needs_ray
@pytest.mark.parametrize("count", [1, 2])
def test_every_number_is_that_of_one_process(make: EvaluatorFactory, count: int) -> None:
    alone, apart = trials(ModelSubsetEvaluator), trials(limited(make, count))
    kept = frozenset(alone.heads)
    odd = [frozenset(alone.heads[::2]), kept, frozenset(alone.heads[:1])]
    for each in (kept, kept - {alone.heads[0]}, kept - {alone.heads[5]}):
        # To the last bit, the metric being a mean of losses: the same subsets share the same forwards.
        assert apart.evaluate_without(each, alone.heads) == alone.evaluate_without(each, alone.heads)
        assert apart.evaluate_all(odd) == alone.evaluate_all(odd)
        np.testing.assert_array_equal(apart.statistics(each), alone.statistics(each))
    assert apart.sensitivity(kept) == alone.sensitivity(kept)
    assert apart.count == alone.count
    assert apart.forwards == pytest.approx(alone.forwards)


@needs_ray
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize(("method", "options"), [("astar", {"variant": "lazy"}), ("random", {"trials": 8})])
def test_the_plan_is_the_same(
    make: EvaluatorFactory, count: int, method: str, options: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextmanager
    def few(ray: str | None) -> Iterator[EvaluatorFactory]:
        yield limited(make, count) if ray else ModelSubsetEvaluator

    monkeypatch.setattr(learner, "evaluator_factory", few)
    task = learning.NextToken()
    found = [
        learning.run(tmp_path, learning.Recipe(method, 4, options=options, ray=ray), learning.language_model(), task)
        for ray in (None, "local")
    ]
    alone, apart = ([(point.step, point.values) for point in learned.curves] for learned in found)
    assert found[0].plan == found[1].plan
    assert [step for step, _ in alone] == [step for step, _ in apart]
    assert all(one == pytest.approx(other) for (_, one), (_, other) in zip(alone, apart, strict=True))


class DiesOnce(learning.NextToken):
    """Kills the process that finds a file first, while it measures."""

    def __init__(self, armed: Path) -> None:
        self.armed = armed

    def per_example(self, logits: np.ndarray, labels: np.ndarray) -> np.ndarray:
        with suppress(FileNotFoundError):
            self.armed.unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().per_example(logits, labels)


@needs_ray
def test_a_worker_that_dies_is_replaced(
    make: EvaluatorFactory, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    armed = tmp_path / "armed"
    alone, apart = trials(ModelSubsetEvaluator), trials(limited(make, 2), DiesOnce(armed))
    kept = frozenset(alone.heads)
    assert apart.evaluate_without(kept, alone.heads) == alone.evaluate_without(kept, alone.heads)
    armed.touch()
    # The one in its place has no record, makes it again, and gives the same numbers to the last bit.
    odd = [frozenset(alone.heads[::2]), frozenset(alone.heads[:1])]
    assert apart.evaluate_all(odd) == alone.evaluate_all(odd)
    assert not armed.exists()
    assert apart.count == alone.count
    assert capfd.readouterr() == ("", "")


class Fails(learning.Sign):
    """Finds fault with its rows."""

    def per_example(self, logits: np.ndarray, labels: np.ndarray) -> np.ndarray:
        raise InputError("rows.tsv: row 3 has no label; give it one")


class Dies(learning.Sign):
    """Ends its process midway, as a system without memory does."""

    def per_example(self, logits: np.ndarray, labels: np.ndarray) -> np.ndarray:
        os._exit(1)


@needs_ray
def test_an_error_comes_back_as_itself(make: EvaluatorFactory) -> None:
    apart = trials(limited(make, 2), Fails())
    with pytest.raises(InputError) as caught:
        apart.evaluate(frozenset(apart.heads))
    assert type(caught.value) is InputError
    assert str(caught.value) == "rows.tsv: row 3 has no label; give it one"


@needs_ray
def test_workers_that_keep_dying_are_one_line(make: EvaluatorFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    trials(make)
    with ExitStack() as stack:
        monkeypatch.setattr(ray_evaluator, "_RESTARTS", 0)
        monkeypatch.setattr(ray_evaluator, "connected", lambda *given: ExitStack())
        monkeypatch.setattr(ray, "available_resources", lambda: {"CPU": 1.0})
        monkeypatch.setattr(ray_evaluator, "_CORES", 0)
        workers = ray_evaluator._Workers("local:1", stack)
        apart = trials(lambda *given: RaySubsetEvaluator(workers, *given), Dies())
        with pytest.raises(TargetMissingError, match=r"^ray local:1: a worker died and 0 restarts did not help \(.*\)"):
            apart.evaluate(frozenset(apart.heads))


SEARCH = """
import sys
import tests.test_distributed as here
assert "ray" not in sys.modules
with here.spread("local:1") as make:
    here.trials(make)
"""


def command_of(process: psutil.Process) -> str:
    """Its command line; empty once it has ended."""
    with suppress(psutil.Error):
        return " ".join(process.cmdline())
    return ""


@needs_ray
def test_ctrl_c_leaves_nothing() -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        search = subprocess.Popen(
            [sys.executable, "-c", SEARCH],
            env={**os.environ, "TMPDIR": folder},
            stderr=subprocess.DEVNULL,
            preexec_fn=heed_ctrl_c,
        )
        process = psutil.Process(search.pid)
        started: list[psutil.Process] = []
        while not any("ray::" in command_of(child) for child in started):
            assert search.poll() is None
            time.sleep(0.2)
            started = process.children(recursive=True)
        search.send_signal(signal.SIGINT)
        assert search.wait(120) in (1, 130, -signal.SIGINT)
        _, alive = psutil.wait_procs(started, timeout=60)
        assert not alive
        assert list(Path(folder).iterdir()) == []


def test_an_address_that_refuses_is_one_line() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and does not listen
        where = f"127.0.0.1:{taken.getsockname()[1]}"
        with (
            pytest.raises(TargetMissingError, match=f"^ray {where}: no Ray cluster answers there .*refused"),
            evaluator_factory(where),
        ):
            pass


@needs_ray
def test_an_address_that_is_silent_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_cluster, "_ANSWERED", 1)
    with socket.create_server(("127.0.0.1", 0)) as server:
        where = f"127.0.0.1:{server.getsockname()[1]}"
        with evaluator_factory(where) as make, pytest.raises(TargetMissingError) as caught:
            trials(make)
    assert str(caught.value).startswith(f"ray {where}: no Ray cluster answers there (nothing for 1 s); start one")


def test_without_ray_installed_one_line_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_cluster, "installed", lambda: False)
    with (
        pytest.raises(TargetMissingError, match=r"^ray local: .* pip install 'compressor\[distributed\]'$"),
        evaluator_factory("local"),
    ):
        pass


@pytest.mark.parametrize(
    ("ray", "method", "message"),
    [
        ("there", "astar", "--ray 'there': no place for workers; say local, local:4 for four of them, or HOST:PORT"),
        ("local:0", "astar", "--ray 'local:0': no place for workers; "),
        ("local", "dsp", "--ray local: spreads a search; name one of taylor, astar, local, global, random (--method)"),
    ],
)
def test_a_place_that_is_none_is_one_line(ray: str, method: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        make_recipe("model", None, {"ray": ray, "method": method, "data": "rows.tsv", "keep": "3"})
    assert str(caught.value).startswith(message)


def test_where_it_runs_does_not_decide_what_is_learned() -> None:
    recipe = Recipe(model=Path("m"), data="d", keep=3, method="astar")
    assert recipe.model_copy(update={"ray": "local"}).learning_key() == recipe.learning_key()
