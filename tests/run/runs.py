"""A tiny model with rows that it can learn, and recipes of short runs on them."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

import compressor
import graph_passes
from compressor.config.run import Recipe
from compressor.config.step_list import steps_of
from compressor.model_folder import load
from compressor.results import NoteCode
from compressor.run.plan_source import PlanFiles
from compressor.run.steps.base import PLAN
from compressor.selection.plan_and_curves import SelectedPlan
from compressor.store import Store
from compressor.workdir import WorkDir
from graph_passes import Plan, Refusal, Shrunk
from tests import folders
from tests.run.listeners import RecordingListener, interrupt

NUMBERS = ["one", "two", "three", "four", "five", "six", "seven"]


def write_inputs(folder: Path) -> Path:
    """A folder with `model`, one layer of two heads, and `rows.tsv`."""
    torch.manual_seed(0)
    folders.save(folders.bert(), folder / "model")
    rows = [f"{n % 2}\tthe {'good' if n % 2 else 'bad'} film {NUMBERS[n % 7]} {NUMBERS[n % 5]}" for n in range(48)]
    (folder / "rows.tsv").write_text("\n".join(["label\ttext", *rows, ""]))
    return folder


def write_answered_rows(folder: Path) -> Path:
    """A model whose answers differ from row to row, and rows of its own answers, which it scores 1 on."""
    torch.manual_seed(0)
    model = load(folders.save(folders.bert(initializer_range=0.5), folder / "model"))
    texts = [" ".join(words) for words in itertools.product(folders.WORDS[:9], folders.WORDS[4:13], ("", "film"))]
    with torch.no_grad():
        labels = [int(model.model(**model.processor(text, return_tensors="pt")).logits.argmax()) for text in texts]
    assert set(labels) == {0, 1}
    rows = [f"{label}\t{text}" for label, text in zip(labels, texts, strict=True)]
    (folder / "rows.tsv").write_text("\n".join(["label\ttext", *rows, ""]))
    return folder


def learning_recipe(inputs: Path, out: Path, **fields: Any) -> Recipe:
    """A short run that learns to keep one head; idle threads of runtimes would compute for a while after each call."""
    learning = {"keep": 1, "training_steps": 4, "batch_size": 8, "max_length": 8}
    defaults = {**learning, "batch": (1,), "seq": (8,), "seconds": 0.01, "threads": 1}
    return Recipe(**{"model": inputs / "model", "out": out, "data": str(inputs / "rows.tsv"), **defaults, **fields})


def refuse_drops(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Let graph_passes refuse to drop units of one group, which therefore keeps all; other groups are shrunk."""
    shrink = graph_passes.shrink

    def refuse(model: Any, plan: Plan, **settings: Any) -> Shrunk:
        group = plan[name]
        if not group.dropped:
            return shrink(model, plan, **settings)
        shrunk = shrink(
            model, plan.replace_groups([replace(group, kept=tuple(range(group.units)), scale=())]), **settings
        )
        refusal = Refusal(frozenset({name}), "Frobnicate", "node_7", "no rule for it")
        return replace(shrunk, refused=(*shrunk.refused, refusal))

    monkeypatch.setattr(graph_passes, "shrink", refuse)


@dataclass(frozen=True)
class Learned:
    """What a run has learned when it is interrupted: its plan, weights by name, codes of notes, and its listener."""

    selected: SelectedPlan
    weights: dict[str, torch.Tensor]
    codes: set[NoteCode]
    listener: RecordingListener


def learn(recipe: Recipe, before: str = "compressed: exporting", part: str | None = None) -> Learned:
    """Interrupt a run before a stage, by default when it has learned everything and nothing is built from it yet.

    Args:
        recipe: the run, which can be resumed.
        before: part of the name of the stage.
        part: the step that was finished; None: the last.
    """
    listener = RecordingListener(before, interrupt)
    with pytest.raises(KeyboardInterrupt):
        compressor.compress(recipe, listener)
    store = Store(WorkDir(recipe.output.out).learning / (part or steps_of(recipe)[-1].name))
    folder = load(recipe.source.model)
    selected = store.load(PLAN, PlanFiles(folder.access))
    assert selected is not None
    return Learned(selected, dict(folder.network.named_parameters()), set(listener.codes), listener)
