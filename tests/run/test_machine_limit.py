"""The limit of a machine: the product that is timed, and the share of it that an engine reaches."""

from __future__ import annotations

import io
import re
from pathlib import Path

import numpy as np
import onnx
import pytest
from rich.console import Console

from compressor.config.sections import EngineConfig
from compressor.engines.matmul_times import ACTIVATIONS, matmul_graph
from compressor.report import summary
from compressor.report.html import render
from compressor.results import Report
from compressor.run import stages
from compressor.targets.onnxruntime.ort_session import open_session, run_session, session_settings
from tests.report import reports


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stages, "_SIDE", 32)
    monkeypatch.setattr(stages, "_SECONDS", 1e-6)


@pytest.mark.parametrize("is_quantized", [False, True])
def test_the_product_is_that_of_its_factors(tmp_path: Path, is_quantized: bool) -> None:
    graph = matmul_graph((32, 16), np.random.default_rng(1), is_quantized=is_quantized, rows=8)
    onnx.save(graph, tmp_path / "product.onnx")
    factor = np.random.default_rng(0).uniform(-1, 1, (8, 32)).astype(np.float32)
    session = open_session(tmp_path / "product.onnx", session_settings("cpu", 1))
    (product,) = run_session(session, {ACTIVATIONS: factor}).values()
    weight = np.random.default_rng(1).standard_normal((32, 16), dtype=np.float32)
    np.testing.assert_allclose(product, factor @ weight, atol=0.5 if is_quantized else 1e-5)


@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_engines_of_one_configuration_share_a_limit(tmp_path: Path, precision: str) -> None:
    report = reports.report()
    config = EngineConfig(target="ort", precision=precision)
    facts = stages.with_limits(
        {"dense": report.dense, "compressed": report.compressed}, {"dense": config, "compressed": config}, tmp_path
    )
    assert facts["dense"].machine_limit is not None
    assert facts["dense"].machine_limit > 0
    assert facts["dense"].machine_limit == facts["compressed"].machine_limit


def test_a_target_that_is_missing_has_no_limit(tmp_path: Path) -> None:
    assert stages.machine_limit(EngineConfig(target="trt", precision="fp32"), tmp_path) is None


def test_the_share_is_operations_per_second_over_the_limit() -> None:
    facts = reports.engine(10, macs_by_length={1: 3_000_000, 128: 5_000_000}, machine_limit=1e9)
    assert facts.share_of_limit(8, 128, 100.0) == pytest.approx(2 * 5e6 * 8 / 0.1 / 1e9)
    assert facts.share_of_limit(8, None, 100.0) == pytest.approx(2 * 3e6 * 8 / 0.1 / 1e9)
    assert facts.share_of_limit(8, 64, 100.0) is None
    assert facts.share_of_limit(8, 128, 10.0) is None, "faster than the limit"
    assert facts.model_copy(update={"machine_limit": None}).share_of_limit(8, 128, 100.0) is None


def test_reports_show_the_share_at_every_length() -> None:
    speeds = (reports.speed(1, 16, 3.0, 2.0), reports.speed(1, 128, 6.0, 4.0))
    engines = {
        name: reports.engine(10, macs_by_length={16: 10**6, 128: 10**7}, machine_limit=1e10)
        for name in ("dense", "compressed")
    }
    report = Report.model_validate_json(reports.report(speeds=speeds, **engines).model_dump_json())
    buffer = io.StringIO()
    Console(width=200, file=buffer).print(summary(report))
    for text in (buffer.getvalue(), render(report)):
        shares = [text[at.end() :] for at in re.finditer("hare of the machine.{1,5}s limit", text)]
        assert len(shares) == 2
        assert [re.findall(r"(\d+)%", share)[0] for share in shares] == ["7", "33"]
