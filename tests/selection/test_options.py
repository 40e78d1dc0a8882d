"""Options: one model for each method, read with errors that name the option, and listed in the documentation."""

from __future__ import annotations

import pydantic
import pytest

from compressor.config.methods import METHODS, PENALISED_METHODS
from compressor.errors import ErrorCode, UsageError
from compressor.selection.checks import check_task_options
from compressor.selection.gates.dsp import DspOptions
from compressor.selection.options import (
    MethodOptions,
    PoolOptions,
    ScheduleOptions,
    SearchOptions,
    check_option_names,
    heads_to_keep,
    option_models,
    option_names,
    option_rows,
    pool_of,
    read_options,
)
from compressor.selection.search.random_subsets import RandomOptions
from compressor.selection.search.taylor import TaylorOptions
from compressor.units import Site
from tests.faults import fails_with
from tests.selection.tiny import selection


@pytest.mark.parametrize("method", METHODS)
def test_every_method_has_a_model_of_its_options(method: str) -> None:
    model, *shared = option_models(method)
    assert issubclass(model, MethodOptions)
    kinds = {"gate": [ScheduleOptions, PoolOptions], "search": [SearchOptions], "budget": []}
    assert shared == kinds[METHODS[method].kind]
    assert len(set(option_names(method))) == len(option_names(method)), "an option has two meanings"


@pytest.mark.parametrize("method", METHODS)
def test_every_option_has_a_description(method: str) -> None:
    for name, _, description in option_rows(*option_models(method)):
        assert description, name


@pytest.mark.parametrize("method", METHODS)
def test_defaults_are_read_as_themselves(method: str) -> None:
    models = option_models(method)
    defaults = {name: value for model in models for name, value in model().model_dump().items()}
    assert tuple(defaults) == option_names(method)
    for model in models:
        assert read_options(method, defaults, model) == model()


@pytest.mark.parametrize("method", ["dsp", "dsp-pipelined"])
def test_translation_has_the_settings_of_the_paper(method: str) -> None:
    """Table 2 of the paper; options that are set win."""
    model = option_models(method)[0]
    defaults = read_options(method, {}, model, "translation")
    assert defaults == DspOptions(tau_ini=0.1, gate_learning_rate=0.2, gate_schedule="constant")
    assert read_options(method, {}, model, "text-classification") == DspOptions()
    options = {"tau_ini": 5.0, "gate_schedule": "linear"}
    assert read_options(method, options, model, "translation") == DspOptions(tau_ini=5.0, gate_learning_rate=0.2)
    with fails_with(ErrorCode.CONTRADICTION, UsageError, field="tau_ini"):
        check_task_options(selection(method=method, options={"tau_end": 0.5}), "translation")


def test_penalised_methods_are_those_with_a_penalty() -> None:
    assert tuple(method for method in METHODS if "penalty" in option_names(method)) == PENALISED_METHODS


def test_options_are_frozen() -> None:
    with pytest.raises(pydantic.ValidationError):
        DspOptions().tau_ini = 1.0  # type: ignore[misc]


def test_options_of_other_models_are_ignored() -> None:
    options = {"tau_ini": 10, "warmup": 0.5, "pool": "kind"}
    assert read_options("dsp", options, DspOptions) == DspOptions(tau_ini=10.0)
    assert read_options("dsp", options, ScheduleOptions) == ScheduleOptions(warmup=0.5)
    assert read_options("dsp", options, PoolOptions) == PoolOptions(pool="kind")


