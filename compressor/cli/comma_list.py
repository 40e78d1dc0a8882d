"""Lists on the command line."""

from __future__ import annotations

from typing import Any

import click


class CommaList(click.ParamType):
    """A list divided by commas."""

    name = "words"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return tuple(word.strip() for word in value.split(",")) if isinstance(value, str) else value
