"""The recipe of a run: all options of `compress run` in sections, one for each stage that reads it.

A flag of the command, a key of `compress.toml` and a field of a section are the same thing. Field names are unique over
all sections, so a recipe can be written flat: `Recipe(model="model", data="train.tsv", keep="50%")`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import pydantic
from pydantic import Field
from pydantic.fields import FieldInfo

from compressor.config.fields import Config, FieldConflictError, fields_with
from compressor.config.methods import (
    BUDGET_METHODS,
    DEFAULT_BUDGET_METHOD,
    METHODS,
    PENALISED_METHODS,
    SEARCH_METHODS,
)
from compressor.config.sections import (
    AUTO,
    BlocksConfig,
    BudgetConfig,
    DistillationConfig,
    EngineConfig,
    ExportConfig,
    MeasureConfig,
    OutputConfig,
    RowsConfig,
    SelectionConfig,
    SourceConfig,
)
from compressor.errors import ErrorCode
from compressor.targets import DEFAULT_TARGET, target

if TYPE_CHECKING:
    from compressor.results import Report

SECTIONS: Mapping[str, type[Config]] = {
    "source": SourceConfig,
    "rows": RowsConfig,
    "selection": SelectionConfig,
    "budget": BudgetConfig,
    "blocks": BlocksConfig,
    "distillation": DistillationConfig,
    "engine": EngineConfig,
    "export": ExportConfig,
    "measure": MeasureConfig,
    "output": OutputConfig,
}
FIELDS: Mapping[str, FieldInfo] = {
    name: field for section in SECTIONS.values() for name, field in section.model_fields.items()
}
"""Every field of a recipe by name, in the order of sections."""
SECTION_OF: Mapping[str, str] = {name: key for key, section in SECTIONS.items() for name in section.model_fields}
"""Field name -> section."""
BUILD_FIELDS = (*EngineConfig.model_fields, *MeasureConfig.model_fields)
"""Fields that decide how a graph is built and timed; `compress build` takes these."""
FORMER_NAMES: Mapping[str, str] = {
    "blocks": "drop_blocks",
    "prune": "drop_blocks_by_kind",
    "watch_rows": "map_rows",
    "weigh_by_rows": "weight_by_count",
    "empty_rows": "allow_empty_rows",
    "everywhere": "mask_all_sites",
    "restart": "from_original_weights",
    "guarantee": "certify",
}
"""Names of fields in version 0.1 -> names today."""


BUDGETS = ("speedup", "latency", "macs", "parameters")
"""Fields that each set a budget."""


def current_fields(stored: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a recipe stored in a report, flat, under their current names and with current kinds of attention."""
    fields = {FORMER_NAMES.get(name, name): value for name, value in stored.items()}
    from graph_passes.plan import current_kind  # imported here: the graph libraries take long to load

    if shares := fields.get("drop_blocks_by_kind"):
        fields["drop_blocks_by_kind"] = {current_kind(kind): share for kind, share in shares.items()}
    return fields


def definite_fields(report: Report) -> dict[str, Any]:
    """Fields of the recipe of a report; where the run chose its engine, target and precision are those delivered."""
    fields = current_fields(report.recipe)
    delivered = {"target": report.target, "precision": report.precision}
    return {**fields, **{name: value for name, value in delivered.items() if fields.get(name) == AUTO}}


