"""Pruning by the Fisher information of a mask: losses, rearrangement, tuning of scales."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel

from compressor.answers import SPAN_ENDS
from compressor.model_folder.access import access_of
from compressor.progress import ignore_progress
from compressor.selection.pruners.fisher import (
    LARGEST,
    FisherPruner,
    answer_loss,
    least_costly_bundles,
    mask_gradients,
    tuned_scales,
)
from compressor.selection.pruners.layerwise.refit import CallTokens
from compressor.selection.pruners.unit_importance import MagnitudePruner, scaled_units
from compressor.units import PrunableGroup, find_groups
from compressor.units.groups import linear_of
from compressor.units.layers import linear_weight
from compressor.units.prunable import LinearWeights
from tests.selection.pruners.pruning import (
    Interrupter,
    InterruptionError,
    are_equal,
    check_dropped_units_have_no_effect,
    check_kept_counts,
    check_labels_are_not_read,
    family_inputs,
    pruning_inputs,
    ranked,
    result_of,
)
from tests.selection.pruners.reconstruct.shared import CASES, bert, bert_spans
from tests.unchanged import unchanged
from tests.zoo import text

FAMILIES = [pytest.param("bert", marks=pytest.mark.zoo), pytest.param("gpt2", marks=pytest.mark.zoo), "llama", "t5"]
"""BERT keeps these promises among all methods, in `tests.selection.pruners.test_base`."""
SPANS = ("start_logits", "end_logits")


@pytest.mark.parametrize("family", FAMILIES)
def test_as_many_units_are_kept_as_requested_and_dropped_ones_have_no_effect(family: str, tmp_path: Path) -> None:
    inputs = family_inputs(family, tmp_path)
    with unchanged(inputs.model):
        check_kept_counts(pruner := ranked(FisherPruner, inputs))
    check_dropped_units_have_no_effect(pruner)


@pytest.mark.parametrize("family", ["bert", pytest.param("gpt2", marks=pytest.mark.zoo)])
def test_labels_are_not_read(family: str, tmp_path: Path) -> None:
    check_labels_are_not_read(FisherPruner, family, tmp_path)


def test_nothing_is_drawn(tmp_path: Path) -> None:
    inputs = family_inputs("bert", tmp_path)
    inputs = replace(inputs, groups=inputs.groups[:3])
    expected = result_of(FisherPruner, replace(inputs, store=tmp_path / "first"))
    assert are_equal(result_of(FisherPruner, replace(inputs, store=tmp_path / "second", seed=1)), expected)


def test_resumes_from_stored_gradients(tmp_path: Path) -> None:
    inputs = family_inputs("llama", tmp_path)
    inputs = replace(inputs, groups=inputs.groups[:3])
    expected = result_of(FisherPruner, replace(inputs, store=tmp_path / "whole"))
    with pytest.raises(InterruptionError):
        FisherPruner(inputs).rank(Interrupter(2))
    assert are_equal(result_of(FisherPruner, inputs), expected)
    FisherPruner(inputs).rank(Interrupter(1))  # no batch runs again
    assert are_equal(result_of(FisherPruner, inputs), expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_losses_are_sums_of_squared_gradients(family: str, tmp_path: Path) -> None:
    inputs = family_inputs(family, tmp_path)
    gradients = mask_gradients(inputs.model, inputs.groups, inputs.statistics, inputs.outputs, ignore_progress)
    losses = ranked(FisherPruner, inputs).losses(ignore_progress)
    for group in inputs.groups:
        curve, squares = losses[group.name], np.square(gradients[group.name].astype(np.float64)).sum(0)
        assert tuple(curve) == group.counts
        assert list(curve.values()) == sorted(curve.values(), reverse=True)
        assert curve[group.units] == 0
        assert curve[0] == pytest.approx(squares.sum())
        assert curve[group.units - group.multiple] == pytest.approx(
            np.sort(squares)[: group.multiple // group.bundle].sum()
        )


def test_a_dead_unit_goes_first(tmp_path: Path) -> None:
    model = bert(3)
    groups = find_groups(model, text())
    with torch.no_grad():
        for group in groups:
            if group.type == "heads":  # nothing reads head 2
                linear_weight(linear_of(model, group)).unflatten(1, (group.units, group.width))[:, 2] = 0
                continue
            # Neuron 2 is always zero, but is read with large weights.
            producer = model.get_submodule(group.name.replace("output", "intermediate"))
            assert isinstance(producer, nn.Linear)
            producer.weight[2], producer.bias[2] = 0, 0
            linear_of(model, group).weight[:, 2] = 5
    pruner = ranked(FisherPruner, pruning_inputs(model, tmp_path))
    assert {group.type for group in groups} == {"heads", "neurons"}
    for group in pruner.inputs.groups:
        assert set(range(group.units)) - set(pruner.kept(group, group.units - 1)) == {2}
        assert pruner.losses(ignore_progress)[group.name][group.units - 1] == 0


def test_a_dead_unit_stays_dropped_whatever_the_others_are_worth() -> None:
    gradients = np.array([[0.0, 1.0, -1.0, 3.0]])
    assert all(0 in least_costly_bundles(gradients, count) for count in (1, 2, 3))
    assert least_costly_bundles(np.zeros((2, 3)), 2).tolist() == [0, 1]


def test_units_that_make_up_for_each_other_are_dropped_together() -> None:
    gradients = np.array([[1.0, -1.0, 0.9]])
    assert least_costly_bundles(gradients, 1).tolist() == [2]
    assert least_costly_bundles(gradients, 2).tolist() == [0, 1]
    assert least_costly_bundles(gradients, 0).tolist() == []
    assert least_costly_bundles(gradients, 3).tolist() == [0, 1, 2]


@pytest.mark.parametrize("seed", range(5))
def test_rearrangement_follows_the_sums_of_gradients(seed: int) -> None:
    gradients = np.random.default_rng(seed).normal(size=(6, 11)) * np.linspace(0.5, 1.5, 11)
    order = np.argsort(np.square(gradients).sum(0), kind="stable").tolist()
    for count in range(12):
        dropped = order[:count]
        start = np.square(gradients[:, dropped].sum(1)).sum()
        for unit in order[count:] if count else []:
            dropped.append(unit)
            without = gradients[:, dropped].sum(1, keepdims=True) - gradients[:, dropped]
            del dropped[int(np.square(without).sum(0).argmin())]
        assert least_costly_bundles(gradients, count).tolist() == sorted(dropped)
        assert np.square(gradients[:, dropped].sum(1)).sum() <= start + 1e-12


def call_of(inputs: Tensor, targets: Tensor) -> CallTokens:
    return CallTokens("linear", 0, 0, torch.ones(len(inputs), dtype=torch.bool), inputs, targets)


@pytest.mark.parametrize("bundle", [1, 2])
def test_scales_reduce_the_error_of_the_outputs(bundle: int) -> None:
    torch.manual_seed(0)
    linear, x = nn.Linear(24, 5), torch.randn(200, 24, dtype=torch.float64) + 1
    linear.double()
    group = PrunableGroup("group", "heads", 8, 3, bundle, "linear", bundle=bundle)
    kept = (0, 1, 4, 5)
    with torch.no_grad():
        target = linear(x)
        scales = tuned_scales(linear, group, kept, [call_of(x[:90], target[:90]), call_of(x[90:], target[90:])])
        errors = []
        for factors in (np.ones(4), scales):
            scaled = copy.deepcopy(linear)
            columns = scaled_units(LinearWeights(scaled.weight.numpy(), None), group, kept, factors).weight
            scaled.weight.copy_(torch.from_numpy(columns))
            errors.append(float((scaled(x) - target).square().sum()))
        parts = torch.stack([x[:, 3 * u : 3 * u + 3] @ linear.weight[:, 3 * u : 3 * u + 3].T for u in kept], -1)
    # The least squares of one scale for each bundle; a damping of one is small beside the squares of 200 tokens.
    parts = parts.unflatten(-1, (-1, bundle)).sum(-1)
    exact = np.linalg.lstsq(parts.flatten(0, 1).numpy(), (target - linear.bias.detach()).flatten().numpy())[0]
    np.testing.assert_allclose(scales, exact.repeat(bundle), rtol=1e-2)
    assert errors[1] < 0.9 * errors[0]


def test_unstable_scales_are_one() -> None:
    torch.manual_seed(0)
    linear, x = nn.Linear(6, 5, bias=False), torch.randn(50, 6)
    group = PrunableGroup("group", "neurons", 6, 1, 1, "linear")
    with torch.no_grad():
        for factor, expected in ((0.5 * LARGEST, 0.5 * LARGEST), (2 * LARGEST, 1.0)):
            scales = tuned_scales(linear, group, tuple(range(6)), [call_of(x, factor * linear(x))])
            np.testing.assert_allclose(scales, expected, rtol=5e-2)


def test_a_model_that_keeps_all_units_is_the_same(tmp_path: Path) -> None:
    inputs = family_inputs("bert", tmp_path)
    batch = inputs.held_out[0]
    with torch.no_grad():
        expected = inputs.model(**batch).logits
        ranked(FisherPruner, inputs).finish({group.name: group.units for group in inputs.groups}, ignore_progress)
        torch.testing.assert_close(inputs.model(**batch).logits, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", [pytest.param("bert", marks=pytest.mark.zoo), "llama"])
def test_finish_repairs_the_output_of_a_layer(family: str, tmp_path: Path) -> None:
    """The error of the first pruned linear is smaller than without scales."""
    inputs = family_inputs(family, tmp_path)
    group = inputs.groups[0]
    pruner = ranked(FisherPruner, inputs)
    counts = {each.name: each.units for each in inputs.groups} | {group.name: group.units // 2}

    def outputs(model: PreTrainedModel) -> Tensor:
        captured: list[Tensor] = []
        hook = model.get_submodule(str(group.linear)).register_forward_hook(lambda *args: captured.append(args[2]))
        with torch.no_grad():
            for batch in inputs.statistics:
                model(**batch)
        hook.remove()
        masks = [batch["attention_mask"] != 0 for batch in inputs.statistics]
        return torch.cat([output[mask] for output, mask in zip(captured, masks, strict=True)])

    dense = outputs(inputs.model)
    untuned = copy.deepcopy(inputs.model)
    kept = pruner.kept(group, group.units // 2)
    access, path = access_of(untuned), str(group.linear)
    access.set_linear(path, scaled_units(access.linear(path), group, kept, np.ones(len(kept))))
    pruner.finish(counts, ignore_progress)
    error, error_untuned = (float((outputs(model) - dense).square().sum()) for model in (inputs.model, untuned))
    assert error < error_untuned


def test_gradients_choose_other_units_than_weights(tmp_path: Path) -> None:
    inputs = family_inputs("bert", tmp_path)
    group = inputs.groups[1]
    fisher, magnitude = (ranked(method, inputs).kept(group, 22) for method in (FisherPruner, MagnitudePruner))
    assert fisher != magnitude


def row_gradient(
    model: PreTrainedModel, group: PrunableGroup, row: dict[str, Tensor], loss: Callable[..., Tensor]
) -> Tensor:
    """The gradient of one row's loss, from a forward of this row alone."""
    mask = torch.ones(group.bundles, requires_grad=True)
    wide = mask.repeat_interleave(group.bundle * group.width)
    hook = model.get_submodule(str(group.linear)).register_forward_pre_hook(lambda _, args: (args[0] * wide,))
    value = loss(model(**row))
    hook.remove()
    return torch.autograd.grad(value, mask)[0]


