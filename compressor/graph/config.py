"""The configuration of a graph: the entries of a `config.json` that tasks read, without transformers."""

from __future__ import annotations

from typing import Any

_LIMITS = ("max_position_embeddings", "n_positions", "max_sequence_length", "seq_length")
"""Entries of families of transformers with the number of positions, the most frequent first."""


class GraphConfig:
    """The entries of a `config.json`, completed from the graph, as attributes.

    Those that every configuration has are set: `model_type`, `num_labels`, `id2label`, `label2id`, `problem_type`,
    `pad_token_id`, `is_encoder_decoder` and `architectures`.

    Args:
        graph: hash of the operators of the graph.
        entries: entries of a configuration of transformers, e.g. `vocab_size`.
    """

    max_position_embeddings: int

    def __init__(self, graph: str = "", **entries: Any) -> None:
        self.graph = graph
        self.model_type, self.pad_token_id = "onnx", 0
        self.is_encoder_decoder, self.problem_type, self.architectures = False, None, None
        known = {name: value for name, value in entries.items() if value is not None}
        limit = next((known[name] for name in _LIMITS if name in known), None)
        if limit is not None:
            known["max_position_embeddings"] = limit
        classes, count = known.pop("id2label", None), known.pop("num_labels", 2)
        known.pop("label2id", None)
        named = classes or {number: f"LABEL_{number}" for number in range(count)}  # as transformers names classes
        self.id2label: dict[int, str] = {int(number): str(name) for number, name in named.items()}
        self.label2id = {name: number for number, name in self.id2label.items()}
        self.__dict__.update(known)

    @property
    def num_labels(self) -> int:
        """Number of classes, or of outputs."""
        return len(self.id2label)

    def get_text_config(self, decoder: bool | None = None) -> GraphConfig:
        """The configuration itself: a graph has no parts."""
        return self

    def to_dict(self) -> dict[str, Any]:
        """The entries by name."""
        return dict(vars(self))
