"""Searches against tables of costs, the papers' examples among them, and Taylor's importance against a loop."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import BertConfig, BertForSequenceClassification, GPT2Config, GPT2LMHeadModel, PreTrainedModel

from compressor.errors import UsageError
from compressor.selection.gradient_importance import sensitivity
from compressor.selection.search import (
    SEARCHES,
    AStarSearch,
    GlobalSearch,
    Head,
    LocalSearch,
    RandomSearch,
    Search,
    TaylorSearch,
)
from compressor.selection.search.taylor import ranked
from compressor.units import find_sites, hooked

HEADS: tuple[Head, ...] = tuple((site, head) for site in ("a", "b") for head in range(5))


class Table:
    """Trials whose numbers are given: importance of each head, and a metric of each subset, else how many are kept."""

    def __init__(
        self, importance: Mapping[Head, float], metric: Callable[[frozenset[Head]], float] = lambda kept: len(kept)
    ) -> None:
        self.heads = tuple(importance)
        self.count, self.forwards = 0, 0.0
        self.scored: list[frozenset[Head]] = []
        self.asked: dict[frozenset[Head], float] = {}
        self._importance, self._metric = importance, metric

    def evaluate(self, kept: frozenset[Head]) -> float:
        if kept not in self.asked:
            self.count += 1
            self.asked[kept] = float(self._metric(kept))
        return self.asked[kept]

    def evaluate_without(self, kept: frozenset[Head], heads: Sequence[Head]) -> list[float]:
        return [self.evaluate(kept - {head}) for head in heads]

    def evaluate_all(self, subsets: Iterable[frozenset[Head]]) -> list[float]:
        return [self.evaluate(kept) for kept in subsets]

    def sensitivity(self, kept: frozenset[Head]) -> Mapping[Head, float]:
        self.scored.append(kept)
        return {head: value if head in kept else 0.0 for head, value in self._importance.items()}


class Backwards(Table):
    """The same, but what can be evaluated in any order is evaluated in another."""

    def evaluate_without(self, kept: frozenset[Head], heads: Sequence[Head]) -> list[float]:
        return super().evaluate_without(kept, heads[::-1])[::-1]

    def evaluate_all(self, subsets: Iterable[frozenset[Head]]) -> list[float]:
        return super().evaluate_all(list(subsets)[::-1])[::-1]


def table(
    own: Sequence[float], together: Mapping[tuple[int, int], float] | None = None, kind: type[Table] = Table
) -> Table:
    """Heads whose costs add up, some pairs costing more (or less) together: none but less makes a cost only grow."""

    def metric(kept: frozenset[Head]) -> float:
        gone = [place for place, head in enumerate(HEADS) if head not in kept]
        pairs = sum(cost for pair, cost in (together or {}).items() if set(pair) <= set(gone))
        return 100 - sum(own[place] for place in gone) - pairs

    return kind(dict(zip(HEADS, own, strict=True)), metric)


costs = st.lists(st.integers(0, 8).map(float), min_size=len(HEADS), max_size=len(HEADS))
places = st.integers(0, len(HEADS) - 1)
pairs = st.dictionaries(st.tuples(places, places).filter(lambda p: p[0] < p[1]), st.integers(0, 40).map(float))
METHODS: dict[str, Callable[[], Search]] = {
    **SEARCHES,
    "astar literal": lambda: AStarSearch(variant="literal"),
    "astar lazy": lambda: AStarSearch(variant="lazy"),
    "taylor by loss": lambda: TaylorSearch(by="loss"),
}


@pytest.mark.parametrize("name", METHODS)
@settings(max_examples=30, deadline=None)
@given(own=costs, together=pairs, keep=st.integers(0, len(HEADS)))
def test_ends_with_exactly_k(name: str, own: list[float], together: dict[tuple[int, int], float], keep: int) -> None:
    steps = list(METHODS[name]().choose(table(own, together), keep, None))
    assert steps[0].kept == frozenset(HEADS)
    assert len(steps[-1].kept) == (keep + keep % 2 if name == "global" else keep)  # two sites: two heads an index
    assert all(after.kept < before.kept for before, after in pairwise(steps))
    assert bool(steps[-1].notes) == (name == "global" and bool(keep % 2))


@pytest.mark.parametrize("name", METHODS)
@settings(max_examples=30, deadline=None)
@given(own=costs, together=pairs, budget=st.integers(0, 60))
def test_stays_within_the_budget(
    name: str, own: list[float], together: dict[tuple[int, int], float], budget: int
) -> None:
    trials = table(own, together)
    steps = list(METHODS[name]().choose(trials, None, budget))
    assert all(after.kept <= before.kept for before, after in pairwise(steps))
    assert all(100 - trials.evaluate(step.kept) <= budget for step in steps)
    assert (len(steps[-1].kept) < len(HEADS)) or steps[-1].notes


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize(("keep", "budget"), [(4, None), (None, 20.0)])
def test_the_order_of_evaluation_does_not_matter(name: str, keep: int | None, budget: float | None) -> None:
    own, together = [3.0, 1, 1, 4, 0, 0, 2, 1, 3, 1], {(1, 2): 5.0, (4, 5): 3.0}
    runs = [METHODS[name]().choose(table(own, together, kind), keep, budget) for kind in (Table, Backwards)]
    assert [step.kept for step in runs[0]] == [step.kept for step in runs[1]]


@pytest.mark.parametrize("name", METHODS)
def test_needs_an_end(name: str) -> None:
    with pytest.raises(UsageError, match="needs an end; say how many heads to keep with --keep"):
        list(METHODS[name]().choose(table([0.0] * 10), None, None))
    with pytest.raises(UsageError, match="max_drop -1"):
        list(METHODS[name]().choose(table([0.0] * 10), None, -1))


GRID = tuple((str(layer), head) for layer in range(3) for head in range(3))


def grid(*matrices: Sequence[float | None]) -> Table:
    """Figure 7's table: the cost matrix of each iteration, `None` where a head is not to be measured."""

    order = [("0", 2), ("2", 1)]

    def metric(kept: frozenset[Head]) -> float:
        gone = set(GRID) - kept
        if not gone:
            return 100.0
        (tried,) = gone - set(order[: len(gone) - 1])
        cost = matrices[len(gone) - 1][GRID.index(tried)]
        assert cost is not None, "an eliminated head was evaluated"
        return 100 - cost

    return Table(dict.fromkeys(GRID, 0.0), metric)


