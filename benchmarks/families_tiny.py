"""A tiny random model of any family of transformers, made from the configuration class of the family.

Sizes follow from the names of the fields, by the first rule that fits; `EXCEPTIONS` has what no rule can know.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PretrainedConfig, PreTrainedModel, ResNetConfig
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES

VOCABULARY, LAYERS, HEADS, HEAD_DIM, WIDTH, INNER = 99, 2, 4, 8, 32, 48
IMAGE, PATCH, POSITIONS = 64, 8, 128

Rule = tuple[str, Callable[[int], int]]


def at_most(limit: int) -> Callable[[int], int]:
    """A value, but at most the limit."""
    return lambda value: min(value, limit)


def exactly(size: int) -> Callable[[int], int]:
    """The size in place of any positive value."""
    return lambda value: size if value > 0 else value


RULES: tuple[Rule, ...] = (
    (r".*(token_id|token_index|token_ids|_token|_index)", lambda value: value % VOCABULARY if value > 0 else value),
    (r"num_groups", at_most(HEADS)),
    (r"num_pos_feats", exactly(WIDTH // 2)),
    (r"(max_window_layers|num_feat_extract_layers|type_vocab_size|.*num_groups|num_channels)", lambda value: value),
    (r"(num_kv_shared_layers|num_nextn_predict_layers|num_hash_layers)", exactly(0)),
    (r"(first_k_dense_replace|num_dense_layers|n_dense_layers)", at_most(1)),
    (r".*(key_value_heads|kv_heads|head_kv|kv_n_heads)", at_most(2)),
    (r"query_dim|in_channels|out_channels", lambda value: value),
    (r"(attention_window|block_size|chunk_size|.*_chunk_size|sliding_window|local_attention)", at_most(4)),
    (r"(mamba_)?n_groups|ngroups", at_most(1)),
    (r".*vocab_size", at_most(VOCABULARY)),
    (r".*codebook_size|num_embeddings", at_most(16)),
    (r"(.*_)?(num_|n_)?(hidden_|attention_|encoder_|decoder_)?(layers?|blocks)|.*n_layers?|depth|.*_depth", at_most(2)),
    (r"qk_rope_head_dim|qk_nope_head_dim|rotary_dim", exactly(HEAD_DIM // 2)),
    (r"mamba_d_head|mamba_head_dim", exactly(2 * WIDTH // HEADS)),
    (r"mamba_d_ssm", exactly(2 * WIDTH)),
    (r"context_size", at_most(8)),
    (r".*head_dim|dim_head|.*_dim_head|d_kv|attention_head_size|(.*_)?d_head|.*head_size", exactly(HEAD_DIM)),
    (r".*heads?|n_heads_.*", at_most(HEADS)),
    (r".*experts_per_tok(en)?|moe_topk|moe_k|top_k|topk_group|n_group|num_expert_group", at_most(2)),
    (r".*experts.*", at_most(4)),
    (r".*(intermediate|ffn|inner|mlp)_?(hidden_)?(size|dim)|d_ff|n_inner|.*ffn_hidden_size", exactly(INNER)),
    (r".*rank", exactly(16)),
    (r".*(hidden|embed|embedding|projection|proj|d|out|output|input|model|state|channel)_?(size|dim|model|channels)"
     r"|d_model|n_embd|dim|.*_dim|.*hidden_size.*|d_embed|upsample_groups", exactly(WIDTH)),
    (r"original_max_position_embeddings", at_most(POSITIONS // 4)),
    (r"max_position_embeddings|n_positions|max_.*positions|max_seq_len|n_ctx|.*_length", at_most(POSITIONS)),
    (r"(.*_)?image_size|.*_resolution|img_size", at_most(IMAGE)),
    (r"patch_size|.*_patch_size", at_most(PATCH)),
    # Windows of more than 32 are counted in pixels, others in patches.
    (r"window_size", lambda value: min(value, 2) if value <= 32 else 4 * PATCH),
    (r"num_queries|num_query_tokens|.*num_latents|num_denoising", at_most(8)),
)  # fmt: skip
"""(Pattern of a field's name, its small value from the usual one), for whole numbers."""

LIST_RULES: tuple[Rule, ...] = (
    (r"depths|.*_depths|num_blocks|encoder_layers|layers|blocks_per_stage", at_most(1)),
    (r".*heads(_per_stage)?", exactly(HEADS)),
    (
        r".*hidden_sizes|embed_dims?|dims|conv_dim|tdnn_dim|.*_dims?|.*_dim_per_stage|.*_channel_list|decoder_in_channels",
        exactly(WIDTH),
    ),
    (r"window_size_per_stage", at_most(2)),
    (r".*ind(ex|ices|exes)|layers_.*", at_most(LAYERS - 1)),
    (r"image_size|img_size", at_most(IMAGE)),
    (r"patch_size", at_most(PATCH)),
)
"""The same for each number of a list."""

DEFAULTS: dict[str, Any] = {
    "head_dim": HEAD_DIM,
    "vocab_size": VOCABULARY,
    "num_key_value_heads": HEADS,
    "layer_types": ["full_attention"] * LAYERS,
    "num_experts_per_tok": 2,
    "sliding_window": 4,
}
"""Values of fields that are None by default."""

RELATIVE_POSITIONS = {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_biased_input": False}
"""DeBERTa as published; its default configuration has no relative positions."""
EXCEPTIONS: dict[str, dict[str, Any]] = {
    "autoformer": {"prediction_length": 4, "num_time_features": 2},
    "bamba": {"attn_layer_indices": [1]},
    "blip-2": {"image_token_index": VOCABULARY - 1},
    "bridgetower_vision_model": {"hidden_size": 64},
    "chameleon": {"vocabulary_map": {"<image>": 5}},
    "cohere_compass_text": {
        "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 2, 1]}}
    },
    "deberta": RELATIVE_POSITIONS,
    "deberta-v2": {**RELATIVE_POSITIONS, "share_att_key": True, "position_buckets": 4, "norm_rel_ebd": "layer_norm"},
    "deepseek_ocr2_text": {"mlp_layer_types": ["dense", "sparse"]},
    "deformable_detr": {"d_model": 2 * WIDTH},  # its norms are over groups of more than one channel
    "diffusion_gemma_text": {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": INNER},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1, "topk_group": 1},
    "emu3": {"vocabulary_map": {"<image>": 5}},
    "esm": {"pad_token_id": 1, "mask_token_id": 3},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "informer": {"prediction_length": 4, "num_time_features": 2},
    "instructblip": {"image_token_index": VOCABULARY - 1},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1},
    "layoutlmv3": {"coordinate_size": 4, "shape_size": 8},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "lilt": {"hidden_size": 48},  # boxes have six coordinates, in layers of a quarter of the width
    "mamba2": {"head_dim": 16},
    "molmo2_adapter": {"vision_feature_layer": [0, 1]},
    "moonshine_streaming_encoder": {"sliding_windows": [[16, 4], [16, 0]]},
    "pix2struct_text_model": {"initializer_range": 0.02},
    "qwen4_exp_text": {
        "indexer_n_heads": HEADS, "indexer_kv_heads": 1, "indexer_head_dim": HEAD_DIM, "indexer_budget": 8,
        "indexer_compress_ratio": 4,
    },
    "recurrent_gemma": {"num_hidden_layers": 3},
    "reformer": {"axial_pos_embds_dim": (16, 16), "axial_pos_shape": (8, 16)},
    "sam2_vision_model": {"backbone_feature_sizes": [[16, 16], [8, 8], [4, 4]]},
    "t5gemma2_decoder": {"dropout_rate": 0.0},
    "t5gemma2_text": {"dropout_rate": 0.0},
    "time_series_transformer": {"prediction_length": 4, "num_time_features": 2},
    "xmod": {"default_language": "en_XX"},
}  # fmt: skip
"""Model type -> values that no rule can know."""


def tiny_config(config_class: type[PretrainedConfig], default: PretrainedConfig | None = None) -> PretrainedConfig:
    """A configuration of the class with small sizes, from those of `default`, or of a default instance."""
    default = default or config_class()
    values = dict(_tiny_values(default)) | _feature_maps(vars(default))
    return config_class(**values | EXCEPTIONS.get(config_class.model_type, {}))


def _tiny_values(config: PretrainedConfig) -> Iterator[tuple[str, Any]]:
    exceptions = EXCEPTIONS.get(config.model_type, {})
    fields = {field.name for field in dataclasses.fields(config)}
    values = vars(config)
    # A network of convolutions keeps its channels, which several fields repeat.
    has_parts = any(isinstance(value, PretrainedConfig) for value in values.values())
    is_convolutional = "num_channels" in values and not has_parts and not any("heads" in name for name in values)
    for name in sorted(fields & set(values) - set(exceptions) - _DERIVED):
        value = values[name]
        if is_convolutional and value is not None and not re.fullmatch(_DEPTHS, name):
            yield name, value
            continue
        if isinstance(value, PretrainedConfig):
            is_timm = value.model_type == "timm_backbone"
            yield name, _backbone(value) if is_timm else tiny_config(type(value), value)
        elif name.endswith(_SHARED_HEADS) and value == values.get(name.replace("key_value", "attention")):
            yield name, min(value, HEADS)
        elif type(value) is bool:  # a part may differ from the defaults of its class
            yield name, value
        elif type(value) is int:
            yield name, _apply(RULES, name, value)
        elif isinstance(value, (list, tuple)) and value:
            yield name, type(value)(_tiny_list(name, list(value), values.get("num_hidden_layers")))
        elif name == "rope_parameters" and isinstance(value, dict):
            yield name, _tiny_rope(value, _reads_mrope(type(config)))
        elif value is None and name in DEFAULTS:
            yield name, DEFAULTS[name]


def _backbone(config: PretrainedConfig) -> PretrainedConfig:
    """A network of convolutions of transformers in place of one of timm, with as many feature maps."""
    maps = [max(index, 1) for index in config.out_indices or (4,)]
    sizes: dict[str, Any] = {"hidden_sizes": [WIDTH] * 4, "depths": [1] * 4, "out_indices": maps}
    return ResNetConfig(embedding_size=WIDTH, layer_type="basic", **sizes)


_DERIVED = {"id2label", "label2id", "_out_features", "_out_indices"}
"""Fields that follow from others."""

_DEPTHS = r"(.*_)?depths|(.*_)?num_.*blocks|image_size|layers"
"""Fields of a network of convolutions that are made small."""


def _feature_maps(values: Mapping[str, Any]) -> dict[str, Any]:
    """As many feature maps as a backbone of layers returns by default, each of another layer."""
    indices = values.get("_out_indices") or ()
    if "num_hidden_layers" not in values:
        return {"out_indices": list(indices)} if len(indices) > 1 else {}
    layers = max(LAYERS, len(indices))
    last = list(range(1 + layers - len(indices), 1 + layers))
    return {"num_hidden_layers": layers, "out_indices": last} if len(indices) > 1 else {}


_SHARED_HEADS = "key_value_heads"
"""End of names of a number of key/value heads."""


def _reads_mrope(config_class: type[PretrainedConfig]) -> bool:
    """Whether positions of this family have three parts: time, height and width."""
    file = inspect.getsourcefile(config_class) or ""
    modeling = Path(file.replace("configuration_", "modeling_"))
    return modeling.is_file() and "mrope_section" in modeling.read_text(encoding="utf-8")


def _tiny_list(name: str, values: list[Any], layers: int | None) -> list[Any]:
    """A list with a value for each layer loses layers, but keeps an attention; others keep their length."""
    names_kinds = isinstance(values[0], str) and re.search("layer|block|types|pattern", name) is not None
    if (names_kinds or len(values) == layers) and len(values) > LAYERS and "feature" not in name:
        kinds = list(dict.fromkeys(map(_hashable, values)))
        attention = [kind for kind in kinds if "attention" in str(kind) and "linear" not in str(kind)]
        kinds = [kinds[0], *attention[:1], *kinds[1:]] if kinds[0] not in attention[:1] else kinds
        small = [*kinds[:LAYERS], *kinds[-1:] * (LAYERS - len(kinds))]
        return [_apply(RULES, name, value) if type(value) is int else value for value in small]
    if all(type(value) is int for value in values):
        small = [_apply(LIST_RULES, name, value) for value in values]
        return sorted(set(small)) if re.fullmatch(r".*ind(ex|ices|exes)", name) else small
    return values


def _hashable(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _tiny_rope(value: dict[str, Any], in_three_parts: bool) -> dict[str, Any]:
    if any(isinstance(part, dict) for part in value.values()):
        return {name: _tiny_rope(part, in_three_parts) if part else part for name, part in value.items()}
    rope = dict(value)
    if type(original := rope.get("original_max_position_embeddings")) is int:
        rope["original_max_position_embeddings"] = min(original, POSITIONS // 4)
    if value and (in_three_parts or "mrope_section" in rope):
        pairs = int(HEAD_DIM * rope.get("partial_rotary_factor", 1.0)) // 2
        quarter, rest = pairs // 4, pairs % 2
        section = [pairs - 2 * quarter - rest, quarter + rest, quarter]
        usual = rope.get("mrope_section") or (2, 1, 1)
        rope["mrope_section"] = section if usual[0] != usual[1] else section[::-1]  # height and width come first
    return rope


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


class Form(StrEnum):
    """Which model class of a family is built."""

    USUAL = "usual"
    """With the head that most users of the family want: the first of `_AUTO_CLASSES`, else any class."""
    BARE = "bare"
    """Without a head."""
    POOLED = "pooled"
    """A classifier of texts, images or sounds: a head on one position, or on a mean of them."""
    TOKENS = "tokens"
    """A head for each position."""
    GENERATES = "generates"
    """With a head that generates text, and with key/value caches."""


_HEADS_OF: dict[Form, dict[str, str]] = {
    Form.BARE: {"MODEL_MAPPING_NAMES": ""},
    Form.POOLED: {
        "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES": "text-classification",
        "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES": "image-classification",
        "MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES": "audio-classification",
    },
    Form.TOKENS: {
        "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES": "token-classification",
        "MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES": "question-answering",
        "MODEL_FOR_AUDIO_FRAME_CLASSIFICATION_MAPPING_NAMES": "",
    },
    Form.GENERATES: {
        "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES": "",
        "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES": "",
        "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES": "",
    },
}
"""Form -> transformers' lists of the classes that have it, the first to be taken first, and the task of each list."""


def _mapped(names: str, model_type: str) -> tuple[str, ...]:
    """Names of the classes that a list of transformers has for a family."""
    mapped = getattr(modeling_auto, names).get(model_type, ())
    return (mapped,) if isinstance(mapped, str) else tuple(mapped)


def forms_of(model_type: str) -> list[Form]:
    """The forms in which a family has a class of its own; the bare model is left out where it is the usual one.

    A class that generates may be the usual one: with caches it is another graph.
    """
    usual = next((name for names in _usual_lists() for name in _mapped(names, model_type)), None)
    forms = [Form.USUAL]
    for form, lists in _HEADS_OF.items():
        named = next((name for names in lists for name in _mapped(names, model_type)), None)
        if named is not None and (named != usual or form is Form.GENERATES):
            forms.append(form)
    return forms


def task_of(model_type: str, form: Form) -> str:
    """The task of the class of a form, which decides about its inputs."""
    lists = _HEADS_OF.get(form, {})
    return next((task for names, task in lists.items() if task and _mapped(names, model_type)), "feature-extraction")


def _usual_lists() -> list[str]:
    names = [f"MODEL_FOR_{head}_MAPPING_NAMES" for head in _AUTO_CLASSES] + ["MODEL_MAPPING_NAMES"]
    return names + sorted(name for name in vars(modeling_auto) if re.fullmatch(r"MODEL_FOR_.*NAMES", name))


def model_class(
    model_type: str, config_class: type[PretrainedConfig], form: Form = Form.USUAL
) -> type[PreTrainedModel] | None:
    """The model class of a family in a form; in its usual one, any that reads its configuration if no list has it."""
    for names in _HEADS_OF.get(form) or _usual_lists():
        for class_name in _mapped(names, model_type):
            cls = getattr(transformers, class_name, None)
            if cls is not None and cls.config_class is config_class:
                return cls
    if form is not Form.USUAL:
        return None
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


def tiny_model(model_type: str, seed: int = 0, form: Form = Form.USUAL) -> PreTrainedModel:
    """A random model of a family in evaluation mode."""
    config_class = CONFIG_MAPPING[model_type]
    cls = model_class(model_type, config_class, form)
    if cls is None:
        raise ValueError("no model class reads this configuration")
    torch.manual_seed(seed)
    config = tiny_config(config_class)
    if form is Form.POOLED:  # a decoder's classifier reads the last token before the padding
        for part in (config, getattr(config, "text_config", None)):
            if part is not None and getattr(part, "pad_token_id", None) is None:
                part.pad_token_id = 0
        if config.is_encoder_decoder and getattr(config, "decoder_start_token_id", None) is None:
            config.decoder_start_token_id = config.pad_token_id
    if form is Form.GENERATES and not config.is_encoder_decoder and hasattr(config, "is_decoder"):
        config.is_decoder = True
    model = cls(config).eval()
    # With usual weights, a head of a random model changes the output by less than rounding does.
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.2)
        elif name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.1)
    return model.float()


_SWITCHES = (
    r"(.*_)?(sliding_window|attention_window|local_window|window_size|local_attention|local_radius|block_size|chunk_size"
    r"|chunk_length|attention_chunk_size|original_max_position_embeddings|index_topk)s?"
)
"""Names of fields with a length at which attention changes: a window, a block, the longest length of short factors."""


def switch_lengths(config: PretrainedConfig) -> list[int]:
    """Lengths up to which a model of this configuration computes attention in another way than beyond them."""
    lengths: set[int] = set()
    parts = [config.to_dict()]
    while parts:
        values = parts.pop()
        for name, value in values.items():
            if isinstance(value, dict):
                parts.append(value)
            elif re.fullmatch(_SWITCHES, str(name)):
                numbers = value if isinstance(value, (list, tuple)) else [value]
                lengths.update(number for number in numbers if type(number) is int and number > 0)
        if values.get("num_random_blocks") and values.get("block_size"):  # BigBird: fewer blocks are not sparse
            lengths.add((5 + 2 * values["num_random_blocks"]) * values["block_size"])
        if values.get("rope_type") == "dynamic" and config.to_dict().get("max_position_embeddings"):
            lengths.add(config.max_position_embeddings)
    return sorted(lengths)
