"""A frozen model, and the state that a context restores."""

from __future__ import annotations

import torch

from compressor.training.gated_model import attach_gate, frozen, restore_model_state
from tests import language
from tests.selection import tiny
from tests.training.gates import NoisyGate
from tests.training.runs import sites_of


def test_a_frozen_model_collects_no_statistics() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 1))
    model[0].bias.requires_grad_(False)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with frozen(model):
        assert not any(weight.requires_grad for weight in model.parameters())
        model(torch.randn(5, 2))
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert [name for name, weight in model.named_parameters() if not weight.requires_grad] == ["0.bias"]
    model(torch.randn(5, 2))
    assert model[1].num_batches_tracked == 1


def test_changes_by_a_trainer_are_restored() -> None:
    model = tiny.classifier().eval()
    config, forward = model.config.to_dict(), model.forward
    with restore_model_state(model):
        model.train()
        model.config.use_cache = False
        model.forward = lambda **inputs: None
    assert not model.training
    assert model.config.to_dict() == config
    assert model.forward == forward
    assert "forward" not in vars(model)


def test_an_attached_gate_is_sampled_in_training_and_hard_in_evaluation() -> None:
    folder = language.folder(**language.UNDROPPED)
    model, inputs = folder.model, {"input_ids": torch.ones(2, 4, dtype=torch.int64)}
    before = dict(model.named_parameters())
    gate = NoisyGate(8, 2, 12)
    steps = [3]
    with torch.no_grad(), attach_gate(model, gate, sites_of(folder), lambda: steps[0]):
        assert {name for name, _ in model.named_parameters()} - before.keys() == {"head_gate.weight"}
        hard = model.eval()(**inputs).logits
        sampled = model.train()(**inputs).logits
        assert torch.equal(model(**inputs).logits, sampled)  # depends only on the step
        steps[0] = 4
        assert not torch.equal(model(**inputs).logits, sampled)
        assert not torch.equal(hard, sampled)
        assert torch.equal(model.eval()(**inputs).logits, hard)
    assert dict(model.named_parameters()).keys() == before.keys()
    assert not model._forward_pre_hooks
