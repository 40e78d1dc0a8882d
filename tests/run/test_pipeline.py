"""The whole way on a tiny model: what the output folder holds, what a run proves, how it stops and goes on."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import onnxruntime
import pytest
import torch
from transformers import BertConfig, BertForSequenceClassification, ViTImageProcessorPil

import compressor
from compressor.config.run import Recipe
from compressor.errors import InputError, MismatchError, SiteRefusedError, TargetMissingError, UsageError
from compressor.model_folder import example_inputs, load
from compressor.progress import ProgressCallback
from compressor.report import Report
from compressor.report import load as load_report
from compressor.results import Note
from compressor.run import pipeline, plan_source, variant, verify
from compressor.selection import subset_evaluator
from graph_passes import Plan, Refusal, Shrunk
from tests import folders
from tests.command import compress as command
from tests.command import heed_ctrl_c
from tests.zoo import FAMILIES

OUTPUT = {
    "model.onnx",
    "model.onnx.data",
    "engine.onnx",
    "plan.json",
    "report.json",
    "report.html",
    "config.json",
    "tokenizer.json",
}
Cap = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model and rows that it can learn."""
    folder = tmp_path_factory.mktemp("pipeline")
    torch.manual_seed(0)
    folders.save(folders.bert(), folder / "model")
    words = ["one", "two", "three", "four", "five", "six", "seven"]
    rows = [f"{n % 2}\tthe {'good' if n % 2 else 'bad'} film {words[n % 7]} {words[n % 5]}" for n in range(48)]
    (folder / "rows.tsv").write_text("\n".join(["label\ttext", *rows, ""]))
    return folder


def recipe(place: Path, out: Path, **more: Any) -> Recipe:
    """A short run that learns."""
    settings = {"keep": 1, "steps": 4, "batch_size": 8, "max_length": 8, "batch": (1,), "seq": (8,), "seconds": 0.01}
    settings["data"] = str(place / "rows.tsv")
    return Recipe(**{"model": place / "model", "out": out, **settings, **more})


class Stages:
    """Listens, and does something when a stage begins."""

    def __init__(self, at: str = "", do: Callable[[], None] = lambda: None) -> None:
        self.at, self.do = at, do
        self.seen: list[str] = []
        self.notes: list[str] = []

    @contextmanager
    def stage(self, name: str) -> Iterator[ProgressCallback]:
        self.seen.append(name)
        if self.at and self.at in name:
            self.do()
        yield lambda done, total: None

    def note(self, note: Note | str) -> None:
        self.notes.append(str(note))


@pytest.fixture(scope="module")
def learned(place: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Report, Stages]:
    """One run with everything on."""
    out = tmp_path_factory.mktemp("learned") / "out"
    heard = Stages()
    return out, compressor.compress(recipe(place, out, max_drop=0.99), heard), heard


def test_the_output_folder(learned: tuple[Path, Report, Stages]) -> None:
    out, report, _ = learned
    assert {path.name for path in out.iterdir()} >= OUTPUT
    assert not out.with_name("out.partial").exists()
    assert load_report(out) == report
    assert (report.plan.heads_kept, report.plan.heads, report.plan.method) == (1, 2, "dsp")
    assert Plan.load(out / "plan.json") == report.plan


def test_proofs_score_and_speed_are_all_there(learned: tuple[Path, Report, Stages]) -> None:
    _, report, _ = learned
    stages = ("gated model = reference graph", "reference graph = shrunk graph", "shrunk graph = engine")
    assert [(proof.side, proof.stage) for proof in report.proofs] == [
        (name, stage) for name in ("dense", "compressed") for stage in stages
    ]
    assert all(proof.holds for proof in report.proofs)
    assert [(score.metric, score.split) for score in report.scores] == [("accuracy", "test")]
    assert [(speed.batch, speed.seq) for speed in report.speeds] == [(1, 8)]
    assert report.gate == "passed"
    assert report.curves
    assert report.plan.evidence["test"]["compressed"] == report.scores[0].compressed


def test_parameters_fall_by_what_the_plan_drops(learned: tuple[Path, Report, Stages]) -> None:
    _, report, _ = learned
    width, head_dim = 16, 8
    assert report.dense.parameters - report.compressed.parameters == 4 * width * head_dim + 3 * head_dim


def test_the_engine_computes_what_the_gated_model_does(learned: tuple[Path, Report, Stages]) -> None:
    out, report, _ = learned
    folder = load(out)
    inputs = example_inputs(folder, 3, 7)
    with compressor.gated(folder.model, report.plan), torch.no_grad():
        expected = folder.model(**inputs).logits
    for name in ("model.onnx", "engine.onnx"):
        session = onnxruntime.InferenceSession(out / name, providers=["CPUExecutionProvider"])
        (found,) = session.run(["logits"], {name: value.numpy() for name, value in inputs.items()})
        torch.testing.assert_close(torch.from_numpy(found), expected, rtol=1e-4, atol=1e-5)


