"""Sparse attention that chooses keys among equal scores: right up to the number of keys, refused by name above."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf

from compressor.config.sections import ExportConfig
from compressor.engines.export import export_graph
from compressor.engines.prove import Case, case_name
from compressor.engines.prove_export import prove_export, require_export
from compressor.errors import ErrorCode
from compressor.model_folder import example_inputs, fresh_model, load
from compressor.models.forward_changes import FirstOfEqual, configured_switches
from compressor.results import NoteCode, Proof, ProofStage
from compressor.run.proof_lengths import prove_beyond
from compressor.units import keep_all
from compressor.units.find import find_units
from tests import folders
from tests.faults import fails_with
from tests.run.length_models import spread

KEYS = 16
"""Keys that the model chooses."""
_SIZES: dict[str, Any] = {
    "vocab_size": 25,
    "hidden_size": 16,
    "intermediate_size": 20,
    "num_hidden_layers": 1,
    "gated_norm_rank": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "v_head_dim": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "index_head_dim": 8,
    "index_n_heads": 1,
    "index_topk": KEYS,
    "pad_token_id": 0,
    "bos_token_id": 2,
    "eos_token_id": 3,
    "max_position_embeddings": 64,
    "mlp_layer_types": ["dense"],
}


def test_the_first_of_equal_values_are_chosen_and_ties_at_the_boundary_are_noticed() -> None:
    low = torch.finfo(torch.float32).min
    for scores, tied in (
        ([0.0, 3.0, 0.0, 0.0], 2),
        ([1.0, 3.0, 0.0, 0.0], None),  # equal values that are not chosen
        ([3.0, 3.0, 1.0, 0.0], None),  # equal values that are both chosen
        ([3.0, low, low, low], None),  # masked
        ([3.0, -torch.inf, -torch.inf, 0.0], None),
    ):
        with FirstOfEqual() as choices:
            values, indices = torch.tensor(scores).topk(2)
        expected = sorted(range(4), key=lambda index: (-scores[index], index))[:2]
        assert indices.tolist() == expected
        assert values.tolist() == [scores[index] for index in expected]
        assert choices.tied == tied


def test_a_choice_among_equal_scores_is_refused_by_the_entry_of_the_configuration() -> None:
    """Also where the outputs agree, by chance."""
    model: Any = folders.bert()
    model.config.index_topk = KEYS

    def prove() -> Proof:
        torch.zeros(KEYS + 1).topk(KEYS)
        return Proof(variant="dense", stage=ProofStage.EXPORT, error=0.0, tolerance=1e-4, cases=("length 17",))

    with fails_with(ErrorCode.UNSUPPORTED_MODEL, field="index_topk", value=KEYS):
        require_export(prove, model, ())


@pytest.mark.zoo
@pytest.mark.parametrize("name", ["AXK2ForSequenceClassification", "AXK2Model"])
def test_keys_among_equal_scores_are_right_up_to_their_number_and_refused_above(name: str, tmp_path: Path) -> None:
    model: Any = getattr(hf, name)
    folder = load(folders.save(spread(model(hf.AXK2Config(**_SIZES))), tmp_path / "model"))
    assert KEYS in configured_switches(folder.config)
    plan = keep_all(find_units(folder.model, example_inputs(folder, 2, 8)).sites)
    config, path = ExportConfig(), tmp_path / "dense.onnx"

    def cases(length: int) -> list[Case]:
        feeds = {key: value.numpy() for key, value in example_inputs(folder, 2, length).items()}
        return [Case(feeds, case_name(feeds))]

    exported = export_graph("dense", folder, plan, config, cases(KEYS), path)
    assert exported.proof.holds
    fresh, above = fresh_model(folder), cases(40)
    prove = partial(prove_export, fresh, plan, path, above, "dense", attention=config.attention)
    assert prove().holds == (name == "AXK2ForSequenceClassification"), "its last position happens to agree"
    with fails_with(ErrorCode.UNSUPPORTED_MODEL, field="index_topk", value=KEYS):
        require_export(prove, fresh, above)
    proven, notes = prove_beyond(folder, exported, (39,), config, KEYS)
    assert [note.code for note in notes] == [NoteCode.LENGTHS_UNPROVEN]
    assert proven.proof.holds
