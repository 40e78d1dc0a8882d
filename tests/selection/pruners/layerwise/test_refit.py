"""Refitting: sums do not depend on how tokens are streamed, and the weights are those of a direct ridge regression."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import SafetensorError

from compressor.errors import ErrorCode
from compressor.selection.pruners.layerwise.refit import Gram, RefitSums, StoredGrams, write_grams
from compressor.selection.pruners.reconstruct.second_order import reconstruct
from compressor.units.prunable import LinearWeights
from tests.faults import fails_with

TOKENS, INPUTS, OUTPUTS = 80, 6, 4
COLUMNS = np.array([0, 2, 5])


def draw(seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Inputs, targets and token weights, float64."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(TOKENS, INPUTS, generator=generator, dtype=torch.float64) + 1
    targets = torch.randn(TOKENS, OUTPUTS, generator=generator, dtype=torch.float64) + inputs[:, :OUTPUTS]
    return inputs, targets, torch.rand(TOKENS, generator=generator, dtype=torch.float64)


def sums_of(
    inputs: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor | None, *, has_ones: bool = True
) -> RefitSums:
    sums = RefitSums(inputs.shape[-1], OUTPUTS, has_ones=has_ones)
    sums.add(inputs, targets, weights)
    return sums


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("has_ones", [False, True])
@pytest.mark.parametrize("columns", [np.arange(INPUTS), COLUMNS, np.array([], int)])
def test_a_refit_is_ridge_regression(seed: int, has_ones: bool, columns: np.ndarray) -> None:
    inputs, targets, weights = draw(seed)
    start = np.random.default_rng(seed).standard_normal((OUTPUTS, len(columns)))
    bias = np.ones(OUTPUTS) if has_ones else None
    sums = sums_of(inputs[:, columns], targets, weights, has_ones=has_ones)
    refit = sums.solve(LinearWeights(start, bias), ridge=0.02)

    scale = np.sqrt(weights.numpy())[:, None]
    kept = inputs.numpy()[:, columns]
    penalty = np.sqrt(0.02 * ((scale * kept) ** 2).sum(0).mean()) if len(columns) else 0.0
    rows = np.vstack([scale * kept, penalty * np.eye(len(columns))])
    if has_ones:
        rows = np.column_stack([rows, np.append(scale, np.zeros(len(columns)))])
    right = np.vstack([scale * targets.numpy(), penalty * start.T])
    expected = np.linalg.lstsq(rows, right, rcond=None)[0].T

    assert refit.weight == pytest.approx(expected[:, : len(columns)], abs=1e-9)
    assert (refit.bias is None) == (not has_ones)
    if refit.bias is not None:
        assert refit.bias == pytest.approx(expected[:, -1], abs=1e-9)
    assert refit.damp == 0.02


def test_without_inputs_the_bias_is_the_mean_target() -> None:
    inputs, targets, weights = draw(0)
    sums = RefitSums(0, OUTPUTS, has_ones=True)
    sums.add(inputs[:, :0], targets, weights)
    refit = sums.solve(LinearWeights(np.zeros((OUTPUTS, 0)), np.zeros(OUTPUTS)), ridge=0.02)
    assert refit.bias == pytest.approx((weights @ targets / weights.sum()).numpy())


def test_targets_that_the_weights_reach_give_these_weights() -> None:
    inputs, _, weights = draw(0)
    weight, bias = np.random.default_rng(0).standard_normal((OUTPUTS, INPUTS)), np.arange(4.0)
    targets = inputs @ torch.from_numpy(weight).T + torch.from_numpy(bias)
    refit = sums_of(inputs, targets, weights).solve(LinearWeights(weight, np.zeros(4)), ridge=0.02)
    assert refit.weight == pytest.approx(weight)
    assert refit.bias == pytest.approx(bias)


def test_targets_of_the_dense_linear_give_its_reconstruction() -> None:
    inputs, _, weights = draw(0)
    weight, bias = np.random.default_rng(0).standard_normal((OUTPUTS, INPUTS)), np.arange(4.0)
    sums = sums_of(inputs, inputs @ torch.from_numpy(weight).T + torch.from_numpy(bias), weights)
    kept = sums_of(inputs[:, COLUMNS], inputs @ torch.from_numpy(weight).T + torch.from_numpy(bias), weights)
    refit = kept.solve(LinearWeights(weight[:, COLUMNS], bias), ridge=1e-9)
    expected = reconstruct(LinearWeights(weight, bias), sums.gram, COLUMNS, damp=1e-9)
    assert refit.weight == pytest.approx(expected.weight[:, COLUMNS], abs=1e-6)
    assert refit.bias == pytest.approx(expected.bias, abs=1e-6)


@pytest.mark.parametrize("has_ones", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_pieces_give_the_sums_of_the_whole(has_ones: bool, dtype: torch.dtype, tolerance: float) -> None:
    inputs, targets, weights = (tensor.to(dtype) for tensor in draw(0))
    whole = sums_of(inputs, targets, weights, has_ones=has_ones)
    pieces = RefitSums(INPUTS, OUTPUTS, has_ones=has_ones)
    for part in torch.arange(TOKENS).split(7):
        pieces.add(inputs[part], targets[part], weights[part])
    assert pieces.gram.matrix == pytest.approx(whole.gram.matrix, rel=tolerance)
    start, bias = np.zeros((OUTPUTS, INPUTS)), np.zeros(OUTPUTS) if has_ones else None
    expected = whole.solve(LinearWeights(start, bias), ridge=0.02).weight
    actual = pieces.solve(LinearWeights(start, bias), ridge=0.02).weight
    assert actual == pytest.approx(expected, rel=100 * tolerance)


@pytest.mark.parametrize("has_ones", [False, True])
def test_arrays_give_the_sums_of_tensors(has_ones: bool) -> None:
    tensors = draw(0)
    expected, sums = sums_of(*tensors, has_ones=has_ones), RefitSums(INPUTS, OUTPUTS, has_ones=has_ones)
    for part in range(0, TOKENS, 20):
        sums.add(*(tensor.numpy()[part : part + 20] for tensor in tensors))
    assert sums.gram.matrix == pytest.approx(expected.gram.matrix)
    assert sums.cross == pytest.approx(expected.cross)


def test_the_gram_matrix_ends_with_the_ones() -> None:
    inputs, _, weights = draw(0)
    sums = RefitSums(INPUTS, has_ones=True)
    sums.add(inputs, weights=weights)
    rows = np.column_stack([inputs.numpy(), np.ones(TOKENS)])
    assert sums.gram.matrix == pytest.approx(rows.T @ (weights.numpy()[:, None] * rows))
    assert (sums.gram.has_ones, sums.gram.inputs) == (True, INPUTS)
    assert sums.gram.matrix[-1, -1] == pytest.approx(float(weights.sum()))


def test_batches_of_rows_are_tokens() -> None:
    inputs, targets, weights = draw(0)
    batch = sums_of(inputs.view(8, 10, INPUTS), targets.view(8, 10, OUTPUTS), weights.view(8, 10))
    assert batch.gram.matrix == pytest.approx(sums_of(inputs, targets, weights).gram.matrix)


def test_an_integer_weight_repeats_a_token() -> None:
    inputs, targets, _ = draw(0)
    counts = torch.arange(TOKENS) % 3
    weighted = sums_of(inputs, targets, counts)
    repeated = sums_of(inputs.repeat_interleave(counts, 0), targets.repeat_interleave(counts, 0), None)
    assert weighted.gram.matrix == pytest.approx(repeated.gram.matrix)
    assert weighted.gram.matrix[-1, -1] == pytest.approx(int(counts.sum()))


def test_tokens_of_weight_zero_may_hold_anything() -> None:
    inputs, targets, weights = draw(0)
    weights[:5] = 0
    expected = sums_of(inputs[5:], targets[5:], weights[5:]).gram.matrix
    inputs[:5], targets[:5] = torch.nan, torch.inf
    assert sums_of(inputs, targets, weights).gram.matrix == pytest.approx(expected)


def test_half_precision_is_summed_in_float32() -> None:
    inputs = torch.full((50, INPUTS), 100.0, dtype=torch.float16)
    sums = RefitSums(INPUTS, has_ones=False)
    sums.add(inputs)
    assert (sums.gram.matrix == 500_000).all()


@pytest.mark.parametrize("tensor", [0, 1, 2])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_values_that_are_not_finite_are_refused(tensor: int, value: float) -> None:
    tensors = draw(0)
    tensors[tensor].view(-1)[3] = value
    with fails_with(ErrorCode.NOT_FINITE, count=1):
        sums_of(*tensors)


def test_products_that_overflow_are_refused_by_the_name_of_the_linear() -> None:
    sums = RefitSums(INPUTS, has_ones=True, name="layer.3.dense")
    with fails_with(ErrorCode.NOT_FINITE, linear="layer.3.dense", count=INPUTS**2):
        sums.add(torch.full((4, INPUTS), 1e25))


def test_the_ridge_is_raised_until_the_matrix_has_a_factor() -> None:
    inputs, targets, weights = draw(0)
    inputs[:, 2] = 0
    start = LinearWeights(np.ones((OUTPUTS, INPUTS)), np.zeros(OUTPUTS))
    refit = sums_of(inputs, targets, weights).solve(start, ridge=0)
    assert 0 < refit.damp < 0.02
    assert refit.weight[:, 2] == pytest.approx(1)


def test_a_large_ridge_keeps_the_weights_and_frees_the_bias() -> None:
    inputs, targets, _ = draw(0)
    start = np.random.default_rng(0).standard_normal((OUTPUTS, INPUTS))
    refit = sums_of(inputs, targets, None).solve(LinearWeights(start, np.full(OUTPUTS, 9.0)), ridge=1e9)
    assert refit.weight == pytest.approx(start, abs=1e-6)
    assert refit.bias == pytest.approx((targets.numpy() - inputs.numpy() @ start.T).mean(0), abs=1e-6)


def test_matrices_are_read_as_they_were_written(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    grams = {
        "encoder.layer.0.output": Gram(rng.normal(size=(4, 4)), has_ones=False),
        "encoder.layer.1.output": Gram(rng.normal(size=(3, 3)), has_ones=True),
    }
    write_grams(grams, tmp_path / "grams")
    stored = StoredGrams(tmp_path / "grams")
    assert stored.keys() == grams.keys()
    for name, gram in grams.items():
        np.testing.assert_array_equal(stored[name].matrix, gram.matrix)
        assert stored[name].has_ones is gram.has_ones
    with pytest.raises(KeyError):
        stored["encoder.layer.2.output"]


@pytest.mark.parametrize("content", [b"", b'{"a', b"\xff" * 100])
def test_a_damaged_file_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "grams").write_bytes(content)
    with pytest.raises(SafetensorError):
        StoredGrams(tmp_path / "grams")


def test_a_file_that_was_cut_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "grams"
    write_grams({"linear": Gram(np.ones((4, 4)), has_ones=False)}, file)
    file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(SafetensorError):
        StoredGrams(file)
