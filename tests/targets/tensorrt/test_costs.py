"""Cost tables of TensorRT: they are measured by the target's own engines, in its precisions."""

from __future__ import annotations

from typing import Any

import pytest

from tests.targets.tensorrt.conftest import RunProbe


@pytest.fixture(scope="module", params=["int8", "fp16"])
def table(request: pytest.FixtureRequest, run_probe: RunProbe, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The table of a precision by the newest version."""
    return run_probe("costs_probe", "11.4", request.param, tmp_path_factory.mktemp("costs")) | {"name": request.param}


@pytest.mark.zoo
def test_predictions_are_the_times_of_engines(table: dict[str, Any]) -> None:
    assert table["measured"] == sorted(table["measured"])
    assert table["predicted"] == pytest.approx(table["measured"], rel=0.05)
    assert table["name"] in table["label"]


@pytest.mark.zoo
def test_engines_of_plans_are_built_for_the_sizes_and_removed(table: dict[str, Any]) -> None:
    assert set(map(str, table["profile"].values())) == {str([[1, 1], [2, 7], [4, 16]])}
    assert table["built"] > 20
    assert len(table["left"]) <= 2
