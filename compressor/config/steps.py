"""The steps of a run: what each does to the model, with the options that belong to it.

A run is a list of steps. `compressor.config.step_list` makes the list of a recipe's flags; `[[steps]]` in
`compress.toml` and `Recipe(steps=[...])` write it out. What a step computes lies in `compressor.run.steps`, in a module
of its name.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeVar

import pydantic
from pydantic import AfterValidator, Field

from compressor.config.fields import Config, InvalidValueError, Rule, one_of, usage_error
from compressor.config.methods import (
    BUDGET_METHODS,
    DEFAULT_BUDGET_METHOD,
    HEAD_METHODS,
    METHODS,
    PENALISED_METHODS,
    SEARCH_METHODS,
)
from compressor.config.sections import BUDGETS, FIELDS, BlockOptions, DistillOptions, TrainingOptions, UnitOptions
from compressor.config.values import Count, Keep, NonNegative, Positive, Seed, Share, ShareByKind, Workers
from compressor.errors import ErrorCode, UsageError, suggestion

_OF_REQUESTS = ("no_cache", "prompt_tokens", "new_tokens")
_OF_GRAPHS = ("keep_unread_positions", "pool_in_graph", "opset", "attention")
_OF_ENGINES = (
    *("target", "provider", "precision", "threads", "batch", "seq", "shapes", "kernel"),
    *_OF_GRAPHS,
    *_OF_REQUESTS,
)
"""Settings of the run that decide graphs, and the times of their engines."""
_RATE_OF_ATTEMPTS = 1e-4
"""Peak learning rate of the distillation of a plan that may lose little; at 2e-4 few steps hardly improve one."""
_MOST_LOSS_ROWS = 768
"""Most rows that losses are measured on. A few rows whose answer flips have most of the divergence, so that curves from
192 rows allocated worse than curves from 768 (MiniLM on SST-2)."""
_TOKENS_OF_ROW, _FEWEST_TOKENS = 64, 2**17
"""Most tokens for each row that units are chosen by, and the least such limit. Sums over tokens gain little from more,
and take most of the time where rows are long."""


StepT = TypeVar("StepT", bound="Step")
_BOUND = pydantic.TypeAdapter[float](NonNegative)


class Step(Config):
    """One step of a run; frozen.

    Attributes:
        name: its key in `[[steps]]`, and the module of `compressor.run.steps` that carries it out.
        reads_labels: whether it learns from the labels of all training rows.
        is_parallel: whether every process of a distributed run takes part; else the main process alone does.
        prunes_groups: whether it may remove any unit, so that plans list neurons beside heads.
        needs_heads: whether the model must have attention heads.
        neutral: options that change how the result is computed, not what it is.
        files: options that name a file or folder, whose content decides the result.
        learning: what an interrupted run was doing in it, for readers.
        flags: option -> its flag, where they differ.
    """

    name: ClassVar[str]
    reads_labels: ClassVar[bool] = False
    is_parallel: ClassVar[bool] = True
    prunes_groups: ClassVar[bool] = False
    needs_heads: ClassVar[bool] = False
    neutral: ClassVar[tuple[str, ...]] = ()
    files: ClassVar[tuple[str, ...]] = ()
    learning: ClassVar[str] = "learning"
    flags: ClassVar[Mapping[str, str]] = {}

    @property
    def settings_read(self) -> tuple[str, ...]:
        """The settings of the run by which it measures what its result costs."""
        return ()

    def rows_drawn(self, processes: int) -> int:
        """The largest number of training rows that it reads without their labels, with this number of processes."""
        return 0

    @property
    def contents(self) -> dict[str, Path | None]:
        """Option -> the file or folder that it names, whose content decides the result."""
        return {name: getattr(self, name) for name in self.files}

    @property
    def settings(self) -> dict[str, Any]:
        """The options that decide the result, as JSON."""
        return self.model_dump(mode="json", exclude=set(self.neutral))

    @property
    def parts(self) -> tuple[Step, ...]:
        """The steps that it consists of: itself, or those of the list that it carries out."""
        return (self,)

    def part(self, kind: type[StepT]) -> StepT | None:
        """Itself or the first of its parts, if it is of a kind; None: none is."""
        return next((part for part in (self, *self.parts) if isinstance(part, kind)), None)

    @classmethod
    def option_of(cls, flag: str) -> str | None:
        """The option that a flag sets; None: none is."""
        return next((name for name in cls.model_fields if cls.flags.get(name, name) == flag), None)

    @property
    def main_option(self) -> str:
        """The option that requests the step; its name where none does."""
        return self.name

    @property
    def flag(self) -> str:
        """The field of a recipe that requests the step, for messages."""
        return self.flags.get(self.main_option, self.main_option)

    @property
    def request(self) -> tuple[str, Any]:
        """The field of a recipe that requests the step, and its value, for messages."""
        return self.flag, getattr(self, self.main_option, True)

    @property
    def summary(self) -> str:
        """What the step does, in one sentence: that of its class, unless its options say more."""
        return (type(self).__doc__ or self.name).partition("\n")[0]

    def __str__(self) -> str:
        """The step with the options that differ from their defaults: `units(speedup=4.0)`."""
        return f"{self.name}({', '.join(f'{name}={value}' for name, value in self.changed.items())})"


CERTIFIES_A_LOSS = (
    "it certifies a loss; set the loss allowed (<max_drop>) and no budget, or choose as <method> one of"
    f" {', '.join(SEARCH_METHODS)}"
)
"""Why there is no certificate where no loss of the metric bounds what is removed."""
RAY_NEEDS_A_SEARCH = Rule(
    "ray",
    f"it distributes a search; choose as <method> one of {', '.join(SEARCH_METHODS)}",
    needs=tuple(f"method={name}" for name in SEARCH_METHODS),
)


def _meets_budgets(method: str) -> str:
    if METHODS[method].kind == "search":
        raise InvalidValueError(
            "a search selects heads and meets no budget; use it in the step heads, or use one of"
            f" {', '.join(BUDGET_METHODS)}",
            ErrorCode.CONTRADICTION,
        )
    return method


def parts_of(steps: Sequence[Step]) -> list[Step]:
    """The steps of a list, with those that a step carries out in its place."""
    return [part for step in steps for part in step.parts]


def part_of(steps: Sequence[Step], kind: type[StepT]) -> StepT | None:
    """The first part of a list that is of a kind; None: none is."""
    return next(filter(None, (step.part(kind) for step in steps)), None)


class Follow(Step):
    """Apply the plan of a file, and the weights in its folder if its run trained or refitted some.

    Attributes:
        plan: the file.
    """

    name = "follow"
    files = ("plan",)
    plan: Path

    @property
    def main_option(self) -> str:
        return "plan"

    @property
    def summary(self) -> str:
        return f"follow the plan {self.plan}, with the weights in its folder if its run changed some"

    @property
    def prunes_groups(self) -> bool:  # type: ignore[override]
        from graph_passes import Plan  # imported here: the graph libraries take long to load

        return bool(Plan.load(self.plan).feed_forwards)


class Heads(TrainingOptions, Step):
    """Select the heads to keep, by a gate that learns or by a search.

    Further options are those of `TrainingOptions`.

    Attributes:
        method: a method of kind `gate` or `search`, see `compressor.config.methods`.
        keep: number of heads (36) or share of them (50%) to keep over the whole model; None: the method decides.
        max_drop: the loss of the metric that a search may spend, in the metric's unit.
        certify: confidence with which the loss is certified on unseen rows; units that fail stay.
        ray: where a search is distributed with Ray: `local`, `local:4`, or `HOST:PORT`.
    """

    name = "heads"
    reads_labels = True
    needs_heads = True
    neutral = ("ray",)
    method: Annotated[str, AfterValidator(one_of(HEAD_METHODS))] = "dsp"
    keep: Keep | None = None
    max_drop: NonNegative | None = None
    certify: Annotated[float, Field(gt=0, lt=1)] | None = None
    ray: Workers | None = None

    def __init__(self, method: str | None = None, /, **options: Any) -> None:
        # `Heads("dsp", keep=36)`; a method that is not given stays unset, and one that is given twice is an error.
        given = {} if method is None else {"method": method}
        super().__init__(**given, **options)

    facts: ClassVar[Mapping[str, str]] = {"searches": "method", "ranks": "method"}
    rules = (
        Rule(
            "searches",
            "it needs the number of heads to keep; set their number or share (<keep>), or the loss allowed"
            " (<max_drop>)",
            needs=("keep", "max_drop"),
            fields=("keep", "max_drop"),
            code=ErrorCode.MISSING_VALUE,
        ),
        Rule(
            "ranks",
            "it needs the number of heads to keep; set their number or share (<keep>)",
            needs=("keep",),
            fields=("keep",),
            code=ErrorCode.MISSING_VALUE,
        ),
        RAY_NEEDS_A_SEARCH,
        Rule(
            "max_drop",
            "it ends a search without a number of heads; omit it, or use one of the methods"
            f" {', '.join(SEARCH_METHODS)} without <keep>",
            needs=("searches",),
            excludes=("keep",),
        ),
        Rule("certify", CERTIFIES_A_LOSS, needs=("searches",), fields=("certify", "max_drop")),
        Rule("certify", "the certificate decides how many heads go; omit one of them", excludes=("keep",)),
    )

    @property
    def summary(self) -> str:
        number = "" if self.keep is None else f"{self.keep} "
        bound = "" if self.max_drop is None else f", as few as lose at most {self.max_drop:g} of the metric"
        return f"select {number}attention heads to keep by {self.method}{bound}"

    @property
    def searches(self) -> bool:
        """Whether the method evaluates subsets instead of learning gates."""
        return self.method in SEARCH_METHODS

    @property
    def ranks(self) -> bool:
        """Whether the method is a gate that has to know how many heads stay."""
        return not self.searches and self.method not in PENALISED_METHODS

    @property
    def main_option(self) -> str:
        return "method" if self.keep is None else "keep"


class Blocks(BlockOptions, TrainingOptions, Step):
    """Drop blocks of the attention maps, and train the model with the masks.

    Further options are those of `BlockOptions` and `TrainingOptions`.

    Attributes:
        share: share of the blocks of every attention layer to drop, over all of its heads, least attention first.
        share_by_kind: the same by kind of attention, which overrides `share`.
    """

    name = "blocks"
    reads_labels = True
    needs_heads = True
    files = ("maps",)
    learning = "learning with masks"
    flags: ClassVar[Mapping[str, str]] = {"share": "drop_blocks", "share_by_kind": "drop_blocks_by_kind"}
    share: Share = 0.0
    share_by_kind: ShareByKind = Field(default_factory=dict)

    facts: ClassVar[Mapping[str, str]] = {"drops_none": "share"}
    rules = (
        Rule(
            "drops_none",
            "no share of the blocks is to be dropped; set share = 0.5, or omit the step",
            fields=("share",),
            code=ErrorCode.MISSING_VALUE,
        ),
        Rule("maps", "maps of an earlier run cannot be computed with entmax; omit one of them", excludes=("entmax",)),
        Rule("random_blocks", "random blocks are not ranked; omit one of them", excludes=("weight_by_count", "entmax")),
    )

    @property
    def summary(self) -> str:
        kinds = [f"{share:.0%} of {kind} ones" for kind, share in self.share_by_kind.items()]
        shares = ", ".join([*([f"{self.share:.0%}"] if self.share else []), *kinds])
        return f"drop {shares} of the blocks of attention maps where that is faster, and train with the masks"

    @property
    def main_option(self) -> str:
        return "share" if self.share else "share_by_kind"

    @property
    def drops_none(self) -> bool:
        """Whether the shares of all kinds of attention are zero."""
        return not (self.share or any(self.share_by_kind.values()))

    @property
    def settings_read(self) -> tuple[str, ...]:
        return ("provider", "precision", "threads", "batch", "seq", "kernel")


class Units(UnitOptions, TrainingOptions, Step):
    """Remove heads and neurons until a budget is met, or as many as a bounded loss of the metric permits.

    Further options are those of `UnitOptions` and `TrainingOptions`.

    Attributes:
        method: a method of kind `budget`; or a gate, which learns the units that meet a budget of work.
        keep: number or share of heads to keep; neurons then stay.
        max_drop: the loss of the metric that is allowed, in the metric's unit; alone it is the budget.
        certify: confidence with which `max_drop` alone is certified on unseen rows.
    """

    name = "units"
    prunes_groups = True
    neutral = ("statistics",)
    method: Annotated[str, AfterValidator(one_of(tuple(METHODS))), AfterValidator(_meets_budgets)] = (
        DEFAULT_BUDGET_METHOD
    )
    keep: Keep | None = None
    max_drop: NonNegative | None = None
    certify: Annotated[float, Field(gt=0, lt=1)] | None = None

    facts: ClassVar[Mapping[str, str]] = {"learns": "method", "is_unbounded": "method"}
    rules = (
        *(
            Rule(
                option,
                "a gate learns which units meet the budget, and does not read it; omit it, or use one of the methods"
                f" {', '.join(BUDGET_METHODS)}",
                excludes=("learns",),
            )
            for option in ("keep", "start_from", "statistics", "group_by")
        ),
        Rule("speedup", "both bound the time of a call; omit one of them", excludes=("latency",)),
        Rule(
            "budget_at",
            "there is no budget that depends on the size; set <speedup>, <latency> or <macs>",
            needs=("speedup", "latency", "macs"),
        ),
        Rule(
            "learns",
            "it needs a budget of work; set <macs> or <parameters>",
            needs=BUDGETS,
            code=ErrorCode.MISSING_VALUE,
        ),
        Rule(
            "start_from",
            "<max_drop> alone removes units of the whole model; set a budget (<speedup>)",
            excludes=("is_unbounded",),
            fields=("start_from", "max_drop"),
        ),
        Rule(
            "learns",
            "it cannot meet a budget of time or of caches; set a budget of multiply-accumulates or of parameters, or"
            f" use the method {DEFAULT_BUDGET_METHOD}",
            excludes=("speedup", "latency", "ttft", "cache"),
        ),
        Rule("certify", CERTIFIES_A_LOSS, needs=("is_unbounded",), fields=("certify", "max_drop")),
        Rule(
            "keep",
            "the budget decides how many heads stay; omit one of them, or select the heads by another method first",
            excludes=BUDGETS,
        ),
        *(
            Rule(option, "no head is removed; omit one of them", excludes=("prune_units=neurons",))
            for option in ("keep", "group_by")
        ),
    )

    @property
    def summary(self) -> str:
        bounds = {
            "speedup": f"the engine is {self.speedup or 0:g} times as fast as the whole model",
            "latency": f"a call takes {self.latency}",
            "ttft": f"the first token takes {self.ttft}",
            "macs": f"{self.macs or 0:.0%} of the multiply-accumulates are left",
            "parameters": f"{self.parameters or 0:.0%} of the parameters are left",
            "cache": f"{self.cache or 0:.0%} of the bytes of a token in the caches are left",
            "keep": f"{self.keep} heads are left",
        }
        budgets = [text for name, text in bounds.items() if getattr(self, name) is not None]
        units = "heads and neurons" if self.prune_units == "all" else self.prune_units
        if not budgets:
            return f"remove {units} by {self.method}, as many as lose at most {self.max_drop:g} of the metric"
        return f"remove {units} by {self.method} until {' and '.join(budgets)}"

    @property
    def is_parallel(self) -> bool:  # type: ignore[override]
        return self.learns

    @property
    def settings_read(self) -> tuple[str, ...]:
        if self.learns:
            return (*_OF_GRAPHS, "batch", "seq", "kernel")
        return (*_OF_ENGINES, "calibration_rows", "allow_float_products")

    @property
    def needs_heads(self) -> bool:  # type: ignore[override]
        return self.prune_units == "heads" or self.keep not in (None, "100%")

    @property
    def reads_labels(self) -> bool:  # type: ignore[override]
        return self.learns

    @property
    def learns(self) -> bool:
        """Whether a gate learns which units meet the budget; else units are removed without training."""
        return self.method not in BUDGET_METHODS

    @pydantic.model_validator(mode="before")
    @classmethod
    def _counts_heads(cls, values: Any) -> Any:
        """A number of heads to keep is one of heads alone."""
        if isinstance(values, dict) and values.get("keep") is not None and values.get("prune_units", "all") == "all":
            return {**values, "prune_units": "heads"}
        return values

    @property
    def main_option(self) -> str:
        fields = (*BUDGETS, "keep", "max_drop")
        return next((name for name in fields if getattr(self, name) is not None), "method")

    @property
    def is_unbounded(self) -> bool:
        """Whether only the metric bounds what is removed."""
        return all(getattr(self, name) is None for name in (*BUDGETS, "keep"))

    @property
    def needs_caches(self) -> str:
        """Name of a budget that only a model with key/value caches has; empty: there is none."""
        per_token = ("latency",) if self.token_milliseconds is not None else ()
        return next((name for name in (*per_token, "ttft", "cache") if getattr(self, name) is not None), "")

    @property
    def loss_rows(self) -> int:
        """Maximum number of further training rows, on which losses are measured: a quarter of all rows drawn."""
        return min(_MOST_LOSS_ROWS, self.prune_rows // 3)

    @property
    def prune_tokens(self) -> int:
        """Maximum number of tokens of the rows that units are chosen or ordered, and refitted by."""
        return max(_FEWEST_TOKENS, _TOKENS_OF_ROW * self.prune_rows)

    @property
    def loss_tokens(self) -> int:
        """Maximum number of tokens of the rows on which losses are measured: half of those that units are chosen by."""
        return self.prune_tokens // 2

    @property
    def contents(self) -> dict[str, Path | None]:
        # The plan holds the fingerprint of the weights beside it.
        return {"start_from": None if self.start_from is None else self.start_from / "plan.json"}

    def rows_drawn(self, processes: int) -> int:
        return self.prune_rows + self.loss_rows


class Distill(DistillOptions, Step):
    """Train the remaining units on the outputs and hidden states of a whole model; labels are not used.

    Further options are those of `DistillOptions`.

    Attributes:
        training_steps: number of training steps.
        learning_rate: peak learning rate.
        batch_size: rows of a training step and process.
        seed: seed of every random draw.
    """

    name = "distill"
    neutral = ("teacher_outputs",)
    files = ("teacher",)
    learning = "distillation"
    flags: ClassVar[Mapping[str, str]] = {
        "training_steps": "distill_steps",
        "learning_rate": "distill_learning_rate",
    }
    training_steps: Count = 2000
    learning_rate: Positive = 2e-4
    batch_size: Count = 32
    seed: Seed = 0

    @property
    def summary(self) -> str:
        teacher = "the whole model" if self.teacher is None else str(self.teacher)
        limit = "" if self.minutes is None else f", within {self.minutes:g} minutes"
        return f"train the rest on the outputs of {teacher}: at most {self.training_steps} training steps{limit}"

    @property
    def settings(self) -> dict[str, Any]:
        # Outputs that are kept are rounded to float16; where they are kept makes no difference.
        return {**super().settings, "keeps_outputs": self.teacher_outputs is not None}

    @property
    def settings_read(self) -> tuple[str, ...]:
        return ("target", "precision") if self.quantized_share else ()

    def rows_drawn(self, processes: int) -> int:
        return self.training_steps * self.batch_size * processes


class Within(Step):
    """Run steps in several attempts, and keep the fastest result whose loss of the metric is at most `max_drop`.

    Each attempt removes units for a speed, and trains the rest if the steps do. It starts from the fastest attempt that
    keeps the metric, so a plan that is reached in several attempts has been trained in each of them. The metric is that
    of the model after the steps, on evaluation rows, with a margin because the fastest is chosen by these rows.

    Attributes:
        max_drop: the loss of the metric that is allowed, in the metric's unit.
        steps: units, without a budget of their own, and distill or nothing else; by default both with their defaults.
            The default of the learning rate of distill is 1e-4 here: a plan that may lose little needs small changes.
        minutes: time that the whole run may take; the trainings share what its other parts leave.
        attempts: maximum number of attempts.
    """

    name = "within"
    prunes_groups = True
    max_drop: NonNegative
    steps: tuple[Step, ...] = ()
    minutes: Positive | None = None
    attempts: Count = 5

    facts: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("has_other_steps", "has_other_bounds", "limits_each_training", "trains"), "steps"
    )
    rules = (
        Rule(
            "has_other_steps",
            "each attempt runs these steps; write units and distill, or units alone",
        ),
        Rule(
            "has_other_bounds",
            "its max_drop determines how many units are removed; omit budgets, gates, and with distill certificates, or"
            " use the step units outside of within",
        ),
        Rule(
            "minutes",
            "the time of the whole run limits each training; omit it, or the minutes of distill",
            excludes=("limits_each_training",),
        ),
        Rule("minutes", "nothing is trained; omit it, or add the step distill", needs=("trains",)),
    )

    @pydantic.model_validator(mode="before")
    @classmethod
    def _bounds_the_units(cls, values: Any) -> Any:
        """Tables become steps; the loss that is allowed is that of the units too, which need no budget.

        Where distill sets no learning rate, it is lower than for plans that lose more.
        """
        if not isinstance(values, dict):
            return values
        values = {"steps": [{Units.name: {}}, {Distill.name: {}}], **values}
        try:
            bound = _BOUND.validate_python(values.get("max_drop"))
        except pydantic.ValidationError:  # the check of `max_drop` reports it
            return {**values, "steps": ()}
        if not isinstance(values["steps"], list | tuple):
            return values
        steps = list[Step]()
        for table in values["steps"]:
            step = step_of(table)
            if isinstance(step, Units) and step.is_unbounded and (step is table or step.max_drop is None):
                step = step.model_copy(update={"max_drop": bound})
            elif isinstance(step, Distill) and "learning_rate" not in step.model_fields_set:
                step = step.model_copy(update={"learning_rate": _RATE_OF_ATTEMPTS})
            steps.append(step)
        return {**values, "steps": tuple(steps)}

    @property
    def parts(self) -> tuple[Step, ...]:
        return self.steps

    @pydantic.field_serializer("steps")
    def _as_tables(self, steps: tuple[Step, ...]) -> list[dict[str, Any]]:
        """The steps as in `[[steps]]`, so that a stored list can be read again."""
        return [{step.name: step.model_dump(mode="json", exclude_unset=True)} for step in steps]

    @property
    def has_other_steps(self) -> bool:
        """Whether an attempt would do something else than to remove units and to train what is left."""
        return [step.name for step in self.steps] not in ([Units.name], [Units.name, Distill.name])

    @property
    def has_other_bounds(self) -> bool:
        """Whether something else than the loss that is allowed decides how many units are removed."""
        return any(
            not units.is_unbounded
            or units.learns
            or units.max_drop != self.max_drop
            or (units.certify is not None and self.trains)
            for units in self.steps
            if isinstance(units, Units)
        )

    @property
    def limits_each_training(self) -> bool:
        """Whether the time of each training is set."""
        return self.distill is not None and self.distill.minutes is not None

    @property
    def trains(self) -> bool:
        """Whether an attempt trains what is left."""
        return self.distill is not None

    @property
    def units(self) -> Units:
        """The step that removes units."""
        return next(step for step in self.steps if isinstance(step, Units))

    @property
    def distill(self) -> Distill | None:
        """The step that trains what is left; None: there is none."""
        return self.part(Distill)

    @property
    def settings_read(self) -> tuple[str, ...]:
        return tuple(name for step in self.steps for name in step.settings_read)

    @property
    def main_option(self) -> str:
        return "max_drop"

    @property
    def needs_heads(self) -> bool:  # type: ignore[override]
        return self.units.needs_heads

    @property
    def summary(self) -> str:
        limit = "" if self.minutes is None else f"; the run takes about {self.minutes:g} min"
        attempts = f"at most {self.attempts} attempts" + (
            " to remove units and train the rest, each from the fastest that keeps the metric"
            if self.trains
            else " to remove units"
        )
        return f"make {attempts}; deliver the fastest that loses at most {self.max_drop:g} of the metric{limit}"

    @property
    def settings(self) -> dict[str, Any]:
        return {**super().settings, "steps": [{step.name: step.settings} for step in self.steps]}

    @property
    def contents(self) -> dict[str, Path | None]:
        return {f"{step.name}.{name}": path for step in self.steps for name, path in step.contents.items()}

    def rows_drawn(self, processes: int) -> int:
        return max(step.rows_drawn(processes) for step in self.steps)


STEPS: dict[str, type[Step]] = {step.name: step for step in (Follow, Heads, Units, Blocks, Distill, Within)}
"""Key of `[[steps]]` -> the step. To add one, write its class here and its module in `compressor.run.steps`."""


def step_of(table: Any) -> Step:
    """A step from a table of `[[steps]]`: `{"units": {"speedup": 4}}`; a step itself is returned as it is.

    Raises:
        UsageError: the table has no step or several, or an option is unknown or cannot have its value.
    """
    if isinstance(table, Step):
        return table
    if not isinstance(table, dict) or len(table) != 1 or not isinstance(next(iter(table.values())), dict):
        raise UsageError(
            f"{table!r}: no step; write one step with its options, such as {{ units = {{ speedup = 4 }} }}, one of"
            f" {', '.join(STEPS)}",
            code=ErrorCode.INVALID_VALUE,
            field="steps",
        )
    ((name, options),) = table.items()
    if name not in STEPS:
        text = f"unknown step {name}; {suggestion(name, list(STEPS))}"
        raise UsageError(text, code=ErrorCode.UNKNOWN_NAME, field="steps", value=name)
    try:
        return STEPS[name](**{key.replace("-", "_"): value for key, value in options.items()})
    except pydantic.ValidationError as error:
        described = {key: FIELDS.get(key, field) for key, field in STEPS[name].model_fields.items()}
        raise usage_error(error, described, lambda option: f"{name}.{option}") from error


def steps_from(value: Any) -> Any:
    """Steps from the text of `--steps`, which is an array of TOML, or from a list of steps and their tables.

    Raises:
        UsageError: the text is no array, or has a table that is no step.
    """
    if isinstance(value, str):
        try:
            value = tomllib.loads(f"steps = {value}")["steps"]
        except tomllib.TOMLDecodeError as error:
            raise UsageError(
                f"--steps {value!r}: no list of steps ({error}); write them as in [[steps]] of compress.toml:"
                " '[{ heads = { keep = 36 } }, { units = { speedup = 4 } }]'",
                code=ErrorCode.INVALID_VALUE,
                field="steps",
                value=value,
            ) from error
    if not isinstance(value, list | tuple):
        raise UsageError(
            f"--steps {value}: no list of steps; the number of training steps is --training-steps {value}",
            code=ErrorCode.INVALID_VALUE,
            field="steps",
            value=value,
        )
    if not value:
        text = "steps: the list is empty; write a step, such as { units = { speedup = 4 } }, or omit the list"
        raise UsageError(text, code=ErrorCode.MISSING_VALUE, field="steps")
    return tuple(map(step_of, value))
