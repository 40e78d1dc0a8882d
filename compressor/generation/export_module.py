"""Write the graphs with caches of a model of PyTorch, and prove them against the model, loaded afresh."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache, EncoderDecoderCache, PreTrainedModel

import graph_passes
from compressor.engines.prove import Case, case_name, prove_outputs
from compressor.engines.prove_export import gated_copy, require_export
from compressor.errors import ErrorCode, InputError, MismatchError
from compressor.export import rewrite_reference
from compressor.generation.export import export_generation
from compressor.generation.prove import generation_cases
from compressor.generation.steps import LOGITS, MASK, TARGET, TEXT, run_in_steps
from compressor.model_folder import ModelFolder, fresh_model
from compressor.results import Proof, ProofStage, VariantName
from compressor.targets.base import TOLERANCE, Feeds
from compressor.targets.caches import positions
from compressor.targets.onnxruntime.sessions import OrtSessions
from compressor.targets.relative_error import Outputs
from compressor.units.hook import Attention, family
from graph_passes import Plan
from graph_passes.attention.gate_initializers import find_gates


def export_graphs(folder: ModelFolder, plan: Plan, out: Path, *, opset: int, attention: Attention) -> tuple[str, ...]:
    """Write the graphs with gates, and return their names in the order in which they run."""
    return export_generation(folder.model, plan, out, opset=opset, attention=attention)


def rewrite_graphs(folder: ModelFolder, plan: Plan, whole: Path, files: Iterable[str], out: Path) -> None:
    """Write the graphs with the gates of a plan and the present weights, from those of the whole model."""
    for name in files:
        part = plan.part(find_gates(graph_passes.load(whole / name).graph))
        if not rewrite_reference(whole / name, folder.model, part, out / name):
            text = f"{name}: the graph has no gate for a group of the plan, or the plan has masks"
            raise InputError(text, code=ErrorCode.PLAN_MISMATCH, file=name)


def texts_of(folder: ModelFolder, cases: Sequence[Case]) -> tuple[Case, ...]:
    """The cases of a run as texts to continue."""
    return generation_cases(cases)


def prove_export(
    folder: ModelFolder, plan: Plan, texts: Sequence[Case], graphs: Path, attention: Attention, variant: VariantName
) -> Proof:
    """The proof that graphs with gates, in steps, compute what the gated model computes on whole texts.

    The reference is the folder, loaded afresh: with the weights of its model where these may have been trained.

    Raises:
        InputError: the graphs do not run on a text, or the model itself computes something else with a cache.
        MismatchError: the proof does not hold.
    """
    fresh, gated = fresh_model(folder, trained=variant != "dense"), OrtSessions(graphs, optimized=False)

    def run(feeds: Feeds) -> Outputs:
        try:
            return run_in_steps(gated, feeds)
        except InputError as error:
            text = (
                f"{family(fresh)}: the graphs with caches do not run on {case_name(feeds)}, as the model does"
                f" ({error}); the exporter of transformers fixes a size of this family"
            )
            raise InputError(text, code=ErrorCode.EXPORT_FAILED, family=family(fresh)) from error

    def prove() -> Proof:
        expected = whole_outputs(fresh, plan, texts, attention)
        return prove_outputs(ProofStage.CACHED_EXPORT, variant, texts, expected, run, TOLERANCE["fp32"])

    try:
        return require_export(prove, fresh, texts)
    except MismatchError:
        if variant == "dense":
            _require_use_of_cache(fresh, plan, texts, attention)
        raise


def _require_use_of_cache(model: PreTrainedModel, plan: Plan, texts: Sequence[Case], attention: Attention) -> None:
    """Raise InputError if the gated model with its own cache, in steps, computes something else than on whole texts."""
    expected = whole_outputs(model, plan, texts, attention)
    try:
        with gated_copy(model, plan, attention) as gated_model:
            run = partial(_run_with_cache, gated_model)
            proof = prove_outputs(ProofStage.CACHED_EXPORT, "dense", texts, expected, run, TOLERANCE["fp32"])
    except Exception:  # model code can raise any type; a model that does not run so explains nothing
        return
    if not proof.holds:
        text = (
            f"{family(model)}: with its own cache, the model computes something else than on whole texts (relative"
            f" error {proof.error:.3g}), and so would graphs with caches"
        )
        raise InputError(text, code=ErrorCode.UNSUPPORTED_MODEL, family=family(model), error=proof.error)


def _run_with_cache(model: Any, feeds: Feeds) -> Outputs:
    """Logits of a whole text from two forwards, the second of which reads what the first has kept."""
    inputs, text = {name: torch.from_numpy(array) for name, array in feeds.items()}, TEXT
    cache: Any = DynamicCache(config=model.config)
    if TARGET in feeds:
        text, cache = TARGET, EncoderDecoderCache(DynamicCache(), DynamicCache())
    half = inputs[text].shape[1] // 2
    logits = list[np.ndarray]()
    for part in (slice(half), slice(half, None)):
        read = inputs | {text: inputs[text][:, part]}
        if text == TEXT and MASK in inputs:
            read[MASK] = inputs[MASK][:, : part.stop]
        read |= _positions_of(model, feeds, part)
        logits.append(model(**read, past_key_values=cache, use_cache=True).logits.numpy())
    return {LOGITS: np.concatenate(logits, axis=1)}


def _positions_of(model: Any, feeds: Feeds, part: slice = slice(None)) -> Mapping[str, torch.Tensor]:
    """Numbers of the tokens of a part of a text, for a decoder-only model that takes them."""
    if TARGET in feeds or MASK not in feeds or "position_ids" not in inspect.signature(model.forward).parameters:
        return {}
    return {"position_ids": torch.from_numpy(positions(feeds[MASK])[:, part])}


def whole_outputs(model: PreTrainedModel, plan: Plan, cases: Sequence[Case], attention: Attention) -> list[Outputs]:
    """Logits of the gated model on each case, from one forward over the whole text and without a cache.

    Args:
        model: the model; nothing may have run on it if it is the reference.
        plan: the plan, whose dropped units the gates switch off.
    """
    expected = list[Outputs]()
    for case in cases:
        inputs = {name: torch.from_numpy(array) for name, array in case.feeds.items()}
        inputs |= _positions_of(model, case.feeds)
        with gated_copy(model, plan, attention) as gated_model:
            expected.append({LOGITS: gated_model(**inputs, use_cache=False).logits.numpy()})
    return expected
