"""Fields of `compress bench` besides those of a run's engine and measurements."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, Field

from compressor.config.fields import Config, config_field, one_of
from compressor.config.sections import ENGINE, MEASURING
from compressor.config.values import Count, as_list
from compressor.targets import DEFAULT_TARGET, TARGETS

_Target = Annotated[str, AfterValidator(one_of(tuple(TARGETS)))]


class BenchConfig(Config):
    """Which runtimes are compared, and by how many callers."""

    target: Annotated[tuple[_Target, ...], Field(min_length=1), BeforeValidator(as_list)] = config_field(
        ENGINE,
        "runtime of the engines; for the folder of a run several, separated by commas, by default its own",
        (DEFAULT_TARGET,),
    )
    callers: Count = config_field(
        MEASURING, "callers at once, with one thread each, whose throughput is measured too (folder of a run)", 1
    )
