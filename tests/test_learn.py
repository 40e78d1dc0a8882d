"""Learning: joint runs and searches end in exact plans, the same every time, interrupted or not, alone or in two."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from compressor.errors import UsageError
from compressor.selection.gates import GATES
from compressor.selection.learn import METHODS, learn
from compressor.selection.options import heads_to_keep
from compressor.selection.subset_evaluator import ModelSubsetEvaluator
from compressor.training.batch_order import row_order
from compressor.training.gated_model import frozen
from tests import learning
from tests.launch import launch
from tests.learning import Recipe

OTHER = Recipe(method="taylor", options={"rows": 20})


class EndOfPowerError(Exception):
    """Stands for whatever ends a run half-way."""


def plan_bytes(learned: learning.Learned, folder: Path) -> bytes:
    learned.plan.save(folder / "plan.json")
    return (folder / "plan.json").read_bytes()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("keep", [0, 3, 8, "50%"])
def test_every_method_keeps_exactly_k(method: str, keep: int | str, tmp_path: Path) -> None:
    learned = learning.run(tmp_path, Recipe(method=method, keep=keep, steps=4))
    exactly = heads_to_keep(keep, 8)
    assert learned.plan.heads_kept == (exactly + exactly % 2 if method == "global" else exactly)  # one of each site
    assert learned.plan.method == method
    assert learned.plan.data == "sha256:rows"
    for site in learned.plan.sites:
        scale = site.heads / max(1, len(site.kept)) if method == "bin-concrete" else 1.0
        assert all(one == pytest.approx(scale) for one in site.scale)


def test_same_seed_same_plan_and_weights(tmp_path: Path) -> None:
    torch.manual_seed(1)
    first, second = learning.model(), learning.model()
    one = learning.run(tmp_path / "1", of=first)
    torch.rand(5)  # whatever was drawn before
    two = learning.run(tmp_path / "2", of=second)
    assert plan_bytes(one, tmp_path) == plan_bytes(two, tmp_path)
    assert one.curves == two.curves
    assert _same_weights(first, second)


def test_the_seed_matters(tmp_path: Path) -> None:
    starts = [learning.run(tmp_path / str(seed), Recipe(seed=seed)).curves[0] for seed in (1, 2)]
    assert starts[0] != starts[1]


@pytest.mark.parametrize(
    ("method", "stop"),
    [*(("dsp", stop) for stop in (1, 3, 4, 7, 11, 12)), *((method, 8) for method in GATES if method != "dsp")],
)
def test_an_interrupted_run_resumes_to_the_same_plan(method: str, stop: int, tmp_path: Path) -> None:
    recipe = Recipe(method=method, options={"evaluations": 4})  # a checkpoint every third step
    whole = learning.model()
    expected = learning.run(tmp_path / "whole", recipe, of=whole)

    def interrupt(done: int, total: int) -> None:
        if done == stop:
            raise EndOfPowerError

    with pytest.raises(EndOfPowerError):
        learning.run(tmp_path / "run", recipe, progress=interrupt)
    torch.rand(stop)
    resumed = learning.model()
    steps: list[int] = []
    learned = learning.run(tmp_path / "run", recipe, of=resumed, progress=lambda done, total: steps.append(done))
    assert steps[0] == (stop - 1) // 3 * 3 + 1  # the last checkpoint's next step
    assert plan_bytes(learned, tmp_path) == plan_bytes(expected, tmp_path)
    assert learned.curves == expected.curves
    assert _same_weights(whole, resumed)


def test_resumes_from_the_last_checkpoint_that_is_whole(tmp_path: Path) -> None:
    recipe = Recipe(options={"evaluations": 4})
    expected = learning.run(tmp_path / "whole", recipe)

    def interrupt(done: int, total: int) -> None:
        if done == 8:
            raise EndOfPowerError

    with pytest.raises(EndOfPowerError):
        learning.run(tmp_path / "run", recipe, progress=interrupt)
    half = tmp_path / "run" / "checkpoint-9"
    half.mkdir()
    (half / "trainer_state.json").write_text('{"global_step": 9, ')
    learned = learning.run(tmp_path / "run", recipe)
    assert learned.curves == expected.curves


def test_checkpoints_of_another_run_are_thrown_away(tmp_path: Path) -> None:
    expected = learning.run(tmp_path / "alone", Recipe(seed=5))
    learning.run(tmp_path / "run", Recipe(seed=4))
    assert learning.run(tmp_path / "run", Recipe(seed=5)).curves == expected.curves


def test_the_result_is_the_best_evaluation_after_the_gates_went_cold(tmp_path: Path) -> None:
    model = learning.model()
    learned = learning.run(tmp_path, Recipe(steps=30, options={"evaluations": 10, "cooldown": 0.5}), of=model)
    measured = {p.step: p.values["eval_accuracy"] for p in learned.curves if "eval_accuracy" in p.values}
    assert sorted(measured) == list(range(3, 31, 3))
    best = max(value for step, value in measured.items() if step >= 15)
    assert learning.accuracy(model, learned.plan) == best


def test_curves_tell_temperature_and_overlap(tmp_path: Path) -> None:
    learned = learning.run(tmp_path)
    last = learned.curves[-1].values
    assert {"loss", "learning_rate", "temperature", "overlap", "eval_accuracy"} <= set(last)
    assert last["temperature"] == 1e-8
    assert all(0 <= point.values["overlap"] <= 1 for point in learned.curves)


def test_the_model_is_left_as_it_was_but_for_its_weights(tmp_path: Path) -> None:
    model = learning.model()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    config = model.config.to_dict()
    learned = learning.run(tmp_path, of=model)
    assert learned.trained
    assert list(model.state_dict()) == list(before)
    assert model.config.to_dict() == config
    assert not model._forward_pre_hooks
    assert model.training
    assert not all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_bf16_multiplies_in_half_precision_and_leaves_float32_weights(tmp_path: Path) -> None:
    whole, half, again = learning.model(), learning.model(), learning.model()
    recipe = Recipe(keep=3, options={"mixed_precision": "bf16"})
    learning.run(tmp_path / "whole", Recipe(keep=3), of=whole)
    learned = learning.run(tmp_path / "half", recipe, of=half)
    assert learned.plan.heads_kept == 3
    assert all(weight.dtype == torch.float32 for weight in half.parameters())
    assert not _same_weights(whole, half)
    plain, inputs = learning.model(), {"input_ids": torch.arange(16).reshape(2, 8)}
    plain.load_state_dict(half.state_dict())
    with torch.no_grad():  # what comes after learning, an export say, is in full precision again
        assert torch.equal(plain.eval()(**inputs).logits, half.eval()(**inputs).logits)
    assert plan_bytes(learning.run(tmp_path / "again", recipe, of=again), tmp_path) == plan_bytes(learned, tmp_path)
    assert _same_weights(half, again)


def test_a_pipelined_method_leaves_the_model_as_it_was(tmp_path: Path) -> None:
    model, untouched = learning.model(), learning.model()
    recipe = Recipe(method="dsp-pipelined", options={"evaluations": 2})
    expected = learning.run(tmp_path / "alone", recipe)
    learning.run(tmp_path / "run", replace(recipe, method="dsp"))  # its checkpoints are those of another run
    learned = learning.run(tmp_path / "run", recipe, of=model)
    assert not learned.trained
    assert plan_bytes(learned, tmp_path) == plan_bytes(expected, tmp_path)
    assert _same_weights(model, untouched)
    assert all(weight.requires_grad and weight.grad is None for weight in model.parameters())
    state = torch.load(tmp_path / "run" / "checkpoint-12" / "optimizer.pt", weights_only=True)
    assert [len(group["params"]) for group in state["param_groups"]] == [1]  # the gate's weights
    assert state["state"][0]["exp_avg"].abs().min() > 0


def test_a_frozen_model_gathers_no_statistics() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 1))
    model[0].bias.requires_grad_(False)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with frozen(model):
        assert not any(weight.requires_grad for weight in model.parameters())
        model(torch.randn(5, 2))
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert [name for name, weight in model.named_parameters() if not weight.requires_grad] == ["0.bias"]
    model(torch.randn(5, 2))
    assert model[1].num_batches_tracked == 1


@pytest.mark.parametrize("method", GATES)
def test_kinds_of_sites_keep_their_share_each(method: str, tmp_path: Path) -> None:
    model = learning.model()
    first, second = learning.sites(model)
    kinds = [replace(first, kind="bidirectional"), replace(second, kind="causal")]
    recipe = Recipe(method=method, keep=5, steps=4, options={"pool": "kind"})
    learned = learn(model, kinds, learning.data(), recipe, tmp_path)
    assert [len(site.kept) for site in learned.plan.sites] == [3, 2]
    assert learned.trained == GATES[method].trains_model


@pytest.mark.parametrize("method", METHODS)
def test_only_the_heads_of_one_kind_compete_where_one_is_named(method: str, tmp_path: Path) -> None:
    model = learning.model()
    first, second = learning.sites(model)
    kinds = [replace(first, kind="causal"), replace(second, kind="cross")]
    recipe = Recipe(method=method, keep="25%", steps=4, options={"pool": "cross"})
    plan = learn(model, kinds, learning.data(), recipe, tmp_path).plan
    assert [len(site.kept) for site in plan.sites] == [4, 1]
    assert set(plan.sites[0].scale) == {1.0}
    with pytest.raises(UsageError, match="option pool=encoder: the model has no such attention; choose among decoder"):
        learn(model, kinds, learning.data(), replace(recipe, options={"pool": "bidirectional"}), tmp_path)


@pytest.mark.parametrize("method", ["hard-concrete", "bin-concrete"])
def test_penalised_gates_settle_and_the_model_trains_with_what_is_kept(method: str, tmp_path: Path) -> None:
    options = {"cooldown": 0.5, "penalty": 0.1, "points": 12, "evaluations": 2}
    learned = learning.run(tmp_path, Recipe(method=method, keep=2, options=options))
    seen = {point.step: point.values for point in learned.curves}
    assert all({"open", "expected", "overlap"} <= set(values) for values in seen.values())
    assert {seen[step]["overlap"] for step in range(6, 13)} == {1.0}
    assert len({seen[step]["expected"] for step in range(1, 7)}) == 6
    assert {seen[step]["expected"] for step in range(6, 13)} == {seen[6]["expected"]}


def test_a_search_changes_no_weight(tmp_path: Path) -> None:
    model, untouched = learning.model(), learning.model()
    learned = learning.run(tmp_path, OTHER, of=model)
    assert not learned.trained
    assert _same_weights(model, untouched)
    assert [point.values["heads"] for point in learned.curves] == [8, 7, 6, 5, 4, 3]
    assert learning.accuracy(model, learned.plan) == learned.curves[-1].values["eval_accuracy"]


def test_a_language_model_with_tied_weights_resumes_and_the_smallest_loss_wins(tmp_path: Path) -> None:
    recipe = Recipe(steps=8, options={"evaluations": 4, "cooldown": 0.5})
    whole, resumed, task = learning.language_model(), learning.language_model(), learning.NextToken()
    expected = learning.run(tmp_path / "whole", recipe, whole, task)

    def interrupt(done: int, total: int) -> None:
        if done == 7:
            raise EndOfPowerError

    with pytest.raises(EndOfPowerError):
        learning.run(tmp_path / "run", recipe, learning.language_model(), task, interrupt)
    learned = learning.run(tmp_path / "run", recipe, resumed, task)
    assert plan_bytes(learned, tmp_path) == plan_bytes(expected, tmp_path)
    assert _same_weights(whole, resumed)
    assert resumed.get_output_embeddings().weight is resumed.get_input_embeddings().weight
    measured = [point.values["eval_loss"] for point in learned.curves if "eval_loss" in point.values]
    trials = ModelSubsetEvaluator(resumed, learning.sites(resumed), learning.data(task), 12, 1, 0)
    kept = frozenset((site.name, head) for site in learned.plan.sites for head in site.kept)
    assert -trials.evaluate(kept) == pytest.approx(min(measured[1:]), rel=1e-5)


def test_subsets_are_counted_and_remembered() -> None:
    model = learning.model()
    trials = ModelSubsetEvaluator(model, learning.sites(model), learning.data(), 12, 1, 0)
    some = frozenset(trials.heads[:3])
    first, second = trials.evaluate_all([some, frozenset(trials.heads)])
    assert trials.count == 2
    assert [trials.evaluate(some), trials.evaluate(frozenset(trials.heads))] == [first, second]
    assert trials.count == 2


def test_learns_what_can_be_learned(tmp_path: Path) -> None:
    model = learning.model()
    learned = learning.run(tmp_path, Recipe(steps=200, batch_size=8, learning_rate=1e-2), of=model)
    losses = [point.values["loss"] for point in learned.curves if "loss" in point.values]
    assert sum(losses[-5:]) / 5 < 0.5 * sum(losses[:5]) / 5


def test_epochs_become_steps(tmp_path: Path) -> None:
    learned = learning.run(tmp_path, Recipe(steps=None, epochs=0.5, batch_size=8))
    assert learned.curves[-1].step == 4  # 30 of 60 rows, 8 a step


@pytest.mark.parametrize(("method", "steps"), [("dsp", 9), ("dsp-pipelined", 3)])
def test_epochs_are_those_of_the_paper_where_none_are_asked_for(method: str, steps: int, tmp_path: Path) -> None:
    learned = learning.run(tmp_path, Recipe(method=method, steps=None, epochs=None, batch_size=20))
    assert learned.curves[-1].step == steps


def test_every_epoch_visits_each_row_once_in_batches_of_like_length() -> None:
    lengths = [1 + row % 40 for row in range(400)]
    order = row_order(lengths, batch_size=8, batches=100, seed=0)
    assert sorted(order[:400]) == sorted(order[400:]) == list(range(400))
    spread = [max(batch) - min(batch) for batch in zip(*[iter(lengths[row] for row in order)] * 8, strict=True)]
    assert sum(spread) / len(spread) < 3
    assert order == row_order(lengths, 8, 100, 0) != row_order(lengths, 8, 100, 1)


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        (Recipe(method="magic"), "method 'magic': unknown; choose one of dsp, dsp-pipelined, ste, hard-concrete"),
        (Recipe(method="a-star"), "method 'a-star': unknown; did you mean astar?"),
        (Recipe(options={"taui_ni": 1}), "option 'taui_ni' of dsp: unknown; did you mean tau_ini?"),
        (Recipe(method="local", keep=None), "local needs an end; say how many heads to keep with --keep"),
        (Recipe(method="local", guarantee=0.9), "guarantee 0.9: certifies what heads cost; give --max-drop"),
        (Recipe(options={"tau": 1}), "option 'tau' of dsp: unknown; did you mean tau_ini"),
        (
            Recipe(method="taylor", options={"tau": 1}),
            "option 'tau' of taylor: unknown; choose one of by, mixed_precision",
        ),
        (Recipe(options={"tau_ini": "hot"}), "option tau_ini='hot' of dsp: Input should be a valid number"),
        (Recipe(options={"tau_ini": float("inf")}), "option tau_ini=inf of dsp: Input should be a finite number"),
        (Recipe(options={"evaluations": 0}), "evaluations 0, points 60: give 1 or more of each"),
        (Recipe(options={"warmup": -1}), "warmup -1.0: a share of the steps"),
        (Recipe(options={"max_grad_norm": 0}), "max_grad_norm 0.0"),
        (
            Recipe(options={"pool": "site"}),
            "option pool='site' of dsp: Input should be 'model', 'kind', 'bidirectional', 'causal' or 'cross'",
        ),
        (Recipe(method="taylor", options={"rows": 0}), "option rows=0 of taylor: Input should be greater than 0"),
        (Recipe(keep=9), "keep 9: there are 8 heads to choose from; give a number from 0 to 8"),
        (Recipe(keep=-1), "keep -1"),
        (Recipe(keep="150%"), "keep 150%"),
        (Recipe(keep="half"), "keep 'half': neither a count nor a share"),
        (Recipe(keep=None), "say how many with --keep"),
    ],
)
def test_refuses_what_it_cannot_do(recipe: Recipe, message: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=message):
        learning.run(tmp_path, recipe)


def test_two_processes_agree(tmp_path: Path) -> None:
    """`accelerate launch` with two processes on the CPU: both end, with the same plan and the same weights."""
    ranks = launch("tests.learning", tmp_path)
    assert ranks[0] == ranks[1]
    assert ranks[0]["processes"] == 2
    for method in ("dsp", "hard-concrete"):
        assert sum(len(kept) for kept in ranks[0][method]["kept"]) == 3


def _same_weights(one: torch.nn.Module, two: torch.nn.Module) -> bool:
    pairs = zip(one.state_dict().values(), two.state_dict().values(), strict=True)
    return all(torch.equal(first, second) for first, second in pairs)
