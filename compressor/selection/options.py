"""Options of methods: one frozen model for each method, in the file of its class, and the models that methods share.

`--options name=value` sets a field of the method's own model or of a shared one: gates share `ScheduleOptions` and
`PoolOptions`, searches share `SearchOptions`. The tables of the documentation are generated from these fields.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, TypeVar, get_args

import pydantic
from pydantic import Field

from compressor.config.fields import Config, reference_rows, usage_error
from compressor.config.methods import METHODS
from compressor.config.steps import Blocks, Distill, Heads, Units
from compressor.config.values import MixedPrecision
from compressor.errors import ErrorCode, UsageError, suggestion
from compressor.processes import process_count
from compressor.training.schedule import Schedule
from compressor.units import Site
from graph_passes.plan import Kind

StepShare = Annotated[float, Field(ge=0, le=1)]
"""A share of the training steps."""


class MethodOptions(Config):
    """Base class of the options of a method. Each field has a default, a range and a description.

    Attributes:
        task_defaults: name of a task -> defaults of some fields for that task.
    """

    task_defaults: ClassVar[Mapping[str, Mapping[str, Any]]] = {}


class ScheduleOptions(MethodOptions):
    """Options of every method that trains, and of training with masks; see `Schedule`."""

    warmup: StepShare = Field(0.06, description="share of the steps in which the learning rate rises")
    weight_decay: float = Field(0.01, ge=0, description="weight decay of the model's matrices")
    max_grad_norm: float = Field(1.0, gt=0, description="maximum norm of the model's gradient")
    evaluations: int = Field(12, ge=1, description="evenly spaced evaluations; each writes a checkpoint")
    points: int = Field(60, ge=1, description="evenly spaced points of the curves in the report")
    mixed_precision: MixedPrecision = Field("no", description="precision of matmuls; no: float32")
    optimizer: Literal["adamw", "lamb"] = Field("adamw", description="optimizer")
    scheduler: Literal["linear", "cosine"] = Field("linear", description="decay of the learning rate after the warm-up")
    final_learning_rate: float = Field(0.0, ge=0, description="learning rate at the end")

    def schedule(self, step: Heads | Units | Blocks | Distill, training_steps: int) -> Schedule:
        """The schedule of a step of a run; raise UsageError if the final learning rate is above the peak."""
        return Schedule(training_steps, step.batch_size, step.learning_rate, step.seed, **self.model_dump())

    def schedule_of_epochs(self, step: Heads | Units | Blocks, rows: int, epochs: float) -> Schedule:
        """The schedule of a step over all processes; of `epochs` passes where the step sets no length."""
        batch = step.batch_size * process_count()
        return self.schedule(step, step.training_steps or math.ceil((step.epochs or epochs) * rows / batch))


class PoolOptions(MethodOptions):
    """Which heads compete, an option of every gate."""

    pool: Literal["model", "kind", Kind] = Field(
        "model",
        description="heads that compete: all of the model, those of each kind of attention for its share, or those of "
        "one kind: keep then counts these, and heads of other kinds stay",
    )


class SearchOptions(MethodOptions):
    """Options of every search."""

    mixed_precision: MixedPrecision = Field("no", description="precision of matmuls in evaluations; no: float32")
    pool: Literal["model", Kind] = Field(
        "model",
        description="heads that are searched: all of the model, or those of one kind of attention: keep then counts "
        "these, and heads of other kinds stay",
    )


_M = TypeVar("_M", bound=MethodOptions)


def option_models(method: str) -> tuple[type[MethodOptions], ...]:
    """The models of a method's options: its own, then the shared ones."""
    registered = METHODS[method]
    model: type[MethodOptions] = registered.load().options_class
    shared: Mapping[str, tuple[type[MethodOptions], ...]] = {
        "gate": (ScheduleOptions, PoolOptions),
        "search": (SearchOptions,),
        "budget": (),
    }
    return (model, *shared[registered.kind])


def option_names(method: str) -> tuple[str, ...]:
    """Names of all options of a method, its own first."""
    return tuple(name for model in option_models(method) for name in model.model_fields)