def class_loss(outputs: dict[str, Tensor]) -> Tensor:
    logits = outputs["logits"]
    return cross_entropy(logits, logits.argmax(-1))


def regression_loss(outputs: dict[str, Tensor]) -> Tensor:
    return outputs["logits"].sum()


def decisions(classes: int) -> PreTrainedModel:
    model = bert(classes)
    model.config.problem_type = "multi_label_classification"
    return model


def decision_loss(outputs: dict[str, Tensor]) -> Tensor:
    logits = outputs["logits"]
    return torch.nn.functional.softplus(-logits.abs()).sum()  # -log of the probability of the more likely outcome


def span_loss(outputs: dict[str, Tensor]) -> Tensor:
    start, end = outputs["start_logits"], outputs["end_logits"]
    return cross_entropy(start, start.argmax(-1)) + cross_entropy(end, end.argmax(-1))


def token_loss(outputs: dict[str, Tensor]) -> Tensor:
    logits = outputs["logits"][0]
    return cross_entropy(logits, logits.argmax(-1))


CASES_OF_TASKS: dict[str, tuple[Callable[[], PreTrainedModel], tuple[str, ...], Callable[..., Tensor]]] = {
    "classes": (lambda: bert(3), ("logits",), class_loss),
    "regression": (lambda: bert(1), ("logits",), regression_loss),
    "decisions": (lambda: decisions(3), ("logits",), decision_loss),
    "one decision": (lambda: decisions(1), ("logits",), decision_loss),
    "span": (bert_spans, SPAN_ENDS, span_loss),
    "tokens": (lambda: CASES["gpt2"]()[0], ("logits",), token_loss),
    "grouped heads": (lambda: CASES["llama"]()[0], ("logits",), token_loss),
    "layer called several times": (lambda: CASES["albert"]()[0], ("logits",), class_loss),
}


