"""Removal by second order: units in the order of a direct search, weights and errors of a least-squares solver."""

from __future__ import annotations

import numpy as np
import pytest

from compressor.errors import ErrorCode
from compressor.selection.pruners.layerwise.refit import Gram
from compressor.selection.pruners.reconstruct.second_order import Removal, reconstruct, removal_order
from compressor.units.prunable import LinearWeights, unit_columns
from tests.faults import fails_with

DAMP = 0.01


def draw(seed: int, inputs: int = 12, outputs: int = 5) -> tuple[np.ndarray, np.ndarray]:
    """Correlated inputs `[tokens, inputs]` with a mean, and a weight `[outputs, inputs]`."""
    random = np.random.default_rng(seed)
    mixing = random.standard_normal((inputs, inputs)) * random.uniform(0.1, 2, inputs)
    rows = random.standard_normal((60, inputs)) @ mixing + random.standard_normal(inputs)
    return rows, random.standard_normal((outputs, inputs))


def gram_of(inputs: np.ndarray, *, has_ones: bool) -> Gram:
    rows = np.column_stack([inputs, np.ones(len(inputs))]) if has_ones else inputs
    return Gram(rows.T @ rows, has_ones)


def damped_rows(inputs: np.ndarray, *, has_ones: bool, damp: float = DAMP) -> np.ndarray:
    """Inputs with a column of ones, and rows whose squares are the damping."""
    width = inputs.shape[1]
    rows = np.vstack([inputs, np.sqrt(damp * (inputs**2).sum(0).mean()) * np.eye(width)])
    return np.column_stack([rows, np.repeat([1.0, 0.0], [len(inputs), width])]) if has_ones else rows


def least_squares(
    inputs: np.ndarray, weight: np.ndarray, columns: np.ndarray, *, has_ones: bool, damp: float = DAMP
) -> tuple[np.ndarray, np.ndarray]:
    """Weight on `columns` and change of the bias by numpy's solver."""
    rows = damped_rows(inputs, has_ones=has_ones, damp=damp)
    kept = np.append(columns, [inputs.shape[1]] * has_ones).astype(int)
    solution = np.linalg.lstsq(rows[:, kept], rows[:, : inputs.shape[1]] @ weight.T, rcond=None)[0].T
    fitted = np.zeros((len(weight), rows.shape[1]))
    fitted[:, kept] = solution
    return fitted[:, : inputs.shape[1]], fitted[:, -1] if has_ones else np.zeros(len(weight))


def relative_error(inputs: np.ndarray, weight: np.ndarray, changed: np.ndarray, bias_change: np.ndarray) -> float:
    error = inputs @ (changed - weight).T + bias_change
    return float(np.linalg.norm(error) / np.linalg.norm(inputs @ weight.T))