def check_option_names(subject: str, options: Mapping[str, Any], names: Sequence[str]) -> None:
    """Raise UsageError if an option of `subject` (a method, or `training with masks`) is not among `names`."""
    for name, value in options.items():
        if name not in names:
            text = f"option {name}={value!r} of {subject}: unknown; {suggestion(name, sorted(names))}"
            raise UsageError(text, code=ErrorCode.UNKNOWN_NAME, field=name, value=value, subject=subject)


def read_options(subject: str, options: Mapping[str, Any], model: type[_M], task: str | None = None) -> _M:
    """The options of one model among `options`, which may hold options of several models.

    Args:
        task: name of the task, whose defaults apply to fields that `options` lacks; None: the usual defaults.

    Raises:
        UsageError: a value is invalid, out of range, or contradicts another.
    """
    values = {**model.task_defaults.get(task or "", {}), **options}
    try:
        return model(**{name: value for name, value in values.items() if name in model.model_fields})
    except pydantic.ValidationError as error:
        fault = usage_error(error, model.model_fields, lambda name: f"option {name} of {subject}")
        fault.details["subject"] = subject
        raise fault from error


def read_method_options(method: str, options: Mapping[str, Any], task: str | None = None) -> tuple[Any, ...]:
    """The options of each of a method's models (`option_models`); see `read_options`."""
    return tuple(read_options(method, options, model, task) for model in option_models(method))


def pool_of(sites: Sequence[Site], options: Mapping[str, Any]) -> list[Site]:
    """The sites whose heads compete: those that the option `pool` names; UsageError if there are none of the kind."""
    pool = options.get("pool", "model")
    if pool not in get_args(Kind):
        return list(sites)
    members = [site for site in sites if site.kind == pool]
    if not members:
        kinds = tuple(dict.fromkeys(site.kind for site in sites))
        text = f"option pool={pool}: the model has no attention of this kind; choose among {', '.join(kinds)}"
        raise UsageError(text, code=ErrorCode.UNSUPPORTED_MODEL, field="pool", value=pool, choices=kinds)
    return members


def heads_to_keep(keep: int | str, heads: int, flag: str = "--keep") -> int:
    """The number of heads that `keep` describes: a count (36, "36"), or a share ("50%", rounded to the nearest head,
    but not to none).

    UsageError, which names the flag that set it, if it is neither or out of range.
    """
    text = str(keep).strip()
    try:
        count = int(text) if not text.endswith("%") else _of_share(float(text[:-1]), heads)
    except (ValueError, OverflowError) as error:
        message = f"{flag} {text!r}: neither a count nor a share; give a number such as 36, or 50%"
        raise UsageError(message, code=ErrorCode.INVALID_VALUE, field="keep", value=keep) from error
    check_count(count, heads, f"{flag} {text}", keep, least=1)
    return count


def _of_share(percent: float, heads: int) -> int:
    """The number of heads in a share of them."""
    return max(round(heads * percent / 100), 1 if percent > 0 else 0)


def check_count(count: int, maximum: int, setting: str, value: int | str, least: int = 0) -> None:
    """Raise UsageError unless a number of units can be kept; `setting` names the option with its value."""
    if not least <= count <= maximum:
        reason = f"none of {maximum} would be kept" if count == 0 else f"there are {maximum} to choose from"
        text = f"{setting}: {reason}; give a number from {least} to {maximum}, or a share such as 50%"
        raise UsageError(text, code=ErrorCode.OUT_OF_RANGE, field="keep", value=value, maximum=maximum)


def option_rows(*models: type[MethodOptions]) -> Iterator[tuple[str, str, str]]:
    """Rows (name, default, description) of the options of some models, as `reference_rows` lists fields."""
    for model in models:
        for name, row in zip(model.model_fields, reference_rows(model.model_fields), strict=True):
            of_tasks = (
                f" ({values[name]} for {task})" for task, values in model.task_defaults.items() if name in values
            )
            yield *row[:2], "".join([row[2], *of_tasks])
