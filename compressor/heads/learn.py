"""From a model and data to a plan: which heads to keep, by the method that the recipe names."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Protocol

from transformers import PreTrainedModel

from compressor.errors import UsageError
from compressor.heads import joint
from compressor.heads.gates import GATES
from compressor.heads.search import SEARCHES, Head
from compressor.heads.trials import ModelTrials
from compressor.report.schema import Point
from compressor.sites import Site
from compressor.tasks.base import Data
from graph_passes import Plan, SitePlan

METHODS = (*GATES, *SEARCHES)

_RECIPE_FIELDS = {"steps", "batch_size", "learning_rate", "seed"}
"""Fields of a schedule that the recipe gives itself; the others are options."""

_ROWS = 10_000
"""Training rows over which sensitivity is averaged, at most, unless the option `rows` says otherwise."""

Progress = Callable[[int, int], None]
"""Called with (done, total) as learning goes on."""


class LearnRequest(Protocol):
    """The part of a recipe that says how to choose heads.

    Attributes:
        method: one of `METHODS`.
        keep: heads to keep over all sites, a count (36) or a share ("50%"); None for a search with its own budget.
        options: the method's options; what is not given keeps its default.
        steps: optimizer steps; None: from `epochs`.
        epochs: passes over the training rows.
        batch_size: rows a step and process.
        learning_rate: the model's peak learning rate.
        seed: of everything drawn.
    """

    @property
    def method(self) -> str: ...
    @property
    def keep(self) -> int | str | None: ...
    @property
    def options(self) -> Mapping[str, Any]: ...
    @property
    def steps(self) -> int | None: ...
    @property
    def epochs(self) -> float: ...
    @property
    def batch_size(self) -> int: ...
    @property
    def learning_rate(self) -> float: ...
    @property
    def seed(self) -> int: ...


@dataclass(frozen=True)
class Learned:
    """The choice and how it came about.

    Attributes:
        plan: every site with the heads kept; the model's fingerprint and the evidence are the caller's to add.
        curves: what was measured on the way, by step.
        trained: whether the model's weights were changed.
    """

    plan: Plan
    curves: tuple[Point, ...]
    trained: bool


def learn(
    model: PreTrainedModel,
    sites: Sequence[Site],
    data: Data,
    recipe: LearnRequest,
    checkpoint_dir: Path,
    progress: Progress | None = None,
) -> Learned:
    """Choose the heads of `model` to keep.

    A joint method (a gate) trains the model with its gates and leaves the trained weights in `model`; a search leaves
    it as it was. The same seed on the same machine gives the same plan, byte for byte, and so does a run that was
    interrupted and started again with the same `checkpoint_dir`.

    Args:
        model: float32.
        sites: its sites, in call order.
        data: encoded rows.
        recipe: method, options, heads to keep, schedule, seed.
        checkpoint_dir: where a joint run keeps its checkpoints; one of another run is thrown away.
        progress: told how far learning is.

    Raises:
        UsageError: an unknown method or option, or one out of its range.
    """
    heads = sum(site.heads for site in sites)
    keep = None if recipe.keep is None else heads_to_keep(recipe.keep, heads)
    tell = progress or (lambda done, total: None)
    if recipe.method in GATES:
        if keep is None:
            raise UsageError(f"{recipe.method} learns which heads to keep, not how many; say how many with --keep")
        return _learn_gate(model, sites, data, recipe, keep, checkpoint_dir, tell)
    if recipe.method in SEARCHES:
        return _search(model, sites, data, recipe, keep, tell)
    raise UsageError(f"method {recipe.method!r}: unknown; choose one of {', '.join(METHODS)}")


def _learn_gate(
    model: PreTrainedModel,
    sites: Sequence[Site],
    data: Data,
    recipe: LearnRequest,
    keep: int,
    checkpoint_dir: Path,
    tell: Progress,
) -> Learned:
    make = GATES[recipe.method]
    own = keywords(make)
    known = {field.name for field in fields(joint.Schedule)} - _RECIPE_FIELDS
    _check_options(recipe, {*own, *known})
    schedule = joint.Schedule(
        steps=recipe.steps or math.ceil(recipe.epochs * len(data.train) / (recipe.batch_size * joint.processes())),
        batch_size=recipe.batch_size,
        learning_rate=recipe.learning_rate,
        seed=recipe.seed,
        **{name: value for name, value in recipe.options.items() if name in known},
    )
    options = {name: value for name, value in recipe.options.items() if name in own}
    gate = make([site.heads for site in sites], keep, schedule.steps, schedule.seed, **options)
    log = joint.train(model, gate, sites, data, schedule, {"keep": keep, **options}, checkpoint_dir, tell)
    mask = gate.harden().tolist()
    names = [(site.name, head) for site in sites for head in range(site.heads)]
    kept = frozenset(name for name, stays in zip(names, mask, strict=True) if stays)
    scale = dict(zip(names, gate.scale().tolist(), strict=True))
    return Learned(_plan(sites, kept, scale, recipe, data), _curves(log, mask, data), trained=True)


def _search(
    model: PreTrainedModel, sites: Sequence[Site], data: Data, recipe: LearnRequest, keep: int | None, tell: Progress
) -> Learned:
    make = SEARCHES[recipe.method]
    _check_options(recipe, {*keywords(make), "rows"})
    options = dict(recipe.options)
    rows = int(options.pop("rows", _ROWS))
    trials = ModelTrials(model, sites, data, recipe.batch_size, rows, recipe.seed)
    sign = 1.0 if data.task.higher_is_better else -1.0
    curves = []
    kept = frozenset(trials.heads)
    for number, step in enumerate(make(**options).choose(trials, keep)):
        kept = step.kept
        values = {name: value for name, value in step.values.items() if name != "metric"}
        if "metric" in step.values:
            values[f"eval_{data.task.metric}"] = sign * step.values["metric"]
        curves.append(Point(step=number, values={**values, "heads": float(len(kept))}))
        tell(len(trials.heads) - len(kept), len(trials.heads) - (keep or 0))
    scale = dict.fromkeys(trials.heads, 1.0)
    return Learned(_plan(sites, kept, scale, recipe, data), tuple(curves), trained=False)


def heads_to_keep(keep: int | str, heads: int) -> int:
    """The count that `keep` asks for of `heads`: a count (36, "36") or a share ("50%", rounded to the nearest head).

    Raises:
        UsageError: it is neither, or out of range.
    """
    text = str(keep).strip()
    try:
        count = round(heads * float(text[:-1]) / 100) if text.endswith("%") else int(text)
    except ValueError as error:
        raise UsageError(f"keep {text!r}: neither a count nor a share; give a number such as 36, or 50%") from error
    if not 0 <= count <= heads:
        raise UsageError(f"keep {text}: the model has {heads} heads; give a number from 0 to {heads}, or 0% to 100%")
    return count


def keywords(make: Callable[..., Any]) -> set[str]:
    """The options of a method: the keyword-only parameters of what makes it."""
    return {
        name
        for name, parameter in inspect.signature(make).parameters.items()
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY
    }


def _check_options(recipe: LearnRequest, known: set[str]) -> None:
    for name in recipe.options:
        if name not in known:
            raise UsageError(f"option {name!r} of {recipe.method}: unknown; it has {', '.join(sorted(known))}")


def _plan(
    sites: Sequence[Site], kept: frozenset[Head], scale: Mapping[Head, float], recipe: LearnRequest, data: Data
) -> Plan:
    entries = []
    for site in sites:
        heads = tuple(head for head in range(site.heads) if (site.name, head) in kept)
        gates = tuple(scale[site.name, head] for head in heads)
        entries.append(SitePlan(site.name, site.kind, site.heads, site.kv_heads, site.head_dim, heads, gates))
    return Plan(
        sites=tuple(entries),
        method=recipe.method,
        options=dict(recipe.options),
        seed=recipe.seed,
        data=data.train_hash,
    )


def _curves(log: Sequence[Mapping[str, Any]], mask: Sequence[bool], data: Data) -> tuple[Point, ...]:
    """The trainer's log as points; `overlap` is the share of the heads kept at the end that were already kept then."""
    final = {head for head, stays in enumerate(mask) if stays}
    shown = ("loss", "learning_rate", f"eval_{data.task.metric}")
    points: dict[int, dict[str, float]] = {}
    for entry in log:
        values = {name: float(entry[name]) for name in shown if name in entry}
        if "kept" in entry:
            values.update(entry["gate"])
            values["overlap"] = len(final & set(entry["kept"])) / len(final) if final else 1.0
        if values:
            points.setdefault(int(entry["step"]), {}).update(values)
    return tuple(Point(step=step, values=values) for step, values in sorted(points.items()))
