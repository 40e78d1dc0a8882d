"""A compacted model computes and learns what the gated model does, with fewer weights, and is restored afterwards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from torch import Tensor, nn
from transformers import PreTrainedModel

from compressor.errors import ErrorCode
from compressor.units import PrunableGroup, compacted, find_groups, find_sites, gated, keep_all
from compressor.units.groups import float_outputs
from graph_passes import Plan
from tests.faults import fails_with
from tests.random_plans import random_groups
from tests.units.families import families
from tests.units.states import are_equal, snapshot
from tests.zoo import FAMILIES, GROUPED, VOCABULARY, WITH_MEMORY, text

CASES = {
    **FAMILIES,
    "llama_of_four_queries": GROUPED,
    **{f"{name}_with_memory": make for name, make in WITH_MEMORY.items()},
}


QUICK = ("bert", "llama_of_four_queries", "t5", "transformer_xl_with_memory")


def some_of_each(groups: Sequence[PrunableGroup], rng: np.random.Generator) -> Plan:
    """A plan that keeps random units of each group at random scales: at least one, and at most half of all."""
    plans = []
    for group in groups:
        count = int(rng.integers(1, group.units // 2 + 1))
        kept = tuple(sorted(int(unit) for unit in rng.choice(group.units, count, replace=False)))
        plans.append(replace(group.plan(kept), scale=tuple(float(scale) for scale in rng.uniform(0.5, 1.5, count))))
    return Plan(groups=tuple(plans))


PLANS = {"none_or_all_of_some_groups": random_groups, "some_of_each_group": some_of_each}


def case(name: str, plan: str = "some_of_each_group") -> tuple[PreTrainedModel, dict[str, Tensor], Plan]:
    """A model, its inputs and a random plan."""
    model, inputs = CASES[name](0)
    return model, inputs, PLANS[plan](find_groups(model, inputs), np.random.default_rng(0))


def small(config: type, model: type, **sizes: int) -> PreTrainedModel:
    """A model of two layers with four heads of 8 channels."""
    torch.manual_seed(0)
    common = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    instance = model(config(**common, intermediate_size=44, pad_token_id=0, eos_token_id=1, bos_token_id=2, **sizes))
    assert isinstance(instance, PreTrainedModel)
    return instance.eval()


def plan_of(model: PreTrainedModel, kept: Callable[[int], tuple[int, ...]]) -> Plan:
    """The plan that keeps `kept(units)` of each group."""
    return Plan(groups=tuple(group.plan(kept(group.units)) for group in find_groups(model, text())))


def dropping(plan: Plan) -> tuple[str, ...]:
    return tuple(group.name for group in plan.groups if group.dropped)


def number_of_weights(model: nn.Module) -> int:
    return sum(weight.numel() for weight in model.parameters())


def first_output(model: PreTrainedModel, inputs: dict[str, Tensor]) -> Tensor:
    with torch.no_grad():
        return float_outputs(model, inputs)[0]


def assert_near(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5 * float(expected.abs().max()))


@pytest.mark.parametrize("kept", PLANS)
@pytest.mark.parametrize("name", families(CASES, QUICK))
def test_every_group_is_compacted_and_the_output_is_that_of_the_gated_model(name: str, kept: str) -> None:
    model, inputs, plan = case(name, kept)
    with gated(model, plan):
        expected = first_output(model, inputs)
    before, weights, names = snapshot(model), list(model.parameters()), list(model.state_dict())
    whole = number_of_weights(model)
    with compacted(model, plan, inputs) as result:
        assert (result.compacted, result.gated) == (dropping(plan), ())
        assert_near(first_output(model, inputs), expected)
        assert number_of_weights(model) < 0.7 * whole
        state = model.state_dict()
        assert list(state) == names
        assert all(tensor.is_contiguous() for tensor in state.values())
    assert all(now is then for now, then in zip(model.parameters(), weights, strict=True))
    assert are_equal(before, snapshot(model))


def steps(model: PreTrainedModel, inputs: dict[str, Tensor], context: AbstractContextManager[Any]) -> dict[str, Tensor]:
    """The change of each weight in two steps of SGD with momentum."""
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    with context:
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)
        for _ in range(2):
            optimizer.zero_grad()
            float_outputs(model, inputs)[0].square().sum().backward()
            optimizer.step()
    return {name: weight.detach() - before[name] for name, weight in model.named_parameters()}


@pytest.mark.parametrize("name", families(CASES, QUICK))
def test_training_changes_the_full_weights_as_training_the_gated_model_does(name: str) -> None:
    model, inputs, plan = case(name)
    reference, _ = CASES[name](0)
    model.double(), reference.double()
    inputs = {key: value.double() if value.is_floating_point() else value for key, value in inputs.items()}
    changes = steps(model, inputs, compacted(model, plan, inputs))
    expected = steps(reference, inputs, gated(reference, plan))
    largest = max(float(change.abs().max()) for change in expected.values())
    assert largest > 1e-5
    for key, change in expected.items():
        torch.testing.assert_close(changes[key], change, rtol=0, atol=1e-9 * largest)


def test_gradients_are_those_of_the_kept_entries() -> None:
    model, inputs, plan = case("bert")
    group = plan.feed_forwards[0]
    name = f"{group.name}.weight"
    with gated(model, plan):
        model(**inputs)[0].sum().backward()
    expected = model.get_parameter(name).grad
    model.zero_grad()
    with compacted(model, plan, inputs):
        model(**inputs)[0].sum().backward()
        gradient = model.get_parameter(name).grad
    assert gradient is not None
    assert expected is not None
    assert gradient.shape == (32, len(group.kept))
    assert_near(gradient, expected[:, list(group.kept)])
    assert model.get_parameter(name).grad is None


def test_an_error_inside_keeps_what_was_trained_and_restores_the_rest() -> None:
    model, inputs, plan = case("bert")
    group = plan.feed_forwards[0]
    name = f"{group.name}.weight"
    weight, before = model.get_parameter(name), model.get_parameter(name).detach().clone()

    def interrupted() -> None:
        model.get_parameter(name).data += 1
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), compacted(model, plan, inputs):
        interrupted()
    assert model.get_parameter(name) is weight
    assert torch.equal(weight[:, list(group.kept)], before[:, list(group.kept)] + 1)
    assert torch.equal(weight[:, list(group.dropped)], before[:, list(group.dropped)])


def test_a_state_loaded_inside_remains_in_the_full_weights() -> None:
    model, inputs, plan = case("gpt2")
    with compacted(model, plan, inputs):
        state = {name: tensor + 1 for name, tensor in model.state_dict().items()}
    with compacted(model, plan, inputs):
        model.load_state_dict(state, assign=True)
    with compacted(model, plan, inputs):
        assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())


def test_frozen_weights_stay_frozen() -> None:
    model, inputs, plan = case("bert")
    model.requires_grad_(False)
    with compacted(model, plan, inputs):
        assert not any(weight.requires_grad for weight in model.parameters())


def test_a_plan_that_drops_nothing_changes_no_weight() -> None:
    model, inputs, _ = case("bert")
    weights = list(model.parameters())
    with compacted(model, keep_all(find_groups(model, inputs)), inputs) as result:
        assert result == type(result)((), ())
        assert all(now is then for now, then in zip(model.parameters(), weights, strict=True))


def test_fused_projections_may_lie_beside_each_other_head_by_head() -> None:
    model = small(hf.GPTNeoXConfig, hf.GPTNeoXForCausalLM)
    plan = plan_of(model, lambda units: (1, units - 1))
    with gated(model, plan):
        expected = first_output(model, text())
    with compacted(model, plan, text()) as result:
        assert result.gated == ()
        assert_near(first_output(model, text()), expected)


def test_heads_that_the_code_does_not_let_go_of_stay_gated() -> None:
    """Phi-3 splits its fused projection by sizes of the configuration."""
    model = small(hf.Phi3Config, hf.Phi3ForCausalLM, num_key_value_heads=2)
    plan = plan_of(model, lambda units: (0, 1, units - 1))
    with gated(model, plan):
        expected = first_output(model, text())
    with compacted(model, plan, text()) as result:
        assert result.gated == tuple(site.name for site in plan.sites)
        assert result.compacted == tuple(group.name for group in plan.feed_forwards)
        assert_near(first_output(model, text()), expected)


def test_what_is_computed_across_units_keeps_its_group_gated() -> None:
    """OLMo 2 normalizes queries and keys over all heads."""
    model = small(hf.Olmo2Config, hf.Olmo2ForCausalLM)
    plan = plan_of(model, lambda units: (0, 2))
    with compacted(model, plan, text()) as result:
        assert result.gated == tuple(site.name for site in plan.sites)


def test_units_that_depend_on_dropped_ones_stay_gated_though_the_output_ignores_them() -> None:
    """The inputs of the reading linear are compared too, because its weights can be zero before training."""
    model = small(hf.BertConfig, hf.BertForSequenceClassification)
    end = "bert.encoder.layer.0.output.dense"
    plan = plan_of(model, lambda units: (0, 2))
    nn.init.zeros_(model.get_parameter(f"{end}.weight"))
    first = model.get_submodule("bert.encoder.layer.0.intermediate.dense")
    first.register_forward_hook(lambda _, args, output: output - output.mean(-1, keepdim=True))
    with compacted(model, plan, text()) as result:
        assert result.gated == (end,)


def test_tied_weights_stay_whole() -> None:
    model, inputs, plan = case("bert")
    first, second = (model.get_submodule(f"bert.encoder.layer.{number}.intermediate.dense") for number in range(2))
    second.weight = first.weight
    with compacted(model, plan, inputs) as result:
        assert result.gated == tuple(f"bert.encoder.layer.{number}.output.dense" for number in range(2))


def test_a_model_of_half_precision_is_compacted() -> None:
    model, inputs, plan = case("llama")
    model.bfloat16()
    with compacted(model, plan, inputs) as result:
        assert (result.compacted, result.gated) == (dropping(plan), ())


def test_a_plan_of_another_model_is_refused() -> None:
    model, inputs, plan = case("bert")
    fewer = Plan(groups=plan.groups[1:])
    assert len(find_sites(model, inputs)) > len(fewer.sites)
    before = snapshot(model)
    with fails_with(ErrorCode.PLAN_MISMATCH), compacted(model, fewer, inputs):
        pass
    assert are_equal(before, snapshot(model))
