"""Fields of `compress costs` besides those of a run's model, engine, export and measurements."""

from __future__ import annotations

from pathlib import Path

from compressor.config.fields import Config, config_field
from compressor.config.sections import OUTPUT


class CostsOutput(Config):
    """The page or picture to write."""

    out: Path | None = config_field(OUTPUT, "page (.html) or picture (.png) to write", is_path=True)
    force: bool = config_field(OUTPUT, "replace the file if it exists", False)
