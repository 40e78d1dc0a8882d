"""Proofs that graphs with caches, run in steps, return the expected logits."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from compressor.engines.prove import Case, case_name, prove_outputs, require
from compressor.errors import ErrorCode, InputError
from compressor.generation.steps import MASK, TARGET, TEXT, padded_left, run_in_steps
from compressor.results import Proof, ProofStage, VariantName
from compressor.targets import Target
from compressor.targets.base import TOLERANCE
from compressor.targets.caches import Sessions
from compressor.targets.onnxruntime.sessions import OrtSessions
from compressor.targets.relative_error import Outputs
from graph_passes.errors import listed

_READ = frozenset((TEXT, MASK, TARGET, "input_features"))
"""Inputs of the models whose graphs have caches."""
_LEFT_OUT = frozenset(("decoder_attention_mask", "token_type_ids"))
"""Inputs that graphs with caches lack: the decoder of an encoder-decoder reads no padding, and a continued text has
one type of token."""


def generation_cases(
    cases: Sequence[Case], *, pads_left: bool = True, left_out: Collection[str] = _LEFT_OUT
) -> tuple[Case, ...]:
    """The cases of a run as texts to continue: with a mask, and padding on the left of a decoder-only model.

    Args:
        pads_left: whether the graphs read padding on the left; else the texts have none.
        left_out: names of inputs that the graphs do not read.

    Raises:
        InputError: the model reads more than a text, such as images beside it.
    """
    texts = []
    for case in cases:
        if unread := sorted(case.feeds.keys() - _READ - set(left_out)):
            text = f"the model also reads {listed(unread)}, which graphs with caches cannot take"
            raise InputError(text, code=ErrorCode.UNSUPPORTED_MODEL, inputs=unread)
        feeds = dict(case.feeds) if TARGET in case.feeds else padded_left(case.feeds)
        feeds = {name: array for name, array in feeds.items() if name not in left_out}
        if not pads_left:
            feeds[MASK] = np.ones_like(feeds[TEXT])
        texts.append(Case(feeds, f"{case_name(feeds)}, in steps"))
    return tuple(texts)


def prove_steps(
    stage: ProofStage,
    variant: VariantName,
    cases: Sequence[Case],
    expected: Sequence[Outputs],
    sessions: Sessions,
    tolerance: float = TOLERANCE["fp32"],
) -> Proof:
    """The proof that graphs in steps return the expected logits.

    Raises:
        MismatchError: the proof does not hold.
    """
    return require(prove_outputs(stage, variant, cases, expected, partial(run_in_steps, sessions), tolerance))


def graph_outputs(folder: Path, texts: Sequence[Case]) -> list[Outputs]:
    """Logits of the graphs of a folder, which the runtime does not optimize, on each text in steps."""
    sessions = OrtSessions(folder, optimized=False)
    return [run_in_steps(sessions, text.feeds) for text in texts]


def prove_engines(
    folder: Path,
    texts: Sequence[Case],
    runtime: Target,
    threads: int | None,
    variant: VariantName,
    tolerance: float = TOLERANCE["fp32"],
) -> Proof:
    """The proof that the engines compute what ONNX Runtime computes from their graphs without optimizations.

    Args:
        folder: the folder of the graphs and engines.

    Raises:
        MismatchError: the proof does not hold.
    """
    engines = runtime.open_sessions(folder, provider="cpu", threads=threads)
    return prove_steps(ProofStage.CACHED_BUILD, variant, texts, graph_outputs(folder, texts), engines, tolerance)
