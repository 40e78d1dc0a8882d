"""The sensitivity of a model to the outputs of linears: gradients row by row, padding, normalisation, draws."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from compressor.errors import ErrorCode, InputError
from compressor.selection.pruners.layerwise import output_sensitivity
from compressor.selection.pruners.layerwise.output_sensitivity import FLOOR, sensitivity_of
from tests.faults import fails_with
from tests.selection.pruners.reconstruct.shared import CASES, albert, bert, bert_spans, with_more_padding
from tests.unchanged import unchanged
from tests.zoo import FAMILIES, text

LINEARS = ["bert.encoder.layer.0.attention.output.dense", "bert.encoder.layer.2.output.dense"]


def normalised(fisher: list[Tensor], masks: list[Tensor]) -> list[Tensor]:
    mean = torch.cat([values[mask] for values, mask in zip(fisher, masks, strict=True)]).mean()
    return [(v / mean + FLOOR) / (1 + FLOOR) * mask for v, mask in zip(fisher, masks, strict=True)]


def row_gradient(model: PreTrainedModel, row: dict[str, Tensor], linear: str, output: int) -> tuple[Tensor, Tensor]:
    """Squared gradient of log p (of the output itself if there is only one) `[positions]`, and p, of one row."""
    outputs: list[Tensor] = []
    handle = model.get_submodule(linear).register_forward_hook(lambda *args: outputs.append(args[2]))
    logits = model(**row).logits[0]
    handle.remove()
    value = logits[0] if len(logits) == 1 else logits.log_softmax(0)[output]
    (gradient,) = torch.autograd.grad(value, outputs[0])
    return gradient[0].square().sum(-1), logits.softmax(0).detach()[output]


@pytest.mark.parametrize("classes", [1, 2, 3])
@pytest.mark.parametrize("linear", LINEARS)
def test_equal_to_gradients_row_by_row(classes: int, linear: str) -> None:
    model, batches = bert(classes), [text(seed=1), text(length=5, seed=2)]
    expected = []
    for batch in batches:
        rows = []
        for index in range(len(batch["input_ids"])):
            row = {name: value[index : index + 1] for name, value in batch.items()}
            terms = [row_gradient(model, row, linear, output) for output in range(classes)]
            if classes == 2:  # p_0 p_1 ||d margin||^2 with the floor on p_0 p_1
                factor = (terms[0][1] * terms[1][1]).clamp(min=0.02) / (terms[0][1] * terms[1][1])
                rows.append(factor * sum(p * squares for squares, p in terms))
            else:
                rows.append(sum(p * squares for squares, p in terms))  # type: ignore[arg-type]
        expected.append(torch.stack(rows))
    masks = [batch["attention_mask"] != 0 for batch in batches]
    with unchanged(model):
        weights = sensitivity_of(model, batches, LINEARS, ("logits",)).weights
    assert all(parameter.requires_grad for parameter in model.parameters())
    for actual, wanted in zip(weights, normalised(expected, masks), strict=True):
        torch.testing.assert_close(actual[linear], [wanted], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("classes", "draws"), [(1, 1), (3, 1), pytest.param(6, 60, marks=pytest.mark.zoo)])
def test_independent_decisions_have_the_information_of_each(classes: int, draws: int) -> None:
    """p (1 - p) times the squared gradient of each logit: exactly for few classes, else in expectation."""
    model, batch = bert(classes), text()
    model.config.problem_type = "multi_label_classification"
    linear = LINEARS[1]
    rows = []
    for index in range(len(batch["input_ids"])):
        row = {name: value[index : index + 1] for name, value in batch.items()}
        outputs: list[Tensor] = []
        handle = model.get_submodule(linear).register_forward_hook(lambda *args, kept=outputs: kept.append(args[2]))
        logits = model(**row).logits[0]
        handle.remove()
        variances = (logits.sigmoid() * (1 - logits.sigmoid())).detach().clamp(min=0.02)
        gradients = [torch.autograd.grad(logit, outputs[0], retain_graph=True)[0][0] for logit in logits]
        rows.append(torch.stack([v * g.square().sum(-1) for v, g in zip(variances, gradients, strict=True)]).sum(0))
    (wanted,) = normalised([torch.stack(rows)], [batch["attention_mask"] != 0])
    weights = [
        sensitivity_of(model, [batch], [linear], ("logits",), seed).weights[0][linear][0] for seed in range(draws)
    ]
    mean = torch.stack(weights).mean(0)
    if draws == 1:
        torch.testing.assert_close(mean, wanted, rtol=1e-4, atol=1e-6)
    else:
        assert float(torch.corrcoef(torch.stack([mean.flatten(), wanted.flatten()]))[0, 1]) > 0.95


@pytest.mark.parametrize("classes", [1, 2, 3])
def test_padding_has_no_influence(classes: int) -> None:
    model, batch = bert(classes), text()
    (plain,) = sensitivity_of(model, [batch], LINEARS, ("logits",)).weights
    (padded,) = sensitivity_of(model, [with_more_padding(batch)], LINEARS, ("logits",)).weights
    for name in LINEARS:
        torch.testing.assert_close(padded[name][0][:, :7], plain[name][0], rtol=1e-4, atol=1e-6)
        assert padded[name][0][:, 7:].count_nonzero() == 0
        assert plain[name][0][-1, -2:].count_nonzero() == 0


@pytest.mark.parametrize("name", ["gpt2", "t5", "bart", "vit", "whisper", "albert"])
def test_mean_is_one_over_kept_tokens(name: str) -> None:
    model, batch = CASES[name]()
    linears = [path for path, _ in model.named_modules() if path.endswith(("wo", "fc2", "c_proj", "ffn_output", ".o"))]
    (weights,) = sensitivity_of(model, [batch], linears, ("logits",)).weights
    for path in linears:
        kept = torch.cat([call[call > 0] for call in weights[path]])
        assert float(kept.mean()) == pytest.approx(1.0, abs=1e-4)
        assert float(kept.min()) >= FLOOR / (1 + FLOOR) - 1e-6


def test_each_call_of_a_shared_layer_has_weights() -> None:
    model, batch = albert()
    name = "albert.encoder.albert_layer_groups.0.albert_layers.0.ffn_output"
    (weights,) = sensitivity_of(model, [batch], [name], ("logits",)).weights
    assert [tuple(call.shape) for call in weights[name]] == [(3, 7)] * 3


def test_an_encoder_decoder_has_the_padding_of_each_side() -> None:
    model, batch = FAMILIES["bart"](0)
    sides = ["model.encoder.layers.0.fc2", "model.decoder.layers.0.fc2"]
    (weights,) = sensitivity_of(model, [batch], sides, ("logits",)).weights
    assert torch.equal(weights[sides[0]][0] > 0, batch["attention_mask"] > 0)
    assert torch.equal(weights[sides[1]][0] > 0, batch["decoder_attention_mask"] > 0)


def test_draws_repeat_for_a_seed() -> None:
    model, batch = bert_spans(), text()
    names = ("start_logits", "end_logits")
    first, repeated, reseeded = (sensitivity_of(model, [batch], LINEARS, names, seed).weights[0] for seed in (0, 0, 1))
    torch.testing.assert_close(first, repeated, rtol=0, atol=0)
    assert not torch.equal(first[LINEARS[0]][0], reseeded[LINEARS[0]][0])


def test_a_linear_without_influence_has_uniform_weights() -> None:
    model, batch = bert(2), text()
    torch.nn.init.zeros_(model.get_parameter("classifier.weight"))
    (weights,) = sensitivity_of(model, [batch], LINEARS, ("logits",)).weights
    assert torch.equal(weights[LINEARS[0]][0], batch["attention_mask"].float())


def test_many_classes_are_sampled() -> None:
    model, batch = bert(6), text()
    drawn = [sensitivity_of(model, [batch], LINEARS, ("logits",), seed).weights[0][LINEARS[1]][0] for seed in range(60)]
    exact = sampled_exactly(model, batch, LINEARS[1])
    assert float(torch.corrcoef(torch.stack([torch.stack(drawn).mean(0).flatten(), exact.flatten()]))[0, 1]) > 0.95


def sampled_exactly(model: PreTrainedModel, batch: dict[str, Tensor], linear: str) -> Tensor:
    rows = []
    for index in range(len(batch["input_ids"])):
        row = {name: value[index : index + 1] for name, value in batch.items()}
        terms = [row_gradient(model, row, linear, output) for output in range(6)]
        rows.append(torch.stack([p * squares for squares, p in terms]).sum(0))
    return torch.stack(rows) * batch["attention_mask"]


def row_gradients(model: PreTrainedModel, row: dict[str, Tensor], linear: str) -> Tensor:
    """Gradients of the difference of two logits, `[positions, out]`, times the square root of p(1-p), of one row."""
    outputs: list[Tensor] = []
    handle = model.get_submodule(linear).register_forward_hook(lambda *args: outputs.append(args[2]))
    logits = model(**row).logits[0]
    handle.remove()
    (gradient,) = torch.autograd.grad(logits[1] - logits[0], outputs[0])
    return gradient[0] * logits.softmax(0).prod().detach().clamp(min=0.02).sqrt()


@pytest.mark.parametrize("linear", LINEARS)
def test_the_metric_is_the_sum_of_outer_products_of_gradients(linear: str) -> None:
    model, batches = bert(2), [text(seed=1), text(length=5, seed=2)]
    gradients = []
    for batch in batches:
        for index in range(len(batch["input_ids"])):
            row = {name: value[index : index + 1] for name, value in batch.items()}
            gradients.append(row_gradients(model, row, linear)[batch["attention_mask"][index] != 0])
    expected = torch.cat(gradients).double()
    expected = expected.T @ expected
    metric = torch.from_numpy(sensitivity_of(model, batches, LINEARS, ("logits",)).metrics[linear])
    torch.testing.assert_close(metric, expected * len(expected) / expected.trace(), rtol=1e-3, atol=1e-5)


def test_padding_has_no_influence_on_the_metric() -> None:
    model, batch = bert(2), text()
    plain, padded = (sensitivity_of(model, [rows], LINEARS, ("logits",)) for rows in (batch, with_more_padding(batch)))
    for name in LINEARS:
        np.testing.assert_allclose(padded.metrics[name], plain.metrics[name], rtol=1e-3, atol=1e-5)


def test_a_linear_without_influence_has_the_identity_as_metric() -> None:
    model, batch = bert(2), text()
    torch.nn.init.zeros_(model.get_parameter("classifier.weight"))
    metric = sensitivity_of(model, [batch], LINEARS, ("logits",)).metrics[LINEARS[0]]
    np.testing.assert_array_equal(metric, np.eye(len(metric)))


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("classes", [1, 2, 3])
def test_parts_of_a_batch_equal_the_whole(classes: int, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model, batches = bert(classes), [text(seed=1), text(length=5, seed=2)]
    whole = sensitivity_of(model, batches, LINEARS, ("logits",))
    monkeypatch.setattr(output_sensitivity, "_ROWS", rows)
    parts = sensitivity_of(model, batches, LINEARS, ("logits",))
    for name in LINEARS:
        # An entry is a sum in float32 whose terms cancel; the mean of the diagonal, one, is their scale.
        np.testing.assert_allclose(parts.metrics[name], whole.metrics[name], rtol=1e-4, atol=1e-5)
        for actual, expected in zip(parts.weights, whole.weights, strict=True):
            torch.testing.assert_close(actual[name], expected[name], rtol=1e-4, atol=1e-6)


def test_an_output_that_is_not_finite_is_refused() -> None:
    model = bert(7)
    with torch.no_grad():
        model.get_parameter("bert.embeddings.word_embeddings.weight")[5] = torch.nan
    batch = {"input_ids": torch.full((2, 4), 5), "attention_mask": torch.ones(2, 4, dtype=torch.long)}
    with fails_with(ErrorCode.NOT_FINITE, InputError):
        sensitivity_of(model, [batch], LINEARS, ("logits",))


def test_terms_of_several_outputs_have_the_information_of_each() -> None:
    """The mean of squared gradients over many draws is the trace of the Fisher information, p (1 - p) for logits."""
    torch.manual_seed(0)
    values = {"topic": torch.randn(1, 5), "score": torch.randn(1, 1), "tags": torch.randn(1, 3, 4)}
    draws, rows = 4000, 100  # each row has draws of its own
    batch = {"attention_mask": torch.tensor([[1, 1, 0]] * rows)}
    squares = {name: torch.zeros_like(value) for name, value in values.items()}
    generator = torch.Generator().manual_seed(0)
    random = output_sensitivity.ScoredForwards(bert(2), tuple(values), generator, None, None)
    for _ in range(draws // 2 // rows):
        inputs = [torch.cat([value] * rows).requires_grad_() for value in values.values()]
        for term, weight in output_sensitivity.scored_terms(inputs, batch, random):
            for name, gradient in zip(values, torch.autograd.grad(term.sum(), inputs), strict=True):
                squares[name] += torch.einsum("r...,r->...", gradient.square(), weight)
    p, tags = values["topic"].softmax(-1), values["tags"].softmax(-1)
    torch.testing.assert_close(squares["topic"] / (draws // 2), p * (1 - p), rtol=0.15, atol=0.01)
    assert squares["score"].item() / (draws // 2) == pytest.approx(1)
    expected = tags * (1 - tags) / 2 * torch.tensor([1.0, 1.0, 0.0])[None, :, None]
    torch.testing.assert_close(squares["tags"] / (draws // 2), expected, rtol=0.15, atol=0.01)
