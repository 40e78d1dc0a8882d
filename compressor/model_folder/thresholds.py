"""The probabilities from which a classifier assigns its classes, as its folder declares them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig

from compressor.errors import ErrorCode, InputError
from compressor.model_folder.configuration import read_json
from compressor.models.classifiers import class_names

THRESHOLD_FILES = "*thresholds.json"
"""Files of thresholds in a model folder."""
_KEY = "thresholds"
_DEFAULT = 0.5


@dataclass(frozen=True)
class Thresholds:
    """The thresholds of the classes.

    Attributes:
        values: one for each class, in their order.
        file: where the folder declares them; None: it does not.
    """

    values: tuple[float, ...]
    file: Path | None = None


def read_thresholds(folder: Path, config: PretrainedConfig) -> Thresholds:
    """The thresholds of a folder; 0.5 for every class where it declares none.

    They are the entry `thresholds` of `config.json`, else the content of a file `thresholds.json` or, for example,
    `best_thresholds.json`, or its entry `thresholds`: a number for all classes, a list in the order of the classes, or
    an object of names and numbers. A class that the object lacks has 0.5.

    Raises:
        InputError: they are no such numbers, or two files declare some.
    """
    declared, file = getattr(config, _KEY, None), folder / "config.json"
    if declared is None:
        files = sorted(folder.glob(THRESHOLD_FILES))
        if not files:
            return Thresholds((_DEFAULT,) * len(class_names(config)))
        if len(files) > 1:
            raise InputError(
                f"{folder}: {files[0].name} and {files[1].name} both declare thresholds of the classes; keep one",
                code=ErrorCode.CONTRADICTION,
                path=files[1],
                field=_KEY,
            )
        file = files[0]
        declared = read_json(file)
        if isinstance(declared, Mapping) and isinstance(declared.get(_KEY), Mapping | list | float | int):
            declared = declared[_KEY]
    names = class_names(config)
    values = _values(declared, names)
    if values is None:
        raise InputError(
            f"{file}: the thresholds are not a number from 0 to 1 for each of {len(names)} classes"
            f" ({', '.join(names):.80}); write a list of them, or an object of these names",
            code=ErrorCode.FILE_MISMATCH,
            path=file,
            field=_KEY,
        )
    return Thresholds(values, file)


def _values(declared: Any, names: Sequence[str]) -> tuple[float, ...] | None:
    """One number for each class; None where something else is declared."""
    values: list[Any]
    if isinstance(declared, Mapping):
        by_name = {str(name).strip().lower(): value for name, value in declared.items()}
        keys = [name.lower() for name in names]
        if not by_name.keys() <= set(keys):
            keys = [str(index) for index in range(len(names))]
        if not by_name or not by_name.keys() <= set(keys):
            return None
        values = [by_name.get(key, _DEFAULT) for key in keys]
    else:
        values = list(declared) if isinstance(declared, list | tuple) else [declared] * len(names)
    is_valid = all(type(value) in (int, float) and 0 <= value <= 1 for value in values)
    return tuple(map(float, values)) if is_valid and len(values) == len(names) else None
