"""The description of the machine that reports hold."""

from __future__ import annotations

from compressor.environment import COMPARABLE_FIELDS, machine, package_version


def test_the_machine_has_the_fields_that_timings_are_compared_by() -> None:
    fields = machine()
    assert set(COMPARABLE_FIELDS) <= fields.keys()
    assert all(isinstance(value, str) and value for value in fields.values())
    assert fields["onnx"] == package_version("onnx")


def test_a_package_that_is_not_installed_has_no_version() -> None:
    assert package_version("no-such-package") is None
    assert "no-such-package" not in machine()
