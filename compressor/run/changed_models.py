"""The refusal of models that change at an input for good, and that no form of the export covers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

from compressor.errors import ErrorCode, InputError
from compressor.results import Proof
from compressor.run import verify
from compressor.run.products import Case

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from compressor.models.forward_changes import Change


def require_export(proof: Proof, model: PreTrainedModel, cases: Sequence[Case]) -> Proof:
    """The proof of an export, if it holds.

    Args:
        proof: the proof.
        model: its reference, on which nothing has run.
        cases: its inputs.

    Raises:
        InputError: it does not hold, and a forward on one of the inputs changes the model.
        MismatchError: it does not hold.
    """
    if proof.holds:
        return proof
    from compressor.units.hook import family

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
    return verify.require(proof)


def _change(model: PreTrainedModel, case: Case) -> Change | None:
    """The change by one input that explains most: of an entry of the configuration, else of any number or text."""
    import torch

    from compressor.model_folder import copy_of
    from compressor.models.forward_changes import changes_of_forward

    inputs = {name: torch.from_numpy(array) for name, array in case.feeds.items()}
    changes = [change for change in changes_of_forward(copy_of(model), inputs) if change.before is not None]
    return min(changes, key=lambda change: not hasattr(model.config, change.name), default=None)
