"""The folder in the user's cache for what builds and loads may use again."""

from __future__ import annotations

import os
from pathlib import Path


def user_cache() -> Path:
    """The folder `compressor` in the user's cache; it may not exist."""
    folder = os.environ.get("XDG_CACHE_HOME")
    return (Path(folder) if folder else Path.home() / ".cache") / "compressor"
