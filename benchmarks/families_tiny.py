"""A tiny random model of any family of transformers, made from the configuration class of the family.

Sizes follow from the names of the fields, by the first rule that fits; `EXCEPTIONS` has what no rule can know.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES

VOCABULARY, LAYERS, HEADS, HEAD_DIM, WIDTH, INNER = 99, 2, 4, 8, 32, 48
IMAGE, PATCH, POSITIONS = 32, 8, 96

Values = Mapping[str, Any]
Rule = tuple[str, Callable[[int], int]]


def at_most(limit: int) -> Callable[[int], int]:
    return lambda value: min(value, limit)


def exactly(size: int) -> Callable[[int], int]:
    return lambda value: size if value > 0 else value


RULES: tuple[Rule, ...] = (
    (r".*(token_id|token_index|token_ids|_token|_index)", lambda value: value % VOCABULARY if value > 0 else value),
    (r"(max_window_layers|num_feat_extract_layers|type_vocab_size|.*num_groups|num_channels)", lambda value: value),
    (r"(num_kv_shared_layers|num_nextn_predict_layers|num_hash_layers)", exactly(0)),
    (r"(first_k_dense_replace|num_dense_layers|n_dense_layers)", at_most(1)),
    (r"(num_key_value_heads|num_kv_heads|n_head_kv|kv_n_heads|.*_kv_heads|.*num_key_value_heads)", at_most(2)),
    (r"(attention_window|block_size|chunk_size|.*_chunk_size|sliding_window|local_attention)", at_most(4)),
    (r".*vocab_size", at_most(VOCABULARY)),
    (r".*codebook_size|num_embeddings", at_most(16)),
    (r"(.*_)?(num_|n_)?(hidden_|attention_|encoder_|decoder_)?(layers?|blocks)|.*n_layers?|depth|.*_depth", at_most(2)),
    (r".*(qk_rope_head_dim)", exactly(HEAD_DIM // 2)),
    (r".*(qk_nope_head_dim)", exactly(HEAD_DIM // 2)),
    (r".*head_dim|dim_head|.*_dim_head|d_kv|attention_head_size|.*_d_head|.*head_size", exactly(HEAD_DIM)),
    (r".*heads?|n_heads_.*", at_most(HEADS)),
    (r".*experts_per_tok(en)?|moe_topk|moe_k|top_k|topk_group|n_group|num_expert_group", at_most(2)),
    (r".*experts.*", at_most(4)),
    (r".*(intermediate|ffn|inner|mlp)_?(size|dim|hidden_size|hidden_dim)|d_ff|n_inner|.*ffn_hidden_size", exactly(INNER)),
    (r".*rank", exactly(16)),
    (r".*(hidden|embed|embedding|projection|proj|d|out|output|input|model|state|channel)_?(size|dim|model|channels)"
     r"|d_model|n_embd|dim|.*_dim|.*hidden_size.*|d_embed", exactly(WIDTH)),
    (r"max_position_embeddings|n_positions|max_.*positions|max_seq_len|n_ctx|seq_length|max_length", at_most(POSITIONS)),
    (r"(.*_)?image_size|.*_resolution|img_size", at_most(IMAGE)),
    (r"patch_size|.*_patch_size", at_most(PATCH)),
    (r"window_size", at_most(4)),
    (r"num_queries|num_query_tokens|.*num_latents|num_denoising", at_most(8)),
)  # fmt: skip

LIST_RULES: tuple[Rule, ...] = (
    (r"depths|.*_depths|num_blocks|encoder_layers|layers", at_most(1)),
    (r".*heads", exactly(HEADS)),
    (r".*hidden_sizes|embed_dims?|.*channels|dims|conv_dim|tdnn_dim|.*_dims?", exactly(WIDTH)),
    (r".*ind(ex|ices|exes)|layers_.*", at_most(LAYERS - 1)),
    (r"image_size|img_size", at_most(IMAGE)),
    (r"patch_size", at_most(PATCH)),
)

EXCEPTIONS: dict[str, dict[str, Any]] = {}
"""Model type -> values that no rule can know."""


def tiny_config(config_class: type[PretrainedConfig], default: PretrainedConfig | None = None) -> PretrainedConfig:
    """A configuration of the class with small sizes, from those of `default`, or of a default instance."""
    default = default or config_class()
    return config_class(**dict(_tiny_values(default)), **EXCEPTIONS.get(config_class.model_type, {}))


def _tiny_values(config: PretrainedConfig) -> Iterator[tuple[str, Any]]:
    exceptions = EXCEPTIONS.get(config.model_type, {})
    fields = {field.name for field in dataclasses.fields(config)} if dataclasses.is_dataclass(config) else None
    layers = [value for name, value in vars(config).items() if _is_layer_count(name, value)]
    for name, value in vars(config).items():
        if name.startswith("_") or name in exceptions or name in ("id2label", "label2id"):
            continue
        if fields is not None and name not in fields:
            continue
        if isinstance(value, PretrainedConfig):
            yield name, tiny_config(type(value), value)
        elif type(value) is int:
            yield name, _apply(RULES, name, value)
        elif isinstance(value, (list, tuple)) and value:
            yield name, type(value)(_tiny_list(name, list(value), layers))
        elif name == "rope_parameters" and isinstance(value, dict):
            yield name, _tiny_rope(value)


def _is_layer_count(name: str, value: Any) -> bool:
    return type(value) is int and re.fullmatch(r"num_hidden_layers|num_layers|n_layers?|depth", name) is not None


def _tiny_list(name: str, values: list[Any], layers: list[int]) -> list[Any]:
    if len(values) in layers and len(values) > LAYERS and not isinstance(values[0], (list, tuple)):
        kinds = list(dict.fromkeys(values))[:LAYERS]
        return [*kinds, *kinds[-1:] * (LAYERS - len(kinds))]
    if all(type(value) is int for value in values):
        small = [_apply(LIST_RULES, name, value) for value in values]
        return sorted(set(small)) if re.fullmatch(r".*ind(ex|ices|exes)", name) else small
    return values


def _tiny_rope(value: dict[str, Any]) -> dict[str, Any]:
    return {
        name: [2, 1, 1] if name == "mrope_section" else _tiny_rope(part) if isinstance(part, dict) else part
        for name, part in value.items()
    }


def _apply(rules: tuple[Rule, ...], name: str, value: int) -> int:
    return next((change(value) for pattern, change in rules if re.fullmatch(pattern, name)), value)


_AUTO_CLASSES = (
    "SEQ_TO_SEQ_CAUSAL_LM",
    "MASKED_LM",
    "CAUSAL_LM",
    "SPEECH_SEQ_2_SEQ",
    "IMAGE_TEXT_TO_TEXT",
    "CTC",
    "IMAGE_CLASSIFICATION",
    "OBJECT_DETECTION",
    "AUDIO_CLASSIFICATION",
)
"""Heads that are tried in this order before the model without a head."""


def model_class(model_type: str, config_class: type[PretrainedConfig]) -> type[PreTrainedModel] | None:
    """The model class of a family: that of the first head that it has, else one that reads its configuration."""
    names = [f"MODEL_FOR_{head}_MAPPING_NAMES" for head in _AUTO_CLASSES] + ["MODEL_MAPPING_NAMES"]
    names += sorted(name for name in vars(modeling_auto) if re.fullmatch(r"MODEL_FOR_.*NAMES", name))
    for name in names:
        mapped = getattr(modeling_auto, name).get(model_type)
        if mapped is not None:
            import transformers

            first = mapped if isinstance(mapped, str) else mapped[0]
            if hasattr(transformers, first):
                return getattr(transformers, first)
    module = importlib.import_module(config_class.__module__.replace(".configuration_", ".modeling_"))
    classes = [
        cls
        for _, cls in inspect.getmembers(module, inspect.isclass)
        if issubclass(cls, PreTrainedModel)
        and cls.config_class is config_class
        and cls.__module__ == module.__name__
        and not cls.__name__.endswith("PreTrainedModel")
    ]
    return min(classes, key=lambda cls: (not cls.__name__.endswith("Model"), len(cls.__name__)), default=None)


def model_types() -> list[str]:
    """All model types of the installed transformers."""
    return sorted(CONFIG_MAPPING_NAMES)


def tiny_model(model_type: str, seed: int = 0) -> PreTrainedModel:
    """A random model of a family in evaluation mode."""
    config_class = CONFIG_MAPPING[model_type]
    cls = model_class(model_type, config_class)
    if cls is None:
        raise ValueError("no model class reads this configuration")
    torch.manual_seed(seed)
    model = cls(tiny_config(config_class)).eval()
    # With usual weights, a head of a random model changes the output by less than rounding does.
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.2)
        elif name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.1)
    return model.float()
