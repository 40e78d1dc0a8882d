"""The stores of the steps of a run: their keys, and what a run uses of an interrupted one."""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from compressor.config.run import Recipe
from compressor.config.sections import RowsConfig, SourceConfig
from compressor.config.steps import Step, Units
from compressor.errors import ErrorCode, UsageError
from compressor.results import Note, NoteCode
from compressor.run.run_context import LoadedModel
from compressor.run.steps.base import PLAN, STATISTICS, functions_of
from compressor.store import FORM, Processes, Store, digest, version_of
from compressor.tasks import Data
from compressor.workdir import ATTEMPTS, MAPS, read_json, write_json

_KEY = "key.json"


def open_stores(
    steps: Sequence[Step], recipe: Recipe, model: LoadedModel, data: Data, path: Path, state: Processes
) -> tuple[tuple[Store, ...], tuple[Note, ...]]:
    """Open the stores of the steps of a run in a folder. Work is kept where everything that it depends on is the same.

    Every process of a distributed run calls this; only the main process writes.

    Returns:
        One store for each step; and what is used of an interrupted run, or that its work was discarded.

    Raises:
        UsageError: work of another run would be lost, and the recipe does not allow to discard it (`force`).
    """
    notes: list[Note] = []
    hashes = {"train": data.train_hash or "", "eval": data.eval_hash or "", "model": model.folder.fingerprint}
    keys = step_keys(steps, recipe, {**hashes, **model.folder.surroundings})
    stores = [
        step_store(step, path / name, key, state if step.is_parallel else None)
        for step, (name, key) in zip(steps, keys.items(), strict=True)
    ]
    if state.is_main_process:
        notes = [*_discard_others(path, stores, force=recipe.output.force), *_resumed(stores, steps)]
        for store in stores:
            store.path.mkdir(parents=True, exist_ok=True)
            write_json(store.path / _KEY, _content_of_key(store))
    state.wait_for_everyone()
    return tuple(stores), tuple(notes)


def step_store(step: Step, path: Path, key: str = "", state: Processes | None = None) -> Store:
    """The store of a step, whose key is a hash of everything that its result depends on, earlier steps included."""
    return Store(path, {"step": key}, version_of(functions_of(step).run), state)


def step_keys(steps: Sequence[Step], recipe: Recipe, hashes: Mapping[str, Any]) -> dict[str, str]:
    """Name of the folder of each step -> its key, which covers the steps before it, and hashes of model and rows."""
    names = {*SourceConfig.model_fields, *RowsConfig.model_fields, "match_dense"} - {"inputs"}
    values = recipe.flat()
    content: dict[str, Any] = {**{name: value for name, value in values.items() if name in names}, **hashes}
    keys: dict[str, str] = {}
    for step in steps:
        settings = {name: values[name] for name in step.settings_read if name != "kernel"}
        files = {name: _content_hash(path) for name, path in step.contents.items()}
        kernel = _content_hash(recipe.engine.kernel) if "kernel" in step.settings_read else ""
        versions = [version_of(functions_of(part).run) for part in (step, *step.parts)]
        content = {"before": content, "step": step.name, **step.settings, **settings, "files": files, "kernel": kernel}
        content = {"key": digest({**content, "versions": versions})}
        count = sum(earlier.name == step.name for earlier in steps[: len(keys)])
        keys[f"{step.name}-{count + 1}" if count else step.name] = content["key"]
    return keys


def _content_hash(path: Path | None) -> str:
    """Hash of the content of a file, or of the files of a folder without its subfolders; empty where there is none."""
    if path is None or not path.exists():
        return ""
    files = sorted(file for file in path.iterdir() if file.is_file()) if path.is_dir() else [path]
    hashes = "".join(f"{file.name} {hashlib.sha256(file.read_bytes()).hexdigest()} " for file in files)
    return hashlib.sha256(hashes.encode()).hexdigest()


def _discard_others(path: Path, stores: Sequence[Store], *, force: bool) -> Iterator[Note]:
    """Remove the folders of steps whose key has changed, and of steps that the run does not have."""
    kept = {store.path for store in stores if read_json(store.path / _KEY) == _content_of_key(store)}
    kept.add(path / STATISTICS)  # whose parts are keyed by all that they depend on
    changed = [folder for folder in path.iterdir() if folder not in kept] if path.is_dir() else []
    lost = next(filter(None, map(_progress, changed)), None)
    if lost and not force:
        text = (
            "an interrupted run with another recipe, model, task or rows, or with another version of compressor,"
            f" learned here ({lost}); run it to its end, write to another folder (-o), or discard what depends on the"
            " change (--force)"
        )
        raise UsageError.of_file(path, text, ErrorCode.RUN_DIFFERS)
    for folder in changed:
        if folder.is_dir() and not folder.is_symlink():
            shutil.rmtree(folder)
        else:
            folder.unlink()
    if changed:
        yield Note(
            code=NoteCode.STARTED_AFRESH,
            text="the recipe, the model, the task or the rows differ from those of the interrupted run: what depends on"
            " them is learned again",
        )


def _content_of_key(store: Store) -> dict[str, Any]:
    return {"form": FORM, **store.inputs}


def _resumed(stores: Sequence[Store], steps: Sequence[Step]) -> list[Note]:
    """Notes on the work of an interrupted run that is used."""
    texts = []
    for store, step in zip(stores, steps, strict=True):
        if store.has(PLAN):
            texts.append(f"the plan was learned by an interrupted run and is taken from {store.path}")
            continue
        for name, stage in ((PLAN, step.learning), (MAPS, "learning with entmax")):
            if training_step := _last_step(store.unfinished(name)):
                texts.append(f"{stage} resumes from {training_step} of an interrupted run")
        if store.has(MAPS):
            texts.append("masks are derived from the attention maps of an interrupted run")
        if (attempts := store.path / ATTEMPTS).is_file():
            count = len(json.loads(attempts.read_text()))
            texts.append(f"{step.name} goes on with the {count} attempts of an interrupted run")
        if step.part(Units) is not None and any((store.path.parent / STATISTICS).glob("*/*")):
            texts.append("pruning resumes with the statistics of an interrupted run")
        if _is_searched(store):
            texts.append("the search resumes with the evaluations of an interrupted run")
    return [Note(code=NoteCode.RESUMED, text=text) for text in texts]


def _last_step(work: Path) -> str | None:
    """The step of an interrupted training's last complete checkpoint, e.g. `step 40 of 120`; None without one."""
    states = []
    for path in work.glob("*/checkpoint-*/trainer_state.json"):
        with contextlib.suppress(OSError, ValueError):  # an incomplete checkpoint, which learning ignores too
            states.append(json.loads(path.read_text()))
    last = max(states, key=lambda state: int(state["global_step"]), default=None)
    return last and f"step {last['global_step']} of {last['max_steps']}"


def _progress(folder: Path) -> str | None:
    """The work in the folder of a step, in words; None: none would be lost without it."""
    store = Store(folder)
    if store.has(PLAN):
        return "learning had finished"
    if step := _last_step(store.unfinished(PLAN)) or _last_step(store.unfinished(MAPS)):
        return step
    if (folder / ATTEMPTS).is_file():
        return "attempts"
    if store.has(MAPS) or _is_searched(store):
        return "attention maps" if store.has(MAPS) else "a search"
    is_known = (read_json(folder / _KEY) or {}).get("form") == FORM
    return None if is_known or len([*folder.glob("*")]) < 2 else "in another form"


def _is_searched(store: Store) -> bool:
    """Whether the evaluations of an interrupted search are stored."""
    return any(store.unfinished(PLAN).rglob("checkpoint-*.npz"))
