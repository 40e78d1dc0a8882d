"""Compare two folders of results: computed values must be equal; words, pictures and times may differ."""

from __future__ import annotations

import csv
import hashlib
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper

from tests.equivalence.renames import (
    IGNORED_COLUMNS,
    IGNORED_FILES,
    IGNORED_NUMBERS,
    RENAMED_KEYS,
    RENAMED_RECIPE_KEYS,
    RENAMED_VALUES,
)
from tests.equivalence.runs import RECORD

WHOLE_JSON = ("plan.json", "graph-sites.json", "folder-sites.json")
"""JSON files whose words are also compared."""
COMPANIONS = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")
"""Files of a model folder that are copied."""
SHOWN = 3
"""Differences of one file that are printed."""
_SPELLED_NUMBERS = ("NaN", "Infinity", "-Infinity")
_SIGNATURE = ("input", "output", "attribute")


def differences(base: Path, current: Path) -> Iterator[str]:
    """Every difference between the folders of one case, one line for each."""
    before, after = _files(base), _files(current)
    if not before:
        yield "the base version wrote no file that is compared"
    for name in sorted(before.keys() ^ after.keys()):
        yield f"{name}: only the {'base' if name in before else 'current'} version wrote it"
    for name in sorted(before.keys() & after.keys()):
        if before[name].read_bytes() == after[name].read_bytes() and not name.endswith(".onnx"):
            continue
        facts = _reader(name)
        lines = list(_unequal(facts(before[name]), facts(after[name])))
        yield from (f"{name}: {line}" for line in lines[:SHOWN])
        if len(lines) > SHOWN:
            yield f"{name}: {len(lines) - SHOWN} more differences"


def _files(folder: Path) -> dict[str, Path]:
    """Files that are compared, by their path in the folder with the names of the current version."""
    suffixes = (".onnx", ".safetensors", ".json", ".csv")
    ignored = {RECORD, *IGNORED_FILES}
    files = (path for path in folder.rglob("*") if path.suffix in suffixes and path.name not in ignored)
    return {_renamed_path(path.relative_to(folder)): path for path in files if path.is_file()}


def _renamed_path(path: Path) -> str:
    return re.sub(r"[^-+./]+", lambda word: RENAMED_VALUES.get(word[0], word[0]), path.as_posix())


def _reader(name: str) -> Callable[[Path], dict[str, Any]]:
    """The function that reads the facts of a file: name of a fact -> value."""
    path = Path(name)
    if path.name in WHOLE_JSON or path.name in COMPANIONS:
        return _json_facts
    readers = {".onnx": _onnx_facts, ".safetensors": _tensor_facts, ".csv": _table_facts, ".json": _json_numbers}
    return readers[path.suffix]


