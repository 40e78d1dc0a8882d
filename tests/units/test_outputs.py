"""The outputs that an exported graph keeps."""

from __future__ import annotations

from torch import nn

from compressor.units.outputs import kept_outputs


def test_by_products_and_parts_are_left_out() -> None:
    names = ["logits", "past_key_values.0", "hidden_states.0", "encoder_last_hidden_state", "part.pooler_output"]
    assert kept_outputs(nn.Identity(), names) == ["logits"]
    assert kept_outputs(nn.Identity(), names[1:]) == names[1:]


def test_a_model_may_list_its_outputs() -> None:
    model = nn.Identity()
    model.graph_outputs = ("last_hidden_state",)  # type: ignore[assignment]
    assert kept_outputs(model, ["embedding", "last_hidden_state"]) == ["last_hidden_state"]
