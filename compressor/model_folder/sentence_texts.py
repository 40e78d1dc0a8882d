"""How the texts of a folder of sentence-transformers are prepared, by its files alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from compressor.errors import ErrorCode, InputError
from compressor.model_folder.files import CONFIG, MODULES, read_json, read_object

LIBRARY_CONFIG, TEXT_CONFIG = "config_sentence_transformers.json", "sentence_bert_config.json"
CLASSIFIER = "ForSequenceClassification"
"""Part of the names of transformers' classes that score texts or pairs, as rerankers do."""
POOLING = "Pooling"
DEFAULT_PROMPT = "default_prompt_name"
_USUAL_PROMPTS = ("query", "document")
"""Names of prompts that the library knows in every folder; they are empty where the folder does not set them."""


@dataclass(frozen=True, kw_only=True)
class SentenceTexts:
    """How the texts of a sentence encoder are prepared for its tokenizer.

    Attributes:
        max_tokens: maximum number of tokens of a text; None: that of tokenizer and model.
        lower_case: whether texts are converted to lower case before the tokenizer.
        prompts: prefixes of texts, by name, e.g. `query`.
        default_prompt: name of the prompt of texts for which no prompt is named; None: they have none.
    """

    max_tokens: int | None = None
    lower_case: bool = False
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str | None = None

    def prepare(self, text: str, *names: str) -> str:
        """The text that the tokenizer gets.

        Args:
            names: names of its prompt, of which the first that exists is used; else the default prompt.
        """
        name = next((name for name in (*names, self.default_prompt) if name is not None and name in self.prompts), None)
        prompted = ("" if name is None else self.prompts[name]) + text
        return prompted.lower() if self.lower_case else prompted


def read_sentence_texts(folder: Path) -> SentenceTexts | None:
    """How the texts of a folder are prepared, whichever modules follow its pooling; None for other models.

    A reranker of sentence-transformers reads pairs: it has no pooling, is a classifier, or is named a `CrossEncoder`.

    Raises:
        InputError: a file that describes the texts is damaged.
    """
    if POOLING not in (name for name, _ in listed_modules(folder)):
        return None
    classes = read_object(folder / CONFIG, required=False).get("architectures")
    library_class = read_object(folder / LIBRARY_CONFIG, required=False).get("model_type", "SentenceTransformer")
    if library_class != "SentenceTransformer" or CLASSIFIER in str(classes):
        return None
    return SentenceTexts(**text_settings(folder))


def text_settings(folder: Path) -> dict[str, Any]:
    """The attributes of `SentenceTexts`; raise InputError for a value that the library does not write."""
    settings = read_object(folder / TEXT_CONFIG, required=False)
    prompting = read_object(folder / LIBRARY_CONFIG, required=False)
    max_tokens = settings.get("max_seq_length")
    if max_tokens is not None and (type(max_tokens) is not int or max_tokens < 1):
        problem = "is not a positive whole number"
        raise invalid_entry(folder / TEXT_CONFIG, "max_seq_length", max_tokens, problem)
    file, prompts, default = folder / LIBRARY_CONFIG, prompting.get("prompts") or {}, prompting.get(DEFAULT_PROMPT)
    if not isinstance(prompts, dict) or not all(isinstance(text, str) for text in prompts.values()):
        raise invalid_entry(file, "prompts", prompts, "is not an object of names and texts")
    names = tuple(dict.fromkeys((*_USUAL_PROMPTS, *prompts)))
    if default is not None and default not in names:
        raise invalid_entry(file, DEFAULT_PROMPT, default, f"is not the name of a prompt ({', '.join(names)})")
    lower_case = bool(settings.get("do_lower_case", False))
    return {"max_tokens": max_tokens, "lower_case": lower_case, "prompts": prompts, "default_prompt": default}


def listed_modules(folder: Path) -> list[tuple[str, str]]:
    """The class and path of each module; empty where the file of modules is missing, damaged or of another program."""
    try:
        modules = read_json(folder / MODULES)
    except InputError:
        return []
    entries = [module for module in modules if isinstance(module, dict)] if isinstance(modules, list) else []
    return [(str(entry.get("type")).rpartition(".")[2], str(entry.get("path", ""))) for entry in entries]


def module_folders(folder: Path) -> tuple[str, ...]:
    """The paths in a folder of its modules, whichever these are; empty for a folder without modules."""
    paths = (PurePosixPath(path) for _, path in listed_modules(folder))
    return tuple(str(path) for path in paths if path.parts and not is_outside(path))


def is_outside(path: PurePosixPath) -> bool:
    """Whether a path that a model names leaves its folder."""
    return path.is_absolute() or ".." in path.parts


def invalid_entry(file: Path, name: str, value: object, problem: str) -> InputError:
    """The error of a key whose value the library does not write, e.g. because it "is not a text"."""
    text = f"{name} ({value!r:.40}) {problem}; correct it or copy the file again"
    return InputError.of_file(file, text, ErrorCode.FILE_UNREADABLE, field=name, value=value)