@pytest.mark.parametrize(
    ("option", "value", "model", "code"),
    [
        ("tau_ini", "hot", DspOptions, ErrorCode.INVALID_VALUE),
        ("tau_ini", float("inf"), DspOptions, ErrorCode.OUT_OF_RANGE),
        ("warmup", -1, ScheduleOptions, ErrorCode.OUT_OF_RANGE),
        ("weight_decay", -0.1, ScheduleOptions, ErrorCode.OUT_OF_RANGE),
        ("max_grad_norm", 0, ScheduleOptions, ErrorCode.OUT_OF_RANGE),
        ("evaluations", 0, ScheduleOptions, ErrorCode.OUT_OF_RANGE),
        ("points", 0, ScheduleOptions, ErrorCode.OUT_OF_RANGE),
        ("final_learning_rate", -1, ScheduleOptions, ErrorCode.OUT_OF_RANGE),
        ("optimizer", "sgd", ScheduleOptions, ErrorCode.UNKNOWN_NAME),
        ("pool", "site", PoolOptions, ErrorCode.UNKNOWN_NAME),
        ("pool", "kind", SearchOptions, ErrorCode.UNKNOWN_NAME),
        ("rows", 0, TaylorOptions, ErrorCode.OUT_OF_RANGE),
        ("trials", 1.5, RandomOptions, ErrorCode.INVALID_VALUE),
        ("share", 1.5, TaylorOptions, ErrorCode.OUT_OF_RANGE),
    ],
)
def test_a_wrong_value_is_refused_by_name(
    option: str, value: object, model: type[MethodOptions], code: ErrorCode
) -> None:
    with fails_with(code, UsageError, field=option, value=value, subject="METHOD"):
        read_options("METHOD", {option: value}, model)


@pytest.mark.parametrize("method", ["astar", "local", "global", "random"])
def test_rows_of_the_gradient_are_an_option_of_its_method_alone(method: str) -> None:
    with fails_with(ErrorCode.UNKNOWN_NAME, UsageError, field="rows", value=8, subject=method):
        check_option_names(method, {"rows": 8}, option_names(method))


@pytest.mark.parametrize(("method", "name", "similar"), [("dsp", "taui_ni", "tau_ini"), ("taylor", "sahre", "share")])
def test_the_nearest_name_is_suggested_for_an_unknown_option(method: str, name: str, similar: str) -> None:
    with fails_with(ErrorCode.UNKNOWN_NAME, UsageError, field=name, value=1, subject=method) as caught:
        check_option_names(method, {name: 1}, option_names(method))
    assert f"did you mean {similar}?" in str(caught.value)


@pytest.mark.parametrize(
    ("model", "name", "default"),
    [
        (DspOptions, "tau_end", "1e-08"),
        (DspOptions, "cooldown", "0.6667"),
        (TaylorOptions, "normalize", ""),
        (ScheduleOptions, "evaluations", "12"),
    ],
)
def test_options_are_listed_with_their_defaults(model: type[MethodOptions], name: str, default: str) -> None:
    assert {row[0]: row[1] for row in option_rows(model)}[f"`{name}`"] == default


SITES = [Site("a", "causal", 4, 4, 4), Site("b", "cross", 4, 4, 4)]


@pytest.mark.parametrize("pool", ["model", "kind"])
def test_all_sites_compete_in_one_pool_or_in_several(pool: str) -> None:
    assert pool_of(SITES, {"pool": pool}) == pool_of(SITES, {}) == SITES


def test_the_sites_of_a_kind_compete() -> None:
    assert pool_of(SITES, {"pool": "cross"}) == SITES[1:]


def test_a_kind_that_the_model_lacks_is_refused() -> None:
    with fails_with(
        ErrorCode.UNSUPPORTED_MODEL, UsageError, field="pool", value="bidirectional", choices=("causal", "cross")
    ):
        pool_of(SITES, {"pool": "bidirectional"})


@pytest.mark.parametrize(
    ("keep", "count"),
    [(1, 1), (8, 8), ("3", 3), ("50%", 4), ("7%", 1), ("1%", 1), ("100%", 8), (" 30% ", 2), ("44%", 4)],
)
def test_the_number_of_heads_is_a_count_or_a_share(keep: int | str, count: int) -> None:
    assert heads_to_keep(keep, 8) == count


@pytest.mark.parametrize(
    ("keep", "code"),
    [
        (9, ErrorCode.OUT_OF_RANGE),
        (0, ErrorCode.OUT_OF_RANGE),
        (-1, ErrorCode.OUT_OF_RANGE),
        ("150%", ErrorCode.OUT_OF_RANGE),
        ("half", ErrorCode.INVALID_VALUE),
        ("inf%", ErrorCode.INVALID_VALUE),
    ],
)
def test_an_invalid_number_of_heads_is_refused(keep: int | str, code: ErrorCode) -> None:
    with fails_with(code, UsageError, field="keep", value=keep):
        heads_to_keep(keep, 8)