class Recipe(Config):
    """Everything that decides what a run computes. It is frozen, and validated at construction.

    Args:
        source: the model.
        rows: rows to learn from, to choose on and to report on.
        selection: how heads are selected.
        budget: what the compressed model may cost.
        blocks: how blocks of the attention maps are dropped.
        distillation: how the compressed model is trained on the outputs of a whole one.
        engine: what is built.
        export: how the graph is exported.
        measure: sizes to time.
        output: the folder to write.

    Fields of sections may be given directly, by keyword.

    Raises:
        pydantic.ValidationError: a field is out of its range, or two fields contradict each other.
    """

    source: SourceConfig
    rows: RowsConfig = Field(default_factory=RowsConfig)
    selection: SelectionConfig = Field(default_factory=SelectionConfig)
    budget: BudgetConfig = Field(default_factory=BudgetConfig)
    blocks: BlocksConfig = Field(default_factory=BlocksConfig)
    distillation: DistillationConfig = Field(default_factory=DistillationConfig)
    engine: EngineConfig = Field(default_factory=EngineConfig)
    export: ExportConfig = Field(default_factory=ExportConfig)
    measure: MeasureConfig = Field(default_factory=MeasureConfig)
    output: OutputConfig = Field(default_factory=OutputConfig)

    def __init__(self, **fields: Any) -> None:
        super().__init__(**fields)

    @pydantic.model_validator(mode="before")
    @classmethod
    def _into_sections(cls, fields: Any) -> Any:
        """Move fields that are given directly into their sections."""
        if not isinstance(fields, dict):
            return fields
        sections: dict[str, Any] = {}
        for name, value in fields.items():
            if name not in SECTION_OF:
                sections[name] = value
                continue
            section = sections.setdefault(SECTION_OF[name], {})
            if not isinstance(section, dict):
                section = sections[SECTION_OF[name]] = section.model_dump(exclude_unset=True)
            section[name] = value
        return _with_budget_method({"source": {}, **sections})

    @pydantic.model_validator(mode="after")
    def _fields_agree(self) -> Self:
        self._check_rows()
        self._check_engine()
        self._check_blocks()
        self._check_distillation()
        self._check_grouping()
        self._check_budget()
        self._check_selection()
        return self

    def _check_rows(self) -> None:
        keep, max_drop = self.selection.keep, self.selection.max_drop
        if self.rows.data is None and keep is not None and self.plan_file is None:
            raise FieldConflictError(
                ErrorCode.MISSING_VALUE,
                f"<keep> {keep}: there are no rows to learn from; add training rows (<data>) or a plan (<plan>)",
                *("keep", "data"),
            )
        if max_drop is not None and not self.rows.available:
            raise FieldConflictError(
                ErrorCode.MISSING_VALUE,
                f"<max_drop> {max_drop:g}: there are no rows to score; add rows (<data>)",
                *("max_drop", "data"),
            )

    def _check_engine(self) -> None:
        engine = self.engine
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

    def _check_blocks(self) -> None:
        blocks = self.blocks
        if blocks.drops_any and self.rows.data is None:
            raise FieldConflictError(
                ErrorCode.MISSING_VALUE,
                "<drop_blocks>: there are no rows to compute attention maps from; add training rows (<data>)",
                *("drop_blocks", "data"),
            )
        if blocks.drops_any and self.plan_file is not None:
            raise FieldConflictError(
                ErrorCode.CONTRADICTION,
                f"<drop_blocks>: the plan {self.plan_file} already says what is kept; omit one of them",
                *("drop_blocks", "plan"),
            )
        if blocks.maps is not None and blocks.entmax:
            raise FieldConflictError(
                ErrorCode.CONTRADICTION,
                f"<maps> {blocks.maps}, <entmax>: maps of an earlier run cannot be computed with entmax; omit one",
                *("maps", "entmax"),
            )
        ranking = [name for name in ("weight_by_count", "entmax") if getattr(blocks, name)]
        if blocks.random_blocks and ranking:
            raise FieldConflictError(
                ErrorCode.CONTRADICTION,
                f"<random_blocks>, <{ranking[0]}>: random blocks are not ranked; omit one of them",
                *("random_blocks", ranking[0]),
            )
        if self.selection.certify is not None and blocks.drops_any:
            raise FieldConflictError(
                ErrorCode.CONTRADICTION,
                f"<certify> {self.selection.certify:g}: it covers heads that are removed, not blocks; omit one of them",
                *("certify", "drop_blocks"),
            )

    def _check_distillation(self) -> None:
        distillation = self.distillation
        if distillation.distill and self.rows.data is None:
            raise FieldConflictError(
                ErrorCode.MISSING_VALUE,
                "<distill>: there are no rows to train on; add training rows (<data>), whose labels are not needed",
                *("distill", "data"),
            )
        if distillation.distill and not self.learns and self.plan_file is None:
            raise FieldConflictError(
                ErrorCode.MISSING_VALUE,
                "<distill>: nothing is removed from the model, so there is nothing to learn again; set a budget"
                " (<speedup>), the number of heads (<keep>), or a plan (<plan>)",
                *("distill", "speedup"),
            )
        if distillation.distill and self.selection.certify is not None:
            raise FieldConflictError(
                ErrorCode.CONTRADICTION,
                f"<certify> {self.selection.certify:g}, <distill>: the loss before the training is certified, not that"
                " of the trained model; omit one of them",
                *("certify", "distill"),
            )
        unused = [name for name in DistillationConfig.model_fields if name in self.fields_set - {"distill"}]
        if unused and not distillation.distill:
            raise FieldConflictError(
                ErrorCode.CONTRADICTION,
                f"<{unused[0]}>: nothing is distilled; add <distill>, or omit it",
                *(unused[0], "distill"),
            )
        if distillation.quantized_share and self.engine.precision not in ("int8", AUTO):
            raise FieldConflictError(
                ErrorCode.CONTRADICTION,
                f"<quantized_share>: engines in {self.engine.precision} do not round to 8 bits; set <precision> int8 or"
                " auto, or omit it",
                *("quantized_share", "precision"),
            )

    def _check_grouping(self) -> None:
        budget = self.budget
        if budget.group_by == "kv" or self.rows.data is None or self.plan_file is not None:
            return
        if self.selection.method not in BUDGET_METHODS:
            raise FieldConflictError(
                ErrorCode.CONTRADICTION,
                f"<group_by> {budget.group_by}: {self.selection.method} drops heads one by one, in any group; omit it,"
                f" or choose one of {', '.join(BUDGET_METHODS)} (<method>)",
                *("group_by", "method"),
            )
        if budget.prune_units == "neurons":
            raise FieldConflictError(
                ErrorCode.CONTRADICTION,
                f"<group_by> {budget.group_by}, <prune_units> neurons: no head is removed; omit one of them",
                *("group_by", "prune_units"),
            )

    def _check_budget(self) -> None:
        budget, keep = self.budget, self.selection.keep
        set_budgets = [name for name in BUDGETS if getattr(budget, name) is not None]
        prunes_alone = self.selection.method in BUDGET_METHODS
        if not set_budgets and not prunes_alone:
            return
        first = set_budgets[0] if set_budgets else "method"
        if self.rows.data is None and self.plan_file is None:
            raise FieldConflictError(
                ErrorCode.MISSING_VALUE,
                f"<{first}>: there are no rows to choose units by; add training rows (<data>), whose labels are not"
                " needed, or a plan (<plan>)",
                *(first, "data"),
            )
        if budget.speedup is not None and budget.latency is not None:
            raise FieldConflictError(
                ErrorCode.CONTRADICTION,
                f"<speedup> {budget.speedup:g}, <latency> {budget.latency}: both bound the time of a call; omit one",
                *("speedup", "latency"),
            )
        if budget.budget_at and not (budget.is_timed or budget.macs is not None):
            raise FieldConflictError(
                ErrorCode.CONTRADICTION,
                "<budget_at>: there is no budget that depends on the size; set <speedup>, <latency> or <macs>",
                *("budget_at", "speedup"),
            )
        if budget.start_from is not None and not prunes_alone:
            raise FieldConflictError(
                ErrorCode.CONTRADICTION,
                f"<start_from> {budget.start_from}: {self.selection.method} selects heads of the whole model; omit one"
                f" of them, or choose one of {', '.join(BUDGET_METHODS)} (<method>)",
                *("start_from", "method"),
            )
        if self.blocks.drops_any:
            raise FieldConflictError(
                ErrorCode.CONTRADICTION,
                f"<{first}>: blocks are dropped by training, after which units would have to be refitted again; drop"
                " blocks in a second run, on the output folder of the first",
                *(first, "drop_blocks"),
            )
        if prunes_alone and keep is not None and set_budgets:
            raise FieldConflictError(
                ErrorCode.CONTRADICTION,
                f"<keep> {keep}, <{first}>: {self.selection.method} decides by the budget how many heads stay; omit one"
                " of them, or choose another method for the heads (<method>)",
                *("keep", first),
            )

    def _check_selection(self) -> None:
        selection = self.selection
        method, keep, max_drop, certify = selection.method, selection.keep, selection.max_drop, selection.certify
        learns = self.selects_heads and self.plan_file is None
        if method in BUDGET_METHODS:
            if self.plan_file is None and not self.budget.is_set and keep is None and max_drop is None:
                raise FieldConflictError(
                    ErrorCode.MISSING_VALUE,
                    f"{method} needs a budget: set <speedup>, <latency>, <macs>, <parameters>, the number of heads"
                    " (<keep>), or the loss allowed (<max_drop>)",
                    *("method", "speedup"),
                )
            learns = False
        counts_heads = not self.learns_units and method not in (*SEARCH_METHODS, *PENALISED_METHODS)
        if learns and keep is None and counts_heads:
            also = ", or the share of blocks to drop (<drop_blocks>)" if self.blocks.model_fields_set else ""
            raise FieldConflictError(
                ErrorCode.MISSING_VALUE,
                f"{method} learns which units to keep, not how many; set the number of heads (<keep>), or a budget of"
                f" operations or parameters alone (<macs>, <parameters>){also}",
                "keep",
            )
        if learns and keep is None and max_drop is None and selection.searches:
            raise FieldConflictError(
                ErrorCode.MISSING_VALUE,
                f"{method} needs a stopping rule: set the number of heads (<keep>) or the loss allowed (<max_drop>)",
                *("keep", "max_drop"),
            )
        if selection.ray is not None and not selection.searches:
            raise FieldConflictError(
                ErrorCode.CONTRADICTION,
                f"<ray> {selection.ray}: it distributes a search; choose one of {', '.join(SEARCH_METHODS)} (<method>)",
                *("ray", "method"),
            )
        bisects = method in BUDGET_METHODS and not self.budget.is_set and keep is None
        if certify is not None and (not (selection.searches or bisects) or max_drop is None):
            raise FieldConflictError(
                ErrorCode.CONTRADICTION,
                f"<certify> {certify:g}: it certifies a loss; set the loss allowed (<max_drop>) and no budget, or"
                f" choose one of {', '.join(SEARCH_METHODS)} (<method>)",
                *("certify", "max_drop"),
            )
        if certify is not None and bisects and self.engine.allows_quantized:
            raise FieldConflictError(
                ErrorCode.CONTRADICTION,
                f"<certify> {certify:g}, <precision> {self.engine.precision}: the loss of the model in floats is"
                " certified, not that of quantization; omit one of them",
                *("certify", "precision"),
            )
        if certify is not None and (first := next((name for name in BUDGETS if self.value(name) is not None), None)):
            raise FieldConflictError(
                ErrorCode.CONTRADICTION,
                f"<certify> {certify:g}, <{first}>: the certificate covers the heads that a search removes, not what"
                " the budget removes after it; omit one of them",
                *("certify", first),
            )
        if certify is not None and keep is not None:
            raise FieldConflictError(
                ErrorCode.CONTRADICTION,
                f"<certify> {certify:g}, <keep> {keep}: the certificate decides how many heads go; omit one of them",
                *("certify", "keep"),
            )

    @property
    def plan_file(self) -> Path | None:
        """The plan to follow: the one configured, else the one in the model folder, else None."""
        if self.selection.plan is not None:
            return self.selection.plan
        stored = self.source.model / "plan.json"
        return stored if stored.exists() else None

    @property
    def selects_heads(self) -> bool:
        """Whether heads are selected from rows.

        Where blocks are dropped, or the fastest engine is chosen, they are only if a number of heads, or another method
        than the default, is set. A run that quantizes and keeps 100% of the heads learns nothing.
        """
        selection = self.selection
        if self.rows.data is None or selection.method in BUDGET_METHODS:
            return False
        if self.engine.chooses and selection.keep == "100%":
            return False
        # A budget without a method has one of its own, so that this one was set.
        is_set = self.budget.is_set or selection.keep is not None or selection.method != FIELDS["method"].default
        return is_set or not (self.blocks.requested or self.engine.chooses)

    @property
    def learns_units(self) -> bool:
        """Whether a gate learns which units meet the budget, of the types that `prune_units` allows.

        This needs costs that are sums over units, which times are not, and no number of heads.
        """
        budget, selection = self.budget, self.selection
        if self.plan_file is not None or self.rows.data is None or METHODS[selection.method].kind != "gate":
            return False
        return budget.is_set and not budget.is_timed and selection.keep is None

    @property
    def learns(self) -> bool:
        """Whether a plan is learned from rows."""
        return self.plan_file is None and (self.selects_heads or self.blocks.drops_any or self.prunes)

    @property
    def distills(self) -> bool:
        """Whether the compressed model is trained on the outputs of a whole one."""
        return self.distillation.distill and self.rows.data is not None

    @property
    def prunes(self) -> bool:
        """Whether units are removed under a budget, or as many as the metric allows."""
        if self.plan_file is not None or self.rows.data is None:
            return False
        return self.budget.is_set or self.selection.method in BUDGET_METHODS

    @property
    def pruner(self) -> str:
        """Name of the method that removes units under a budget."""
        method = self.selection.method
        return method if method in BUDGET_METHODS else DEFAULT_BUDGET_METHOD

    @property
    def fields_set(self) -> frozenset[str]:
        """Names of the fields that were set, even to their defaults."""
        return frozenset().union(*(getattr(self, section).model_fields_set for section in SECTIONS))

    def value(self, name: str) -> Any:
        """The value of a field, by its name alone."""
        return getattr(getattr(self, SECTION_OF[name]), name)

    def flat(self) -> dict[str, Any]:
        """Every field as JSON, by name, without sections: what reports and studies store."""
        return {
            name: value
            for section in SECTIONS
            for name, value in getattr(self, section).model_dump(mode="json").items()
        }

    def updated(self, **fields: Any) -> Recipe:
        """A copy with other values for some fields, which are not validated."""
        sections: dict[str, Any] = {}
        for name, value in fields.items():
            sections.setdefault(SECTION_OF[name], {})[name] = value
        copies = {key: getattr(self, key).model_copy(update=values) for key, values in sections.items()}
        return self.model_copy(update=copies)

    def learning_key(self, **fingerprints: str) -> str:
        """Hash of the fields that decide what is learned, and of the fingerprints of the files that they name.

        Where blocks are dropped, the engine's settings are included, since they decide whether a mask pays.
        """
        names = set(fields_with(FIELDS, "decides_plan"))
        if self.selection.keep is None and self.selection.searches:  # the allowed loss then decides how many heads go
            names.add("max_drop")
        if self.prunes:
            names |= {"target", "provider", "precision", "threads", "batch", "seq", "shapes", "max_drop"}
            names.add("keep_unread_positions")  # counted costs depend on it
        if self.blocks.drops_any:
            names |= {"provider", "precision", "threads", "batch", "seq"}
            for name, file in (("maps", self.blocks.maps), ("kernel", self.engine.kernel)):
                if file is not None:
                    fingerprints[name] = _file_hash(file)
        if self.budget.start_from is not None:
            # The plan holds the fingerprint of the weights.
            fingerprints["start"] = _file_hash(self.budget.start_from / "plan.json")
        if self.distills and self.plan_file is not None:
            fingerprints["plan"] = _file_hash(self.plan_file)
        content = {name: value for name, value in self.flat().items() if name in names} | fingerprints
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _file_hash(file: Path) -> str:
    """Hash of the content of a file; empty where there is none."""
    return hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else ""


def _with_budget_method(sections: dict[str, Any]) -> dict[str, Any]:
    """The sections with the method that a budget implies, where none is set.

    A loss that is allowed, with neither a number of heads nor anything else to learn, means as few units as it permits.
    """
    parts = {}
    for key in ("selection", "budget", "blocks"):
        part = sections.get(key, {})
        if isinstance(part, Config):
            part = part.model_dump(exclude_unset=True)
        if not isinstance(part, dict):
            return sections
        parts[key] = part
    selection, budget = parts["selection"], parts["budget"]
    if selection.get("method") is not None or selection.get("keep") is not None or selection.get("plan") is not None:
        return sections
    bounded = selection.get("max_drop") is not None and not parts["blocks"]
    if not bounded and not any(budget.get(name) is not None for name in BUDGETS):
        return sections
    return {**sections, "selection": {**selection, "method": DEFAULT_BUDGET_METHOD}}
