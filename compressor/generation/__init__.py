"""Generation of text: graphs with key/value caches, sessions that keep them, and transformers' own `generate`."""

ENCODER, DECODER = "encoder.onnx", "decoder.onnx"
"""The graphs of a folder that generates; only an encoder-decoder has an encoder."""
