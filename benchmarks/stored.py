"""The settings that the files which benchmarks keep between calls were made with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from graph_passes.files import write_text


def require_settings(folder: Path, **settings: Any) -> None:
    """Note the settings that a folder is made with, which are numbers or text.

    Raises:
        SystemExit: it was made with others.
    """
    file = folder / "settings.json"
    if file.exists() and (stored := json.loads(file.read_text(encoding="utf-8"))) != settings:
        raise SystemExit(f"{folder}: made with {stored}, not with {settings}; name another folder (--out)")
    folder.mkdir(parents=True, exist_ok=True)
    write_text(file, json.dumps(settings))
