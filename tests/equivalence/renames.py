"""Names that the current version may spell differently than the base version, and values that are not compared."""

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
    "--steps": "--training-steps",
}
"""Flag of the base version -> flag of the current one. The key of a recipe is the flag without dashes."""
ADDED_FLAGS = ("--keep-unread-positions",)
"""Flags that switch off, in a version that has them, what the base version does not do."""


def recipe_key(flag: str) -> str:
    """The key of a recipe for a flag: `--eval-data` is `eval_data`."""
    return flag.removeprefix("--").replace("-", "_")


RENAMED_RECIPE_KEYS: dict[str, str] = {recipe_key(old): recipe_key(new) for old, new in FLAGS.items()}
"""Key of a recipe in the base version -> key in the current version."""
RENAMED_KEYS: dict[str, dict[str, str]] = {
    "study.json": RENAMED_RECIPE_KEYS,
    "training.json": {"asked": "training", "found": "result"},
    "cells/*.json": {"asked": "settings"},
}
"""Pattern of the path of a file -> former key, or column of a CSV file, at any depth -> current key. Patterns follow
`PurePath.match`, e.g. `report.json`, `study.csv`, `cells/*.json`. Add entries when keys are renamed."""
RENAMED_VALUES: dict[str, str] = {**KINDS}
"""A value of one word, e.g. a kind of attention or a cell of study.csv -> the value in the current version."""
IGNORED_NUMBERS = re.compile(
    r"(?:^|\.)(?:seconds|milliseconds|peak_memory_bytes|file_bytes|machine|session|built)(?:\.|$)"
    r"|_(?:runtime|per_second)$"
    r"|^speeds\.\d+\.(?:dense|compressed|ratio|low|high)(?:\.|$)"
    r"|^(?:speeds_over_rewritten|throughputs)\."
    r"|(?:^|\.)(?:calibration_rows|allow_float_products|keep_unread_positions)$"
)
"""Paths of numbers in JSON files that depend on time, memory or the length of names, and fields that the base version
lacks, with current keys."""
IGNORED_FILES = frozenset({"engine.onnx"})
"""Files whose form is chosen by timing on this machine."""
IGNORED_COLUMNS = frozenset({"seconds"})
"""Columns of study.csv that depend on time."""
