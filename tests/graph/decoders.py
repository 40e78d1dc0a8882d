"""Tiny decoders with key/value caches as files: as Optimum names them, and as genai's builder writes them."""

from __future__ import annotations

import functools
import shutil
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
import transformers as hf
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from tests import folders
from tests.generation.exported import random_model

_FOLDER = tempfile.TemporaryDirectory(prefix="decoders-")
_SIZES: dict[str, Any] = {"vocab_size": 25, "bos_token_id": 2, "eos_token_id": 3, "pad_token_id": 0}
MODELS: Mapping[str, Callable[[], PreTrainedModel]] = {
    # As many heads as texts, and as many neurons as tokens.
    "gpt2": lambda: hf.GPT2LMHeadModel(
        hf.GPT2Config(**_SIZES, n_embd=24, n_layer=1, n_head=2, n_positions=32, n_inner=25)
    ),
    "qwen3": lambda: hf.Qwen3ForCausalLM(
        hf.Qwen3Config(
            **_SIZES,
            hidden_size=20,
            intermediate_size=36,
            num_hidden_layers=2,
            num_attention_heads=6,
            num_key_value_heads=3,
            head_dim=8,
            max_position_embeddings=32,
            use_sliding_window=False,
        )
    ),
}


class _Steps(nn.Module):
    """A decoder with positional inputs, those of texts and then its caches, which are tensors."""

    def __init__(self, model: PreTrainedModel, texts: Sequence[str]) -> None:
        super().__init__()
        self.model, self.texts = model, texts

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        past = inputs[len(self.texts) :]
        result = self.model(
            **dict(zip(self.texts, inputs, strict=False)),
            past_key_values=DynamicCache(list(zip(past[::2], past[1::2], strict=True))),
            use_cache=True,
        )
        layers = result.past_key_values.layers
        return (result.logits, *(tensor for layer in layers for tensor in (layer.keys, layer.values)))


def model(name: str) -> PreTrainedModel:
    """A random model, whose tokens vary."""
    return random_model(MODELS[name])


def trace(network: PreTrainedModel, path: Path, *, masked: bool = True) -> Path:
    """The graph with Optimum's names that torch's older exporter traces; `masked`: it reads masks and positions."""
    config = network.config
    heads = getattr(config, "num_key_value_heads", config.num_attention_heads)
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    names = [f"{layer}.{part}" for layer in range(config.num_hidden_layers) for part in ("key", "value")]
    caches = {f"past_key_values.{name}": torch.randn(2, heads, 5, width) for name in names}
    mask = torch.ones(2, 8, dtype=torch.long)
    mask[1, :2] = 0
    texts = {"input_ids": torch.randint(5, 25, (2, 3), generator=torch.Generator().manual_seed(0))}
    if masked:
        texts |= {"attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(min=0)[:, 5:]}
    network.set_attn_implementation("eager")
    axes = {name: {0: "batch_size", 1: "sequence_length"} for name in ("input_ids", "position_ids", "logits")}
    axes["attention_mask"] = {0: "batch_size", 1: "past_sequence_length + sequence_length"}
    axes |= {name: {0: "batch_size", 2: "past_sequence_length"} for name in caches}
    axes |= {f"present.{name}": {0: "batch_size", 2: "past_sequence_length + sequence_length"} for name in names}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            _Steps(network, tuple(texts)).eval(),
            (*texts.values(), *caches.values()),
            path,
            input_names=[*texts, *caches],
            output_names=["logits", *(f"present.{name}" for name in names)],
            dynamic_axes=axes,
            opset_version=14,
            dynamo=False,
        )
    return path


def halve(path: Path) -> Path:
    """The file in half precision, with its inputs and outputs."""
    from onnxruntime.transformers.float16 import convert_float_to_float16

    onnx.save(convert_float_to_float16(onnx.load(path), max_finite_val=65504.0), path)
    return path