def _unequal(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[str]:
    for name in (*before, *(name for name in after if name not in before)):
        old, new = (facts.get(name, "nothing") for facts in (before, after))
        if old != new and not (_is_nan(old) and _is_nan(new)):
            yield f"{name} is {_short(old)} in the base version, {_short(new)} in the current one"


def _is_nan(value: Any) -> bool:
    return isinstance(value, float) and math.isnan(value)


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 100 else f"{text[:97]}..."


def _renamed_keys(path: Path) -> dict[str, str]:
    """Key of a file, or a kind of attention that is a key -> the name in the current version."""
    tables = [table for pattern, table in RENAMED_KEYS.items() if path.match(pattern)]
    return {**RENAMED_VALUES, **{key: renamed for table in tables for key, renamed in table.items()}}


def _renamed(value: Any, keys: Mapping[str, str]) -> Any:
    """JSON with the keys and one-word values of the current version."""
    if isinstance(value, dict):
        return {
            keys.get(key, key): _renamed(item, {**keys, **RENAMED_RECIPE_KEYS} if key == "recipe" else keys)
            for key, item in value.items()
        }
    if isinstance(value, list):
        return [_renamed(item, keys) for item in value]
    return RENAMED_VALUES.get(value, value) if isinstance(value, str) else value


def _leaves(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Every value without nested values, by its path: `scores.0.dense`."""
    items: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, (dict, list)) and value:
        items = value.items() if isinstance(value, dict) else enumerate(value)
    else:
        yield ".".join(path), value
    for key, item in items:
        yield from _leaves(item, (*path, str(key)))


def _json_facts(path: Path) -> dict[str, Any]:
    return dict(_leaves(_renamed(json.loads(path.read_text(encoding="utf-8")), _renamed_keys(path))))


def _json_numbers(path: Path) -> dict[str, Any]:
    """Numbers and truth values of a JSON file, except those that depend on time or memory."""
    return {
        name: value
        for name, value in _json_facts(path).items()
        if (isinstance(value, (bool, int, float)) or value in _SPELLED_NUMBERS) and not IGNORED_NUMBERS.search(name)
    }


def _table_facts(path: Path) -> dict[str, Any]:
    """Cells of a CSV file by line and column; lines are sorted, because renamed names change their order."""
    keys = _renamed_keys(path)
    with path.open(encoding="utf-8", newline="") as file:
        lines = [
            {keys.get(column, column): _renamed_cell(cell) for column, cell in line.items()}
            for line in csv.DictReader(file)
        ]
    compared = [{column: line[column] for column in sorted(line) if column not in IGNORED_COLUMNS} for line in lines]
    return {
        f"row {number} {column}": cell
        for number, line in enumerate(sorted(compared, key=lambda line: list(line.values())))
        for column, cell in line.items()
    }


def _renamed_cell(cell: str) -> str:
    """Rename the words of a cell, which are separated by plus signs."""
    return "+".join(RENAMED_VALUES.get(word, word) for word in cell.split("+"))


def _tensor_facts(path: Path) -> dict[str, Any]:
    """Type, shape and bytes of every tensor of a safetensors file, and its metadata."""
    content = path.read_bytes()
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    facts = {f"metadata {name}": _metadata(text) for name, text in header.pop("__metadata__", {}).items()}
    for name, entry in header.items():
        first, last = (8 + size + offset for offset in entry["data_offsets"])
        facts[name] = (entry["dtype"], tuple(entry["shape"]), _digest(content[first:last]))
    return facts


def _metadata(text: str) -> Any:
    try:
        return _renamed(json.loads(text), RENAMED_VALUES)
    except ValueError:
        return text


def _onnx_facts(path: Path) -> dict[str, Any]:
    """Initializers, nodes, functions, inputs and outputs of a graph; names of nodes and their metadata are left out."""
    model = onnx.load(path)
    facts: dict[str, Any] = {f"metadata {entry.key}": entry.value for entry in model.metadata_props}
    facts["versions"] = (model.ir_version, _opsets(model.opset_import))
    facts |= _graph_facts(model.graph, "")
    for function in model.functions:
        name = f"function {function.domain}::{function.name} {function.overload}"
        facts[f"{name} signature"] = [list(getattr(function, part)) for part in _SIGNATURE]
        facts[f"{name} defaults"] = [_attribute(attribute) for attribute in function.attribute_proto]
        facts[f"{name} versions"] = _opsets(function.opset_import)
        facts |= _node_facts(function.node, f"{name} ")
    return facts


def _opsets(imports: Iterable[onnx.OperatorSetIdProto]) -> list[tuple[str, int]]:
    return sorted((entry.domain, entry.version) for entry in imports)


def _graph_facts(graph: onnx.GraphProto, prefix: str) -> dict[str, Any]:
    facts: dict[str, Any] = {f"{prefix}initializer {tensor.name}": _tensor(tensor) for tensor in graph.initializer}
    for role, values in (("input", graph.input), ("output", graph.output)):
        facts |= {f"{prefix}{role} {number}": (value.name, str(value.type)) for number, value in enumerate(values)}
    return facts | _node_facts(graph.node, prefix)


def _node_facts(nodes: Iterable[onnx.NodeProto], prefix: str) -> dict[str, Any]:
    return {
        f"{prefix}node {number}": (
            f"{node.domain}::{node.op_type}:{node.overload}",
            tuple(node.input),
            tuple(node.output),
            tuple(sorted(map(_attribute, node.attribute), key=str)),
        )
        for number, node in enumerate(nodes)
    }


def _attribute(attribute: onnx.AttributeProto) -> tuple[str, Any]:
    value = onnx.helper.get_attribute_value(attribute)
    if isinstance(value, onnx.TensorProto):
        return attribute.name, _tensor(value)
    if isinstance(value, onnx.GraphProto):
        return attribute.name, tuple(_graph_facts(value, "").items())
    return attribute.name, tuple(value) if not isinstance(value, (int, float, bytes, str)) else value


def _tensor(tensor: onnx.TensorProto) -> tuple[str, tuple[int, ...], str]:
    array = np.ascontiguousarray(numpy_helper.to_array(tensor))
    return onnx.TensorProto.DataType.Name(tensor.data_type), tuple(tensor.dims), _digest(array.tobytes())


def _digest(content: bytes) -> str:
    return f"sha256:{hashlib.sha256(content).hexdigest()[:16]}"
