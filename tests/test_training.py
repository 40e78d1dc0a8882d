"""Training: the text is met in order, memories go from step to step, and interrupted runs are the uninterrupted."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
import pytest
import torch
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from pytorch_optimizer import Lamb
from safetensors.torch import save_file
from torch import nn
from transformers import TrainingArguments

from compressor.cli.train import train as command
from compressor.config.run import flag_of
from compressor.config.train import Training, make
from compressor.errors import DivergedError, InputError, UsageError
from compressor.model_folder import load
from compressor.progress import NullListener, ProgressCallback
from compressor.results import Note
from compressor.selection.gates import GATES, BinConcreteGate, StraightThroughGate
from compressor.selection.learn import learn
from compressor.tasks import open_data
from compressor.tasks.segment_streams import Streams, assign_streams, read, reader
from compressor.training.checkpoints import memory_file, newest
from compressor.training.fit import _one_device, fit
from compressor.training.schedule import Schedule
from compressor.training.train import train
from compressor.training.trainer import lamb
from compressor.units import find_sites, gated
from tests import language
from tests.folders import Request
from tests.language import EndOfPowerError
from tests.learning import Recipe


class Heard(NullListener):
    """Hears every note, and ends the run after a step, if asked to."""

    def __init__(self, stop: int | None = None) -> None:
        self.stop, self.notes = stop, list[str]()

    @contextmanager
    def stage(self, name: str) -> Iterator[ProgressCallback]:
        def tell(done: int, total: int) -> None:
            if done == self.stop and name.startswith("training"):
                raise EndOfPowerError

        yield tell

    def note(self, note: Note | str) -> None:
        self.notes.append(str(note))


@settings(max_examples=100, deadline=None)
@given(
    steps=st.integers(1, 300),
    warmup=st.floats(0, 1),
    scheduler=st.sampled_from(["linear", "cosine"]),
    final=st.floats(0, 1),
)
def test_the_rate_rises_to_its_peak_and_falls_to_its_end(
    steps: int, warmup: float, scheduler: Any, final: float
) -> None:
    schedule = language.schedule(
        steps=steps, warmup=warmup, scheduler=scheduler, learning_rate=2.0, final_learning_rate=2.0 * final
    )
    rise = round(warmup * steps)
    paces = [schedule.pace(step) for step in range(steps + 1)]
    assert paces[:rise] == pytest.approx([step / max(1, rise) for step in range(rise)])
    assert paces[rise:] == sorted(paces[rise:], reverse=True)
    assert paces[-1] == pytest.approx(final) or rise == steps
    assert rise == steps or paces[rise] == pytest.approx(1.0)


def test_half_way_down_a_cosine_the_rate_is_between_its_ends() -> None:
    assert language.schedule(steps=100, warmup=0.0).pace(50) == pytest.approx((1 + 0.01) / 2)
    assert language.schedule(steps=100, warmup=0.5, scheduler="linear", final_learning_rate=0.0).pace(75) == 0.5


@pytest.mark.parametrize("optimizer", ["lamb", "adamw"])
def test_training_is_the_plain_loop_over_segments_that_follow_each_other(optimizer: Any, tmp_path: Path) -> None:
    held, by_hand = language.folder(**language.UNDROPPED), language.folder(**language.UNDROPPED)
    rows = language.data(tmp_path, held, lines=20)
    task = rows.task
    assert isinstance(task, Streams)
    schedule = language.schedule(optimizer=optimizer, weight_decay=0.0)
    order = assign_streams(len(rows.train), 3, whole=False)
    assert len(order) < schedule.steps  # the text is read more than once
    log = fit(held.model, rows, schedule, {}, tmp_path / "run", lambda done, total: None)

    model = by_hand.model.train()
    made: torch.optim.Optimizer = (
        Lamb(model.parameters(), adam_debias=True)
        if optimizer == "lamb"
        else torch.optim.AdamW(model.parameters(), weight_decay=0.0)
    )
    losses, memories, best = [], None, (math.inf, dict[str, torch.Tensor]())
    for step in range(schedule.steps):
        batch = task.collate([rows.train[int(row)] for row in order[step % len(order)]])
        memories = None if step % len(order) == 0 else memories
        out = model(**batch, memories=memories)
        memories = out.memories
        out.loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), schedule.max_grad_norm)
        for group in made.param_groups:
            group["lr"] = schedule.learning_rate * schedule.pace(step)
        made.step()
        made.zero_grad()
        losses.append(out.loss.item())
        if (step + 1) % 3 == 0:
            metric = task.score(read(task, rows.eval, reader(model.eval()), streams=3))
            best = min(best, (metric, {name: value.clone() for name, value in model.state_dict().items()}))
            model.train()
    assert [entry["loss"] for entry in log if "loss" in entry] == pytest.approx(losses, abs=1e-4)
    measured = [entry["eval_perplexity"] for entry in log if "eval_perplexity" in entry]
    assert (len(measured), min(measured)) == (4, pytest.approx(best[0], rel=1e-4))
    for name, weight in held.model.state_dict().items():
        assert torch.allclose(weight, best[1][name], atol=1e-4), name


@pytest.mark.parametrize(("stop", "precision"), [(2, "no"), (7, "no"), (12, "no"), (7, "bf16")])
def test_an_interrupted_training_is_the_uninterrupted_one_bit_for_bit(
    stop: int, precision: Any, tmp_path: Path
) -> None:
    (tmp_path / "train.txt").write_text(language.text(30))
    whole = train(language.asked(tmp_path / "whole", mixed_precision=precision))
    with pytest.raises(EndOfPowerError):
        train(language.asked(tmp_path / "run", mixed_precision=precision), Heard(stop))
    checkpoints = tmp_path / "run.partial" / "learning" / "checkpoints"
    if stop > 3:
        held = {file.name for file in next(iter(checkpoints.glob("checkpoint-*"))).iterdir()}
        assert {"model.safetensors", "optimizer.pt", "memory_0.safetensors"} <= held
    torch.rand(stop)
    assert train(language.asked(tmp_path / "run", mixed_precision=precision)) == whole
    assert not (tmp_path / "run.partial").exists()
    for name in ("model.safetensors", "config.json", "tokenizer.json"):
        assert (tmp_path / "run" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes(), name
    logs = [json.loads((tmp_path / name / "training.json").read_text())["log"] for name in ("whole", "run")]
    timed = {"eval_runtime", "eval_samples_per_second", "eval_steps_per_second", "train_runtime"}
    shown = [
        [{k: v for k, v in entry.items() if k not in timed} for entry in log if "train_loss" not in entry]
        for log in logs
    ]
    assert shown[0] == shown[1]


@pytest.mark.parametrize(
    ("level", "architecture", "metric"),
    [("word", "transformer-xl", "perplexity"), ("character", "all-attention", "bits-per-character")],
)
def test_what_is_written_is_a_complete_model_folder(level: Any, architecture: Any, metric: str, tmp_path: Path) -> None:
    (tmp_path / "train.txt").write_text(language.text(40))
    (tmp_path / "eval.txt").write_text(language.text(10, seed=1))
    heard = Heard()
    asked = language.asked(
        tmp_path / "out", level=level, architecture=architecture, eval_data=str(tmp_path / "eval.txt")
    )
    found = train(asked, heard)
    folder = load(tmp_path / "out")
    assert (folder.task, folder.family, found.metric) == ("causal-lm", architecture, metric)
    assert folder.config.memory_length == 8
    assert len(folder.processor) == folder.config.vocab_size == found.vocabulary
    request = Request(test_data=str(tmp_path / "eval.txt"), max_length=6)
    data = open_data(request, folder)
    assert isinstance(data.task, Streams)
    assert data.task.score(read(data.task, data.test, reader(folder.model), streams=3)) == pytest.approx(
        found.test, rel=1e-5
    )
    same, *steps = heard.notes
    assert same.startswith("no test data was given: the test text is that of --eval-data")
    assert [note.split(":")[0] for note in steps] == [f"step {step} of 12" for step in (3, 6, 9, 12)]
    assert f"{metric} {found.eval:.4g}" in " ".join(heard.notes)


@pytest.mark.parametrize(("optimizer", "rate"), [("lamb", 0.1), ("adamw", 0.02)])
def test_training_learns_to_count(optimizer: Any, rate: float, tmp_path: Path) -> None:
    (tmp_path / "train.txt").write_text(language.text(200))
    pace = {"steps": 60, "batch_size": 8, "evaluations": 1, "learning_rate": rate, "optimizer": optimizer}
    found = train(language.asked(tmp_path / "out", hidden=32, **pace, **language.UNDROPPED))
    assert found.test < 0.6 * found.vocabulary


def test_checkpoints_of_another_training_are_refused(tmp_path: Path) -> None:
    (tmp_path / "train.txt").write_text(language.text(30))
    with pytest.raises(EndOfPowerError):
        train(language.asked(tmp_path / "out"), Heard(7))
    with pytest.raises(UsageError, match=r"of another run \(layers 2, now 3; seed 0, now 1\); ask for the same"):
        train(language.asked(tmp_path / "out", layers=3, seed=1))
    (tmp_path / "train.txt").write_text(language.text(31))
    with pytest.raises(UsageError, match=r"of another run \(rows"):
        train(language.asked(tmp_path / "out"))
    assert list((tmp_path / "out.partial").rglob("model.safetensors"))
    train(language.asked(tmp_path / "out", layers=1, force=True))
    assert load(tmp_path / "out").config.num_hidden_layers == 1
    with pytest.raises(UsageError, match="is there already; add --force"):
        train(language.asked(tmp_path / "out"))


def test_a_loss_that_is_no_number_stops_before_it_does_harm(tmp_path: Path) -> None:
    held, whole = language.folder(), language.folder()
    rows = language.data(tmp_path, held)
    expected = fit(whole.model, rows, language.schedule(), {}, tmp_path / "whole", lambda done, total: None)

    def poison(done: int, total: int) -> None:
        if done == 7:
            with torch.no_grad():
                next(held.model.parameters()).fill_(math.inf)

    with pytest.raises(
        DivergedError, match=r"step 8: the loss is nan; lower .*; the last good checkpoint is checkpoint-6"
    ):
        fit(held.model, rows, language.schedule(), {}, tmp_path / "run", poison)
    again = language.folder()
    log = fit(again.model, rows, language.schedule(), {}, tmp_path / "run", lambda done, total: None)
    assert [entry.get("loss") for entry in log] == [entry.get("loss") for entry in expected]
    assert all(torch.equal(*pair) for pair in zip(again.model.parameters(), whole.model.parameters(), strict=True))


def test_a_checkpoint_that_has_diverged_is_not_kept(tmp_path: Path) -> None:
    (tmp_path / "train.txt").write_text(language.text(30))
    wild = {"learning_rate": 1e30, "warmup": 0.0, "evaluations": 12}
    with pytest.raises(
        DivergedError,
        match=r"^step 1: .* (nan|inf|not finite); lower .*-rate.*--warmup.*--force.*; there was no checkpoint yet$",
    ):
        train(language.asked(tmp_path / "out", **wild))
    assert train(language.asked(tmp_path / "out")).eval < math.inf  # as it was told to, nothing in the way


def test_after_a_late_divergence_the_advice_can_be_followed(tmp_path: Path) -> None:
    (tmp_path / "train.txt").write_text(language.text(30))
    wild = language.asked(tmp_path / "out", learning_rate=1e4, warmup=1.0, optimizer="adamw", evaluations=12)
    with pytest.raises(DivergedError, match=r"start anew with --force.*; the last good checkpoint is checkpoint-\d+"):
        train(wild)
    for state in (tmp_path / "out.partial").rglob("trainer_state.json"):
        log = json.loads(state.read_text())["log_history"]
        assert all(math.isfinite(entry.get("eval_perplexity", 0.0)) for entry in log)
    with pytest.raises(UsageError, match=r"of another run .*--force"):
        train(language.asked(tmp_path / "out"))
    train(language.asked(tmp_path / "out", force=True))


def test_a_gradient_that_is_no_number_stops_too(tmp_path: Path) -> None:
    held = language.folder()
    rows = language.data(tmp_path, held)
    bias = held.model.model.norm.bias
    bias.register_hook(lambda gradient: gradient * math.inf)
    before = [weight.clone() for weight in held.model.parameters()]
    with pytest.raises(
        DivergedError, match=r"step 1: the gradient's norm is (nan|inf); .*; there was no checkpoint yet"
    ):
        fit(held.model, rows, language.schedule(), {}, tmp_path / "run", lambda done, total: None)
    assert all(torch.equal(*pair) for pair in zip(before, held.model.parameters(), strict=True))


def test_a_checkpoint_is_whole_once_every_process_wrote_its_memory(tmp_path: Path) -> None:
    for step in (1, 2):
        (checkpoint := tmp_path / f"checkpoint-{step}").mkdir()
        (checkpoint / "trainer_state.json").write_text("{}")
        for process in range(2):
            save_file({"0": torch.zeros(3)}, memory_file(checkpoint, process))
    last, before = tmp_path / "checkpoint-2", tmp_path / "checkpoint-1"
    assert newest(tmp_path, 2) == last
    second = memory_file(last, 1)
    second.write_bytes(second.read_bytes()[:-4])  # cut short
    assert newest(tmp_path, 1) == last
    assert newest(tmp_path, 2) == before
    memory_file(before, 1).unlink()
    assert newest(tmp_path, 2) is None


def test_one_process_has_one_device(tmp_path: Path) -> None:
    for seen, used in ((0, 0), (1, 1), (4, 1)):
        args = TrainingArguments(output_dir=str(tmp_path), per_device_train_batch_size=3, use_cpu=True)
        assert args.device.type == "cpu"
        args._n_gpu = seen
        _one_device(args)
        assert (args.n_gpu, args.train_batch_size, args.eval_batch_size) == (used, 3, 8)


def test_lamb_decays_inside_the_ratio_of_trust() -> None:
    """Algorithm 2 of You et al. 2020 without its bias correction; beyond a norm of 10 a tensor counts as 10."""
    torch.manual_seed(0)
    weights = [(size * torch.randn(3, 4)).requires_grad_() for size in (1.0, 8.0)]
    decays, by_hand = (0.5, 0.0), [weight.detach().clone() for weight in weights]
    groups = [{"params": [weight], "weight_decay": decay} for weight, decay in zip(weights, decays, strict=True)]
    made = lamb(groups, 0.1, (0.9, 0.999))
    first, second = ([torch.zeros(3, 4) for _ in range(2)] for _ in range(2))
    for _ in range(3):
        for index, weight in enumerate(weights):
            weight.grad = gradient = torch.randn(3, 4)
            first[index] = 0.9 * first[index] + 0.1 * gradient
            second[index] = 0.999 * second[index] + 0.001 * gradient**2
            update = first[index] / (second[index].sqrt() + 1e-6) + decays[index] * by_hand[index]
            by_hand[index] -= 0.1 * min(10.0, by_hand[index].norm()) / update.norm() * update
        made.step()
        for weight, expected in zip(weights, by_hand, strict=True):
            assert torch.allclose(weight, expected, atol=1e-5)
    assert weights[1].norm() > 10 > weights[0].norm()


def test_lamb_moves_gates_as_adam_does(tmp_path: Path) -> None:
    ends = []
    for optimizer in ("adamw", "lamb"):
        held = language.folder(**language.UNDROPPED)
        sites = find_sites(held.model, {"input_ids": torch.ones(2, 4, dtype=torch.int64)})
        gate = StraightThroughGate([4, 4], 5, 12, 0)
        rows = language.data(tmp_path, held)
        fit(
            held.model,
            rows,
            language.schedule(optimizer=optimizer, evaluations=1),
            {},
            tmp_path / optimizer,
            lambda done, total: None,
            gate=gate,
            sites=sites,
            trains_model=False,
        )
        ends.append(gate.weight.detach())
    assert not torch.allclose(ends[0], StraightThroughGate([4, 4], 5, 12, 0).weight)
    assert torch.allclose(ends[0], ends[1], atol=1e-2)


def test_a_penalised_gate_ends_with_the_heads_that_it_left(tmp_path: Path) -> None:
    held = language.folder()
    sites = find_sites(held.model, {"input_ids": torch.ones(2, 4, dtype=torch.int64)})
    rows = language.data(tmp_path, held)
    kept = []
    for penalty in (0.0, 30.0):
        options = {
            "penalty": penalty,
            "penalty_warmup": 0,
            "cooldown": 0.5,
            "gate_learning_rate": 1.5,
            "optimizer": "lamb",
        }
        recipe = Recipe(method="bin-concrete", keep=None, options=options, batch_size=3)
        learned = learn(held.model, sites, rows, recipe, tmp_path / f"{penalty}")
        kept.append(learned.plan.heads_kept)
        for site in learned.plan.sites:
            assert all(scale == pytest.approx(4 / len(site.kept)) for scale in site.scale)
        assert learned.curves[-1].values["overlap"] == 1.0
        assert "eval_perplexity" in learned.curves[-1].values
    assert kept[1] < kept[0]


@pytest.mark.parametrize("method", GATES)
def test_every_gate_keeps_exactly_k_over_streams(method: str, tmp_path: Path) -> None:
    """What is chosen is the model gated by the plan, as it reads the text with its memory."""
    held = language.folder()
    before = [weight.clone() for weight in held.model.parameters()]
    sites = find_sites(held.model, {"input_ids": torch.ones(2, 4, dtype=torch.int64)})
    rows = language.data(tmp_path, held)
    assert isinstance(rows.task, Streams)
    options = {"optimizer": "lamb", "evaluations": 4, "gate_learning_rate": 0.5}
    learned = learn(held.model, sites, rows, Recipe(method=method, options=options, batch_size=3), tmp_path / "run")
    assert learned.plan.heads_kept == 3
    changed = [not torch.equal(*pair) for pair in zip(before, held.model.parameters(), strict=True)]
    assert any(changed) == GATES[method].trains_model
    measured = [found.values["eval_perplexity"] for found in learned.curves if "eval_perplexity" in found.values]
    with gated(held.model.eval(), learned.plan) as live:
        chosen = rows.task.score(read(rows.task, rows.eval, reader(live), streams=3))
    assert chosen in [pytest.approx(value, rel=1e-5) for value in measured]


def test_too_little_text_for_the_streams(tmp_path: Path) -> None:
    (tmp_path / "train.txt").write_text(language.text(40))
    with pytest.raises(InputError, match=r"90 streams side by side need as many segments, the text has \d+; lower"):
        train(language.asked(tmp_path / "out", batch_size=90))
    assert not (tmp_path / "out.partial").exists()


def test_every_field_is_one_flag() -> None:
    flags = {str(option.name): option.opts for option in command.params if isinstance(option, click.Option)}
    assert set(flags) - {"quiet", "debug", "json"} == set(Training.model_fields) - {"out"}
    assert all(flag_of(name) in opts for name, opts in flags.items())
    shown = CliRunner().invoke(command, ["--help"]).output
    assert all(heading in shown for heading in ("Data:", "Model:", "Training:", "Output:"))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"hidden": "30"}, "--hidden 30: give an even multiple of heads 8"),
        ({"layers": "0"}, "--layers '0': input should be greater than or equal to 1 (layers)"),
        ({"learning_rate": "1e-5"}, "--final-learning-rate 0.0001: the rate falls to it from learning_rate 1e-05"),
        (
            {"level": "character", "vocabulary": "9"},
            "--vocabulary 9: characters are a to z and the space; leave it out",
        ),
        ({"optimizer": "sgd"}, "--optimizer 'sgd': input should be 'lamb' or 'adamw' (LAMB or AdamW)"),
    ],
)
def test_a_fault_is_one_line(flags: dict[str, str], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        make(out="out", data="text.txt", **flags)
    assert str(caught.value).startswith(message)


def test_a_schedule_ends_below_its_peak() -> None:
    with pytest.raises(UsageError, match=r"final_learning_rate 1.0: the rate falls to it from 0.01; give a number"):
        language.schedule(final_learning_rate=1.0)
    assert isinstance(language.schedule(), Schedule)


def test_the_gate_is_frozen_after_its_share_of_the_steps() -> None:
    gate = BinConcreteGate([4, 4], None, 10, 0, cooldown=0.2)
    with torch.no_grad():
        gate.weight.copy_(torch.tensor([-2.0, -1.0, -0.5, 2.0, 0.5, 1.0, -1.0, 2.0]))
    frozen = gate.sample(2)
    assert torch.equal(frozen > 0, torch.tensor([False, False, False, True, True, True, False, True]))
    assert all(torch.equal(gate.sample(step), frozen) for step in range(3, 10))
    assert not torch.equal(gate.sample(1), frozen)  # drawn until then
