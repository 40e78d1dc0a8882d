"""The rules of a run: which of its steps and settings go together. No other module knows them.

Rules of the options of one step are declared beside them, in `compressor.config.steps`. Each rule here says why neither
the type of an option nor the list of steps expresses it. A rule is stated for the list of steps, whether flags request
them or they are written out; `option_of` then names an option as the list does.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from compressor.config.fields import FieldConflictError, Rule, check_rules, shown
from compressor.config.methods import BUDGET_METHODS
from compressor.config.sections import AUTO, FIELDS, DistillationConfig
from compressor.config.step_list import OPTIONS_OF_STEPS, RecipeSections, requested_kinds, requested_steps
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
    part_of,
    parts_of,
)
from compressor.errors import ErrorCode
from compressor.targets import DEFAULT_TARGET, target

# 1. Settings are shared by all steps, and flags of a step that is not requested reach no list: what each of them needs
# or excludes. Names are those of fields, of steps, and of the facts of `_facts_of_settings`.
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
    # 2. Runtimes are registered, each with devices and options of its own.
    Rule(
        "provider",
        f"the target runs on no other device; omit it, or choose {DEFAULT_TARGET} (<target>)",
        excludes=("lacks_device",),
    ),
    Rule("kernel", "only ONNX Runtime on the CPU uses it; omit it", excludes=("lacks_kernels",)),
    # 3. An empty list is a run of the whole model, but rows with flags of training alone request more than that.
    Rule(
        "requests_nothing",
        "nothing says how much to remove; set a budget (<speedup>, <latency>, <macs>, <parameters>), the loss allowed"
        " (<max_drop>), or the number of heads (<keep>)",
        fields=("keep", "speedup"),
        code=ErrorCode.MISSING_VALUE,
    ),
)

_OF_PYTORCH = ("attention", "opset", "pool_in_graph", "allow_pickle", "trust_remote_code")
"""Settings of the export of a PyTorch model, and of the files that it is loaded from."""

# What depends on several steps, or on a step and a setting; names are those of fields, and of the facts of
# `_facts_of_steps`.
_STEPS = (
    # 4. The list does not know the model folder. Flags follow its plan by themselves.
    Rule(
        "ignores_plan",
        "the weights in the model folder belong to its plan; begin with the step follow, or name the folder of the"
        " whole model",
        fields=("steps",),
    ),
    # 5. Rows are settings of the run, since all steps share them, and a plan is followed without any. The loss that
    # bounds units may be that of the step that carries them out.
    *(
        Rule(
            fact,
            f"there are no rows to learn from; add training rows (<data>){addition}",
            needs=("data",),
            code=ErrorCode.MISSING_VALUE,
        )
        for fact, addition in (
            ("selects_heads", " or a plan (<plan>)"),
            ("learns_labels", ""),
            ("learns", ", whose labels are not needed"),
        )
    ),
    Rule(
        "has_no_bound",
        "it needs a budget; set <speedup>, <latency>, <macs>, <parameters>, the number of heads (<keep>), or the loss"
        " allowed (<max_drop>)",
        fields=("method", "speedup"),
        code=ErrorCode.MISSING_VALUE,
    ),
    # 6. The whole model learns nothing from itself; whether it is whole depends on the steps before.
    Rule(
        "begins_to_distill",
        "nothing is removed from the model, so there is nothing to distill; add a step before it, such as a budget"
        " (<speedup>), heads to keep (<keep>) or a plan (<plan>), or a teacher (<teacher>)",
        needs=("teacher",),
        code=ErrorCode.MISSING_VALUE,
    ),
    # 7. Whether a step reads rows, and their labels, follows from its method.
    Rule(
        "unlabelled_data",
        "this step learns from labels, and these rows have none; omit one of them",
        excludes=("reads_labels",),
    ),
    Rule(
        "unlabelled_data",
        "no unit is removed from the model and nothing is trained by these rows; set a budget (<speedup>) or <distill>,"
        " or omit it",
        needs=("draws_rows",),
        fields=("unlabelled_data", "distill"),
    ),
    # 8. A certificate is of the model that is delivered, which later steps and the engine change.
    Rule(
        "certified",
        "the loss before this step is certified, not that of the model that is delivered; omit one of them",
        excludes=("changes_certified",),
    ),
    Rule(
        "certified",
        "the loss of the model in floats is certified, not that of the precision of the engine; omit one of them",
        excludes=("rounds_certified",),
    ),
    # 9. A graph is pruned as its file has it; the list does not know whether the model is one.
    *(
        Rule(
            name,
            "the graph is compressed as its file has it, without PyTorch's model; omit it, or name the model folder"
            " that the graph was exported from",
            excludes=("graph",),
        )
        for name in (*_OF_PYTORCH, "masks_blocks")
    ),
    Rule(
        "tokenizer",
        "only an ONNX file has its tokenizer elsewhere, and this is a model folder; omit it",
        needs=("graph",),
        fields=("tokenizer", "model"),
    ),
)


def check(recipe: RecipeSections) -> None:
    """Check that the settings and the steps of a recipe go together.

    Raises:
        FieldConflictError: they do not, or an option that one of them needs is missing.
    """
    settings = {name: value for name in FIELDS if (value := recipe.value(name)) != FIELDS[name].default}
    # 10. Neither the list nor a flag wins: the flag may be meant to change the list or to replace it.
    # The recipe of a report sets every field; those that have their default decide nothing.
    flag = next(iter(sorted(settings.keys() & OPTIONS_OF_STEPS)), None)
    if recipe.steps is not None and flag is not None:
        text = f"<{flag}>: the steps are written out; set the option of its step instead, or omit the list of steps"
        raise FieldConflictError(ErrorCode.CONTRADICTION, text, flag, "steps")
    listed = {name: value for step in parts_of(recipe.steps or ()) for name, value in step.changed.items()}
    settings = {name: listed[name] for name in ("teacher", "quantized_share") if name in listed} | settings
    check_rules(_SETTINGS, settings, _facts_of_settings(recipe))
    steps = parts_of(requested_steps(recipe))
    _check_order(recipe, steps)
    _check_units_after_heads(recipe, steps)
    check_rules(_STEPS, settings, dict(_facts_of_steps(recipe, steps)))


def _facts_of_settings(recipe: RecipeSections) -> dict[str, tuple[str, Any]]:
    kinds, engine, selection = requested_kinds(recipe), recipe.engine, recipe.selection
    runtime = target(engine.reference.target)
    devices = f"{runtime.name} on {' or '.join(runtime.providers)}"
    says_how = {"method", "plan"} & selection.model_fields_set or recipe.blocks.model_fields_set
    facts = {
        "rows": ("data", recipe.rows.sources),
        "no_rows": ("data", recipe.rows.data is None),
        "lacks_device": ("target", engine.provider not in (None, *runtime.providers) and devices),
        "lacks_kernels": ("target", ("kernel" not in runtime.options or engine.provider == "cuda") and devices),
        "requests_nothing": (
            "data",
            Heads in kinds and recipe.steps is None and selection.keep is None and not says_how and recipe.rows.data,
        ),
        **{kind.name: (kind.name, True) for kind in kinds},
    }
    return {name: (field, value) for name, (field, value) in facts.items() if value}


def _facts_of_steps(recipe: RecipeSections, steps: Sequence[Step]) -> Iterator[tuple[str, tuple[str, Any]]]:
    def subject(step: Step) -> tuple[str, Any]:
        return ("steps", step.name) if recipe.steps is not None else step.request

    engine, first = recipe.engine, next(iter(steps), None)
    if recipe.stored_plan is not None and recipe.steps is not None and not isinstance(first, Follow):
        yield "ignores_plan", ("steps", ", ".join(step.name for step in steps) or "none")
    learning = next((step for step in reversed(steps) if not isinstance(step, Follow)), None)
    if learning is not None:
        fact = "learns_labels" if learning.reads_labels else "learns"
        yield ("selects_heads" if isinstance(learning, Heads) else fact), subject(learning)
    unbounded = next((step for step in steps if isinstance(step, Units) and step.is_unbounded), None)
    if unbounded is not None and unbounded.max_drop is None:
        yield "has_no_bound", ("method", unbounded.method)
    if isinstance(first, Distill):
        yield "begins_to_distill", subject(first)
    if (labelled := next((step for step in steps if step.reads_labels), None)) is not None:
        yield "reads_labels", labelled.request
    if engine.chooses or any(step.rows_drawn(1) for step in steps):
        yield "draws_rows", ("data", True)
    for number, step in enumerate(steps):
        if "certify" in step.changed:
            yield "certified", ("certify", step.changed["certify"])
            if later := steps[number + 1 :]:
                yield "changes_certified", later[0].request
            elif isinstance(step, Units) and engine.rounds:
                yield "rounds_certified", ("precision", engine.precision)
    if recipe.graph is not None:
        yield "graph", ("model", recipe.graph)
    yield from (("masks_blocks", subject(step)) for step in steps if isinstance(step, Blocks))


def _subject(recipe: RecipeSections, steps: Sequence[Step]) -> str:
    """The steps of a conflict: `<steps> units, distill` of a list, `<macs> 0.5, <distill>` of flags."""
    if recipe.steps is not None:
        return f"<steps> {', '.join(step.name for step in steps)}"
    return ", ".join(shown(*step.request) for step in steps)


def _check_order(recipe: RecipeSections, steps: Sequence[Step]) -> None:
    # 11. The type of a list neither orders its steps nor bounds their number, and flags can request steps that no list
    # may have together.
    for first, later in itertools.pairwise(recipe.steps or ()):
        if isinstance(first, Within):
            text = (
                f"<steps> {first.name}, {later.name}: the model that {first.name} delivers keeps the metric, and this"
                f" step changes it; omit it, or write {Distill.name} into the steps of {first.name}"
            )
            raise FieldConflictError(ErrorCode.CONTRADICTION, text, "steps", step=_number(recipe, later))
    for earlier, later in itertools.combinations(steps, 2):
        at_fault = [later]
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
            case Follow(plan=plan), Blocks() if Units in map(type, steps):
                reason = (
                    f"blocks are dropped from the heads that the plan {plan} keeps, not after further units are"
                    " removed; omit one of them, or drop blocks from the output of this run"
                )
                at_fault += [step for step in steps if isinstance(step, Units)]
            case Follow(plan=plan), Blocks() if recipe.selection.plan is not None:
                reason = f"the plan {plan} already says what is kept; omit one of them"
            case Blocks(), Units():
                reason = "blocks are dropped by training after units are removed; write units before blocks"
                at_fault.append(earlier)
            case Units(), _ if earlier.is_unbounded and not isinstance(later, Distill):
                reason = (
                    "the loss before this step is bounded, not that of the model that is delivered; set a budget"
                    " (<speedup>), or omit one of them"
                )
                at_fault.append(earlier)
            case _:
                continue
        fields = (
            (later.flag, "plan" if len(at_fault) == 1 else at_fault[1].flag) if recipe.steps is None else ("steps",)
        )
        listed, number = steps if recipe.steps is None else at_fault, _number(recipe, later)
        raise FieldConflictError(ErrorCode.CONTRADICTION, f"{_subject(recipe, listed)}: {reason}", *fields, step=number)
    order = [name for name in STEPS if name != Within.name]
    for earlier, later in itertools.pairwise(steps):
        if order.index(earlier.name) >= order.index(later.name):
            raise FieldConflictError(
                ErrorCode.CONTRADICTION,
                f"{_subject(recipe, steps)}: steps run in the order {', '.join(order)}, each at most once,"
                f" {Within.name} in place of {Units.name} and {Distill.name}, and only a ladder repeats them, all with"
                " stricter budgets of one kind; write them in this order, or run compress on the output of another run",
                "steps",
                step=_number(recipe, later),
            )


def _number(recipe: RecipeSections, part: Step) -> int | None:
    """The index in the list that is written out of the last step with such a part; None: flags request it."""
    steps = reversed(list(enumerate(recipe.steps or ())))
    return next((number for number, step in steps if step.part(type(part)) is not None), None)


def _check_units_after_heads(recipe: RecipeSections, steps: Sequence[Step]) -> None:
    # 12. The types of units that a step may remove depend on the steps before it.
    heads = next((step for step in steps if isinstance(step, Heads)), None)
    units = {} if (step := part_of(steps, Units)) is None else step.changed
    options = ("prune_units", "group_by", "start_from")
    option = next((name for name in options if name in units and units[name] != "neurons"), None)
    if heads is not None and option is not None:
        remedy = "omit the step heads" if recipe.steps else f"choose one of {', '.join(BUDGET_METHODS)} (<method>)"
        raise FieldConflictError(
            ErrorCode.CONTRADICTION,
            f"{shown(option, units[option])}: {heads.method} selects heads of the whole model, and the budget then"
            f" removes neurons only; omit it, or {remedy}",
            *(("steps",) if recipe.steps else (option, "method")),
            step=_number(recipe, next(step for step in steps if isinstance(step, Units))),
        )