def error_with(
    inputs: np.ndarray, weight: np.ndarray, removal: Removal, count: int, *, has_ones: bool, damp: float = DAMP
) -> float:
    """The relative error of the weights that are reconstructed for `count` kept units."""
    columns = unit_columns(removal.kept(count), weight.shape[1] // len(removal.order))
    bias = np.zeros(len(weight)) if has_ones else None
    result = reconstruct(LinearWeights(weight, bias), gram_of(inputs, has_ones=has_ones), columns, damp=damp)
    return relative_error(inputs, weight, result.weight, np.zeros(len(weight)) if result.bias is None else result.bias)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("has_ones", [False, True])
@pytest.mark.parametrize(("units", "together"), [(12, 1), (12, 5), (4, 1), (4, 3), (1, 1)])
def test_errors_are_those_of_least_squares(seed: int, has_ones: bool, units: int, together: int) -> None:
    inputs, weight = draw(seed)
    removal = removal_order(weight, gram_of(inputs, has_ones=has_ones), units, together=together, damp=DAMP)

    assert sorted(removal.order) == list(range(units))
    for count in range(units + 1):
        columns = unit_columns(removal.kept(count), 12 // units)
        fitted = least_squares(inputs, weight, columns, has_ones=has_ones)
        error = error_with(inputs, weight, removal, count, has_ones=has_ones)
        assert error == pytest.approx(relative_error(inputs, weight, *fitted), abs=1e-7)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("has_ones", [False, True])
@pytest.mark.parametrize("units", [12, 4])
@pytest.mark.parametrize("with_metric", [False, True])
def test_each_removed_unit_costs_least(seed: int, has_ones: bool, units: int, with_metric: bool) -> None:
    inputs, weight = draw(seed)
    root = np.random.default_rng(seed).standard_normal((2, 5)) if with_metric else np.eye(5)
    rows = damped_rows(inputs, has_ones=has_ones)

    def damped_error(kept: list[int]) -> float:
        changed, bias = least_squares(inputs, weight, unit_columns(kept, 12 // units), has_ones=has_ones)
        change = np.column_stack([changed - weight, bias]) if has_ones else changed - weight
        return float(np.linalg.norm(root @ change @ rows.T))

    kept, order = list(range(units)), []
    while kept:
        best = min(kept, key=lambda unit: damped_error([rest for rest in kept if rest != unit]))
        kept.remove(best)
        order.append(best)

    metric = root.T @ root if with_metric else None
    gram = gram_of(inputs, has_ones=has_ones)
    for together in (1, 4):
        assert removal_order(weight, gram, units, together=together, damp=DAMP, metric=metric).order == tuple(order)


@pytest.mark.parametrize("units", [12, 4])
def test_the_order_is_that_of_the_metric(units: int) -> None:
    """With a metric that sees one output alone, units go as in a linear without the others."""
    inputs, weight = draw(0)
    gram = gram_of(inputs, has_ones=True)
    removal = removal_order(weight, gram, units, metric=np.diag([1.0, 0, 0, 0, 0]))
    expected = removal_order(weight[:1], gram, units)
    assert removal.order == expected.order != removal_order(weight, gram, units).order


@pytest.mark.parametrize("units", [12, 4])
@pytest.mark.parametrize("together", [1, 2])
def test_a_redundant_unit_goes_first_and_its_twin_does_not_follow(units: int, together: int) -> None:
    inputs, weight = draw(0)
    width = 12 // units
    first, second = unit_columns([1], width), unit_columns([2], width)
    inputs[:, second] = inputs[:, first]
    weight[:, first] *= 10
    weight[:, second] = 0.5 * weight[:, first]
    removal = removal_order(weight, gram_of(inputs, has_ones=False), units, together=together, damp=1e-7)
    assert removal.order[0] in {1, 2}
    assert removal.order[1] not in {1, 2}
    assert error_with(inputs, weight, removal, units - 1, has_ones=False, damp=1e-7) < 1e-6


@pytest.mark.parametrize("together", [1, 6])
def test_neurons_that_are_always_zero_go_before_all_others(together: int) -> None:
    inputs, weight = draw(0)
    inputs[:, [3, 7, 8]] = 0
    removal = removal_order(weight, gram_of(inputs, has_ones=False), 12, together=together)
    assert set(removal.order[:3]) == {3, 7, 8}


def test_a_duplicate_moves_into_the_other_column() -> None:
    inputs, weight = draw(0)
    inputs[:, 5] = inputs[:, 2]
    result = reconstruct(
        LinearWeights(weight, None), gram_of(inputs, has_ones=False), np.delete(np.arange(12), 5), damp=1e-9
    )
    expected = weight.copy()
    expected[:, 2] += expected[:, 5]
    expected[:, 5] = 0
    assert result.weight == pytest.approx(expected, abs=1e-6)
    assert result.bias is None


def test_a_constant_column_moves_into_the_bias() -> None:
    inputs, weight = draw(0)
    inputs[:, 5] = 3.0
    bias = np.arange(5.0)
    result = reconstruct(
        LinearWeights(weight, bias), gram_of(inputs, has_ones=True), np.delete(np.arange(12), 5), damp=1e-9
    )
    assert result.bias == pytest.approx(bias + 3 * weight[:, 5], abs=1e-6)
    removal = removal_order(weight, gram_of(inputs, has_ones=True), 12, damp=1e-9)
    assert removal.order[0] == 5
    assert error_with(inputs, weight, removal, 11, has_ones=True, damp=1e-9) < 1e-6


@pytest.mark.parametrize("has_ones", [False, True])
@pytest.mark.parametrize("columns", [[], [4], [0, 3, 11], list(range(12))])
def test_reconstruction_is_least_squares(has_ones: bool, columns: list[int]) -> None:
    inputs, weight = draw(1)
    bias = np.arange(5.0) if has_ones else None
    result = reconstruct(LinearWeights(weight, bias), gram_of(inputs, has_ones=has_ones), np.array(columns), damp=DAMP)
    expected, bias_change = least_squares(inputs, weight, np.array(columns), has_ones=has_ones)
    assert result.weight == pytest.approx(expected, abs=1e-8)
    assert (result.bias is None) == (bias is None)
    if result.bias is not None:
        assert result.bias == pytest.approx(np.arange(5.0) + bias_change, abs=1e-8)


def test_without_units_the_mean_output_remains_in_the_bias() -> None:
    inputs, weight = draw(1)
    gram = gram_of(inputs, has_ones=True)
    removal = removal_order(weight, gram, 12)
    result = reconstruct(LinearWeights(weight, np.zeros(5)), gram, np.array([], int))
    assert not result.weight.any()
    assert result.bias == pytest.approx(weight @ inputs.mean(0))
    assert error_with(inputs, weight, removal, 0, has_ones=True) < 1
    assert error_with(inputs, weight, removal, 0, has_ones=False) == pytest.approx(1)


def test_the_damping_is_raised_until_the_matrix_has_a_factor() -> None:
    inputs, weight = draw(0)
    inputs[:, 5] = 0
    gram = gram_of(inputs, has_ones=True)
    removal = removal_order(weight, gram, 12, damp=0)
    result = reconstruct(LinearWeights(weight, np.zeros(5)), gram, np.arange(6), damp=0)
    assert 0 < removal.damp < DAMP
    assert 0 < result.damp < DAMP
    assert removal.order[0] == 5
    assert removal_order(weight, gram, 12, damp=DAMP).damp == DAMP


def test_inputs_that_are_all_zero_lose_nothing() -> None:
    weight, gram = draw(0)[1], gram_of(np.zeros((20, 12)), has_ones=False)
    removal = removal_order(weight, gram, 4)
    assert sorted(removal.order) == list(range(4))
    for count in range(5):
        columns = unit_columns(removal.kept(count), 3)
        result = reconstruct(LinearWeights(weight, None), gram, columns)
        assert (result.weight[:, columns] == weight[:, columns]).all()
        assert not np.delete(result.weight, columns, axis=1).any()


def test_sums_without_tokens_are_refused() -> None:
    with fails_with(ErrorCode.INVALID_ROWS):
        removal_order(draw(0)[1], Gram(np.zeros((13, 13)), has_ones=True), 12)


def test_sums_that_are_not_finite_are_refused() -> None:
    inputs, weight = draw(0)
    inputs[0, 0] = np.nan
    with fails_with(ErrorCode.NOT_FINITE):
        removal_order(weight, gram_of(inputs, has_ones=False), 12)


def test_kept_units_are_nested_and_ascending() -> None:
    inputs, weight = draw(0)
    removal = removal_order(weight, gram_of(inputs, has_ones=False), 4)
    assert removal.kept(4) == (0, 1, 2, 3)
    assert removal.kept(0) == ()
    assert removal.kept(2) == tuple(sorted(removal.order[2:]))