def build_grouped(path: Path, dtype: type = np.float32, *, layers: int = 2) -> Path:
    """A Llama with 4 query and 2 key/value heads of width 16, in the form of genai's builder."""
    hidden, width, heads, kv_heads, neurons, vocabulary, positions = 24, 16, 4, 2, 40, 25, 32
    rng, nodes, weights = np.random.default_rng(0), list[onnx.NodeProto](), list[onnx.TensorProto]()
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))

    def constant(name: str, values: Any, like: Any = None) -> str:
        weights.append(numpy_helper.from_array(np.asarray(values, like or dtype), name))
        return name

    def add(op: str, inputs: list[str], outputs: list[str], domain: str = "", **attributes: Any) -> str:
        nodes.append(helper.make_node(op, inputs, outputs, f"/{outputs[0]}", domain=domain, **attributes))
        return outputs[0]

    def linear(name: str, source: str, rows: int, columns: int) -> str:
        weight = constant(f"{name}.weight", rng.normal(0, 0.3, (rows, columns)))
        return add("MatMul", [source, weight], [f"{name}/output"])

    angles = np.arange(positions)[:, None] / 100.0 ** (np.arange(width // 2) / (width // 2))
    tables = [constant("cos_cache", np.cos(angles)), constant("sin_cache", np.sin(angles))]
    unit = constant("one", [1], np.int64)
    last = add("Sub", [add("ReduceSum", ["attention_mask", unit], ["tokens"], keepdims=0), unit], ["last"])
    last = add("Cast", [last], ["last_32"], to=TensorProto.INT32)
    total = add("Gather", [add("Shape", ["attention_mask"], ["sizes"]), unit], ["total"], axis=0)
    total = add("Cast", [total], ["total_32"], to=TensorProto.INT32)
    embedding = constant("model.embed_tokens.weight", rng.normal(0, 0.5, (vocabulary, hidden)))
    stream, added = add("Gather", [embedding, "input_ids"], ["embedded"]), ""
    shapes = {"past_key_values": "past_sequence_length", "present": "total_sequence_length"}
    caches: dict[str, list[onnx.ValueInfoProto]] = {name: [] for name in shapes}

    def norm(name: str) -> str:
        nonlocal stream, added
        scale, options = constant(f"{name}.weight", rng.uniform(0.5, 1.5, hidden)), dict[str, Any](epsilon=1e-5)
        if not added:
            return add("SimplifiedLayerNormalization", [stream, scale], [f"{name}/output"], axis=-1, **options)
        outputs, read = [f"{name}/output", "", "", f"{name}/sum"], [stream, added, scale]
        normed = add("SkipSimplifiedLayerNormalization", read, outputs, "com.microsoft", **options)
        stream, added = outputs[3], ""
        return normed

    for layer in range(layers):
        name = f"model.layers.{layer}"
        normed = norm(f"{name}.input_layernorm")
        sizes = {"q": heads * width, "k": kv_heads * width, "v": kv_heads * width}
        projected = [linear(f"{name}.attn.{part}_proj", normed, hidden, size) for part, size in sizes.items()]
        pairs = [[f"{side}.{layer}.{part}" for part in ("key", "value")] for side in shapes]
        for side, pair in zip(shapes, pairs, strict=True):
            axes: list[Any] = ["batch_size", kv_heads, shapes[side], width]
            caches[side] += [helper.make_tensor_value_info(each, kind, axes) for each in pair]
        read = [*projected, *pairs[0], last, total, *tables]
        options: dict[str, Any] = {"num_heads": heads, "kv_num_heads": kv_heads, "do_rotary": 1}
        attended = add("GroupQueryAttention", read, [f"{name}.attn/output", *pairs[1]], "com.microsoft", **options)
        added = linear(f"{name}.attn.o_proj", attended, heads * width, hidden)
        normed = norm(f"{name}.post_attention_layernorm")
        gate, up = (linear(f"{name}.mlp.{part}_proj", normed, hidden, neurons) for part in ("gate", "up"))
        active = add("Mul", [gate, add("Sigmoid", [gate], [f"{name}.mlp.sigmoid"])], [f"{name}.mlp.active"])
        product = add("Mul", [active, up], [f"{name}.mlp.product"])
        added = linear(f"{name}.mlp.down_proj", product, neurons, hidden)
    normed = norm("model.norm")
    weight = constant("lm_head.weight", rng.normal(0, 0.3, (hidden, vocabulary)))
    add("MatMul", [normed, weight], ["logits"])
    ids = helper.make_tensor_value_info("input_ids", TensorProto.INT64, ["batch_size", "sequence_length"])
    mask = helper.make_tensor_value_info("attention_mask", TensorProto.INT64, ["batch_size", "total_sequence_length"])
    logits = helper.make_tensor_value_info("logits", kind, ["batch_size", "sequence_length", vocabulary])
    graph = helper.make_graph(
        nodes, "decoder", [ids, mask, *caches["past_key_values"]], [logits, *caches["present"]], weights
    )
    imports = [helper.make_opsetid("", 18), helper.make_opsetid("com.microsoft", 1)]
    onnx.save(helper.make_model(graph, opset_imports=imports, ir_version=9), path)
    return path


FILES: Mapping[str, Callable[[Path], Path]] = {
    "gpt2": lambda path: trace(model("gpt2"), path),
    "qwen3": lambda path: trace(model("qwen3"), path),
    "gpt2, half": lambda path: halve(trace(model("gpt2"), path)),
    "unmasked": lambda path: trace(model("qwen3"), path, masked=False),
    "grouped": build_grouped,
    "grouped, half": lambda path: build_grouped(path, np.float16),
}
"""Name -> writes a file."""


@functools.cache
def decoder(name: str) -> Path:
    """A file beside a tokenizer; beside a configuration too where it was exported from a model."""
    folder = Path(_FOLDER.name) / name.replace(", ", "-")
    folder.mkdir()
    folders.tokenizer().save_pretrained(folder)
    if name in MODELS:
        network = model(name)
        network.config.architectures = [type(network).__name__]
        network.config.save_pretrained(folder)
        network.generation_config.save_pretrained(folder)
    return FILES[name](folder / "model.onnx")


def copy(name: str, folder: Path) -> Path:
    """The file in a folder of its own."""
    return shutil.copytree(decoder(name).parent, folder) / "model.onnx"
