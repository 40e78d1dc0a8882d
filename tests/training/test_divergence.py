"""KL of outputs per row: literal values, and no influence of padding."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from compressor.answers import EMBEDDING, AnswerKind
from compressor.training.divergence import distributions, divergence, fisher_outputs

LOG3 = math.log(3)
EVEN_TO_QUARTERS = 0.5 * math.log(0.5 / 0.75) + 0.5 * math.log(0.5 / 0.25)
"""KL of (1/2, 1/2) from (3/4, 1/4)."""


def test_classes() -> None:
    dense, changed = torch.tensor([[0.0, 0.0], [1.0, 1.0]]), torch.tensor([[LOG3, 0.0], [2.0, 2.0]])
    rows = divergence({"logits": dense}, {"logits": changed}, ("logits",), {})
    assert rows.tolist() == pytest.approx([EVEN_TO_QUARTERS, 0.0], abs=1e-7)
    assert rows.dtype == torch.float64


@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_the_temperature_divides_logits_and_its_square_multiplies_the_divergence(temperature: float) -> None:
    dense, changed = torch.randn(2, 5, 3, generator=torch.Generator().manual_seed(0)).double()
    rows = divergence({"logits": dense}, {"logits": changed}, ("logits",), {}, temperature=temperature)
    softer = divergence({"logits": dense / temperature}, {"logits": changed / temperature}, ("logits",), {})
    torch.testing.assert_close(rows, temperature**2 * softer)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_spans_with_padding_have_a_divergence_at_any_temperature(temperature: float, dtype: torch.dtype) -> None:
    mask = torch.tensor([[1, 1, 0]])
    dense, changed = ({"start_logits": torch.tensor([[x, 0.0, 9.0]]), "end_logits": torch.zeros(1, 3)} for x in (0, 1))
    settings: dict[str, Any] = {"temperature": temperature, "dtype": dtype}
    rows = divergence(dense, changed, tuple(dense), {"attention_mask": mask}, **settings)
    dense_start, changed_start = ({"logits": outputs["start_logits"][:, :2]} for outputs in (dense, changed))
    torch.testing.assert_close(rows, divergence(dense_start, changed_start, ("logits",), {}, **settings))


def test_numbers_and_embeddings_have_no_temperature() -> None:
    for name, width in (("logits", 1), (EMBEDDING, 4)):
        dense, changed = torch.randn(2, 5, width, generator=torch.Generator().manual_seed(0))
        cold, warm = (
            divergence({name: dense}, {name: changed}, (name,), {}, temperature=temperature) for temperature in (1, 2)
        )
        assert torch.equal(cold, warm)
        assert cold.sum() > 0


def test_spans_sum_start_and_end_without_padding() -> None:
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]])
    dense = {"start_logits": torch.tensor([[0.0, 0.0, 9.0], [0.0, 0.0, 0.0]]), "end_logits": torch.zeros(2, 3)}
    changed = {
        "start_logits": torch.tensor([[LOG3, 0.0, -9.0], [0.0, 0.0, 0.0]]),
        "end_logits": torch.tensor([[0.0, LOG3, 7.0], [0.0, 0.0, 0.0]]),
    }
    rows = divergence(dense, changed, ("start_logits", "end_logits"), {"attention_mask": mask})
    assert rows.tolist() == pytest.approx([2 * EVEN_TO_QUARTERS, 0.0], abs=1e-7)


@pytest.mark.parametrize(
    "batch",
    [
        {"attention_mask": torch.tensor([[1, 1, 0], [0, 0, 0]])},
        {"labels": torch.tensor([[7, 8, -100], [-100, -100, -100]]), "attention_mask": torch.ones(2, 3)},
        {
            "decoder_attention_mask": torch.tensor([[1, 1, 0], [0, 0, 0]]),
            "decoder_input_ids": torch.ones(2, 3),
            "attention_mask": torch.ones(2, 3),
        },
    ],
    ids=["attention_mask", "labels", "decoder"],
)
def test_language_models_average_positions(batch: dict[str, Tensor]) -> None:
    dense = torch.zeros(2, 3, 2)
    changed = torch.tensor([[[LOG3, 0.0], [0.0, 0.0], [50.0, 0.0]], [[50.0, 0.0]] * 3])
    rows = divergence({"logits": dense}, {"logits": changed}, ("logits",), batch)
    assert rows.tolist() == pytest.approx([EVEN_TO_QUARTERS / 2, 0.0], abs=1e-7)


def test_a_decoder_without_mask_keeps_all_positions() -> None:
    batch = {"attention_mask": torch.zeros(1, 3), "decoder_input_ids": torch.ones(1, 3)}
    changed = torch.tensor([[[LOG3, 0.0]] * 3])
    rows = divergence({"logits": torch.zeros(1, 3, 2)}, {"logits": changed}, ("logits",), batch)
    assert rows.tolist() == pytest.approx([EVEN_TO_QUARTERS])


@pytest.mark.parametrize("shape", [(2,), (2, 1)])
def test_regression_divides_by_the_variance(shape: tuple[int, ...]) -> None:
    dense, changed = torch.tensor([1.0, 5.0]).reshape(shape), torch.tensor([1.0, 7.0]).reshape(shape)
    outputs, changed_outputs = {"logits": dense}, {"logits": changed}
    assert divergence(outputs, changed_outputs, ("logits",), {}).tolist() == [0.0, 1.0]
    assert divergence(outputs, changed_outputs, ("logits",), {}, variance=2.0).tolist() == [0.0, 2.0]


def test_several_numbers_are_divided_by_their_own_variance_and_summed() -> None:
    dense = torch.tensor([[1.0, 100.0], [5.0, 300.0]])
    changed = torch.tensor([[1.0, 100.0], [7.0, 500.0]])
    kind = AnswerKind.NUMBERS
    rows = divergence({"logits": dense}, {"logits": changed}, ("logits",), {}, kind=kind, temperature=2)
    assert rows.tolist() == [0.0, 1.0 + 4.0]
    variance = torch.tensor([2.0, 1e4])
    assert divergence({"logits": dense}, {"logits": changed}, ("logits",), {}, variance, kind=kind).tolist() == [0, 6]


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_independent_decisions_have_the_sum_of_their_divergences(temperature: float) -> None:
    dense, changed = torch.randn(2, 5, 3, generator=torch.Generator().manual_seed(0)).double()
    rows, of_classes = (
        divergence({"logits": dense}, {"logits": changed}, ("logits",), {}, kind=kind, temperature=temperature)
        for kind in (AnswerKind.CLASSES, None)
    )
    p, q = (torch.distributions.Bernoulli(logits=logits / temperature) for logits in (dense, changed))
    torch.testing.assert_close(rows, temperature**2 * torch.distributions.kl_divergence(p, q).sum(1))
    assert not torch.allclose(rows, of_classes)


def test_a_single_decision_is_no_number() -> None:
    dense, changed = torch.tensor([[0.0], [30.0]]), torch.tensor([[0.0], [40.0]])
    rows = divergence({"logits": dense}, {"logits": changed}, ("logits",), {}, kind=AnswerKind.CLASSES)
    assert rows.tolist() == pytest.approx([0.0, 0.0], abs=1e-9)


def test_outputs_of_another_name_have_no_kind_of_the_model() -> None:
    dense, changed = torch.randn(2, 5, 3, generator=torch.Generator().manual_seed(0))
    values = [
        divergence({"document_scores": dense}, {"document_scores": changed}, ("document_scores",), {}, kind=kind)
        for kind in (None, AnswerKind.CLASSES, AnswerKind.NUMBERS)
    ]
    assert torch.equal(values[0], values[1])
    assert torch.equal(values[0], values[2])


def test_embeddings_differ_by_their_cosine() -> None:
    dense = torch.tensor([[2.0, 0.0], [1.0, 1.0], [0.0, 3.0]])
    changed = torch.tensor([[5.0, 0.0], [1.0, 0.0], [0.0, -1.0]])
    rows = divergence({EMBEDDING: dense}, {EMBEDDING: changed}, (EMBEDDING,), {})
    assert rows.tolist() == pytest.approx([0, 1 - math.sqrt(0.5), 2])


def test_the_fisher_information_of_embeddings_is_that_of_their_cosine() -> None:
    start = torch.tensor([3.0, 4.0, 0.0])

    def distance(embedding: Tensor) -> Tensor:
        return divergence({EMBEDDING: start[None]}, {EMBEDDING: embedding[None]}, (EMBEDDING,), {}).sum()

    expected = torch.autograd.functional.hessian(distance, start.double())
    embeddings = start.repeat(2000, 1).requires_grad_()
    (rows,) = fisher_outputs({EMBEDDING: embeddings}, (EMBEDDING,), torch.Generator().manual_seed(0))
    (gradients,) = torch.autograd.grad(rows.sum(), embeddings)
    assert torch.allclose((gradients.T @ gradients).double() / len(rows), expected, atol=5e-3)


def test_several_outputs_of_classes_have_no_padding() -> None:
    """As many classes as the row has positions are no positions."""
    dense = {"topic": torch.zeros(1, 3), "mood": torch.tensor([[0.0, 0.0, 50.0]])}
    changed = {"topic": torch.zeros(1, 3), "mood": torch.tensor([[50.0, 0.0, 0.0]])}
    batch = {"attention_mask": torch.tensor([[1, 1, 0]])}
    assert divergence(dense, changed, ("topic", "mood"), batch).item() == pytest.approx(50)
    kept = distributions(list(dense.values()), tuple(dense), batch)
    assert all(torch.equal(logits, dense[name]) for name, logits in zip(dense, kept, strict=True))


def test_vectors_differ_by_half_their_squared_distance_over_the_squared_norm() -> None:
    dense, changed = torch.tensor([[3.0, 4.0], [0.0, 1.0]]), torch.tensor([[3.0, 9.0], [1.0, 0.0]])
    rows = divergence({"out": dense}, {"out": changed}, ("out",), {}, kind=AnswerKind.VECTOR, temperature=2)
    assert rows.tolist() == [0.5, 1.0]


@pytest.mark.parametrize("shape", [(2, 5), (2, 3, 5), (2, 3, 5, 7)])
def test_vectors_of_norm_one_differ_by_their_cosine(shape: tuple[int, ...]) -> None:
    dense, changed = (
        torch.nn.functional.normalize(values.flatten(1)).reshape(shape)
        for values in torch.randn(2, *shape, generator=torch.Generator().manual_seed(0)).double()
    )
    rows = divergence({"out": dense}, {"out": changed}, ("out",), {}, kind=AnswerKind.VECTOR)
    torch.testing.assert_close(rows, 1 - (dense * changed).flatten(1).sum(1))


def test_padded_positions_of_vectors_have_no_influence() -> None:
    batch = {"attention_mask": torch.tensor([[1, 1, 0], [0, 1, 1]])}
    dense, changed = torch.randn(2, 2, 3, 4, generator=torch.Generator().manual_seed(0))
    spoilt = changed.masked_fill(batch["attention_mask"][..., None] == 0, torch.nan)
    first, second = (
        divergence({"out": dense}, {"out": values}, ("out",), batch, kind=AnswerKind.VECTOR)
        for values in (changed, spoilt)
    )
    assert torch.equal(first, second)
    assert (first > 0).all()


def test_the_fisher_information_of_vectors_is_that_of_their_divergence() -> None:
    batch = {"attention_mask": torch.tensor([[1, 1, 0]])}
    start = torch.randn(1, 3, 2, generator=torch.Generator().manual_seed(0))
    generator, squares, draws = torch.Generator().manual_seed(0), torch.zeros(6), 400
    for _ in range(draws):
        states = start.clone().requires_grad_()
        (value,) = fisher_outputs({"out": states}, ("out",), generator, kind=AnswerKind.VECTOR, batch=batch)
        (gradient,) = torch.autograd.grad(value.sum(), states)
        squares += gradient.flatten().square() / draws

    def loss(states: Tensor) -> Tensor:
        outputs = {"out": states.reshape(1, 3, 2)}
        return divergence({"out": start}, outputs, ("out",), batch, kind=AnswerKind.VECTOR, dtype=torch.float32).sum()

    hessian = torch.autograd.functional.hessian(loss, start.flatten())
    assert isinstance(hessian, Tensor)
    torch.testing.assert_close(squares, hessian.diagonal(), rtol=0.1, atol=1e-6)
