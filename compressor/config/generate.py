"""The configuration of `compress generate`. Each field is a flag."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar

from pydantic import Field

from compressor.config.fields import Rule, config_field
from compressor.config.request import Request
from compressor.config.sections import ENGINE
from compressor.config.values import Count, Natural, Positive
from compressor.targets import Provider

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

    rules: ClassVar[tuple[Rule, ...]] = (
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
