"""Generation of text: graphs with key/value caches, sessions that keep them, and transformers' own `generate`."""

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path

ENCODER, DECODER = "encoder.onnx", "decoder.onnx"
"""The graphs of a folder that generates; only an encoder-decoder has an encoder."""
FINER = "compressor.weights.finer"
"""Key of the metadata of an engine: JSON list of the weights in the next finer precision."""
WEIGHTS = "compressor.weights"
"""Entry of the metadata of an engine with the precision of its weights."""
PLAN = "compressor.plan"
"""Entry of the metadata of a graph without what a plan drops, and of its engine: the digest of the plan."""


def engine_of(graph: Path) -> Path:
    """The file of ONNX Runtime's engine of a graph, beside it."""
    return graph.with_name(f"{graph.stem}.engine.onnx")


def plan_digest(kept: Mapping[str, Iterable[int]]) -> str:
    """A digest of a plan.

    Args:
        kept: name of a group -> the units that are kept.
    """
    content = json.dumps(sorted((name, sorted(units)) for name, units in kept.items()))
    return f"sha256:{hashlib.sha256(content.encode()).hexdigest()}"
