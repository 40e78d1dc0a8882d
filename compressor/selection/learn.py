"""From a model and data to a plan: which heads to keep, by the method that the recipe names."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from pydantic import PositiveInt
from transformers import PreTrainedModel

from compressor.config.methods import PENALISED_METHODS
from compressor.config.sections import SelectionConfig
from compressor.errors import UsageError, nearest
from compressor.progress import ProgressCallback
from compressor.results import CurvePoint
from compressor.selection.certify import certify, divide, removal_steps
from compressor.selection.gates import GATES, Gate, PooledGate
from compressor.selection.options import defaults, heads_to_keep, read_options
from compressor.selection.plan_and_curves import all_heads, joint_curves, search_curves, to_plan
from compressor.selection.ray_cluster import reachable
from compressor.selection.ray_evaluator import EvaluatorFactory, evaluator_factory
from compressor.selection.search import SEARCHES, Step
from compressor.selection.subset_evaluator import ModelSubsetEvaluator, PooledSubsetEvaluator
from compressor.tasks.base import Data
from compressor.tasks.segment_streams import Streams
from compressor.training.fit import fit, processes
from compressor.training.schedule import MixedPrecision, Schedule
from compressor.units import Site
from graph_passes import Plan
from graph_passes.plan import Kind

METHODS = (*GATES, *SEARCHES)


@dataclass(frozen=True)
class Learned:
    """The choice and how it came about.

    Attributes:
        plan: every site with the heads kept; the model's fingerprint and the evidence are the caller's to add.
        curves: what was measured on the way, by step.
        trained: whether the model's weights were changed.
        notes: what a reader must know, e.g. what was certified.
    """

    plan: Plan
    curves: tuple[CurvePoint, ...]
    trained: bool
    notes: tuple[str, ...] = ()


def learn(
    model: PreTrainedModel,
    sites: Sequence[Site],
    data: Data,
    recipe: SelectionConfig,
    checkpoint_dir: Path,
    progress: ProgressCallback | None = None,
) -> Learned:
    """Choose the heads of `model` to keep.

    A joint method (a gate) trains the model with its gates and leaves the trained weights in `model`; a pipelined one
    and a search leave it as it was. The same seed on the same machine gives the same plan, byte for byte, and so does a
    run that was interrupted and started again with the same `checkpoint_dir`.

    Args:
        model: float32.
        sites: its sites, in call order.
        data: encoded rows; what is chosen is chosen by `Task.chooser`.
        recipe: method, options, heads to keep, schedule, seed.
        checkpoint_dir: where a joint run keeps its checkpoints; one of another run is thrown away.
        progress: told how far learning is.

    Raises:
        UsageError: an unknown method or option, or one out of its range.
    """
    heads = sum(site.heads for site in pool_of(sites, recipe.options))
    keep = None if recipe.keep is None else heads_to_keep(recipe.keep, heads)
    tell = progress or (lambda done, total: None)
    asked = data.task
    if recipe.method in SEARCHES or not isinstance(asked, Streams):  # training reads streams as they are scored
        data = replace(data, task=asked.chooser)
    if recipe.method in SEARCHES and keep is None and data.task.metric != asked.metric:
        raise UsageError(
            f"{asked.metric}: heads are chosen by the {data.task.metric}, so what they may cost in {asked.metric} ends"
            f" no search; say how many to keep (--keep), or score by {data.task.metric} (--metric {data.task.metric})"
        )
    if recipe.method in GATES:
        if keep is None and recipe.method not in PENALISED_METHODS:
            raise UsageError(f"{recipe.method} learns which heads to keep, not how many; say how many with --keep")
        return _learn_gate(model, sites, data, recipe, keep, checkpoint_dir, tell)
    if recipe.method in SEARCHES:
        with evaluator_factory(recipe.ray) as make_trials:
            return _search(model, sites, data, recipe, keep, checkpoint_dir, tell, make_trials)
    raise UsageError(f"method {recipe.method!r}: unknown; {nearest(recipe.method, METHODS)}")


def check_options(recipe: SelectionConfig, *, heads: bool = True, blocks: bool = False) -> None:
    """Check the options as learning will read them, without a model: the method's own where `heads` are learned, the
    schedule's where the model learns with masks afterwards (`blocks`).

    Raises:
        UsageError: one is unknown, of the wrong type or out of its range.
        TargetMissingError: the workers asked for cannot be had.
    """
    options = recipe.options
    if blocks:
        masks = {name: value for name, value in options.items() if name in defaults(schedule_options)}
        (pace,) = read_options("learning with masks", masks, schedule_options)
        Schedule(1, recipe.batch_size, recipe.learning_rate, recipe.seed, **pace)
        own_names = known_options(recipe.method) if heads else {}
        options = {name: value for name, value in options.items() if name in own_names or name not in masks}
        if not heads:
            read_options("learning with masks", options)
    if heads and recipe.method in SEARCHES:
        own, _ = read_options(recipe.method, options, SEARCHES[recipe.method], sample_options)
        SEARCHES[recipe.method](**own)
        if recipe.ray is not None:
            reachable(recipe.ray)
    elif heads and recipe.method in GATES:
        make = GATES[recipe.method].make
        own, pace, _ = read_options(recipe.method, options, make, schedule_options, pool_options)
        make([2], 1, 1, recipe.seed, **own)
        Schedule(1, recipe.batch_size, recipe.learning_rate, recipe.seed, **pace)


def check_budget(recipe: SelectionConfig, data: Data) -> None:
    """Check what the heads may cost against the metric and the number of rows, before anything is computed.

    Raises:
        UsageError: a drop that the metric cannot make, or a guarantee of a metric that has none.
        InputError: too few rows for the guarantee.
    """
    if recipe.max_drop is None:
        return
    task = data.task.chooser if recipe.keep is None and recipe.method in SEARCHES else data.task
    if recipe.max_drop >= task.metric_maximum:
        raise UsageError(
            f"--max-drop {recipe.max_drop:g}: {task.metric} is at most {task.metric_maximum:g}, so this"
            " permits anything; give less, e.g. 0.01"
        )
    if recipe.certify is not None:
        divide(data.eval, data.task, recipe.max_drop, recipe.certify, recipe.seed)


def known_options(method: str) -> dict[str, Any]:
    """The options of a method with their defaults."""
    if method in GATES:
        return {**defaults(GATES[method].make), **defaults(schedule_options), **defaults(pool_options)}
    return {**defaults(SEARCHES[method]), **defaults(sample_options)}


def _learn_gate(
    model: PreTrainedModel,
    sites: Sequence[Site],
    data: Data,
    recipe: SelectionConfig,
    keep: int | None,
    checkpoint_dir: Path,
    tell: ProgressCallback,
) -> Learned:
    method = GATES[recipe.method]
    own, pace, pooling = read_options(recipe.method, recipe.options, method.make, schedule_options, pool_options)
    rows = recipe.batch_size * processes()
    steps = recipe.steps or math.ceil((recipe.epochs or method.epochs) * len(data.train) / rows)
    schedule = Schedule(steps, recipe.batch_size, recipe.learning_rate, recipe.seed, **pace)

    def one(layers: Sequence[int], count: int | None, seed: int) -> Gate:
        return method.make(layers, count, steps, seed, **own)

    layers = [site.heads for site in sites]
    pool, kinds = pooling["pool"], [site.kind for site in sites]
    if pool == "model":
        gate = one(layers, keep, recipe.seed)
    else:
        gate = PooledGate(one, layers, kinds, keep, recipe.seed, only=None if pool == "kind" else pool)
    options = {**own, **pace, **pooling}
    asked = {"keep": keep, **options}
    log = fit(
        model, data, schedule, asked, checkpoint_dir, tell, gate=gate, sites=sites, trains_model=method.trains_model
    )
    heads = all_heads(sites)
    scales = dict(zip(heads, gate.scale().tolist(), strict=True))
    kept = {head: scales[head] for head, stays in zip(heads, gate.harden().tolist(), strict=True) if stays}
    plan = to_plan(sites, kept, recipe, options, data)
    return Learned(plan, joint_curves(log, data.task.metric), method.trains_model)


def _search(
    model: PreTrainedModel,
    sites: Sequence[Site],
    data: Data,
    recipe: SelectionConfig,
    keep: int | None,
    checkpoint_dir: Path,
    tell: ProgressCallback,
    make_trials: EvaluatorFactory,
) -> Learned:
    make = SEARCHES[recipe.method]
    own, sample = read_options(recipe.method, recipe.options, make, sample_options)
    if "seed" in own and "seed" not in recipe.options:
        own["seed"] = recipe.seed
    unseen = None
    if recipe.certify is not None:
        if keep is not None or recipe.max_drop is None:
            raise UsageError(f"guarantee {recipe.certify:g}: certifies what heads cost; give --max-drop, not --keep")
        searched, unseen = divide(data.eval, data.task, recipe.max_drop, recipe.certify, recipe.seed)
        data = replace(data, eval=searched)

    if torch.cuda.is_available():
        model.to("cuda")  # type: ignore[arg-type]

    def trials_on(rows: Data, name: str) -> ModelSubsetEvaluator:
        made = make_trials(
            model, sites, rows, recipe.batch_size, sample["rows"], recipe.seed, sample["mixed_precision"]
        )
        made.remember(checkpoint_dir / f"checkpoint-{name}.npz")
        return made

    trials = PooledSubsetEvaluator(trials_on(data, "search"), all_heads(pool_of(sites, recipe.options)))
    steps = []
    for step in make(**own).choose(trials, keep, recipe.max_drop):
        steps.append(replace(step, kept=step.kept | trials.rest))
        tell(len(trials.heads) - len(step.kept), len(trials.heads) - (keep or 0))
    notes = steps[-1].notes
    if unseen is not None and recipe.certify is not None and recipe.max_drop is not None:
        others = trials_on(replace(data, eval=unseen), "unseen")

        def losses(step: Step) -> np.ndarray:
            predicted, true = others.statistics(step.kept).T
            return (predicted != true).astype(np.float64)

        steps = removal_steps(steps)
        found = certify(steps, losses, recipe.max_drop, recipe.certify, len(data.eval))
        cost = f"certifying took {others.count} evaluations, {others.forwards:.1f} forwards over the unseen rows"
        notes = (*notes, found.note(steps), cost)
        chosen = steps[found.steps - 1]
    else:
        chosen = steps[-1]
        if keep is None and len(chosen.kept) == len(steps[0].kept):
            raise UsageError(f"{notes[-1]}; raise it")
    plan = to_plan(sites, dict.fromkeys(chosen.kept, 1.0), recipe, {**own, **sample}, data)
    return Learned(plan, search_curves(steps, data.task), trained=False, notes=notes)


def schedule_options(
    *,
    warmup: float = 0.06,
    weight_decay: float = 0.01,
    max_grad_norm: float = 1.0,
    evaluations: int = 12,
    points: int = 60,
    mixed_precision: MixedPrecision = "no",
    optimizer: Literal["adamw", "lamb"] = "adamw",
    scheduler: Literal["linear", "cosine"] = "linear",
    final_learning_rate: float = 0.0,
) -> None:
    """The options of every joint method; `Schedule` says what they mean."""


def pool_options(*, pool: Literal["model", "kind", Kind] = "model") -> None:
    """Which heads compete for the places: all; those of each kind of site for a share of them; or those of one kind
    alone, whose number `keep` then is, while the others stay."""


def sample_options(
    *, rows: PositiveInt = 10_000, mixed_precision: MixedPrecision = "no", pool: Literal["model", Kind] = "model"
) -> None:
    """Training rows, at most, over which a search averages what it measures on them; what its evaluations multiply
    matrices in; and which heads it chooses among, all or those of one kind of site."""


def pool_of(sites: Sequence[Site], options: Mapping[str, Any]) -> list[Site]:
    """The sites among whose heads a method with these options chooses.

    Raises:
        UsageError: the model has none of the kind.
    """
    pool = options.get("pool", "model")
    if pool not in get_args(Kind):
        return list(sites)
    found = [site for site in sites if site.kind == pool]
    if not found:
        kinds = ", ".join(dict.fromkeys(site.kind for site in sites))
        raise UsageError(f"option pool={pool}: the model has no such attention; choose among {kinds}")
    return found