FIRST = [15.0, 9, 5, 12, 8, 10, 13, 7, 11]


def test_astar_first_iteration_of_figure_7() -> None:
    trials = grid(FIRST, [100.0] * 9)
    step = list(AStarSearch().choose(trials, None, 20))[1]
    assert frozenset(GRID) - step.kept == {("0", 2)}
    assert step.values["budget_left"] == 15
    assert step.kept - step.eliminated == {("2", 1), ("1", 1), ("0", 1), ("1", 2)}
    assert len(step.eliminated) == 4
    assert step.costs == dict(zip(GRID, FIRST, strict=True))
    assert step.values["searches"] == 9


def test_astar_second_iteration_of_figure_7() -> None:
    second = [None, 12.0, None, None, 10.0, 10.0, None, 8.0, None]
    steps = list(AStarSearch().choose(grid(FIRST, second, [100.0] * 9), None, 20))
    assert frozenset(GRID) - steps[2].kept == {("0", 2), ("2", 1)}
    assert steps[2].values["budget_left"] == 12
    assert steps[2].kept - steps[2].eliminated == {("0", 1), ("1", 1), ("1", 2)}
    assert steps[2].values["candidates"] == 3
    assert sum(step.values.get("searches", 0) for step in steps[:3]) == 13
    # Figure 6 to the letter takes 8 off the 15 that were left.
    literal = list(AStarSearch(variant="literal").choose(grid(FIRST, second, [100.0] * 9), None, 20))
    assert literal[2].values["budget_left"] == 7


def test_astar_takes_every_head_that_makes_the_metric_better() -> None:
    trials = Table(dict.fromkeys(GRID, 0.0), lambda kept: 100 - len(kept))
    steps = list(AStarSearch().choose(trials, None, 20))
    assert steps[-1].kept == frozenset()
    assert sum(step.values.get("searches", 0) for step in steps) == 45
    assert all(step.values["budget_left"] == 20 for step in steps)


def test_astar_takes_none_that_costs_the_budget() -> None:
    trials = Table(dict.fromkeys(GRID, 0.0), lambda kept: 100 - 20 * (len(kept) < 9))
    steps = list(AStarSearch().choose(trials, None, 20))
    assert steps[-1].kept == frozenset(GRID)
    assert sum(step.values.get("searches", 0) for step in steps) == 9
    (note,) = steps[-1].notes
    assert note.startswith("no head was removed: head 0 of 0 costs least, 20 of the metric, and 20 may be lost")


def heads_in_turn(search: Search, trials: Table, keep: int | None, budget: float | None) -> list[frozenset[Head]]:
    return list(dict.fromkeys(step.kept for step in search.choose(trials, keep, budget)))


