"""Labels as numbers: one mapping for every split of a run."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from datasets import ClassLabel, Dataset
from transformers import PretrainedConfig

from compressor.errors import InputError


def class_ids(rows: Dataset, column: str, config: PretrainedConfig, source: str) -> dict[str, int]:
    """Label, as text, to the model's class.

    In this order: names that the model knows (`config.id2label`, in any case) are its own, also those behind the
    numbers of a `ClassLabel` column; whole numbers stand for themselves; other names are numbered in sorted order,
    which is how one trains a model that never was told its labels' names.

    Raises:
        InputError: a label is empty or outside the model's range, some are the model's by name and others not, or all
            rows have the same.
    """
    classes = int(config.num_labels or 0)
    names = sorted(set(label_texts(rows, column, source)))
    if len(names) < 2:
        raise InputError(f"{source}: every row has the label {names[0]!r}; give rows of two classes or more")
    feature = rows.features[column]
    if isinstance(feature, ClassLabel) and (known := _known(feature.names, config)):
        ids = {str(index): known[name] for index, name in enumerate(feature.names)}
    elif all(_whole(name) is not None for name in names):
        ids = {str(index): index for index in range(classes)} | {name: int(float(name)) for name in names}
    elif known := _known(names, config):
        ids = known
    else:
        strange = _strangers(names, config)
        if 0 < len(strange) < len(names):
            raise InputError(
                f"{source}: label {_some([repr(name) for name in strange])} is not among the model's"
                f" ({_some(list((config.id2label or {}).values()))}, id2label in its config.json); mend the label or"
                " leave its rows out"
            )
        if len(names) > classes:
            raise InputError(
                f"{source}: {len(names)} different labels ({_some(names)}), the model has {classes} classes;"
                " fine-tune a model with that many, or name another column (--label-column)"
            )
        if len(names) < classes:
            raise InputError(
                f"{source}: {len(names)} different labels ({_some(names)}), the model has {classes} classes and knows"
                " none by name; put id2label into its config.json, or number the labels"
            )
        ids = {name: index for index, name in enumerate(names)}
        config.id2label, config.label2id = dict(enumerate(names)), dict(ids)  # other rows will be read by them
    outside = [name for name in names if not 0 <= ids[name] < classes]
    if outside:
        raise InputError(
            f"{source}: label {outside[0]} is outside the model's range 0 to {classes - 1};"
            f" number the labels from 0, or take a model with more classes"
        )
    return ids


def classes_of(rows: Dataset, column: str, ids: Mapping[str, int], source: str) -> list[int]:
    """The class of every row.

    Raises:
        InputError: a label that `ids` does not have.
    """
    texts = label_texts(rows, column, source)
    unknown = next((text for text in texts if text not in ids), None)
    if unknown is not None:
        raise InputError(
            f"{source}: label {unknown!r} is none of {_some(list(ids))}; mend the label or leave its rows out"
        )
    return [ids[text] for text in texts]


def numbers_of(rows: Dataset, column: str, source: str) -> list[float]:
    """The label of every row as a finite number.

    Raises:
        InputError: a label that is none.
    """
    values = []
    for index, text in enumerate(label_texts(rows, column, source)):
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not math.isfinite(value):
            raise InputError(f"{source}: row {index + 1} has the label {text!r}, regression needs a number; mend it")
        values.append(value)
    return values


def label_texts(rows: Dataset, column: str, source: str) -> list[str]:
    """Every label as text, the same for `1`, `"1"` and `1.0`.

    Raises:
        InputError: a label is missing or is a list or an object.
    """
    feature = rows.features[column]
    texts = []
    for index, value in enumerate(rows[column]):
        text = _text(value)
        if text is None:
            raise InputError(
                f"{source}: row {index + 1} has no usable {column!r} ({value!r:.40}); mend it or leave it out"
            )
        texts.append(text)
    if isinstance(feature, ClassLabel) and "-1" in texts:
        raise InputError(f"{source}: its labels are withheld (-1); take a split that has labels")
    return texts


def withheld(rows: Dataset) -> bool:
    """Whether the labels are kept back, as in the test rows of a public contest: classes that are -1 throughout."""
    classes = [name for name, feature in rows.features.items() if isinstance(feature, ClassLabel)]
    return any(set(rows[name]) == {-1} for name in classes)


def _text(value: Any) -> str | None:
    if isinstance(value, bool):
        return str(int(value))
    if isinstance(value, (int, float)):
        whole = _whole(str(value))
        return str(value if whole is None else whole)
    if isinstance(value, str) and value.strip():
        whole = _whole(value.strip())
        return value.strip() if whole is None else str(whole)
    return None


def _whole(text: str) -> int | None:
    """`3` of `3` and `3.0`; None of anything else."""
    try:
        number = float(text)
    except ValueError:
        return None
    return int(number) if math.isfinite(number) and number == int(number) and abs(number) < 2**53 else None


def _known(names: Sequence[str], config: PretrainedConfig) -> dict[str, int]:
    """`config.id2label` turned round, under the data's spelling, or nothing where it lacks one of `names`."""
    exact = {str(name): int(index) for index, name in (config.id2label or {}).items()}
    model = {name.lower(): index for name, index in exact.items()}
    if _strangers(names, config):
        return {}
    return exact | {name: model[name.lower()] for name in names}


def _strangers(names: Sequence[str], config: PretrainedConfig) -> list[str]:
    """Those of `names` that `config.id2label` does not have in any case."""
    known = {str(name).lower() for name in (config.id2label or {}).values()}
    return [name for name in names if name.lower() not in known]


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(str(name)[:40] for name in names[:6])
    return shown if len(names) <= 6 else f"{shown}, ..."
