"""Where the product advises: every error and note in the source whose text names a flag or a command."""

from __future__ import annotations

import ast
import functools
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from compressor.config.fields import flag_of

ROOT = Path(__file__).parents[2]
FOLDERS = ("compressor", "graph_passes", "benchmarks/studies")

ADVICE = re.compile(
    r"(?<![\w-])(?<!var\()--(?:[a-z]|$)"  # a flag, whose name may follow, and no variable of a style sheet
    r"|\(-o\)"
    r"|\bcompress (?:run|sites|costs|apply|build|bench|check|report|generate|train|export-triton|kernel|recipe)\b"
    r"|\bcompress (?:again|MODEL)\b"
    r"|\bpip install\b"
    r"|\bray start\b|\baccelerate launch\b"
)
"""What a text names that advises: a flag, a command, or a package to install."""

PLACEHOLDER = re.compile(r"<([a-z_][a-z_0-9]*)>")
"""A field in a message of `compressor.config`, in place of which its flag is printed."""

_CONSTRUCTORS = ("Error", "Note")
_FACTORIES = ("RowError.of", "TargetMissingError.of_package")
_DECLARATIONS = (
    *("click.option", "click.command", "click.group", "_field", "option_of"),
    *("config.addinivalue_line", "logger.debug"),
)
"""Calls whose texts declare flags, or are for the log, and advise nobody."""


@dataclass(frozen=True)
class AdviceSite:
    """A place in the source that advises.

    Attributes:
        key: its module, function and code, with a number where these are equal: lines and wording may change.
        file: the source file.
        lines: the first and the last line of the call or text.
        texts: the literal parts of its text that advise.
        is_call: whether an error or a note is constructed there; otherwise a text of an error or note that is
            constructed elsewhere.
    """

    key: str
    file: Path
    lines: tuple[int, int]
    texts: tuple[str, ...]
    is_call: bool


@functools.cache
def advice_sites() -> dict[str, AdviceSite]:
    """Every place that advises, by its key."""
    sites: dict[str, AdviceSite] = {}
    numbers: Counter[str] = Counter()
    for folder in FOLDERS:
        for file in sorted((ROOT / folder).rglob("*.py")):
            source = file.read_text()
            if folder == "compressor" and file.parts[len(ROOT.parts) + 1] == "config":
                source = re.sub(r"<(?={\w)", "--", PLACEHOLDER.sub(lambda field: flag_of(field[1]), source))
            for prefix, node, is_call in _advising_nodes(ast.parse(source)):
                name = f"{_module(file)} {prefix}"
                numbers[name] += 1
                key = name if numbers[name] == 1 else f"{name} #{numbers[name]}"
                lines = (node.lineno, node.end_lineno or node.lineno)
                texts = (str(node.value),) if isinstance(node, ast.Constant) else tuple(_advising_texts(node))
                sites[key] = AdviceSite(key, file, lines, texts, is_call)
    return sites


def _module(file: Path) -> str:
    package, *parts = file.relative_to(ROOT).with_suffix("").parts
    names = [package, *parts] if package == "graph_passes" else parts
    return ".".join(name for name in names if name != "__init__") or "main"


def _advising_nodes(tree: ast.Module) -> Iterator[tuple[str, ast.expr, bool]]:
    """`function code` of every call or text that advises, in the order of the source, and whether it is a call."""
    yield from _walk(tree, ())


def _walk(node: ast.AST, names: tuple[str, ...]) -> Iterator[tuple[str, ast.expr, bool]]:
    match node:
        case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.AsyncFunctionDef(name=name):
            names = (*names, name)
        case ast.Expr(value=ast.Constant()):
            return  # a docstring
        case ast.Call(func=function) if ast.unparse(function).endswith(_DECLARATIONS):
            return
        case ast.Call() if _constructs(node) and any(_advising_texts(node)):
            yield f"{'.'.join(names)} {_code(node)}", node, True
            return
        case ast.Call(func=ast.Name(id="Rule"), args=[option, text, *_]):
            if literals := [part for part in ast.walk(text) if isinstance(part, ast.Constant)]:
                prefix = ".".join((*names, ast.unparse(option).strip("'")))
                yield f"{prefix} rule", max(literals, key=lambda part: len(str(part.value))), False
            return
        case ast.Constant(value=str(text)) if ADVICE.search(text):
            yield f"{'.'.join(names) or 'constant'} text", node, False
            return
    for child in ast.iter_child_nodes(node):
        yield from _walk(child, names)


def _constructs(call: ast.Call) -> bool:
    name = ast.unparse(call.func)
    return name.endswith((*_CONSTRUCTORS, ".of_file")) or name in _FACTORIES


def _advising_texts(node: ast.AST) -> Iterator[str]:
    for child in ast.walk(node):
        match child:
            case ast.Constant(value=str(text)) if ADVICE.search(text):
                yield text
            case ast.Call(func=ast.Name(id="flag_of" | "shown" | "_subject")):
                yield "--"


def _code(call: ast.Call) -> str:
    """The code of an error or a note as its enumeration spells it, or `code` where it is passed on."""
    for value in (*call.args, *(keyword.value for keyword in call.keywords if keyword.arg == "code")):
        match value:
            case ast.Attribute(value=ast.Name(id=kind), attr=name) if kind.endswith("Code"):
                return name.lower().replace("_", "-")
    return "code"
