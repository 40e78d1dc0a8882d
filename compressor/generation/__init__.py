"""Generation of text: graphs with key/value caches, sessions that keep them, and transformers' own `generate`."""

from pathlib import Path

ENCODER, DECODER = "encoder.onnx", "decoder.onnx"
"""The graphs of a folder that generates; only an encoder-decoder has an encoder."""
FINER = "compressor.weights.finer"
"""Key of the metadata of an engine: JSON list of the weights in the next finer precision."""
WEIGHTS = "compressor.weights"
"""Entry of the metadata of an engine with the precision of its weights."""


def engine_of(graph: Path) -> Path:
    """The file of ONNX Runtime's engine of a graph, beside it."""
    return graph.with_name(f"{graph.stem}.engine.onnx")
