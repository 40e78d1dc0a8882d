"""Rules of options: each names what exists, and one rule serves flags and a list of steps that is written out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from compressor.config import rules as run_rules
from compressor.config.fields import Config, FieldConflictError, Rule
from compressor.config.ladder import recipes_of
from compressor.config.recipe_file import recipe_of
from compressor.config.run import FIELDS, Recipe
from compressor.config.steps import STEPS, Blocks, Distill, Follow, Heads, Units, Within
from compressor.errors import ErrorCode, UsageError
from tests.faults import fails_with


class Tea(Config):
    """Options with one rule of each kind."""

    sugar: int = 0
    honey: bool = False
    temperature: float = 90.0
    leaves: str | None = None
    pot: str = "china"

    facts = {"is_cold": "temperature"}  # noqa: RUF012
    rules = (
        Rule("sugar", "either is sweet; omit one of them", excludes=("honey",)),
        Rule("sugar", "it does not dissolve; raise <temperature>", excludes=("is_cold",)),
        Rule("honey", "it is hard to wash off; omit one of them", excludes=("pot=iron",)),
        Rule("temperature", "there is no tea; name its <leaves>", needs=("leaves",), code=ErrorCode.MISSING_VALUE),
    )

    @property
    def is_cold(self) -> bool:
        return self.temperature < 20


@pytest.mark.parametrize(
    ("options", "message", "fields"),
    [
        ({"sugar": 2, "honey": True}, "<sugar> 2, <honey>: either is sweet; omit one of them", ("sugar", "honey")),
        (
            {"sugar": 2, "temperature": 5.5, "leaves": "x"},
            "<sugar> 2, <temperature> 5.5: it does not dissolve; raise <temperature>",
            ("sugar", "temperature"),
        ),
        (
            {"honey": True, "pot": "iron"},
            "<honey>, <pot> iron: it is hard to wash off; omit one of them",
            ("honey", "pot"),
        ),
        (
            {"temperature": 80},
            "<temperature> 80: there is no tea; name its <leaves>",
            ("temperature", "leaves"),
        ),
    ],
)
def test_the_options_of_a_violated_rule_are_named(
    options: dict[str, Any], message: str, fields: tuple[str, ...]
) -> None:
    with pytest.raises(ValueError, match=r"tea|sweet|dissolve|wash") as caught:
        Tea(**options)
    (fault,) = caught.value.errors()  # type: ignore[attr-defined]
    error = fault["ctx"]["error"]
    assert isinstance(error, FieldConflictError)
    assert (error.message, error.fields) == (message, fields)


@pytest.mark.parametrize("options", [{}, {"sugar": 2}, {"honey": True, "sugar": 0}, {"temperature": 5, "leaves": "x"}])
def test_options_at_their_default_violate_no_rule(options: dict[str, Any]) -> None:
    assert Tea(**options)


@pytest.mark.parametrize("step", STEPS.values())
def test_rules_of_a_step_name_its_options_and_properties(step: Any) -> None:
    assert step.facts.keys() <= set(dir(step))
    assert set(step.facts.values()) <= step.model_fields.keys()
    for rule in step.rules:
        names = {name.partition("=")[0] for name in (rule.option, *rule.needs, *rule.excludes)}
        assert names <= step.model_fields.keys() | step.facts.keys(), rule
        assert set(rule.fields) <= step.model_fields.keys(), rule
        assert rule.needs or rule.excludes or rule.option in step.facts, rule


def test_rules_of_a_run_name_fields_steps_and_facts() -> None:
    facts = {
        *("rows", "no_rows", "lacks_device", "lacks_kernels", "requests_nothing", "ignores_plan", "selects_heads"),
        *("learns_labels", "learns", "begins_to_distill", "reads_labels", "draws_rows", "certified"),
        *("changes_certified", "rounds_certified", "masks_blocks", "graph", "has_no_bound"),
    }
    for rule in (*run_rules._SETTINGS, *run_rules._STEPS):
        names = {name.partition("=")[0] for name in (rule.option, *rule.needs, *rule.excludes)}
        assert names <= FIELDS.keys() | STEPS.keys() | facts, rule
        assert set(rule.fields) <= FIELDS.keys() | {"steps"}, rule


@pytest.mark.parametrize(
    ("flags", "steps", "in_list"),
    [
        ({"speedup": 2, "latency": "5ms"}, [{"units": {"speedup": 2, "latency": "5ms"}}], "units.speedup 2"),
        (
            {"max_drop": 0.1, "certify": 0.9, "precision": "int8"},
            [{"units": {"max_drop": 0.1, "certify": 0.9}}],
            "units.certify 0.9",
        ),
        (
            {"macs": 0.5, "distill": True, "quantized_share": 0.5},
            [{"units": {"macs": 0.5}}, {"distill": {"quantized_share": 0.5}}],
            "distill.quantized_share 0.5",
        ),
    ],
)
def test_a_message_names_the_flag_or_the_option_of_the_list(
    flags: dict[str, Any], steps: list[dict[str, Any]], in_list: str
) -> None:
    settings = {name: flags[name] for name in ("precision",) if name in flags}
    field = in_list.partition(" ")[0].partition(".")[2]
    with fails_with(ErrorCode.CONTRADICTION, UsageError, field=field) as by_flags:
        Recipe(model="m", data="d", **flags)
    with fails_with(ErrorCode.CONTRADICTION, UsageError, field=field) as by_list:
        Recipe(model="m", data="d", steps=steps, **settings)
    assert str(by_flags.value).startswith(f"--{field.replace('_', '-')} ")
    assert str(by_list.value).startswith(in_list)
    assert str(by_flags.value).partition(": ")[2] == str(by_list.value).partition(": ")[2]


@pytest.mark.parametrize(
    "steps",
    [
        [{"heads": {"keep": 3}}, {"units": {"macs": 0.5, option: value}}]
        for option, value in {"prune_units": "heads", "group_by": "query", "start_from": "out"}.items()
    ],
)
def test_neurons_alone_are_removed_after_heads(steps: list[dict[str, Any]]) -> None:
    with fails_with(ErrorCode.CONTRADICTION, UsageError, field="steps"):
        Recipe(model="m", data="d", steps=steps)


@pytest.mark.parametrize(
    ("flags", "code", "fields"),
    [
        (
            {"data": "x", "drop_blocks": "0.5", "random_blocks": True, "weight_by_count": True},
            ErrorCode.CONTRADICTION,
            ("random_blocks", "weight_by_count"),
        ),
        ({"data": "x", "maps": "m", "entmax": True, "drop_blocks": 0.5}, ErrorCode.CONTRADICTION, ("maps", "entmax")),
        ({"data": "x", "allow_empty_rows": True}, ErrorCode.MISSING_VALUE, ("keep",)),
        ({"keep": "3"}, ErrorCode.MISSING_VALUE, ("keep", "data")),
        ({"unlabelled_data": "u"}, ErrorCode.MISSING_VALUE, ("unlabelled_data", "data")),
        (
            {"data": "x", "unlabelled_data": "u", "keep": 3, "distill": True},
            ErrorCode.CONTRADICTION,
            ("unlabelled_data", "keep"),
        ),
        (
            {"data": "x", "unlabelled_data": "u", "keep": 3, "method": "dsp", "speedup": 2},
            ErrorCode.CONTRADICTION,
            ("unlabelled_data", "keep"),
        ),
        (
            {"data": "x", "unlabelled_data": "u", "drop_blocks": 0.5, "distill": True},
            ErrorCode.CONTRADICTION,
            ("unlabelled_data", "drop_blocks"),
        ),
        ({"data": "x", "unlabelled_data": "u", "plan": "p"}, ErrorCode.CONTRADICTION, ("unlabelled_data", "distill")),
        ({"drop_blocks": "0.5"}, ErrorCode.MISSING_VALUE, ("drop_blocks", "data")),
        ({"data": "x", "drop_blocks": 0.5, "plan": "p"}, ErrorCode.CONTRADICTION, ("drop_blocks", "plan")),
        ({"data": "x", "epochs": 2}, ErrorCode.MISSING_VALUE, ("keep", "speedup")),
        ({"data": "x", "method": "taylor"}, ErrorCode.MISSING_VALUE, ("keep", "max_drop")),
        ({"max_drop": "0.1"}, ErrorCode.MISSING_VALUE, ("max_drop", "data")),
        ({"data": "x", "keep": 1, "match_dense": True}, ErrorCode.CONTRADICTION, ("match_dense", "macs")),
        (
            {"data": "x", "macs": 0.5, "distill": True, "teacher": "t", "match_dense": True},
            ErrorCode.CONTRADICTION,
            ("match_dense", "teacher"),
        ),
        ({"data": "x", "keep": 1, "ray": "local"}, ErrorCode.CONTRADICTION, ("ray", "method")),
        ({"data": "x", "keep": 1, "certify": 0.9}, ErrorCode.CONTRADICTION, ("certify", "max_drop")),
        (
            {"data": "x", "macs": 0.5, "max_drop": 0.1, "certify": 0.9},
            ErrorCode.CONTRADICTION,
            ("certify", "max_drop"),
        ),
        (
            {"data": "x", "max_drop": 0.1, "certify": 0.9, "method": "reconstruct", "precision": "int8"},
            ErrorCode.CONTRADICTION,
            ("certify", "precision"),
        ),
        (
            {"data": "x", "method": "astar", "keep": "3", "max_drop": "0.1", "certify": "0.95"},
            ErrorCode.CONTRADICTION,
            ("certify", "keep"),
        ),
        (
            {"data": "x", "method": "taylor", "max_drop": "0.1", "certify": 0.9, "speedup": 2},
            ErrorCode.CONTRADICTION,
            ("certify", "speedup"),
        ),
        (
            {"data": "x", "method": "taylor", "max_drop": "0.1", "certify": 0.9, "distill": True},
            ErrorCode.CONTRADICTION,
            ("certify", "distill"),
        ),
        ({"data": "x", "keep": 1, "group_by": "query"}, ErrorCode.CONTRADICTION, ("group_by", "method")),
        (
            {"data": "x", "keep": 1, "method": "dsp", "macs": "50%", "group_by": "query"},
            ErrorCode.CONTRADICTION,
            ("group_by", "method"),
        ),
        (
            {"data": "x", "macs": "50%", "group_by": "query", "prune_units": "neurons"},
            ErrorCode.CONTRADICTION,
            ("group_by", "prune_units"),
        ),
        (
            {"data": "x", "keep": "50%", "macs": "50%", "prune_units": "heads"},
            ErrorCode.CONTRADICTION,
            ("prune_units", "method"),
        ),
        (
            {"data": "x", "keep": "50%", "method": "reconstruct", "prune_units": "neurons"},
            ErrorCode.CONTRADICTION,
            ("keep", "prune_units"),
        ),
        ({"data": "x", "method": "dsp", "speedup": 2}, ErrorCode.MISSING_VALUE, ("keep",)),
        ({"data": "x", "method": "dsp", "speedup": 2, "target": "auto"}, ErrorCode.MISSING_VALUE, ("keep",)),
        ({"data": "x", "method": "ste", "latency": "5ms", "macs": "50%"}, ErrorCode.MISSING_VALUE, ("keep",)),
        (
            {"data": "x", "method": "dsp", "macs": "50%", "start_from": "out"},
            ErrorCode.CONTRADICTION,
            ("start_from", "method"),
        ),
        (
            {"data": "x", "max_drop": 0.01, "method": "reconstruct", "start_from": "out"},
            ErrorCode.CONTRADICTION,
            ("start_from", "max_drop"),
        ),
        (
            {"data": "x", "max_drop": 0.1, "method": "reconstruct", "drop_blocks": 0.5},
            ErrorCode.CONTRADICTION,
            ("drop_blocks", "max_drop"),
        ),
        ({"data": "x", "macs": "50%", "plan": "p", "method": "dsp"}, ErrorCode.CONTRADICTION, ("macs", "plan")),
        ({"speedup": 2, "plan": "p"}, ErrorCode.MISSING_VALUE, ("speedup", "data")),
        (
            {"data": "x", "macs": "50%", "start_from": "out", "plan": "p"},
            ErrorCode.CONTRADICTION,
            ("macs", "plan"),
        ),
        ({"data": "x", "speedup": 2, "latency": "5ms"}, ErrorCode.CONTRADICTION, ("speedup", "latency")),
        ({"data": "x", "parameters": "50%", "budget_at": "1x128"}, ErrorCode.CONTRADICTION, ("budget_at", "speedup")),
        ({"speedup": 2}, ErrorCode.MISSING_VALUE, ("speedup", "data")),
        (
            {"data": "x", "keep": 36, "method": "reconstruct", "macs": "50%"},
            ErrorCode.CONTRADICTION,
            ("keep", "macs"),
        ),
        ({"target": "trt", "provider": "cpu"}, ErrorCode.CONTRADICTION, ("provider", "target")),
        ({"kernel": "k.so", "provider": "cuda"}, ErrorCode.CONTRADICTION, ("kernel", "target")),
    ],
)
def test_contradicting_fields_are_named(flags: dict[str, Any], code: ErrorCode, fields: tuple[str, ...]) -> None:
    with fails_with(code, UsageError, fields=fields) as caught:
        recipe_of("model", None, flags)
    assert "<" not in str(caught.value)


@pytest.mark.parametrize("flags", [{"speedup": "2,4"}, {"speedup": "2,4", "distill": True}, {"start_from": "out"}])
def test_a_plan_of_the_model_folder_excludes_ladders_and_starts(tmp_path: Path, flags: dict[str, Any]) -> None:
    (tmp_path / "plan.json").touch()
    with fails_with(ErrorCode.CONTRADICTION, UsageError, fields=("speedup", "plan")):
        recipes_of(str(tmp_path), None, {"data": "x", "speedup": "4", **flags})
    (student,) = recipes_of(str(tmp_path), None, {"data": "x", "distill": True})
    assert student.plan_file == tmp_path / "plan.json"


def test_no_rung_of_a_ladder_follows_a_plan() -> None:
    with pytest.raises(UsageError) as caught:
        recipes_of("model", None, {"data": "x", "macs": "50%,30%", "plan": "p"})
    assert caught.value.details["fields"] == ("macs", "plan")


@pytest.mark.parametrize(
    ("steps", "code", "field"),
    [
        ([{"unit": {"speedup": 4}}], ErrorCode.UNKNOWN_NAME, "steps"),
        ([{"units": {"speedp": 4}}], ErrorCode.UNKNOWN_NAME, "speedp"),
        ([{"units": {"speedup": 0.5}}], ErrorCode.OUT_OF_RANGE, "speedup"),
        ([{"units": {}}], ErrorCode.MISSING_VALUE, "method"),
        ([{"units": {"method": "dsp", "speedup": 2}}], ErrorCode.CONTRADICTION, "method"),
        ([{"units": {"speedup": 2, "latency": "3ms"}}], ErrorCode.CONTRADICTION, "speedup"),
        ([{"units": {"parameters": 0.5, "budget_at": "1x8"}}], ErrorCode.CONTRADICTION, "budget_at"),
        ([{"heads": {}}], ErrorCode.MISSING_VALUE, "keep"),
        ([{"heads": {"keep": 3}, "units": {"macs": 0.5}}], ErrorCode.INVALID_VALUE, "steps"),
        ([{"distill": {}}], ErrorCode.MISSING_VALUE, "steps"),
        ([Units(macs=0.5), Heads(keep=3)], ErrorCode.CONTRADICTION, "steps"),
        ([Follow(plan=Path("p")), Units(max_drop=0.5)], ErrorCode.CONTRADICTION, "steps"),
        ([Follow(plan=Path("p")), Units(macs=0.5, start_from=Path("out"))], ErrorCode.CONTRADICTION, "steps"),
        ([Follow(plan=Path("p")), Heads(keep=3)], ErrorCode.CONTRADICTION, "steps"),
        ([Heads(keep=3), Units(macs=0.5, prune_units="heads")], ErrorCode.CONTRADICTION, "steps"),
        ([{"units": {"method": "astar", "macs": 0.5}}], ErrorCode.CONTRADICTION, "method"),
        ([{"units": {"method": "dsp", "keep": 3, "macs": 0.5}}], ErrorCode.CONTRADICTION, "keep"),
        ([{"units": {"method": "dsp", "macs": 0.5, "group_by": "query"}}], ErrorCode.CONTRADICTION, "group_by"),
        ([{"heads": {"keep": 3, "ray": "local"}}], ErrorCode.CONTRADICTION, "ray"),
        ([{"heads": {"keep": 3, "max_drop": 0.1}}], ErrorCode.CONTRADICTION, "max_drop"),
        ([{"blocks": {}}], ErrorCode.MISSING_VALUE, "share"),
        ([Units(macs=0.5), Units(macs=0.4)], ErrorCode.CONTRADICTION, "steps"),
        ([Blocks(share=0.5), Units(macs=0.4)], ErrorCode.CONTRADICTION, "steps"),
        ([Units(max_drop=0.1), Blocks(share=0.5)], ErrorCode.CONTRADICTION, "steps"),
        ([Within(max_drop=0.1, steps=[Units()]), Distill()], ErrorCode.CONTRADICTION, "steps"),
        ([Within(max_drop=0.1), Blocks(share=0.5)], ErrorCode.CONTRADICTION, "steps"),
        ([Follow(plan=Path("p")), Units(macs=0.4), Blocks(share=0.5)], ErrorCode.CONTRADICTION, "steps"),
        ([{"within": {}}], ErrorCode.MISSING_VALUE, "max_drop"),
        ([{"within": {"max_drop": -1}}], ErrorCode.OUT_OF_RANGE, "max_drop"),
        ([{"heads": {"keep": 0}}], ErrorCode.OUT_OF_RANGE, "keep"),
        ([], ErrorCode.MISSING_VALUE, "steps"),
        ([{"blocks": {"share": 0.5, "maps": "m", "entmax": True}}], ErrorCode.CONTRADICTION, "maps"),
        ([{"units": {"keep": 3, "macs": 0.5}}], ErrorCode.CONTRADICTION, "keep"),
        (
            [{"units": {"macs": 0.5, "prune_units": "neurons", "group_by": "query"}}],
            ErrorCode.CONTRADICTION,
            "group_by",
        ),
        ([{"units": {"macs": 0.5, "certify": 0.9}}], ErrorCode.CONTRADICTION, "certify"),
        ([{"heads": {"keep": 3, "certify": 0.9}}], ErrorCode.CONTRADICTION, "certify"),
        ([{"units": {"max_drop": 0.1, "certify": 0.9}}, {"distill": {}}], ErrorCode.CONTRADICTION, "certify"),
        ([{"units": {"macs": 0.5}}, {"distill": {"quantized_share": 0.5}}], ErrorCode.CONTRADICTION, "quantized_share"),
        (4, ErrorCode.INVALID_VALUE, "steps"),
        ("[", ErrorCode.INVALID_VALUE, "steps"),
    ],
)
def test_a_list_that_cannot_be_carried_out_is_refused(steps: Any, code: ErrorCode, field: str) -> None:
    with pytest.raises(UsageError) as caught:
        Recipe(model="m", data="d", steps=steps)
    assert (caught.value.code, caught.value.details["field"]) == (code, field)
    assert "\n" not in str(caught.value)


def test_steps_beside_their_flags_or_without_rows_are_refused() -> None:
    with fails_with(ErrorCode.CONTRADICTION, UsageError, field="keep"):
        Recipe(model="m", data="d", keep=3, steps=[Units(macs=0.5)])
    with fails_with(ErrorCode.MISSING_VALUE, UsageError, field="steps"):
        Recipe(model="m", steps=[Units(macs=0.5)])


def test_written_steps_follow_the_plan_in_the_model_folder(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text("{}")
    with fails_with(ErrorCode.CONTRADICTION, UsageError, field="steps"):
        Recipe(model=tmp_path, data="d", steps=[Units(macs=0.5)])
    assert Recipe(model=tmp_path, data="d", steps=[Follow(plan=tmp_path / "plan.json"), Distill(teacher="t")]).steps