@pytest.mark.parametrize("task", CASES_OF_TASKS)
def test_gradients_equal_those_of_rows_alone(task: str) -> None:
    make, names, loss = CASES_OF_TASKS[task]
    model, batches = make(), [text(seed=1), text(length=5, seed=2)]
    groups = find_groups(model, batches[0])
    with unchanged(model):
        gradients = mask_gradients(model, groups, batches, names, ignore_progress)
    assert all(parameter.requires_grad for parameter in model.parameters())
    for group in groups:
        expected = []
        for batch in batches:
            for index, length in enumerate(batch["attention_mask"].sum(1).tolist()):
                row = {name: value[index : index + 1, :length] for name, value in batch.items()}
                expected.append(row_gradient(model, group, row, loss).numpy())
        np.testing.assert_allclose(gradients[group.name], np.stack(expected), rtol=2e-3, atol=1e-5)
        assert np.abs(gradients[group.name]).max() > 1e-4


def test_losses_of_several_outputs_are_those_of_each() -> None:
    """As many classes as the row has positions are no positions; a number has a gradient beside classes."""
    torch.manual_seed(0)
    outputs = {"topic": torch.randn(2, 3), "score": torch.randn(2, 1), "tags": torch.randn(2, 3, 4)}
    batch = {"attention_mask": torch.tensor([[1, 1, 0], [1, 1, 1]])}
    each = [answer_loss([output], (name,), batch) for name, output in outputs.items()]
    torch.testing.assert_close(answer_loss(list(outputs.values()), tuple(outputs), batch), torch.stack(each).sum(0))
    assert torch.equal(each[0], cross_entropy(outputs["topic"], outputs["topic"].argmax(-1), reduction="none"))
    assert torch.equal(each[1], outputs["score"][:, 0])
    span = answer_loss([outputs["topic"]], ("start_logits",), batch)
    assert span[0] < each[0][0]
    assert span[1] == each[0][1]


def test_several_numbers_count_alike_whatever_their_scale() -> None:
    """The squared gradients have the expectation of those of each number over its deviation."""
    model, batches = bert(2), [text(seed=seed) for seed in range(4)]
    model.config.problem_type = "regression"
    groups = find_groups(model, batches[0])[:1]
    plain = mask_gradients(model, groups, batches, ("logits",), ignore_progress)
    head = model.get_submodule("classifier")
    assert isinstance(head, nn.Linear)
    with torch.no_grad():
        head.weight[1] *= 100
        head.bias[1] *= 100
    scaled = mask_gradients(model, groups, batches, ("logits",), ignore_progress)
    for name in plain:
        np.testing.assert_allclose(scaled[name], plain[name], rtol=1e-2, atol=1e-5)
    assert any(np.abs(gradient).max() > 0 for gradient in plain.values())
