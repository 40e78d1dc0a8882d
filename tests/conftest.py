"""Settings of all tests, exports that runs share, and timing that is short."""

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.written_once import FOLDER, written_once

# Tiny models gain nothing from several threads, and parallel test processes would compete for the cores.
torch.set_num_threads(1)

LONGEST = (
    *(
        "tests/run/",
        "tests/generation/",
        "tests/law/",
        "tests/engines/",
        "tests/block_masks/",
        "tests/benchmarks/studies/",
        "tests/advice/",
    ),
    *("tests/selection/", "tests/training/", "tests/tasks/", "tests/graph/", "tests/docs/", "tests/test_export.py"),
    *("tests/serving/test_triton.py", "tests/cli/test_costs.py", "tests/test_without_torch.py"),
)
"""Where the tests are that take longest."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the files that take longest, so that processes which share the files end at the same time."""
    items.sort(key=lambda item: not item.nodeid.startswith(LONGEST))


@pytest.fixture(scope="module", autouse=True)
def _frozen_modules() -> None:
    """Exempt imported modules from garbage collection, which visits their millions of objects after every training.

    Tests import more of them, and PyTorch fills its caches at every export.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def _exports_folder(tmp_path_factory: pytest.TempPathFactory) -> None:
    """The folder of shared exports, one for all processes of this pytest run; see `tests.written_once`."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    os.environ[FOLDER] = str(folder / "exports")


@pytest.fixture(scope="session", autouse=True)
def _short_timing() -> Iterator[None]:
    """Engines are timed in few rounds, which take as little time as possible."""
    from compressor.block_masks import mask_selector
    from compressor.engines import matmul_times
    from compressor.measure import timing
    from compressor.pruning import measure
    from compressor.targets.onnxruntime import sessions

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(timing, "ROUNDS", (3, timing.ROUNDS[1]))
        patch.setattr(timing, "QUIET_SECONDS", 0.001)  # most of a round is a wait for idle threads
        for name in ("ENGINE_SECONDS", "WHOLE_SECONDS", "PLAN_SECONDS"):
            patch.setattr(measure, name, 0.0)
        patch.setattr(matmul_times, "PRODUCT_SECONDS", 0.0)
        patch.setattr(mask_selector, "FORM_SECONDS", 0.0)
        patch.setattr(sessions, "CHOICE_SECONDS", 0.01)  # at zero nothing is chosen
        yield


@pytest.fixture(scope="session", autouse=True)
def _random_fingerprints() -> Iterator[None]:
    """Data sets are not identified by hashes of their rows, which take as long as most of what tests do with them."""
    from datasets import arrow_dataset
    from datasets.fingerprint import generate_random_fingerprint

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(arrow_dataset, "generate_fingerprint", lambda dataset: generate_random_fingerprint())
        yield


@pytest.fixture(scope="session")
def shared_exports() -> Iterator[None]:
    """Until the end of the session, runs in this process export each structure of a model once."""
    from tests.shared_exports import sharing_exports

    with sharing_exports():
        yield


@pytest.fixture(scope="session")
def inputs() -> Path:
    """A tiny model and rows that it can learn; tests must not change them."""
    from tests.run.runs import write_inputs

    return written_once("inputs", write_inputs)


@pytest.fixture(scope="session")
def answered() -> Path:
    """A tiny model and rows that it answers rightly; tests must not change them."""
    from tests.run.runs import write_answered_rows

    return written_once("answered", write_answered_rows)