def test_the_output_is_a_model_folder_with_its_plan(
    learned: tuple[Path, Report, Stages], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, report, _ = learned
    heard = Stages()
    shrunk: list[int] = []
    real = variant.graph_passes.shrink

    def count(model: Any, plan: Plan, **how: Any) -> Shrunk:
        shrunk.append(plan.heads_kept)
        return real(model, plan, **how)

    monkeypatch.setattr(variant.graph_passes, "shrink", count)
    again = compressor.compress(Recipe(model=out, out=tmp_path / "out", batch=(1,), seq=(8,), seconds=0.01), heard)
    assert again.plan.sites == report.plan.sites
    assert again.compressed.parameters == report.compressed.parameters
    assert not any("learning" in name for name in heard.seen)
    assert shrunk == [2, 1], "dense, then by the plan; nothing was rehearsed"
    assert again.refused == ()
    assert (
        f"the heads are those of {out / 'plan.json'}, which lies in the model folder: nothing was learned"
        in heard.notes
    )


def test_stages_and_notes_are_told(learned: tuple[Path, Report, Stages]) -> None:
    _, report, heard = learned
    assert list(report.seconds) == heard.seen
    assert list(report.notes) == heard.notes
    assert any("were set aside" in note for note in heard.notes)
    assert any("dense is the model folder as it was given" in note for note in heard.notes)


def test_without_rows_and_plan_the_model_goes_through_as_it_is(place: Path, tmp_path: Path) -> None:
    report = compressor.compress(Recipe(model=place / "model", out=tmp_path / "out", batch=(1,), seconds=0.01))
    assert report.plan.heads_kept == report.plan.heads
    assert any("nothing was learned" in note and "--data" in note for note in report.notes)
    assert (report.scores, report.gate) == ((), "not asked")
    assert report.verdict.startswith("Nothing was learned")


def test_a_search_leaves_the_weights(place: Path, tmp_path: Path) -> None:
    report = compressor.compress(recipe(place, tmp_path / "out", method="taylor", max_length=1000))
    assert "taylor searches and trains nothing: --steps had no effect" in report.notes
    assert "--max-length 1000: the model takes 20 tokens, longer rows are cut there" in report.notes
    assert (report.plan.method, report.plan.heads_kept) == ("taylor", 1)
    assert report.plan.model == load(place / "model").fingerprint
    assert not (tmp_path / "out" / "model.safetensors").exists()


def test_a_failed_gate_keeps_the_evidence(
    place: Path, tmp_path: Path, capfd: Cap, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline, "judged", lambda max_drop, scores: "failed")
    words = ["--keep", "1", "--steps", "2", "--batch", "1", "--seconds", "0.01", "--max-drop", "0"]
    out = tmp_path / "out"
    done = command(capfd, place / "model", "--data", place / "rows.tsv", *words, "-o", out, "--quiet")
    assert done.code == 4
    assert re.search(
        r"accuracy on the test rows went from [\d.]+ to [\d.]+, worse than --max-drop 0 allows", done.error
    )
    assert done.out.startswith("Gate failed")
    assert load_report(out).gate == "failed"


def test_numbers_that_differ_end_the_run(
    place: Path, tmp_path: Path, capfd: Cap, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verify, "relative_error", lambda *args: 0.5)
    done = command(capfd, place / "model", "-o", tmp_path / "out", "--quiet")
    assert (done.code, done.out) == (5, "")
    assert "gated model = reference graph does not hold" in done.error
    assert list(tmp_path.iterdir()) == []
    assert MismatchError.exit_code == 5


def test_a_refused_site_is_known_before_learning(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = variant.graph_passes.shrink

    def refuse(model: Any, plan: Plan, **how: Any) -> Shrunk:
        done = real(model, plan, **how)
        if plan.heads_kept == plan.heads:
            return done
        refusal = Refusal(frozenset({plan.sites[0].name}), "Frobnicate", "node_7", "no rule for it")
        return Shrunk(done.model, done.plan, (), (), (refusal,), done.parameters)

    monkeypatch.setattr(variant.graph_passes, "shrink", refuse)
    heard = Stages()
    with pytest.raises(SiteRefusedError, match="self: Frobnicate node_7: no rule for it; keep every head of the site"):
        compressor.compress(recipe(place, tmp_path / "out"), heard)
    assert not any("learning" in name for name in heard.seen)
    assert list(tmp_path.iterdir()) == []


def test_images_have_no_length(tmp_path: Path) -> None:
    model, _ = FAMILIES["vit"](0)
    folder = tmp_path / "model"
    model.save_pretrained(folder)
    size = {"height": model.config.image_size, "width": model.config.image_size}
    ViTImageProcessorPil(size=size).save_pretrained(folder)
    asked: dict[str, Any] = {"model": folder, "out": tmp_path / "out", "batch": (1,), "seconds": 0.01}
    report = compressor.compress(Recipe(**asked))
    assert [(row.batch, row.seq) for row in report.speeds] == [(1, None)]
    assert "at batch 1 (" in report.verdict
    with pytest.raises(UsageError, match=r"--seq 8: .* takes no text; leave it out"):
        compressor.compress(Recipe(**asked, seq=(8,), force=True))


def test_a_site_that_must_stay_whole_is_reported(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a plan the model goes through with all of its heads, and the report says why they would stay."""
    real = variant.graph_passes.shrink

    def refuse(model: Any, plan: Plan, **how: Any) -> Shrunk:
        done = real(model, plan, **how)
        dropped = [site.name for site in plan.sites if site.dropped]
        refusals = tuple(Refusal(frozenset({name}), "Frobnicate", "node_7", "no rule for it") for name in dropped)
        return Shrunk(done.model, done.plan, (), (), refusals, done.parameters)

    monkeypatch.setattr(variant.graph_passes, "shrink", refuse)
    report = compressor.compress(recipe(place, tmp_path / "out", data=None, keep=None))
    assert len(report.refused) == len(report.plan.sites) > 0
    assert "Frobnicate node_7: no rule for it" in report.refused[0].why
    assert "refused" in report.verdict


def interrupt() -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("asked", "error"),
    [
        ({"options": {"tau": 3}}, UsageError),
        ({"options": {"tau_ini": -1.0}}, UsageError),
        ({"method": "taylor", "options": {"share": 2.0}}, UsageError),
        ({"precision": "fp16", "provider": "cpu"}, TargetMissingError),
    ],
)
def test_what_can_be_known_to_fail_fails_before_an_export(
    place: Path, tmp_path: Path, asked: dict[str, Any], error: type[Exception]
) -> None:
    heard = Stages()
    with pytest.raises(error):
        compressor.compress(recipe(place, tmp_path / "out", **asked), heard)
    assert heard.seen == ["loading the model"]


@pytest.mark.parametrize("stage", ["loading", "dense: building", "learning"])
def test_an_interrupted_run_leaves_nothing(stage: str, place: Path, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        compressor.compress(recipe(place, tmp_path / "out"), Stages(stage, interrupt))
    assert list(tmp_path.iterdir()) == []


def test_what_was_learned_is_not_learned_again(
    place: Path, tmp_path: Path, learned: tuple[Path, Report, Stages]
) -> None:
    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        compressor.compress(recipe(place, out, max_drop=0.99), Stages("compressed: exporting", interrupt))
    assert [path.name for path in tmp_path.iterdir()] == ["out.partial"]
    heard = Stages()
    compressor.compress(recipe(place, out, max_drop=0.99), heard)
    assert any("an earlier run learned" in note for note in heard.notes)
    assert (out / "plan.json").read_bytes() == (learned[0] / "plan.json").read_bytes()


@pytest.mark.parametrize(
    ("left", "content", "how_far"),
    [
        ("done.json", "{}", "it had ended learning"),
        ("checkpoints/checkpoint-3/trainer_state.json", '{"global_step": 3, "max_steps": 9}', "step 3 of 9"),
        ("blocks/entmax/checkpoint-3/trainer_state.json", '{"global_step": 3, "max_steps": 9}', "step 3 of 9"),
        ("blocks/maps.safetensors", "", "attention maps"),
        ("checkpoints/checkpoint-search.npz", "", "a search"),
    ],
)
def test_another_recipe_starts_afresh_only_when_told_to(left: str, content: str, how_far: str, tmp_path: Path) -> None:
    store = tmp_path / "learning"
    (store / left).parent.mkdir(parents=True)
    (store / "key").write_text("another")
    (store / left).write_text(content)
    heard = Stages()
    with pytest.raises(UsageError, match=rf"another recipe, model or rows \({how_far}\); .*--force"):
        plan_source._open_store(store, "this", False, heard)
    assert (store / left).read_text() == content
    plan_source._open_store(store, "this", True, heard)
    assert any("learning starts afresh" in note for note in heard.notes)
    assert [path.name for path in store.iterdir()] == ["key"]


def test_a_run_refuses_what_another_recipe_left(place: Path, tmp_path: Path) -> None:
    store = tmp_path / "out.partial" / "learning"
    store.mkdir(parents=True)
    store.with_name(".compress").touch()
    (store / "key").write_text("another")
    (store / "done.json").write_text("{}")
    with pytest.raises(UsageError, match="it had ended learning"):
        compressor.compress(recipe(place, tmp_path / "out"))
    assert (store / "done.json").is_file()


def test_what_nothing_was_learned_with_yet_is_given_up(place: Path, tmp_path: Path) -> None:
    store = tmp_path / "out.partial" / "learning"
    store.mkdir(parents=True)
    store.with_name(".compress").touch()
    (store / "key").write_text("another")
    with pytest.raises(KeyboardInterrupt):
        compressor.compress(recipe(place, tmp_path / "out"), Stages("compressed", interrupt))


@pytest.mark.parametrize("stage", ["exporting", "measuring memory"])
def test_a_full_disk_leaves_nothing(stage: str, place: Path, tmp_path: Path) -> None:
    def fill() -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "model.onnx.data")

    with pytest.raises(InputError, match="the disk is full; free some space"):
        compressor.compress(
            Recipe(model=place / "model", out=tmp_path / "out", batch=(1,), seconds=0.01), Stages(stage, fill)
        )
    assert list(tmp_path.iterdir()) == []


def test_ctrl_c_and_kill_from_outside(place: Path, tmp_path: Path, learned: tuple[Path, Report, Stages]) -> None:
    """The real thing, in a process of its own: interrupted while learning, gone on with, then killed."""
    out = tmp_path / "out"
    flags = ["--keep", "1", "--steps", "400", "--batch-size", "8", "--max-length", "8", "--batch", "1", "--seq", "8"]
    words = [place / "model", "--data", place / "rows.tsv", *flags, "--seconds", "0.01", "-o", out, "--quiet"]
    for sent, code in ((signal.SIGINT, 130), (signal.SIGKILL, -9)):
        run = subprocess.Popen(
            [sys.executable, "-m", "compressor.cli", *map(str, words)],
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=heed_ctrl_c,
        )
        wait_for(lambda: any(out.with_name("out.partial").glob("learning/checkpoints/checkpoint-*/trainer_state.json")))
        run.send_signal(sent)
        _, err = run.communicate(timeout=600)
        assert run.returncode == code, err
        assert not out.exists()
        if code == 130:
            assert err.startswith("compress: interrupted; the same command goes on from ")
            assert len(err.splitlines()) == 1
    shutil.rmtree(out.with_name("out.partial"))


class Halfway(Stages):
    """Interrupts learning once it has come to a first step."""

    @contextmanager
    def stage(self, name: str) -> Iterator[ProgressCallback]:
        with super().stage(name):
            yield lambda done, total: interrupt() if done and "learning" in name else None


def test_an_interrupted_search_goes_on(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same command measures no subset a second time, and comes to the same plan. Nothing is exported or built."""

    def build(name: str, *rest: Any, **more: Any) -> Any:
        return SimpleNamespace(reference=None) if name == "dense" else interrupt()

    monkeypatch.setattr(pipeline, "build", build)
    monkeypatch.setattr(pipeline, "shrink", lambda *given: SimpleNamespace(obstacle=None))
    monkeypatch.setattr(subset_evaluator, "_SAVE_SECONDS", 0.0)
    monkeypatch.setattr(subset_evaluator, "_SAVE_SHARE", 0.0)
    torch.manual_seed(0)
    two_layers = {**folders.SIZES, "num_hidden_layers": 2}
    folders.save(BertForSequenceClassification(BertConfig(**two_layers)), tmp_path / "model")

    def run(out: str, listener: Stages) -> Path:
        with pytest.raises(KeyboardInterrupt):
            compressor.compress(
                recipe(place, tmp_path / out, model=tmp_path / "model", method="astar", steps=None), listener
            )
        return tmp_path / f"{out}.partial" / "learning"

    whole = run("whole", Stages())
    assert not (run("out", Halfway()) / "done.json").exists()
    heard = Stages()
    resumed = run("out", heard)
    assert "the search goes on with what an interrupted run measured" in heard.notes
    assert (resumed / "plan.json").read_bytes() == (whole / "plan.json").read_bytes()
    once, again = (json.loads((of / "done.json").read_text())["curves"][-1]["values"] for of in (whole, resumed))
    assert again["eval_accuracy"] == once["eval_accuracy"]
    # What it spent before it was interrupted counts, and so does what is run anew to go on.
    assert again["forwards"] >= once["forwards"] > 0


def test_how_far_an_interrupted_run_is(tmp_path: Path) -> None:
    assert plan_source._step(tmp_path) is None
    for step, state in (
        (9, '{"global_step": 9, "max_steps": 40}'),
        (10, '{"global_step": 10, "max_steps": 40}'),
        (20, "{"),
    ):
        (tmp_path / f"checkpoint-{step}").mkdir()
        (tmp_path / f"checkpoint-{step}" / "trainer_state.json").write_text(state)
    assert plan_source._step(tmp_path) == "step 10 of 40", "the last that is whole"


def wait_for(happened: Callable[[], bool]) -> None:
    for _ in range(1200):
        if happened():
            return
        time.sleep(0.05)
    pytest.fail("waited for nothing")
