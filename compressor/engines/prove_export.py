"""Proofs that an exported graph computes the same function as the PyTorch model. Models for which no proof can hold are
refused: their outputs are not finite, an input changes them for good, or they choose among equal scores."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.exporters.utils import get_leaf_tensors

from compressor.engines.prove import Case, case_name, prove_outputs, require, unoptimized
from compressor.errors import ErrorCode, InputError
from compressor.model_folder import copy_of
from compressor.model_folder.text_limits import text_config
from compressor.models.forward_changes import Change, FirstOfEqual, changes_of_forward, chosen_keys
from compressor.results import Proof, ProofStage, VariantName
from compressor.silence_libraries import quiet_transformers
from compressor.targets.base import TOLERANCE, Feeds
from compressor.targets.relative_error import Outputs, is_defined
from compressor.units import gated
from compressor.units.find import evaluation_mode
from compressor.units.hook import Attention, family
from graph_passes import Plan


def prove_export(
    model: PreTrainedModel,
    plan: Plan,
    graph: Path,
    cases: Sequence[Case],
    variant: VariantName,
    *,
    attention: Attention,
) -> Proof:
    """Compare the gated PyTorch model with its reference graph.

    Each case runs on a copy of the model that nothing has run on before: a model may change at an input.

    Args:
        model: the model, which stays unchanged; nothing may have run on it if it is the reference.

    Raises:
        InputError: the graph does not run on inputs of some size that the model reads, or the model's own outputs are
            not finite.
    """
    run = unoptimized(graph)

    def run_exported(feeds: Feeds) -> Outputs:
        try:
            return run(feeds)
        except InputError as error:
            text = (
                f"{family(model)}: the model runs on {case_name(feeds)}, but the exported graph does not ({error}); the"
                " exporter of transformers fixes a size of this family; use a model with another head, or another form"
                " of attention"
            )
            raise InputError(text, code=ErrorCode.EXPORT_FAILED, family=family(model)) from error

    expected: list[Outputs] = []
    for case in cases:
        inputs = {name: torch.from_numpy(array) for name, array in case.feeds.items()}
        with gated_copy(model, plan, attention) as gated_model:
            # By the names that the exporter gives to outputs, also to parts of sequences and to a single tensor.
            outputs = {name: value.numpy() for name, value in get_leaf_tensors(gated_model(**inputs)).items()}
            require_defined(gated_model, inputs, outputs)
        expected.append(outputs)
    return prove_outputs(ProofStage.EXPORT, variant, cases, expected, run_exported, TOLERANCE["fp32"])


@contextmanager
def gated_copy(model: PreTrainedModel, plan: Plan, attention: Attention) -> Iterator[Any]:
    """A copy of a model with the gates of a plan, on which nothing has run, for a forward of a reference."""
    fresh = copy_of(model)
    with (
        gated(fresh, plan, attention=attention) as gated_model,
        evaluation_mode(fresh),
        quiet_transformers(),
        torch.no_grad(),
    ):
        yield gated_model


def require_export(prove: Callable[[], Proof], model: PreTrainedModel, cases: Sequence[Case]) -> Proof:
    """The proof of an export, if it holds.

    Args:
        model: its reference, on which nothing has run.

    Raises:
        InputError: the proof does not hold, and a forward on an input changes the model; or the model chooses keys
            among equal scores, so the proof can only hold by chance.
        MismatchError: the proof does not hold.
    """
    with FirstOfEqual(watches=True) as choices:
        proof = prove()
    if proof.holds and (choices.tied is None or choices.tied != chosen_keys(model.config)):
        return proof

    for case in cases:
        change = _change(model, case)
        if change is not None:
            what = " ".join(filter(None, (change.module, change.name)))
            known = change.before is not None and getattr(model.config, change.name, None) == change.before
            remedy = (
                f'to compress the changed model, set "{change.name}": {json.dumps(change.after)} in config.json;'
                " the result computes a different function than the folder"
                if known
                else "use a model without this change"
            )
            raise InputError(
                f"{family(model)}: the model changes permanently at {case.name} ({what}: {change.before} to"
                f" {change.after}), so its outputs depend on earlier inputs, which no graph can reproduce; {remedy}",
                code=ErrorCode.UNSUPPORTED_MODEL,
                family=family(model),
                module=change.module,
                field=change.name,
                before=change.before,
                after=change.after,
            )
    tied = choices.tied if proof.holds else prove_with_ties(prove)[1]
    if tied is not None:
        field = _entry(model, tied)
        named = "" if field is None else f" ({field})"
        raise InputError(
            f"{family(model)}: above {tied} keys{named} the model chooses keys by score. Among equal scores PyTorch"
            f" and ONNX choose different keys, so the graph differs on texts of more than {tied} tokens;"
            f' to compress the model for shorter texts, set "max_position_embeddings": {tied} in config.json',
            code=ErrorCode.UNSUPPORTED_MODEL,
            family=family(model),
            field=field,
            value=tied,
        )
    return require(proof)


def prove_with_ties(prove: Callable[[], Proof]) -> tuple[Proof, int | None]:
    """A proof against the model as it is if it chooses the first of equal scores, as ONNX does.

    Returns:
        The proof, and the smallest number of chosen keys where scores are equal; None: the proof does not hold, or no
        scores are equal, so ties are not the reason for a difference.
    """
    with FirstOfEqual() as choices:
        proof = prove()
    return proof, choices.tied if proof.holds else None


def _entry(model: PreTrainedModel, size: int) -> str | None:
    """The entry of the configuration that holds a number of chosen keys."""
    return next(
        (name for name, value in vars(text_config(model.config)).items() if "topk" in name and value == size), None
    )


def _change(model: PreTrainedModel, case: Case) -> Change | None:
    """The change by one input that explains most: of an entry of the configuration, else of any number or text."""
    inputs = {name: torch.from_numpy(array) for name, array in case.feeds.items()}
    changes = [change for change in changes_of_forward(copy_of(model), inputs) if change.before is not None]
    return min(changes, key=lambda change: not hasattr(model.config, change.name), default=None)


def require_defined(model: PreTrainedModel, inputs: Mapping[str, Tensor], outputs: Mapping[str, np.ndarray]) -> None:
    """Check that each output has no NaN and some finite number; name the module where they overflow.

    Raises:
        InputError: an output has NaN, or no finite number.
    """
    feeds = {name: tensor.numpy() for name, tensor in inputs.items()}
    undefined = next((name for name, array in outputs.items() if not is_defined(array, feeds)), None)
    if undefined is None:
        return
    module = first_not_finite(model, inputs)
    where = "" if module is None else f", and so is the earlier output of its module {module}"
    text = (
        f"{family(model)}: the output {undefined} of the model is NaN or infinite{where}; check its weights, or use a"
        " checkpoint from before the training diverged"
    )
    raise InputError(text, code=ErrorCode.NOT_FINITE, output=undefined, module=module)


def first_not_finite(model: PreTrainedModel, inputs: Mapping[str, Tensor]) -> str | None:
    """Path of the module that is the first to return a value that is NaN or infinite; None: no module does."""
    paths: list[str] = []

    def observe(path: str, module: nn.Module, args: tuple[Any, ...], result: Any) -> None:
        tensors = get_leaf_tensors(result).values()
        if not paths and any(not torch.isfinite(tensor).all() for tensor in tensors if tensor.is_floating_point()):
            paths.append(path)

    with ExitStack() as undo:
        for path, module in model.named_modules():
            if path:
                undo.enter_context(module.register_forward_hook(partial(observe, path)))
        model(**inputs)
    return paths[0] if paths else None
