"""Proofs that graphs with caches, run in steps, compute what the model computes on the whole text at once."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from functools import partial

import torch
from transformers import PreTrainedModel

from compressor.engines.prove import Case, case_name, prove_outputs, require
from compressor.errors import ErrorCode, InputError
from compressor.generation.steps import LOGITS, MASK, TARGET, TEXT, padded_left, positions, run_in_steps
from compressor.model_folder import copy_of
from compressor.results import Proof, ProofStage, VariantName
from compressor.silence_libraries import quiet_transformers
from compressor.targets.base import TOLERANCE
from compressor.targets.caches import Sessions
from compressor.targets.relative_error import Outputs
from compressor.units import gated
from compressor.units.find import evaluation_mode
from compressor.units.hook import Attention
from graph_passes import Plan
from graph_passes.errors import listed

_READ = frozenset((TEXT, MASK, TARGET, "decoder_attention_mask", "input_features"))
"""Inputs of the models whose graphs have caches."""


def generation_cases(cases: Sequence[Case]) -> tuple[Case, ...]:
    """The cases of a run as texts to continue: with a mask, and padding on the left of a decoder-only model.

    Raises:
        InputError: the model reads more than a text, such as images beside it.
    """
    texts = []
    for case in cases:
        if unread := sorted(case.feeds.keys() - _READ):
            raise InputError(
                f"the model reads {listed(unread)} too, for which there are no graphs with caches",
                code=ErrorCode.UNSUPPORTED_MODEL,
                inputs=unread,
            )
        feeds = dict(case.feeds) if TARGET in case.feeds else padded_left(case.feeds)
        feeds = {name: array for name, array in feeds.items() if name != "decoder_attention_mask"}
        texts.append(Case(feeds, f"{case_name(feeds)}, in steps"))
    return tuple(texts)


def whole_outputs(model: PreTrainedModel, plan: Plan, cases: Sequence[Case], attention: Attention) -> list[Outputs]:
    """Logits of the gated model on each case, from one forward over the whole text and without a cache.

    Args:
        model: the model; to be the reference, nothing has run on it.
        plan: the plan, whose dropped units the gates switch off.
        cases: the inputs.
        attention: form of attention.
    """
    expected = list[Outputs]()
    for case in cases:
        inputs = {name: torch.from_numpy(array) for name, array in case.feeds.items()}
        if TARGET not in inputs and MASK in inputs and "position_ids" in inspect.signature(model.forward).parameters:
            inputs["position_ids"] = torch.from_numpy(positions(case.feeds[MASK]))
        fresh = copy_of(model)
        with (
            gated(fresh, plan, attention=attention) as gated_model,
            evaluation_mode(fresh),
            quiet_transformers(),
            torch.no_grad(),
        ):
            expected.append({LOGITS: gated_model(**inputs, use_cache=False).logits.numpy()})
    return expected


def prove_steps(
    stage: ProofStage,
    variant: VariantName,
    cases: Sequence[Case],
    expected: Sequence[Outputs],
    sessions: Sessions,
    tolerance: float = TOLERANCE["fp32"],
) -> Proof:
    """The proof that graphs in steps return the expected logits.

    Args:
        stage: what is compared with what.
        variant: name of the variant.
        cases: the inputs.
        expected: logits of each case.
        sessions: the graphs.
        tolerance: largest relative error.

    Raises:
        MismatchError: the proof does not hold.
    """
    return require(prove_outputs(stage, variant, cases, expected, partial(run_in_steps, sessions), tolerance))
