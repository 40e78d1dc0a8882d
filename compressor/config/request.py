"""Configurations that commands construct from their flags alone: their base class, and those of short commands."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import pydantic
from pydantic import AfterValidator, BeforeValidator, Field

from compressor.config.fields import Config, InvalidValueError, Rule, config_field, flag_of, one_of, usage_error
from compressor.config.sections import ENGINE, MEASURING, OUTPUT
from compressor.config.values import Count, Natural, Positive, as_list
from compressor.errors import ErrorCode
from compressor.targets import DEFAULT_TARGET, TARGETS, Provider


class Request(Config):
    """A configuration that raises usage errors, which name the flag and hold a code, the field and the value.

    Raises:
        UsageError: a field is missing, unknown or invalid, or two fields contradict each other.
    """

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**{name: value for name, value in values.items() if value is not None})
        except pydantic.ValidationError as error:
            raise usage_error(error, type(self).model_fields, flag_of) from error


def _check_writable(path: Path) -> Path:
    # Checked before the work whose result is written there.
    if not path.absolute().parent.is_dir():
        raise InvalidValueError(f"the folder {path.parent} does not exist; create it first", ErrorCode.FILE_MISSING)
    if not os.access(path.absolute().parent, os.W_OK):
        raise InvalidValueError(f"the folder {path.parent} cannot be written", ErrorCode.FILE_UNWRITABLE)
    if path.is_dir():
        raise InvalidValueError("this is a folder; give the name of a file", ErrorCode.FILE_UNWRITABLE)
    return path


OutputFile = Annotated[Path, AfterValidator(_check_writable)]
"""A file to write, in a folder that exists."""


class CostsOutput(Config):
    """The page or picture that `compress costs` writes."""

    out: Path | None = config_field(OUTPUT, "page (.html) or picture (.svg) to write", is_path=True)
    force: bool = config_field(OUTPUT, "replace the file if it exists", False)


class SitesOptions(Request):
    """What `compress sites` counts of each group.

    Raises:
        UsageError: the length is no positive number.
    """

    count: bool = config_field(
        MEASURING, "count parameters and multiply-accumulates, for which the model is exported", True
    )
    seq: Count | None = config_field(
        MEASURING,
        "length in tokens at which multiply-accumulates are counted; default: 128, at most the model's maximum",
    )


_Target = Annotated[str, AfterValidator(one_of(tuple(TARGETS)))]


class BenchConfig(Config):
    """Which runtimes `compress bench` compares, and by how many callers."""

    target: Annotated[tuple[_Target, ...], Field(min_length=1), BeforeValidator(as_list)] = config_field(
        ENGINE,
        "runtime of the engines; for the folder of a run several, separated by commas, by default its own",
        (DEFAULT_TARGET,),
    )
    callers: Count = config_field(
        MEASURING, "callers at once, with one thread each, whose throughput is measured too (folder of a run)", 1
    )


NonEmpty = Annotated[str, Field(min_length=1)]
PROMPTS, TEXT = "Prompts", "Text"


class GenerateRequest(Request):
    """What a model generates, and from which prompts.

    Raises:
        UsageError: a value is out of range, or two options contradict each other.
    """

    prompt: str | None = config_field(PROMPTS, "the prompt; default: the text on stdin")
    batch_file: Path | None = config_field(
        PROMPTS, "file of prompts, one a line; a line of JSON is printed for each", is_path=True
    )
    batch_size: Count = config_field(PROMPTS, "prompts of the file that are completed at once", 8)
    chat: bool = config_field(PROMPTS, "format each prompt as a message by the chat template of the tokenizer", False)

    max_new_tokens: Count | None = config_field(
        TEXT, "maximum number of new tokens; default: that of generation_config.json, else 64"
    )
    stop: tuple[NonEmpty, ...] = config_field(TEXT, "text at which generation stops; may be repeated", ())
    beams: Count | None = config_field(TEXT, "beams of a beam search; default: that of generation_config.json, else 1")
    temperature: Positive | None = config_field(TEXT, "draw tokens, from probabilities at this temperature")
    top_p: Annotated[float, Field(gt=0, le=1)] | None = config_field(
        TEXT, "draw tokens, from the most probable ones that have this probability together"
    )
    top_k: Count | None = config_field(TEXT, "draw tokens, from this many of the most probable ones")
    seed: Natural | None = config_field(TEXT, "seed of the draws; default: another one each time")

    provider: Provider | None = config_field(ENGINE, "device of the engine; default: CUDA where available")
    threads: Count | None = config_field(ENGINE, "threads of the engine; default: one per core")

    rules = (
        Rule("prompt", "the prompts are in the file; omit one of them", excludes=("batch_file",)),
        Rule("batch_size", "it is for a file of prompts; add <batch_file>, or omit it", needs=("batch_file",)),
        *(
            Rule(name, "a beam search draws no tokens; omit one of them", excludes=("beams",))
            for name in ("temperature", "top_p", "top_k")
        ),
        Rule(
            "seed",
            "no token is drawn; add <temperature>, <top_p> or <top_k>, or omit it",
            needs=("temperature", "top_p", "top_k"),
        ),
    )
