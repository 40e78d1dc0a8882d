"""Settings of all tests, and exports that runs share."""

from collections.abc import Iterator

import pytest
import torch

# Tiny models gain nothing from several threads, and parallel test processes would compete for the cores.
torch.set_num_threads(1)

LONGEST = (
    *("tests/run/", "tests/law/", "tests/selection/", "tests/training/", "tests/studies/", "tests/tasks/"),
    "tests/test_export.py",
)
"""Where the tests are that take longest."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the files that take longest, so that processes which share the files end at the same time."""
    items.sort(key=lambda item: not item.nodeid.startswith(LONGEST))


@pytest.fixture(scope="session")
def shared_exports(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Until the end of the session, runs in this process export each structure of a model once."""
    from tests.shared_exports import sharing_exports

    with sharing_exports(tmp_path_factory.mktemp("exports")):
        yield
