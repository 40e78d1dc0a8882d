"""Instances follow the throughput of the run, unless the request names them or another engine is served."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compressor.config.request import ServeRequest
from compressor.results import RowRates, Throughput
from compressor.serving import export, triton_config
from compressor.serving.model_files import Placement, choose_placement
from tests.serving.outputs import report, run_folder

_RATES = st.floats(1, 1e6)


def throughput(single: float, several: float, callers: int = 4, batch: int = 1) -> Throughput:
    """Rows per second of a compressed engine; those of the dense one do not matter."""
    rates = RowRates(one_caller=single, all_callers=several)
    return Throughput(
        batch=batch, seq=8, callers=callers, dense=RowRates(one_caller=9, all_callers=9), compressed=rates
    )


def request(**fields: Any) -> ServeRequest:
    return ServeRequest(out=Path("out"), repository=Path("repository"), **fields)


@given(st.lists(st.tuples(_RATES, _RATES), min_size=1, max_size=3), st.integers(2, 64))
def test_instances_are_callers_where_these_have_more_rows_per_second(
    rates: list[tuple[float, float]], callers: int
) -> None:
    rows = tuple(throughput(*pair, callers) for pair in rates)
    placement = choose_placement(request(), report(throughputs=rows), "cpu", serves_measured=True)
    is_faster = max(several for _, several in rates) > max(single for single, _ in rates)
    assert (placement.instances, placement.threads) == ((callers, 1) if is_faster else (1, None))
    assert placement.reason


@given(st.integers(1, 9), st.none() | st.integers(1, 9))
def test_requested_instances_count_first(instances: int, threads: int | None) -> None:
    measured = report(throughputs=(throughput(1, 2),))
    placement = choose_placement(request(instances=instances, threads=threads), measured, "cpu", serves_measured=True)
    assert placement == Placement(instances, threads)


@pytest.mark.parametrize(
    ("fields", "device", "serves_measured"),
    [({}, "gpu", True), ({}, "cpu", False), ({"threads": 3}, "cpu", True), ({"threads": 1}, "cpu", True)],
)
def test_throughput_of_something_else_does_not_count(
    fields: dict[str, Any], device: Any, serves_measured: bool
) -> None:
    measured = report(throughputs=(throughput(1, 2),))
    placement = choose_placement(request(**fields), measured, device, serves_measured=serves_measured)
    assert placement == Placement(1, fields.get("threads"))


def test_the_configuration_states_what_instances_are_based_on(tmp_path: Path) -> None:
    out = run_folder(tmp_path / "out", throughputs=(throughput(100, 180, callers=2),))
    exported = export(ServeRequest(out=out, repository=tmp_path / "r"))
    path = exported.model / "config.pbtxt"
    assert path.read_text().startswith("# ")
    config = triton_config.load(path)
    assert (config.instance_group[0].count, config.parameters["intra_op_thread_count"].string_value) == (2, "1")
    plain = export(ServeRequest(out=out, repository=tmp_path / "r", name="plain", plain=True))
    assert triton_config.load(plain.model / "config.pbtxt").instance_group[0].count == 1
