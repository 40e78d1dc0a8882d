"""Properties of the fields of configurations."""

from __future__ import annotations

import pytest

from compressor.config.fields import has_default
from compressor.config.request import Training
from compressor.config.run import FIELDS


@pytest.mark.parametrize(("name", "shown"), [("seed", True), ("max_length", True), ("force", False), ("keep", False)])
def test_a_default_of_zero_is_shown(name: str, shown: bool) -> None:
    assert has_default(FIELDS[name]) is shown


def test_a_required_field_has_no_default() -> None:
    assert not has_default(Training.model_fields["data"])
