"""Taylor's importance and its greedy removal, against numbers worked out by hand and a loop over examples."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import BertConfig, BertForSequenceClassification, GPT2Config, GPT2LMHeadModel, PreTrainedModel

from compressor.errors import UsageError
from compressor.heads.search import SEARCHES, Head, TaylorSearch
from compressor.heads.search.taylor import ranked
from compressor.heads.sensitivity import sensitivity
from compressor.sites import find_sites, hooked

HEADS: tuple[Head, ...] = tuple((site, head) for site in ("a", "b") for head in range(5))


class Table:
    """Trials whose numbers are given: importance of each head, and a metric that counts the heads."""

    def __init__(self, importance: Mapping[Head, float]) -> None:
        self.heads = tuple(importance)
        self.count = 0
        self.scored: list[frozenset[Head]] = []
        self._importance = importance

    def evaluate(self, kept: frozenset[Head]) -> float:
        self.count += 1
        return float(len(kept))

    def evaluate_all(self, subsets: Iterable[frozenset[Head]]) -> list[float]:
        return [self.evaluate(kept) for kept in subsets]

    def sensitivity(self, kept: frozenset[Head]) -> Mapping[Head, float]:
        self.scored.append(kept)
        return {head: value if head in kept else 0.0 for head, value in self._importance.items()}


@pytest.mark.parametrize("name", SEARCHES)
@settings(max_examples=40, deadline=None)
@given(
    values=st.lists(st.floats(0, 10) | st.just(0.0), min_size=len(HEADS), max_size=len(HEADS)),
    keep=st.integers(0, len(HEADS)),
)
def test_ends_with_exactly_k(name: str, values: list[float], keep: int) -> None:
    steps = list(SEARCHES[name]().choose(Table(dict(zip(HEADS, values, strict=True))), keep))
    assert steps[0].kept == frozenset(HEADS)
    assert len(steps[-1].kept) == keep
    assert all(after.kept < before.kept for before, after in pairwise(steps))


def test_importance_is_compared_within_a_sites_norm() -> None:
    # Norms 5 and 0.5: (a, 0) is 0.6 and (b, 1) is 0.8 of its site.
    importance = {("a", 0): 3.0, ("a", 1): 4.0, ("b", 0): 0.3, ("b", 1): 0.4}
    kept = frozenset(importance)
    heads = tuple(importance)
    assert ranked(importance, kept, heads, normalize=False) == [("b", 0), ("b", 1), ("a", 0), ("a", 1)]
    assert ranked(importance, kept, heads, normalize=True) == [("b", 0), ("a", 0), ("b", 1), ("a", 1)]


def test_heads_that_are_gone_are_left_out_of_the_norm() -> None:
    importance = {("a", 0): 3.0, ("a", 1): 400.0, ("b", 0): 0.3, ("b", 1): 0.4}
    kept = frozenset(importance) - {("a", 1)}
    assert ranked(importance, kept, tuple(importance), normalize=True) == [("b", 0), ("b", 1), ("a", 0)]


def test_a_site_without_any_importance_scores_zero() -> None:
    importance = {("a", 0): 0.0, ("a", 1): 0.0, ("b", 0): 0.1, ("b", 1): 0.2}
    rank = ranked(importance, frozenset(importance), tuple(importance), normalize=True)
    assert rank == [("a", 1), ("a", 0), ("b", 0), ("b", 1)]


def test_removes_a_tenth_a_step_and_scores_again() -> None:
    importance = {("a", head): float(head + 1) for head in range(20)}
    table = Table(importance)
    steps = list(TaylorSearch().choose(table, 15))
    assert [len(step.kept) for step in steps] == [20, 18, 16, 15]
    assert [len(kept) for kept in table.scored] == [20, 18, 16]
    assert steps[-1].kept == frozenset(("a", head) for head in range(5, 20))
    once = Table(importance)
    assert list(TaylorSearch(rescore=False).choose(once, 15))[-1].kept == steps[-1].kept
    assert len(once.scored) == 1


def test_refuses_to_run_without_a_number() -> None:
    with pytest.raises(UsageError, match="say how many with --keep"):
        list(TaylorSearch().choose(Table({("a", 0): 1.0}), None))
    with pytest.raises(UsageError, match="share 0: heads removed a step"):
        TaylorSearch(share=0)


def _bert() -> tuple[PreTrainedModel, dict[str, Tensor]]:
    torch.manual_seed(0)
    config = BertConfig(vocab_size=50, hidden_size=12, num_hidden_layers=2, num_attention_heads=3, intermediate_size=8)
    batch = {
        "input_ids": torch.randint(0, 50, (4, 6)),
        "attention_mask": torch.tensor([[1] * 6, [1] * 6, [1] * 4 + [0] * 2, [1] * 5 + [0]]),
        "labels": torch.tensor([0, 1, 1, 0]),
    }
    return BertForSequenceClassification(config).train(), batch


def _gpt2() -> tuple[PreTrainedModel, dict[str, Tensor]]:
    torch.manual_seed(1)
    config = GPT2Config(vocab_size=50, n_embd=12, n_layer=2, n_head=3, n_positions=16, bos_token_id=0, eos_token_id=0)
    ids = torch.randint(0, 50, (4, 6))
    labels = ids.clone()
    labels[1, 3:] = -100
    labels[2, 2:] = -100
    batch = {"input_ids": ids, "attention_mask": (labels != -100).long(), "labels": labels}
    return GPT2LMHeadModel(config).train(), batch


@pytest.mark.parametrize("make", [_bert, _gpt2])
def test_importance_is_taken_for_each_example(make: object) -> None:
    """The batched gates equal a loop over single examples of |sum of Att . dL/dAtt|, some heads gone."""
    assert callable(make)
    model, batch = make()
    sites = find_sites(model, {name: tensor for name, tensor in batch.items() if name != "labels"})
    mask = torch.tensor([True, True, False, True, True, True])
    found = sensitivity(model, sites, mask, [{name: t[:3] for name, t in batch.items()}, _part(batch, 3)])
    assert model.training

    gates = dict(zip([site.name for site in sites], mask.float().split(3), strict=True))
    model.eval()
    expected = torch.zeros(6)
    for row in range(4):
        outs: dict[str, Tensor] = {}

        def keep(name: str, out: Tensor, outs: dict[str, Tensor] = outs) -> Tensor:
            outs[name] = out
            return out * gates[name][:, None]

        with hooked(model, keep):
            loss = model(**_part(batch, row)).loss
        slopes = torch.autograd.grad(loss, [outs[site.name] for site in sites])
        each = [(outs[site.name] * slope).sum((0, 1, 3)) for site, slope in zip(sites, slopes, strict=True)]
        # dL/dAtt = gate * dL/d(gate * Att); the heads that are gone are at zero either way.
        expected += torch.cat(each).abs() / 4
    torch.testing.assert_close(found.float(), expected, rtol=1e-4, atol=1e-7)
    assert found[2] == 0


def _part(batch: Mapping[str, Tensor], row: int) -> dict[str, Tensor]:
    return {name: tensor[row : row + 1] for name, tensor in batch.items()}
