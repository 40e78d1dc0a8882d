"""The weights that an earlier run fitted to its plan, in the output folder in which the plan lies."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from compressor.config.methods import METHODS
from compressor.config.run import Recipe
from compressor.errors import ErrorCode, InputError
from compressor.model_folder import ModelFolder
from compressor.model_folder.fingerprints import record_weights, weight_fingerprints
from compressor.run.load import load_folder
from compressor.units.find import KnowsGroups
from graph_passes import WEIGHTS, Plan

_OUTPUT = "the output folder of its run"


def require_fitted_weights(recipe: Recipe, plan: Plan, file: Path, model: ModelFolder, *, distills: bool) -> Path:
    """The folder that holds the weights of a plan, which its run fitted to those of the model.

    Args:
        recipe: says how folders are loaded.
        plan: a plan that belongs to other weights than the model has.
        file: the file of the plan, beside which its weights lie.
        model: the model folder, as the run of the plan began with it.
        distills: whether the model is distilled afterwards, so that it needs a teacher.

    Raises:
        InputError: the plan is that of another model, or its weights are not beside it.
    """
    original, teacher = weight_fingerprints(model.model), model.path if distills else None
    missing = partial(_missing, plan, file, teacher)
    if not _has_weights(plan) or any(original.get(name) != row.original for name, row in plan.weights.items()):
        raise _foreign(plan, file, model)
    has_file = file.with_name(WEIGHTS).is_file()
    if not plan.weights:
        output = str(file.parent) if has_file else _OUTPUT
        raise missing("it does not record which weights its run began with", output)
    pruned = file.with_name("model.onnx")
    if not has_file and model.file is not None and pruned.is_file():
        raise missing(f"{pruned} has them, with nothing left that the plan removes", str(pruned))
    if not has_file:
        raise missing(f"{WEIGHTS} does not lie beside it")
    fitted = load_folder(recipe, file.parent)
    if fitted.fingerprint != plan.model:
        raise missing(f"the {WEIGHTS} beside it is that of another run, or was changed")
    # Parameters without a record are those that the run did not change.
    if dict(record_weights(plan, original, fitted.model).weights) != dict(plan.weights):
        raise _foreign(plan, file, model)
    return file.parent


def _has_weights(plan: Plan) -> bool:
    """Whether a plan belongs to weights of its own; files of version 0.1 do not record them."""
    methods = [METHODS[name] for name in (plan.method or "").split("+") if name in METHODS]
    changes_weights = any(method.trains_model or method.kind == "budget" for method in methods)
    return bool(plan.weights or plan.masks) or changes_weights


def require_groups(plan: Plan, file: Path, model: ModelFolder) -> None:
    """Raise InputError unless a model that knows its groups has those of a plan, with as many units.

    Args:
        plan: the plan.
        file: its file.
        model: the model folder or file; the groups of a model of PyTorch are checked where it is gated.
    """
    network = model.model
    if not isinstance(network, KnowsGroups):
        return
    sizes = {site.name: site.heads for site in network.sites} | dict(network.feed_forwards)
    group = next((group for group in plan.groups if sizes.get(group.name) != group.units), None)
    if group is not None:
        units = sizes.get(group.name, "no")
        raise InputError(
            f"{file}: the plan of another graph: {group.name} has {group.units} {group.type} there, and {units} in"
            f" {model.source}; use the graph that it was learned on, or learn again",
            code=ErrorCode.FILE_MISMATCH,
            path=file,
            model=plan.model,
            group=group.name,
            graph=model.source,
        )


def _foreign(plan: Plan, file: Path, model: ModelFolder) -> InputError:
    return InputError(
        f"{file}: the plan of another model ({plan.model}, not {model.fingerprint}, that of {model.source}); use the"
        " model that it was learned on, or learn again",
        code=ErrorCode.FILE_MISMATCH,
        path=file,
        model=plan.model,
    )


def _missing(plan: Plan, file: Path, teacher: Path | None, reason: str, output: str = _OUTPUT) -> InputError:
    """The error for a plan that cannot be followed on the model of a run, but in the output folder of its own run."""
    taught = "" if teacher is None else f", with --teacher {teacher}"
    return InputError(
        f"{file}: the plan ({plan.method or 'masks'}) belongs to weights that its run fitted, and {reason}; use"
        f" {output} as the model{taught}",
        code=ErrorCode.FILE_MISMATCH,
        path=file,
        model=plan.model,
    )
