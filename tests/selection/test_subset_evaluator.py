"""Evaluating subsets of heads: with any replay, every number equals that of the whole model."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from transformers import PreTrainedModel

from compressor.config.values import MixedPrecision
from compressor.selection.measure_subsets import Measurement, Measurer, SubsetMeasurer
from compressor.selection.search import Head
from compressor.selection.subset_evaluator import ModelSubsetEvaluator, sensitivity
from compressor.tasks.base import Task
from compressor.units import find_sites
from tests.selection import tiny

BATCH_SIZE = 5


def evaluator_of(
    model: PreTrainedModel,
    task: Task | None = None,
    measurer: Measurer | None = None,
    mixed_precision: MixedPrecision = "no",
    **options: Any,
) -> ModelSubsetEvaluator:
    """An evaluator of a tiny model; options are those of `SubsetMeasurer`."""
    data, sites = tiny.data(task), tiny.sites_of(model)
    make: Callable[..., Measurer] = partial(SubsetMeasurer, **options) if measurer is None else lambda *_: measurer
    return ModelSubsetEvaluator(model, sites, data, BATCH_SIZE, 0, mixed_precision, make_measurer=make)


def fast_and_plain(
    make: Callable[[], PreTrainedModel] = tiny.classifier, task: Task | None = None, **options: Any
) -> tuple[ModelSubsetEvaluator, ModelSubsetEvaluator]:
    """An evaluator that replays, and one that runs the whole model for every subset."""
    model = make()
    return evaluator_of(model, task, **options), evaluator_of(model, task, reuse=False)


def compare_random_walk(fast: ModelSubsetEvaluator, plain: ModelSubsetEvaluator, seed: int) -> None:
    """A search that removes one or two random heads per step and evaluates random subsets in between."""
    draw = random.Random(seed)
    kept = frozenset(fast.heads)
    while kept:
        heads = draw.sample(sorted(kept), draw.randint(1, len(kept)))
        assert fast.evaluate_without(kept, heads) == plain.evaluate_without(kept, heads)
        subsets = [frozenset(draw.sample(fast.heads, draw.randint(0, len(fast.heads)))) for _ in range(2)]
        assert fast.evaluate_all([*subsets, kept]) == plain.evaluate_all([*subsets, kept])
        assert fast.evaluate(kept - subsets[0]) == plain.evaluate(kept - subsets[0])
        kept -= set(heads[:2])
    assert fast.count == plain.count


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.zoo)])
def test_metrics_equal_those_of_the_whole_model(seed: int) -> None:
    fast, plain = fast_and_plain()
    compare_random_walk(fast, plain, seed)
    assert plain.forwards == pytest.approx(plain.count)


@pytest.mark.parametrize("memory_share", [pytest.param(0.0, marks=pytest.mark.zoo), 1e-6])
def test_metrics_do_not_depend_on_the_memory_for_activations(memory_share: float) -> None:
    compare_random_walk(*fast_and_plain(memory_share=memory_share), seed=2)


def test_only_layers_above_the_change_run() -> None:
    """One forward of the base, and half a forward for each head of the upper of two layers."""
    fast, _ = fast_and_plain()
    heads = fast.heads[len(fast.heads) // 2 :]
    fast.evaluate_without(frozenset(fast.heads), heads)
    assert fast.forwards == pytest.approx(1 + len(heads) / 2)


def test_each_step_of_a_removal_runs_what_it_changes() -> None:
    fast, plain = fast_and_plain()
    heads = fast.heads[len(fast.heads) // 2 :]
    subsets = [frozenset(fast.heads) - frozenset(heads[:removed]) for removed in range(len(heads) + 1)]
    assert [fast.evaluate(kept) for kept in subsets] == [plain.evaluate(kept) for kept in subsets]
    assert fast.forwards == pytest.approx(1 + len(heads) / 2)
    assert plain.forwards == pytest.approx(1 + len(heads))


def test_statistics_are_in_the_order_of_the_rows() -> None:
    fast, plain = fast_and_plain()
    kept = frozenset(fast.heads[::2])
    np.testing.assert_array_equal(fast.statistics(kept), plain.statistics(kept))


def test_half_precision_measures_the_same_rows() -> None:
    model = tiny.classifier()
    whole, half = evaluator_of(model), evaluator_of(model, mixed_precision="bf16")
    kept = frozenset(whole.heads[1::2])
    assert half.statistics(kept).shape == whole.statistics(kept).shape


def test_a_loss_is_negated() -> None:
    fast, plain = fast_and_plain(tiny.language_model, tiny.NextToken())
    kept = frozenset(fast.heads[::2])
    assert fast.evaluate(kept) == pytest.approx(plain.evaluate(kept), rel=1e-6)
    assert fast.evaluate(kept) < 0


def test_every_subset_is_evaluated_once() -> None:
    evaluator = evaluator_of(tiny.classifier())
    kept, all_heads = frozenset(evaluator.heads[:3]), frozenset(evaluator.heads)
    metrics = evaluator.evaluate_all([kept, all_heads])
    forwards = evaluator.forwards
    assert [evaluator.evaluate(kept), evaluator.evaluate(all_heads)] == metrics
    assert (evaluator.count, evaluator.forwards) == (2, forwards)


class RecordingMeasurer:
    """A measurer that returns zeros and records requests."""

    def __init__(self) -> None:
        self.requests: list[tuple[list[frozenset[Head]], frozenset[Head] | None]] = []

    def measure(self, subsets: Any, base: frozenset[Head] | None) -> Measurement:
        self.requests.append((list(subsets), base))
        return Measurement(np.zeros((len(subsets), 12, 2)), float(len(subsets)))


def test_heads_outside_the_pool_are_always_kept() -> None:
    measurer = RecordingMeasurer()
    model = tiny.classifier()
    evaluator = evaluator_of(model, measurer=measurer)
    all_heads = frozenset(evaluator.heads)
    first, last = evaluator.heads[:4], evaluator.heads[4:]
    evaluator.search_among(last)
    assert (evaluator.heads, evaluator.always_kept) == (last, frozenset(first))
    evaluator.evaluate(frozenset(last[:1]))
    evaluator.evaluate_without(frozenset(last), last[:2])
    evaluator.evaluate_all([frozenset()])
    assert measurer.requests == [
        ([frozenset((*first, last[0]))], frozenset((*first, last[0]))),
        ([all_heads - {last[0]}, all_heads - {last[1]}], all_heads),
        ([frozenset(first)], None),
    ]
    assert (evaluator.count, evaluator.forwards) == (4, 4.0)
    assert tuple(evaluator.sensitivity(frozenset(last[1:]), 6)) == last


SIZES: dict[str, Any] = {
    "n_embd": 8,
    "n_layer": 2,
    "n_head": 4,
    "vocab_size": 12,
    "bos_token_id": 1,
    "eos_token_id": 1,
    "num_labels": 3,
}


@pytest.mark.parametrize("model_class", [hf.GPT2ForTokenClassification, hf.GPT2LMHeadModel])
def test_rows_count_alike_whatever_the_number_of_their_labels(model_class: type[PreTrainedModel]) -> None:
    """Labels of tokens are not shifted, so that that of the first token counts; those of a language model are."""
    torch.manual_seed(0)
    model = model_class(hf.GPT2Config(**SIZES)).eval()
    ids = torch.randint(2, 12, (3, 6))
    labels = torch.randint(0, 3, (3, 6))
    labels[1, 2:] = labels[2, 4:] = -100
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}
    sites = find_sites(model, {name: batch[name] for name in ("input_ids", "attention_mask")})
    heads = torch.ones(sum(site.heads for site in sites), dtype=torch.bool)
    rows = [{name: value[row : row + 1] for name, value in batch.items()} for row in range(3)]
    together, separate = sensitivity(model, sites, heads, [batch]), sensitivity(model, sites, heads, rows)
    torch.testing.assert_close(together, separate, rtol=1e-4, atol=1e-9)
