"""The rules of a run: which of its steps and settings go together. No other module knows them.

Rules of the options of one step are declared beside them, in `compressor.config.steps`. Each rule here says why neither
the type of an option nor the list of steps expresses it. A rule is stated for the list of steps, whether flags request
them or they are written out; `option_of` then names an option as the list does.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from compressor.config.fields import FieldConflictError, Rule, shown, with_texts
from compressor.config.methods import BUDGET_METHODS
from compressor.config.recipe_fields import FIELDS
from compressor.config.recipe_sections import RecipeSections
from compressor.config.sections import AUTO, DistillationConfig
from compressor.config.step_list import OPTIONS_OF_STEPS, requested_kinds, requested_steps, value_of
from compressor.config.steps import (
    CERTIFIES_A_LOSS,
    RAY_NEEDS_A_SEARCH,
    STEPS,
    Blocks,
    Distill,
    Follow,
    Heads,
    Step,
    Units,
    Within,
    parts_of,
)
from compressor.errors import ErrorCode
from compressor.targets import DEFAULT_TARGET, target

# 1. Settings are shared by all steps, and flags of a step that is not requested reach no list: what each of them needs
# or excludes. Names are those of fields, of steps, and of the facts of `_check_settings`.
_SETTINGS = (
    *(
        Rule(name, "nothing is distilled; add <distill>, or omit it", needs=("distill",))
        for name in DistillationConfig.model_fields
        if name != "distill"
    ),
    RAY_NEEDS_A_SEARCH,
    Rule("certify", CERTIFIES_A_LOSS, needs=("heads", "units", "follow"), fields=("certify", "max_drop")),
    Rule(
        "group_by",
        f"heads are dropped one by one, in any group; omit it, or choose one of {', '.join(BUDGET_METHODS)} (<method>)",
        needs=("units", "follow", "no_rows"),
        fields=("group_by", "method"),
    ),
    Rule(
        "max_drop",
        "there are no rows to score; add rows (<data>)",
        needs=("rows",),
        fields=("max_drop", "data"),
        code=ErrorCode.MISSING_VALUE,
    ),
    Rule(
        "unlabelled_data",
        "there are no training rows to add these rows to; name them as training rows (<data>)",
        needs=("data",),
        code=ErrorCode.MISSING_VALUE,
    ),
    Rule(
        "match_dense",
        "documents are those of the whole model, not of another teacher; omit one of them",
        excludes=("teacher",),
    ),
    Rule(
        "match_dense",
        "no unit is chosen and nothing is trained by it; set a budget (<macs>), or omit it",
        needs=("units", "distill"),
        fields=("match_dense", "macs"),
    ),
    Rule(
        "quantized_share",
        "the engine does not round weights to 8 bits or bfloat16; set <precision> int8, bf16 or auto, or omit it",
        needs=("precision=int8", "precision=bf16", f"precision={AUTO}"),
    ),
)

_OF_PYTORCH = ("attention", "opset", "pool_in_graph", "allow_pickle", "trust_remote_code")
"""Settings of the export of a PyTorch model, and of the files that it is loaded from."""


def check(recipe: RecipeSections) -> None:
    """Check that the settings and the steps of a recipe go together.

    Raises:
        FieldConflictError: they do not, or an option that one of them needs is missing.
    """
    _check_list_or_flags(recipe)
    _check_settings(recipe)
    _check_engine(recipe)
    _check_request(recipe)
    steps = parts_of(requested_steps(recipe))
    for check_steps in (
        _check_order,
        _check_stored_plan,
        _check_units_after_heads,
        _check_training_rows,
        _check_distillation,
        _check_unlabelled_rows,
        _check_certificate,
        _check_graph,
    ):
        check_steps(recipe, steps)


def _check_list_or_flags(recipe: RecipeSections) -> None:
    # 2. Neither wins over the other: a flag may be meant to change the list or to replace it.
    # The recipe of a report sets every field; those that have their default decide nothing.
    flag = next((name for name in sorted(OPTIONS_OF_STEPS) if recipe.value(name) != FIELDS[name].default), None)
    if recipe.steps is not None and flag is not None:
        raise FieldConflictError(
            ErrorCode.CONTRADICTION,
            f"<{flag}>: the steps are written out; set the option of its step instead, or omit the list of steps",
            *(flag, "steps"),
        )


def _check_settings(recipe: RecipeSections) -> None:
    kinds = requested_kinds(recipe)
    options = {name: value for step in parts_of(recipe.steps or ()) for name, value in step.changed.items()}
    facts = {
        **{kind.name: True for kind in kinds},
        "rows": recipe.rows.available,
        "no_rows": recipe.rows.data is None,
    }
    settings = {name: recipe.value(name) for name in FIELDS if recipe.value(name) != FIELDS[name].default}
    values = {name: options[name] for name in ("teacher", "quantized_share") if name in options} | settings
    for rule in _SETTINGS:
        rule.check(with_texts(values) | {name: True for name, holds in facts.items() if holds})


def _check_engine(recipe: RecipeSections) -> None:
    # 3. Runtimes are registered, each with devices and options of its own.
    engine = recipe.engine
    runtime = target(engine.reference.target)
    if engine.provider is not None and engine.provider not in runtime.providers:
        raise FieldConflictError(
            ErrorCode.CONTRADICTION,
            f"<provider> {engine.provider}: {runtime.title} runs on {' or '.join(runtime.providers)} only; omit it,"
            f" or choose {DEFAULT_TARGET} (<target>)",
            *("provider", "target"),
        )
    if engine.kernel is not None and ("kernel" not in runtime.options or engine.provider == "cuda"):
        raise FieldConflictError(
            ErrorCode.CONTRADICTION,
            f"<kernel> {engine.kernel}: only ONNX Runtime on the CPU uses it; omit it",
            *("kernel", "target"),
        )


def _check_request(recipe: RecipeSections) -> None:
    # 4. An empty list is a run of the whole model, but rows with flags of training alone request more than that.
    selection = recipe.selection
    says_how = {"method", "plan"} & selection.model_fields_set or recipe.blocks.model_fields_set
    if Heads in requested_kinds(recipe) and recipe.steps is None and selection.keep is None and not says_how:
        raise FieldConflictError(
            ErrorCode.MISSING_VALUE,
            "nothing says how much to remove; set a budget (<speedup>, <latency>, <macs>, <parameters>), the loss"
            " allowed (<max_drop>), or the number of heads (<keep>)",
            *("keep", "speedup"),
        )


def _subject(recipe: RecipeSections, *steps: Step) -> str:
    """The steps of a conflict: `<steps> units, distill` of a list, `<macs> 0.5, <distill>` of flags."""
    if recipe.steps is not None:
        return f"<steps> {', '.join(step.name for step in steps) or 'none'}"
    return ", ".join(shown(step.flag, value_of(step, step.flag)) for step in steps)


def _check_order(recipe: RecipeSections, steps: Sequence[Step]) -> None:
    # 5. The type of a list neither orders its steps nor bounds their number, and flags can request steps that no list
    # may have together.
    for earlier, later in itertools.combinations(steps, 2):
        at_fault, fields = [later], (later.flag, "plan")
        match earlier, later:
            case Follow(plan=plan), Units() if later.start_from is not None:
                reason = f"units are removed from what the plan {plan} keeps; omit one of them (<start_from>)"
            case Follow(plan=plan), Units() if later.is_unbounded or later.learns:
                reason = (
                    f"this removes units of the whole model, and the plan {plan} already says what is kept; omit the"
                    " plan, or set a budget alone (<speedup>)"
                )
            case Follow(plan=plan), Heads():
                reason = f"the heads are those of the plan {plan}; omit one of them"
                at_fault += [step for step in steps if isinstance(step, Blocks)]
            case Follow(plan=plan), Blocks() if recipe.selection.plan is not None:
                reason = f"the plan {plan} already says what is kept; omit one of them"
            case Blocks(), Units():
                reason = (
                    "blocks are dropped by training, after which units would have to be refitted again; omit one of"
                    " them"
                )
                at_fault.append(earlier)
            case _:
                continue
        if len(at_fault) > 1:
            fields = (later.flag, at_fault[1].flag)
        raise FieldConflictError(
            ErrorCode.CONTRADICTION,
            f"{_subject(recipe, *(at_fault if recipe.steps is None else steps))}: {reason}",
            *(fields if recipe.steps is None else ("steps",)),
        )
    names, order = [step.name for step in steps], [name for name in STEPS if name != Within.name]
    if names != [name for name in order if name in names]:
        raise FieldConflictError(
            ErrorCode.CONTRADICTION,
            f"{_subject(recipe, *steps)}: steps are carried out in the order {', '.join(order)}, each at most once"
            f" ({Within.name} carries out the last two); write such a list, or run compress on the output of another"
            " run",
            "steps",
        )


def _check_stored_plan(recipe: RecipeSections, steps: Sequence[Step]) -> None:
    # 6. The list does not know the model folder. Flags follow its plan by themselves.
    stored = recipe.stored_plan
    if stored is not None and recipe.steps is not None and not isinstance(next(iter(steps), None), Follow):
        raise FieldConflictError(
            ErrorCode.CONTRADICTION,
            f"{_subject(recipe, *steps)}: the plan {stored} in the model folder says what its weights are of; begin"
            " with the step follow, or name the folder of the whole model",
            "steps",
        )


def _check_units_after_heads(recipe: RecipeSections, steps: Sequence[Step]) -> None:
    # 7. The types of units that a step may remove depend on the steps before it.
    heads = next((step for step in steps if isinstance(step, Heads)), None)
    units = next((step.changed for step in steps if isinstance(step, Units)), {})
    options = ("prune_units", "group_by", "start_from")
    option = next((name for name in options if name in units and units[name] != "neurons"), None)
    if heads is not None and option is not None:
        remedy = "omit the step heads" if recipe.steps else f"choose one of {', '.join(BUDGET_METHODS)} (<method>)"
        raise FieldConflictError(
            ErrorCode.CONTRADICTION,
            f"{shown(option, units[option])}: {heads.method} selects heads of the whole model, and the budget then"
            f" removes neurons only; omit it, or {remedy}",
            *(("steps",) if recipe.steps else (option, "method")),
        )


def _check_training_rows(recipe: RecipeSections, steps: Sequence[Step]) -> None:
    # 8. Rows are settings of the run, since all steps share them, and a plan is followed without any.
    learning = next((step for step in reversed(steps) if not isinstance(step, Follow)), None)
    if learning is not None and recipe.rows.data is None:
        labels = "" if learning.reads_labels else ", whose labels are not needed"
        plan = " or a plan (<plan>)" if isinstance(learning, Heads) else ""
        raise FieldConflictError(
            ErrorCode.MISSING_VALUE,
            f"{_subject(recipe, learning)}: there are no rows to learn from; add training rows (<data>){labels}{plan}",
            *("steps" if recipe.steps else learning.flag, "data"),
        )


def _check_distillation(recipe: RecipeSections, steps: Sequence[Step]) -> None:
    # 9. The whole model learns nothing from itself; whether it is whole depends on the steps before.
    if steps and isinstance(steps[0], Distill) and steps[0].teacher is None:
        remedy = "a step before it" if recipe.steps else "a budget (<speedup>), heads to keep (<keep>), a plan (<plan>)"
        raise FieldConflictError(
            ErrorCode.MISSING_VALUE,
            f"{_subject(recipe, steps[0])}: nothing is removed from the model, so there is nothing to distill; add"
            f" {remedy}, or a teacher (<teacher>)",
            *(("steps", "teacher") if recipe.steps else ("distill", "speedup")),
        )


def _check_unlabelled_rows(recipe: RecipeSections, steps: Sequence[Step]) -> None:
    # 10. Whether a step reads rows, and their labels, follows from its method.
    source = recipe.rows.unlabelled_data
    if source is None:
        return
    learning = next((step for step in steps if step.reads_labels), None)
    if learning is not None:
        raise FieldConflictError(
            ErrorCode.CONTRADICTION,
            f"<unlabelled_data> {source}, <{learning.flag}>: the step {learning.name} learns from labels, and these"
            " rows have none; omit one of them",
            *("unlabelled_data", learning.flag),
        )
    if not (any(step.rows_drawn(1) for step in steps) or recipe.engine.chooses):
        raise FieldConflictError(
            ErrorCode.CONTRADICTION,
            f"<unlabelled_data> {source}: no unit is removed from the model and nothing is trained by these rows; set a"
            " budget (<speedup>) or <distill>, or omit it",
            *("unlabelled_data", "distill"),
        )


def _check_certificate(recipe: RecipeSections, steps: Sequence[Step]) -> None:
    # 11. A certificate is of the model that is delivered, which later steps and the engine change.
    engine = recipe.engine
    number = next((number for number, step in enumerate(steps) if "certify" in step.changed), None)
    if number is None:
        return
    certified, *later = steps[number:]
    certify = shown("certify", certified.changed["certify"])
    if later:
        raise FieldConflictError(
            ErrorCode.CONTRADICTION,
            f"{certify}, <{later[0].flag}>: the loss after the step {certified.name} is certified, not that of the"
            f" model that the step {later[0].name} delivers; omit one of them",
            *("certify", later[0].flag),
        )
    rounds = engine.allows_quantized or engine.precision == "bf16" or engine.weight_precision is not None
    if isinstance(certified, Units) and rounds:
        raise FieldConflictError(
            ErrorCode.CONTRADICTION,
            f"{certify}, <precision> {engine.precision}: the loss of the model in floats is certified, not that of the"
            " precision of the engine; omit one of them",
            *("certify", "precision"),
        )


def _check_graph(recipe: RecipeSections, steps: Sequence[Step]) -> None:
    # 12. A graph is pruned as its file has it; the list does not know whether the model is one.
    if recipe.graph is None:
        if recipe.source.tokenizer is not None:
            raise FieldConflictError(
                ErrorCode.CONTRADICTION,
                f"<tokenizer> {recipe.source.tokenizer}: only an ONNX file has its tokenizer elsewhere, and"
                f" {recipe.source.model} is a model folder; omit it",
                *("tokenizer", "model"),
            )
        return
    subjects = {name: f"<{name}>" for name in _OF_PYTORCH if recipe.value(name) != FIELDS[name].default}
    for step in steps:
        if isinstance(step, Blocks):
            subjects["steps" if recipe.steps else step.flag] = _subject(recipe, step)
    for field, subject in subjects.items():
        raise FieldConflictError(
            ErrorCode.CONTRADICTION,
            f"{subject}: {recipe.graph} is compressed as the file has it, without PyTorch's model; omit it, or name the"
            " model folder that the graph was exported from",
            *(field, "model"),
        )
