"""What the current version may spell differently than the base version, and what no comparison looks at."""

from __future__ import annotations

import re

KINDS = {"encoder": "bidirectional", "decoder": "causal", "cross": "cross"}
"""Kind of attention in the base version -> in the current one."""
FLAGS = {
    "--everywhere": "--mask-all-sites",
    "--watch-rows": "--map-rows",
    "--weigh-by-rows": "--weight-by-count",
    "--empty-rows": "--allow-empty-rows",
    "--blocks": "--drop-blocks",
    "--prune": "--drop-blocks-by-kind",
    "--restart": "--from-original-weights",
    "--guarantee": "--certify",
}
"""Flag of the base version -> of the current one. A recipe's key is the flag without dashes."""


def recipe_key(flag: str) -> str:
    """Key of a recipe that a flag stands for: `--eval-data` is `eval_data`."""
    return flag.removeprefix("--").replace("-", "_")


RENAMED_RECIPE_KEYS: dict[str, str] = {recipe_key(old): recipe_key(new) for old, new in FLAGS.items()}
"""Key of a recipe -> the current version's."""
RENAMED_KEYS: dict[str, dict[str, str]] = {
    "study.json": RENAMED_RECIPE_KEYS,
    "training.json": {"asked": "training", "found": "result"},
    "cells/*.json": {"asked": "settings"},
}
"""Pattern of a file's path -> its keys, or columns of a CSV file, at any depth -> the current version's. Add to it: the
patterns are those of `PurePath.match`, e.g. `report.json`, `study.csv`, `cells/*.json`."""
RENAMED_VALUES: dict[str, str] = {**KINDS}
"""A value that is one word, e.g. a kind of attention or a cell of study.csv -> the current version's. Add to it."""
IGNORED_NUMBERS = re.compile(
    r"(?:^|\.)(?:seconds|milliseconds|peak_memory_bytes|file_bytes|machine|session|built)(?:\.|$)"
    r"|_(?:runtime|per_second)$"
    r"|^speeds\.\d+\.(?:dense|compressed|ratio|low|high)(?:\.|$)"
)
"""Paths of numbers in a JSON file that time, memory or the length of names decide, in the current version's keys."""
IGNORED_COLUMNS = frozenset({"seconds"})
"""Columns of study.csv that time decides."""
