"""`genai_config.json`, with which onnxruntime-genai loads the engine of a decoder.

Version 0.18 reads the layers, their numbers of key/value heads and their head widths from the inputs of the graph, so
layers may differ; the entries of the file are for earlier versions. If the engine writes into the memory of its caches,
past and present tensors share memory for the maximum length of a text, up to 1 GiB.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import onnx_ir as ir

from compressor.targets.caches import DECODER, ENCODER, GeneratingModel
from compressor.targets.onnxruntime.sessions import engine_of
from compressor.workdir import write_json
from graph_passes import load
from graph_passes.flow.caches import IN_PLACE, bytes_per_token, read_caches

FILE, LOGITS = "genai_config.json", "logits"
_KEY = re.compile(r"past_key_values\.(\d+)\.key")
_UNBOUNDED = 2**15
"""Length of texts where the model has no maximum."""
_RESERVED = 2**30
"""Maximum number of bytes of the caches of a text that the library allocates when it begins; beyond it, caches grow."""


def write_genai_config(folder: Path, model: GeneratingModel) -> str | None:
    """Write the file for the engine of a folder.

    Returns:
        Why onnxruntime-genai cannot load the engine, in which case there is no file; None: it can.
    """
    if (folder / ENCODER).is_file() or model.config.get("is_encoder_decoder"):
        return "it runs no encoder-decoder models from these graphs"
    path = engine_of(folder / DECODER)
    graph = load(path)
    keys = {
        int(match[1]): value
        for value, present in read_caches(graph).items()
        if present is not None and (match := _KEY.fullmatch(str(value.name)))
    }
    if not keys:
        return "no layer keeps keys and values under the names past_key_values.N.key"
    if not model.config:
        return "the folder of the model has no config.json, which names the tokens that begin and end a text"
    longest = model.positions or _UNBOUNDED
    reserves = IN_PLACE in graph.metadata_props and bytes_per_token(graph) * longest <= _RESERVED
    # Greedy search, which the application may change.
    search = {"do_sample": False, "num_beams": 1, "max_length": longest, "past_present_share_buffer": reserves}
    write_json(folder / FILE, {"model": _model(path.name, graph, keys, model), "search": search})
    return None


def _model(file: str, graph: ir.Model, keys: Mapping[int, ir.Value], model: GeneratingModel) -> dict[str, Any]:
    """What the file says of the model; `keys` has the number of each layer, and its cache of keys."""
    shape = next(iter(keys.values())).shape
    logits = next(value for value in graph.graph.outputs if value.name == LOGITS)
    assert shape is not None
    assert logits.shape is not None
    heads, width = shape[1], shape[3]
    assert isinstance(heads, int)
    assert isinstance(width, int)
    inputs = {str(value.name) for value in graph.graph.inputs}
    names = {name: name for name in ("input_ids", "attention_mask", "position_ids") if name in inputs}
    tokens = {name: model.token(name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    if tokens["pad_token_id"] is None:
        ends = tokens["eos_token_id"]
        tokens["pad_token_id"] = ends[0] if isinstance(ends, list) else ends
    return {
        "type": "decoder",
        "vocab_size": logits.shape[-1],
        "context_length": model.positions or _UNBOUNDED,
        **{name: token for name, token in tokens.items() if token is not None},
        "decoder": {
            "filename": file,
            "session_options": {"log_id": "onnxruntime-genai", "provider_options": []},
            "num_hidden_layers": len(keys),
            "num_attention_heads": heads,
            "num_key_value_heads": heads,
            "head_size": width,
            "hidden_size": model.config.get("hidden_size") or model.config.get("n_embd") or heads * width,
            "inputs": {
                **names,
                "past_key_names": "past_key_values.%d.key",
                "past_value_names": "past_key_values.%d.value",
            },
            "outputs": {
                LOGITS: LOGITS,
                "present_key_names": "present.%d.key",
                "present_value_names": "present.%d.value",
            },
        },
    }
