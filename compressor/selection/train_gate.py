"""Select heads by gradient: train a gate together with the model, or on a frozen model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from transformers import PreTrainedModel

from compressor.config.methods import METHODS
from compressor.config.sections import SelectionConfig
from compressor.progress import ProgressCallback
from compressor.selection.gates import Gate, PooledGate
from compressor.selection.options import PoolOptions, ScheduleOptions, check_option_names, option_names, read_options
from compressor.selection.plan_and_curves import Learned, all_heads, to_plan, training_curves
from compressor.tasks.base import Data
from compressor.training.checkpoints import Checkpoints
from compressor.training.fit import GateSetup, fit
from compressor.training.processes import process_count
from compressor.units import Site


def train_gate(
    model: PreTrainedModel,
    sites: Sequence[Site],
    data: Data,
    selection: SelectionConfig,
    keep: int | None,
    checkpoint_dir: Path,
    on_progress: ProgressCallback,
) -> Learned:
    """Train the gate of `selection.method` and keep the heads that it selects, at their scales.

    Args:
        model: trained in place, unless the method is pipelined.
        sites: its sites, in call order.
        data: encoded rows, with the task by which heads are selected.
        selection: method, options, schedule, seed.
        keep: number of heads to keep; None: as many as the penalty leaves open.
        checkpoint_dir: folder of the checkpoints, from which an interrupted run resumes.
        on_progress: called with (step, steps).

    Raises:
        UsageError: an option does not exist or is out of range.
        DivergedError: see `fit`.
    """
    method, name, options = METHODS[selection.method], selection.method, selection.options
    gate_class = method.load()
    check_option_names(name, options, option_names(name))
    gate_options = read_options(name, options, gate_class.options_class, data.task.name)
    schedule_options = read_options(name, options, ScheduleOptions)
    pool = read_options(name, options, PoolOptions)
    rows_per_step = selection.batch_size * process_count()
    steps = selection.steps or math.ceil((selection.epochs or method.epochs) * len(data.train) / rows_per_step)
    schedule = schedule_options.schedule(steps, selection.batch_size, selection.learning_rate, selection.seed)

    def make_gate(layers: Sequence[int], count: int | None, seed: int) -> Gate:
        gate: Gate = gate_class(layers, count, steps, seed, gate_options)
        return gate

    layers, kinds = [site.heads for site in sites], [site.kind for site in sites]
    if pool.pool == "model":
        gate = make_gate(layers, keep, selection.seed)
    else:
        only = None if pool.pool == "kind" else pool.pool
        gate = PooledGate(make_gate, layers, kinds, keep, selection.seed, only=only)
    all_options = {**gate_options.model_dump(), **schedule_options.model_dump(), **pool.model_dump()}
    log = fit(
        model,
        data,
        schedule,
        Checkpoints(checkpoint_dir, {"keep": keep, **all_options}),
        gating=GateSetup(gate, sites, trains_model=method.trains_model),
        on_progress=on_progress,
    )
    heads, mask = all_heads(sites), gate.harden().tolist()
    scales = {head: scale for head, scale, kept in zip(heads, gate.scale().tolist(), mask, strict=True) if kept}
    plan = to_plan(sites, scales, selection, all_options, data)
    return Learned(plan, training_curves(log, data.task.metric), method.trains_model)
