"""Gradients with respect to masks of units: those of each row alone, those that are stored, and losses by output."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel

from compressor.progress import ignore_progress
from compressor.selection.pruners.fisher import answer_loss, mask_gradients
from compressor.tasks.forwards import SPAN_ENDS
from compressor.units import PrunableGroup, find_groups
from tests.selection.pruners.reconstruct.shared import CASES, bert, bert_spans
from tests.unchanged import unchanged
from tests.zoo import text


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
