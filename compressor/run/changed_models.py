"""The refusal of models that change at an input for good or choose among equal scores, which no form of the export
covers."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from compressor.errors import ErrorCode, InputError
from compressor.results import Proof
from compressor.run import verify
from compressor.run.products import Case

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from compressor.models.forward_changes import Change


def require_export(prove: Callable[[], Proof], model: PreTrainedModel, cases: Sequence[Case]) -> Proof:
    """The proof of an export, if it holds.

    Args:
        prove: makes the proof.
        model: its reference, on which nothing has run.
        cases: its inputs.

    Raises:
        InputError: it does not hold, and a forward on one of the inputs changes the model; or the model chooses keys
            among equal scores, so that it holds by chance if it does.
        MismatchError: it does not hold.
    """
    from compressor.models.forward_changes import FirstOfEqual, chosen_keys
    from compressor.units.hook import family

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
                f'to compress what it is afterwards, set "{change.name}": {json.dumps(change.after)} in config.json,'
                " which is another function than that of the folder"
                if known
                else "a graph computes one function for all inputs; use a model without this change"
            )
            raise InputError(
                f"{family(model)}: the model changes at {case.name} for good ({what}: {change.before} to"
                f" {change.after}), so that what it computes depends on its inputs before, and its graph computes"
                f" something else; {remedy}",
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
            f"{family(model)}: above {tied} keys{named} the model chooses keys by scores, and several are equal:"
            " PyTorch chooses others of these than ONNX does, so that the graph computes something else on texts of"
            f' more than {tied} tokens; to compress it for shorter texts, set "max_position_embeddings": {tied} in'
            " config.json",
            code=ErrorCode.UNSUPPORTED_MODEL,
            family=family(model),
            field=field,
            value=tied,
        )
    return verify.require(proof)


def prove_with_ties(prove: Callable[[], Proof]) -> tuple[Proof, int | None]:
    """A proof against the model as it is if it chooses the first of equal scores, as ONNX does.

    Args:
        prove: makes the proof.

    Returns:
        The proof, and the smallest number of chosen keys where scores are equal; None: the proof does not hold, or no
        scores are equal, so that these are not what a graph differs by.
    """
    from compressor.models.forward_changes import FirstOfEqual

    with FirstOfEqual() as choices:
        proof = prove()
    return proof, choices.tied if proof.holds else None


def _entry(model: PreTrainedModel, size: int) -> str | None:
    """The entry of the configuration that holds a number of chosen keys."""
    from compressor.models.text_config import text_config

    return next(
        (name for name, value in vars(text_config(model.config)).items() if "topk" in name and value == size), None
    )


def _change(model: PreTrainedModel, case: Case) -> Change | None:
    """The change by one input that explains most: of an entry of the configuration, else of any number or text."""
    import torch

    from compressor.model_folder import copy_of
    from compressor.models.forward_changes import changes_of_forward

    inputs = {name: torch.from_numpy(array) for name, array in case.feeds.items()}
    changes = [change for change in changes_of_forward(copy_of(model), inputs) if change.before is not None]
    return min(changes, key=lambda change: not hasattr(model.config, change.name), default=None)