@settings(max_examples=300, deadline=None)
@given(own=costs, budget=st.integers(1, 80))
def test_lazy_is_paper_where_costs_add_up(own: list[float], budget: int) -> None:
    lazy, paper = table(own), table(own)
    found = list(AStarSearch(variant="lazy").choose(lazy, None, budget))
    assert list(dict.fromkeys(step.kept for step in found)) == heads_in_turn(AStarSearch(), paper, None, budget)
    assert not any(step.values.get("fell") or (step.notes and "lazy" in step.notes[0]) for step in found)


@settings(max_examples=100, deadline=None)
@given(own=costs, together=pairs, keep=st.integers(0, len(HEADS)) | st.none())
def test_lazy_is_paper_where_costs_only_grow_and_nothing_is_eliminated(
    own: list[float], together: dict[tuple[int, int], float], keep: int | None
) -> None:
    lazy, paper = table(own, together), table(own, together)
    assert heads_in_turn(AStarSearch(variant="lazy"), lazy, keep, 1e6) == heads_in_turn(AStarSearch(), paper, keep, 1e6)
    assert lazy.count <= paper.count


def test_lazy_measures_what_could_be_cheapest() -> None:
    """Nine heads whose loss costs nothing go, each by one measurement; the tenth was eliminated at first sight."""
    lazy, paper = table([0.0] * 9 + [5.0]), table([0.0] * 9 + [5.0])
    for search, trials in ((AStarSearch(variant="lazy"), lazy), (AStarSearch(), paper)):
        assert len(heads_in_turn(search, trials, None, 1)[-1]) == 1
    assert (lazy.count, paper.count) == (19, 47)


def test_lazy_says_where_costs_fell() -> None:
    trials = table([1.0, 5, 5, 5, 5, 5, 5, 5, 5, 5], {(0, 1): -4.0})
    last = list(AStarSearch(variant="lazy").choose(trials, 5, None))[-1]
    assert last.values["fell"] == 1
    assert last.notes[0].startswith("lazy A*: 1 of the ")


def test_local_goes_on_to_the_last_that_fits_and_tells_why_none_does() -> None:
    trials = table([1.0, 2, 3, 4, 5, 6, 7, 8, 9, 10])
    steps = list(LocalSearch().choose(trials, None, 6))
    assert frozenset(HEADS) - steps[-1].kept == {("a", 0), ("a", 1), ("a", 2)}
    steps = list(LocalSearch().choose(table([3.0, 2, 3, 4, 5, 6, 7, 8, 9, 10]), None, 1))
    assert steps[-1].notes == (
        "no head was removed: head 1 of a costs least, 2 of the metric, and 1 may be lost (--max-drop)",
    )


def test_global_takes_the_cheapest_index_of_every_site() -> None:
    steps = list(GlobalSearch().choose(table([1.0, 2, 3, 4, 5, 9, 2, 3, 4, 5]), 7, None))
    assert [sorted(a.kept - b.kept) for a, b in pairwise(steps)] == [[("a", 1), ("b", 1)]]
    assert "8 heads stay, the fewest not below 7" in steps[-1].notes[0]


def test_random_is_drawn_from_its_seed() -> None:
    own = [1.0, 2, 3, 4, 5, 6, 7, 8, 9, 10]
    found = [list(RandomSearch(trials=5, seed=seed).choose(table(own), 5, None))[-1].kept for seed in (1, 1, 2)]
    assert found[0] == found[1] != found[2]
    trials = table(own)
    list(RandomSearch(trials=7).choose(trials, 5, None))
    assert trials.count <= 8
    with pytest.raises(UsageError, match="trials 0"):
        RandomSearch(trials=0)


def test_taylor_by_loss_ranks_by_what_one_head_costs_alone() -> None:
    own = [3.0, 1, 10, 4, 5, 9, 2, 6, 8, 7]
    trials = table(own)
    steps = list(TaylorSearch(by="loss").choose(trials, 5, None))
    gone = [next(iter(before.kept - after.kept)) for before, after in pairwise(steps)]
    assert gone == [("a", 1), ("b", 1), ("a", 0), ("a", 3), ("a", 4)]
    assert not trials.scored
    assert trials.count == 1 + 10 + 4  # all, each without one, and the steps after the first


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
    held = Table(importance)
    steps = list(TaylorSearch().choose(held, 15, None))
    assert [len(step.kept) for step in steps] == [20, 18, 16, 15]
    assert [len(kept) for kept in held.scored] == [20, 18, 16]
    assert steps[-1].kept == frozenset(("a", head) for head in range(5, 20))
    once = Table(importance)
    assert list(TaylorSearch(rescore=False).choose(once, 15, None))[-1].kept == steps[-1].kept
    assert len(once.scored) == 1


def test_refuses_a_share_of_nothing() -> None:
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
