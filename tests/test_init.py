"""The public names of the package; `test_skeleton` checks that importing it is light."""

from __future__ import annotations

import pytest

import compressor
from compressor.units import PrunableGroup, find_groups, find_sites


def test_public_names_are_loaded_when_they_are_used() -> None:
    assert dir(compressor) == sorted(compressor.__all__)
    assert compressor.find_sites is find_sites
    assert compressor.find_groups is find_groups
    assert compressor.PrunableGroup is PrunableGroup
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        compressor.nothing  # noqa: B018
