"""Properties of the fields of configurations."""

from __future__ import annotations

from typing import Any

import numpy as np
import pydantic
import pytest
import torch

from compressor.config.check import CheckRequest
from compressor.config.fields import has_default
from compressor.config.request import GenerateRequest, Training
from compressor.config.run import FIELDS
from compressor.config.steps import Distill


@pytest.mark.parametrize(("name", "shown"), [("seed", True), ("max_length", True), ("force", False), ("keep", False)])
def test_a_default_of_zero_is_shown(name: str, shown: bool) -> None:
    assert has_default(FIELDS[name]) is shown


def test_a_required_field_has_no_default() -> None:
    assert not has_default(Training.model_fields["data"])


@pytest.mark.parametrize(
    "field",
    [FIELDS["seed"], *(each.model_fields["seed"] for each in (CheckRequest, GenerateRequest, Training, Distill))],
)
def test_every_generator_takes_every_seed(field: pydantic.fields.FieldInfo) -> None:
    create: Any = pydantic.create_model
    seeds = create("Seeds", seed=(field.annotation, field))
    for seed in (0, 2**63 - 1):
        assert seeds(seed=seed).seed == seed
        torch.Generator().manual_seed(seed)
        np.random.default_rng(seed)
    for seed in (-1, 2**63):
        with pytest.raises(pydantic.ValidationError):
            seeds(seed=seed)
