"""Groups and numbers of graphs of every family and exporter are those that `matrix.json` records."""

from __future__ import annotations

from pathlib import Path

import pytest

from compressor.errors import ErrorCode, InputError
from compressor.graph.program import Program
from tests.graph import matrix

QUICK = [
    ("bert", "legacy 11"),
    ("bert", "ONNX Runtime"),
    ("vit", "legacy 14"),
    ("distilbert", "fp16"),
]
CELLS = [(family, exporter) for family in matrix.FAMILIES for exporter in matrix.EXPORTERS]
FAULTS = ("silent", "wrong")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("graphs")


@pytest.mark.parametrize(
    ("family", "exporter"), [cell if cell in QUICK else pytest.param(*cell, marks=pytest.mark.zoo) for cell in CELLS]
)
def test_a_cell_has_its_outcome(family: str, exporter: str, folder: Path) -> None:
    outcome = matrix.outcome(family, exporter, folder)
    if outcome == matrix.NOT_INSTALLED:
        pytest.skip(f"{exporter} is not installed")
    assert outcome == matrix.recorded()[family][exporter]


def test_no_recorded_outcome_is_a_fault() -> None:
    record = matrix.recorded()
    assert [(family, exporter) for family, row in record.items() for exporter in row] == CELLS
    assert not [cell for row in record.values() for cell in row.values() if cell.startswith(FAULTS)]


@pytest.mark.parametrize(
    "family", [name if name == "bert" else pytest.param(name, marks=pytest.mark.zoo) for name in matrix.FAMILIES]
)
def test_a_graph_of_integers_is_refused_by_its_operator(family: str, folder: Path) -> None:
    with pytest.raises(InputError) as caught:
        Program.of(matrix.int8(family, folder))
    assert caught.value.code is ErrorCode.UNSUPPORTED_MODEL
    assert caught.value.details["op_type"] in ("DequantizeLinear", "DynamicQuantizeLinear", "MatMulInteger")
