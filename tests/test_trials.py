"""Evaluating subsets of heads: whatever is played back, every number is that of the whole model run anew."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from compressor.selection import subset_evaluator as evaluator
from compressor.selection.prefix_cache import ActivationCache, PartialForward, blocks
from compressor.selection.subset_evaluator import ModelSubsetEvaluator
from compressor.units import find_sites, hooked
from tests import learning
from tests.zoo import FAMILIES

Pair = tuple[ModelSubsetEvaluator, ModelSubsetEvaluator]


def pair(make: Callable[[], Any] = learning.model, task: learning.Sign | None = None) -> Pair:
    """The evaluator and what it must equal."""
    model = make()
    given = (model, learning.sites(model), learning.data(task), 5, 6, 0)
    return ModelSubsetEvaluator(*given), ModelSubsetEvaluator(*given, plain=True)


def walk(fast: ModelSubsetEvaluator, plain: ModelSubsetEvaluator, seed: int) -> None:
    """A search that drops a random head a step, and looks at random subsets between."""
    draw = random.Random(seed)
    kept = frozenset(fast.heads)
    while kept:
        heads = draw.sample(sorted(kept), draw.randint(1, len(kept)))
        assert fast.evaluate_without(kept, heads) == plain.evaluate_without(kept, heads)
        odd = [frozenset(draw.sample(fast.heads, draw.randint(0, len(fast.heads)))) for _ in range(3)]
        assert fast.evaluate_all([*odd, kept]) == plain.evaluate_all([*odd, kept])
        assert fast.evaluate(kept - odd[0]) == plain.evaluate(kept - odd[0])
        kept -= {draw.choice(heads)}
    assert fast.count == plain.count


@pytest.mark.parametrize("seed", range(3))
def test_equals_the_plain_evaluation(seed: int) -> None:
    fast, plain = pair()
    walk(fast, plain, seed)
    assert plain.forwards == pytest.approx(plain.count)


def test_only_what_lies_above_the_change_is_run() -> None:
    """The base once, and half of the two blocks for each head of the upper one."""
    fast, _ = pair()
    heads = fast.heads[len(fast.heads) // 2 :]
    fast.evaluate_without(frozenset(fast.heads), heads)
    assert fast.forwards == pytest.approx(1 + len(heads) / 2)


def test_a_way_down_runs_what_each_step_changes() -> None:
    fast, plain = pair()
    heads = fast.heads[len(fast.heads) // 2 :]
    ways = [frozenset(fast.heads) - frozenset(heads[:gone]) for gone in range(len(heads) + 1)]
    assert [fast.evaluate(kept) for kept in ways] == [plain.evaluate(kept) for kept in ways]
    assert fast.forwards == pytest.approx(1 + len(heads) / 2)
    assert plain.forwards == pytest.approx(1 + len(heads))


@pytest.mark.parametrize("room", [0.0, 1e-6])
def test_equals_it_where_records_find_no_room(room: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluator, "_OF_MEMORY", room)
    fast, plain = pair()
    walk(fast, plain, 1)


def test_half_precision_is_another_measurement_of_the_same_subsets() -> None:
    model = learning.model()
    given = (model, learning.sites(model), learning.data(), 5, 6, 0)
    whole, half = ModelSubsetEvaluator(*given), ModelSubsetEvaluator(*given, "bf16")
    odd = frozenset(whole.heads[1::2])
    batch = next(whole._batches())
    one, two = (torch.from_numpy(of._run(batch, [odd], None, 0).logits.float().numpy()) for of in (whole, half))
    assert not torch.equal(one, two)
    torch.testing.assert_close(one, two, rtol=0.05, atol=0.05)
    assert half.statistics(odd).shape == whole.statistics(odd).shape


def test_statistics_stand_in_the_order_of_the_rows() -> None:
    fast, plain = pair()
    some = frozenset(fast.heads[::2])
    np.testing.assert_array_equal(fast.statistics(some), plain.statistics(some))


def test_a_metric_that_falls_is_turned_around() -> None:
    fast, plain = pair(learning.language_model, learning.NextToken())
    some = frozenset(fast.heads[::2])
    assert fast.evaluate(some) == pytest.approx(plain.evaluate(some), rel=1e-6)
    assert fast.evaluate(some) < 0


def test_the_model_is_left_as_it_was() -> None:
    fast, _ = pair()
    model = fast._model.train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    fast.evaluate_without(frozenset(fast.heads), fast.heads)
    assert model.training
    assert not any("forward" in vars(module) for module in model.modules())
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_can_be_played_back(family: str) -> None:
    model, inputs = FAMILIES[family](0)
    sites = find_sites(model, inputs)
    replay = PartialForward(model, sites)
    heads = sum(site.heads for site in sites)
    base, record = torch.ones(1, heads), ActivationCache()
    base[0, 1] = 0
    whole = _logits(replay.run(inputs, base, record=record))
    assert torch.equal(whole, _plainly(model, sites, inputs, base))
    assert len(record.blocks) > 1
    draw = torch.Generator().manual_seed(0)
    first = 0
    for site in sites:
        other = base.repeat(2, 1)
        other[0, first] = 1 - other[0, first]
        other[1, first + torch.randint(site.heads, (1,), generator=draw)] = 0.5
        other[1, first + site.heads :] = 0.25
        call = record.first_call({site.name})
        parts = [_plainly(model, sites, inputs, gates[None]) for gates in other]
        played = [_logits(replay.run(inputs, gates[None], base=record, call=call)) for gates in other]
        assert all(torch.equal(one, two) for one, two in zip(parts, played, strict=True))
        torch.testing.assert_close(_logits(replay.run(inputs, other, base=record, call=call)), torch.cat(parts))
        first += site.heads
    # From the first block on which the last site changes, nothing before is run.
    assert record.start(len(record.sites) - 1) >= len(record.blocks) // 2


def _plainly(model: Any, sites: Any, inputs: dict[str, Tensor], gates: Tensor) -> Tensor:
    apart = dict(zip((site.name for site in sites), gates[0].split([site.heads for site in sites]), strict=True))
    with torch.no_grad(), hooked(model.eval(), lambda name, out: out * apart[name][:, None]):
        return _logits(model(**inputs))


def _logits(out: Any) -> Tensor:
    found = out[0]
    assert isinstance(found, Tensor)
    return found


def test_blocks_are_the_outermost() -> None:
    model, _ = FAMILIES["bert"](0)
    assert len(blocks(model)) == model.config.num_hidden_layers


def test_an_interrupted_search_does_not_measure_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluator, "_SAVE_SECONDS", 0.0)
    monkeypatch.setattr(evaluator, "_SAVE_SHARE", 0.0)
    (first, _), (second, _) = pair(), pair()
    kept = frozenset(first.heads)

    def search(trials: ModelSubsetEvaluator) -> list[float]:
        trials.remember(tmp_path / "store" / "found.npz")
        return [trials.evaluate(kept), *trials.evaluate_without(kept, trials.heads[:3])]

    found = search(first)
    monkeypatch.setattr(second, "_measure", None)
    assert search(second) == found
    assert (second.count, second.forwards) == (first.count, first.forwards) == (4, first.forwards)
    assert all(np.array_equal(first.statistics(subset), second.statistics(subset)) for subset in first._found)


def test_what_a_subset_took_counts_for_every_search_that_asks_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it would have alone, whichever came first; what nobody asked for does not count."""
    monkeypatch.setattr(evaluator, "_SAVE_SECONDS", 0.0)
    monkeypatch.setattr(evaluator, "_SAVE_SHARE", 0.0)
    (alone, _), (longer, _), (shorter, _) = pair(), pair(), pair()
    kept = frozenset(alone.heads)
    for trials, ways in ((alone, 1), (longer, 2), (shorter, 1)):
        if trials is not alone:
            trials.remember(tmp_path / "found.npz")
        for way in range(ways):
            trials.evaluate_without(kept - {trials.heads[0]} if way else kept, trials.heads[1:4])
    assert shorter.forwards == alone.forwards < longer.forwards
    assert shorter.count == alone.count == 3


def test_searches_that_share_a_store_lose_nothing_of_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evaluator, "_SAVE_SECONDS", 0.0)
    monkeypatch.setattr(evaluator, "_SAVE_SHARE", 0.0)
    (first, _), (second, _), (third, _) = pair(), pair(), pair()
    kept = frozenset(first.heads)
    for trials in (first, second):
        trials.remember(tmp_path / "found.npz")
    first.evaluate(kept)
    second.evaluate(kept - {first.heads[0]})
    third.remember(tmp_path / "found.npz")
    monkeypatch.setattr(third, "_measure", None)
    third.evaluate_all([kept, kept - {first.heads[0]}])


@pytest.mark.parametrize("content", [b"", b"PK", b"not an archive"])
def test_a_damaged_store_is_passed_over(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "found.npz").write_bytes(content)
    fast, plain = pair()
    fast.remember(tmp_path / "found.npz")
    assert fast.evaluate(frozenset(fast.heads)) == plain.evaluate(frozenset(plain.heads))
