"""The equations of the papers in NumPy, and reading a text in segments in PyTorch."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from compressor.models import SegmentForCausalLM, TransformerXLForCausalLM


def read_in_segments(model: SegmentForCausalLM, text: Tensor, length: int) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Logits of a text read in segments of `length`, and the memories at its end."""
    memories: Any = None
    logits = []
    for segment in text.split(length, dim=1):
        outputs: Any = model(segment, memories=memories)
        memories = outputs.memories
        logits.append(outputs.logits)
    return torch.cat(logits, dim=1), memories


def hidden_states(model: SegmentForCausalLM, text: Tensor, memories: list[np.ndarray]) -> np.ndarray:
    """Hidden states after the layers `[batch, segment, hidden]`, in float64 and one query, head and key at a time."""
    weights = {name: value.double().numpy() for name, value in model.model.state_dict().items()}
    config = model.config
    d, w = config.hidden_size, config.head_dim or 0
    states = weights["embed_tokens.weight"][text.numpy()] * math.sqrt(d)

    def norm(x: np.ndarray) -> np.ndarray:
        return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + config.layer_norm_eps)

    def encoding(distance: int) -> np.ndarray:
        angles = distance / 10000 ** (np.arange(0, d, 2) / d)
        return np.concatenate([np.sin(angles), np.cos(angles)])

    for layer in range(config.num_hidden_layers):
        site = {name.split("attention.")[1]: value for name, value in weights.items() if f"layers.{layer}.att" in name}
        past = memories[layer].shape[1]
        added = np.zeros_like(states)
        for b, i, h in np.ndindex(states.shape[0], states.shape[1], config.num_attention_heads):
            rows = slice(h * w, (h + 1) * w)
            context = norm(np.concatenate([memories[layer][b], states[b]]))
            query = site["q_proj.weight"][rows] @ context[past + i]
            scores, values = [], []
            for j in range(i + past + 1):
                key = site["k_proj.weight"][rows] @ context[j]
                position = site["r_proj.weight"][rows] @ encoding(i + past - j)
                content = (query + site["content_bias"][h]) @ key
                scores.append((content + (query + site["position_bias"][h]) @ position) / math.sqrt(w))
                values.append(site["v_proj.weight"][rows] @ context[j])
            for n in range(getattr(config, "num_persistent", 0)):
                key = site["persistent_key"][h, n] * math.sqrt(w)
                scores.append((query + site["content_bias"][h]) @ key / math.sqrt(w))
                values.append(site["persistent_value"][h, n] * math.sqrt(config.num_persistent))
            share = np.exp(np.array(scores) - max(scores))
            added[b, i] += site["o_proj.weight"][:, rows] @ (share / share.sum() @ np.array(values))
        states = states + added + site["o_proj.bias"]
        if isinstance(model, TransformerXLForCausalLM):
            names = ("1.weight", "1.bias", "4.weight", "4.bias")
            first, first_bias, second, second_bias = (weights[f"layers.{layer}.feed_forward.{name}"] for name in names)
            states = states + np.maximum(norm(states) @ first.T + first_bias, 0) @ second.T + second_bias
    return norm(states)
