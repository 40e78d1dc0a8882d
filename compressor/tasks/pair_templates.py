"""Pairs as a language model reads them: a query and a document in the chat template of its tokenizer."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from compressor.errors import ErrorCode, InputError
from compressor.model_folder import ModelFolder
from compressor.models.causal_reranker import Answers, CausalReranker
from compressor.silence_libraries import one_line, quiet_transformers

_FILLERS = ("0", "1 2 3 4")
"""Texts of which no tokens at the end are equal; see `PairTemplate.suffix`."""


class PairTemplate:
    """The chat template of a tokenizer that has the roles `query` and `document`, as sentence-transformers uses it.

    Args:
        tokenizer: the tokenizer.
        answers: the arguments and the system message of the template.
        path: the model folder, for error messages.

    Raises:
        InputError: the template fails, or leaves out the query or the document.
    """

    def __init__(self, tokenizer: Any, answers: Answers, path: Any) -> None:
        self._tokenizer, self._answers = tokenizer, answers
        self._is_structured = False
        problem = self._problem()
        if problem is not None:
            self._is_structured = True
            if self._problem() is not None:
                raise InputError(
                    f"{path}: the chat template has no place for a query and a document ({problem}); save a template"
                    " with these roles in chat_template.jinja",
                    code=ErrorCode.UNSUPPORTED_MODEL,
                    path=path,
                    field="chat_template",
                )

    @classmethod
    def of(cls, folder: ModelFolder) -> PairTemplate | None:
        """The template of a folder; None for a model that reads pairs as its tokenizer joins them."""
        if not isinstance(folder.model, CausalReranker) or not getattr(folder.processor, "chat_template", None):
            return None
        return cls(folder.processor, folder.model.answers, folder.path)

    @functools.cached_property
    def suffix(self) -> list[int]:
        """The tokens after the content, which stay where a row is cut: the last ones decide the score."""
        first, second = (self._ids(text, text) for text in _FILLERS)
        pairs = zip(reversed(first), reversed(second), strict=False)
        count = next((count for count, (left, right) in enumerate(pairs) if left != right), 0)
        return first[len(first) - count :]

    def encode(self, queries: Sequence[str], documents: Sequence[str], longest: int) -> tuple[list[list[int]], int]:
        """The tokens of each pair, at most `longest`, and the number of pairs that are cut before their suffix."""
        rows = [self._ids(query, document) for query, document in zip(queries, documents, strict=True)]
        suffix = self.suffix[-longest:]
        cut = [[*ids[: longest - len(suffix)], *suffix] if len(ids) > longest else ids for ids in rows]
        return cut, sum(len(ids) > longest for ids in rows)

    def _ids(self, query: str, document: str) -> list[int]:
        text = self._render(query, document)
        ids: list[int] = self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return ids

    def _render(self, query: str, document: str) -> str:
        contents = {"system": self._answers.prompt, "query": query, "document": document}
        messages = [
            {"role": role, "content": [{"type": "text", "text": text}] if self._is_structured else text}
            for role, text in contents.items()
            if text or role != "system"
        ]
        with quiet_transformers():
            text: str = self._tokenizer.apply_chat_template(messages, tokenize=False, **self._answers.template)
        return text

    def _problem(self) -> str | None:
        """Why the template cannot hold a pair; None: it can."""
        query, document = "a query of a pair", "its other document"
        try:
            text = self._render(query, document)
        except Exception as error:  # a template is a program of the folder
            return one_line(error)
        missing = [name for name, part in (("query", query), ("document", document)) if part not in text]
        return f"it leaves out the {missing[0]}" if missing else None
