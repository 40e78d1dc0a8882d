"""Units of a model with their shares: what cannot be counted is noted, and does not end the command."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import MixtralConfig, MixtralForCausalLM

from compressor.config.run import Recipe
from compressor.results import NoteCode
from compressor.run.model_units import list_units, measure_costs
from tests import folders
from tests.run.listeners import RecordingListener, interrupt


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of experts, whose multiply-accumulates depend on the rows."""
    sizes = {**folders.SIZES, "num_key_value_heads": 1, "num_local_experts": 2, "num_experts_per_tok": 1}
    return folders.save(MixtralForCausalLM(MixtralConfig(**sizes)), tmp_path_factory.mktemp("mixtral"))


def test_experts_are_noted_before_times_are_measured(model: Path) -> None:
    listener = RecordingListener("exporting", interrupt)
    with pytest.raises(KeyboardInterrupt):
        measure_costs(Recipe(model=model, batch=(1,), seq=(8,)), listener)
    assert listener.codes == [NoteCode.EXPERTS_KEPT]


@pytest.mark.zoo
def test_experts_and_what_cannot_be_counted_are_noted(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    notes = RecordingListener()
    (heads,) = list_units(Recipe(model=model), notes)
    assert notes.codes == [NoteCode.EXPERTS_KEPT, NoteCode.COSTS_NOT_COUNTED, NoteCode.COSTS_NOT_MEASURED]
    assert (heads.group.type, heads.macs, heads.ms) == ("heads", None, None)
    assert heads.parameters is not None
    assert 0 < heads.parameters < 1
