"""The sweep over families: tiny models by general rules, an outcome for every way to end, and the page."""

from __future__ import annotations

import multiprocessing
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from benchmarks.families import run_apart
from benchmarks.families_law import Outcome, Row, padded_left, sweep_family
from benchmarks.families_page import page_of
from benchmarks.families_tiny import (
    HEADS,
    LAYERS,
    VOCABULARY,
    Form,
    forms_of,
    model_class,
    switch_lengths,
    task_of,
    tiny_config,
    tiny_model,
)


@pytest.mark.parametrize("family", ["bert", "qwen2_vl", "vit", "t5", "nemotron_h", "deepseek_v3"])
def test_models_are_tiny(family: str) -> None:
    model = tiny_model(family)
    assert sum(parameter.numel() for parameter in model.parameters()) < 300_000
    assert torch.equal(next(model.parameters()), next(tiny_model(family).parameters()))


def test_sizes_of_parts_are_small_too() -> None:
    config = tiny_config(CONFIG_MAPPING["qwen3_vl"])
    text, vision = config.text_config, config.vision_config
    assert (text.num_hidden_layers, text.num_attention_heads, text.vocab_size) == (LAYERS, HEADS, VOCABULARY)
    assert config.image_token_id < VOCABULARY
    assert vision.out_hidden_size == text.hidden_size


def test_parts_keep_their_flags_and_need_no_further_package() -> None:
    decoder = tiny_config(CONFIG_MAPPING["encoder-decoder"]).decoder
    assert (decoder.is_decoder, decoder.add_cross_attention) == (True, True)
    assert tiny_config(CONFIG_MAPPING["detr"]).backbone_config.model_type == "resnet"
    assert tiny_config(CONFIG_MAPPING["fuyu"]).text_config.hidden_size < 64


def test_layers_of_a_hybrid_model_keep_an_attention() -> None:
    kinds = tiny_config(CONFIG_MAPPING["qwen3_next"]).layer_types
    assert kinds == ["linear_attention", "full_attention"]


@pytest.mark.parametrize("family", ["bert", "llama", "vit", "wav2vec2", "bart"])
def test_each_form_of_a_family_has_a_class_of_its_own(family: str) -> None:
    forms = forms_of(family)
    classes = [model_class(family, CONFIG_MAPPING[family], form) for form in forms]
    assert forms[0] is Form.USUAL
    assert None not in classes
    assert len({*classes}) == len(forms) >= 2


def test_a_classifier_of_texts_reads_rows_of_several_lengths() -> None:
    model = tiny_model("llama", form=Form.POOLED)
    assert model.config.pad_token_id == 0
    assert task_of("llama", Form.POOLED) == "text-classification"
    assert task_of("vit", Form.POOLED) == "image-classification"


def test_lengths_at_which_a_family_changes_are_read_from_its_configuration() -> None:
    assert switch_lengths(tiny_config(CONFIG_MAPPING["bert"])) == []
    assert switch_lengths(tiny_config(CONFIG_MAPPING["mistral"])) == [4]
    big_bird = tiny_config(CONFIG_MAPPING["big_bird"])
    sparse = (5 + 2 * big_bird.num_random_blocks) * big_bird.block_size
    assert switch_lengths(big_bird) == [big_bird.block_size, sparse]
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    llama = LlamaConfig(max_position_embeddings=32, rope_parameters=rope)
    assert switch_lengths(llama) == [32]


def test_padding_moves_to_the_left_with_its_tokens() -> None:
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])
    ids = torch.tensor([[5, 6, 7, 8], [9, 10, 0, 0]])
    moved = padded_left({"input_ids": ids, "attention_mask": mask, "pixel_values": torch.ones(2, 4)})
    assert moved is not None
    assert moved["input_ids"].tolist() == [[5, 6, 7, 8], [0, 0, 9, 10]]
    assert moved["attention_mask"].tolist() == [[1, 1, 1, 1], [0, 0, 1, 1]]
    assert padded_left({"input_ids": ids, "attention_mask": torch.ones_like(ids)}) is None
    assert padded_left({"pixel_values": torch.ones(2, 3, 8, 8)}) is None


def test_a_family_without_attention_ends_early() -> None:
    stages: list[str] = []
    row = sweep_family("resnet", lambda row: stages.append(row.reason))
    assert row.outcome is Outcome.NO_ATTENTION
    assert stages == ["building the model", "finding units"]


ONCE_FAILING = (
    # shapes at sizes of images and sounds that strided convolutions cannot read
    *("dinov2", "dinov2_with_registers", "depth_anything", "clipseg", "owlvit", "owlv2", "siglip", "siglip2", "detr"),
    *("conditional_detr", "deformable_detr", "yolos", "segformer", "beit", "dpt", "audio-spectrogram-transformer"),
    *("dinov3_vit", "instructblip", "aimv2", "wav2vec2", "hubert", "data2vec-audio", "unispeech", "unispeech-sat"),
    *("wav2vec2-conformer", "moonshine", "blip-2"),
    # recurrences that ran at one length, and graphs with one chunk of positions
    *("jamba", "falcon_h1", "qwen3_next", "qwen3_5_text", "qwen3_5"),
    # inputs that were missing, norms over all heads, latent attention, a mask that was missing, weights that stayed
    *(
        "qwen2_vl",
        "qwen2_5_vl",
        "qwen3_vl",
        "olmo2",
        "olmo3",
        "olmoe",
        "deepseek_v2",
        "deepseek_v3",
        "bitnet",
        "canary",
    ),
    *("qwen2_audio", "longt5", "swin", "xmod", "axk2"),
    # attention outside the interface
    *("deberta", "deberta-v2", "mpnet", "falcon", "bloom", "gptj", "gpt_neo", "xlnet", "roformer", "megatron-bert"),
    *("rembert", "trocr", "blip"),
    # heads that are not recognized
    *("convbert", "fnet", "nystromformer"),
)


@pytest.mark.zoo
@pytest.mark.parametrize("family", ONCE_FAILING)
def test_a_family_that_once_failed_holds(family: str) -> None:
    row = sweep_family(family, lambda row: None)
    assert row.outcome is Outcome.HOLDS, row.reason


@pytest.mark.zoo
def test_a_process_without_a_result_is_an_outcome() -> None:
    context: Any = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([sweep_family.__module__])
    row = run_apart(context, "no such family", 60)
    assert (row.outcome, row.family) == (Outcome.NOT_BUILT, "no such family")
    row = run_apart(context, "bert", 1)
    assert row.outcome is not Outcome.HOLDS
    assert "over 1 s of the processor" in row.reason


def test_the_page_counts_outcomes_and_names_what_is_missing() -> None:
    rows = [
        Row("bert", Outcome.HOLDS, heads=2, neurons=2, parameters=(100, 60), error=1e-6, openvino=2e-6),
        Row("kosmos", Outcome.REFUSED, reason="layers.0: LayerNormalization a|b"),
        Row("resnet", Outcome.NO_ATTENTION),
        Row("resnet", Outcome.NO_ATTENTION, form=Form.POOLED),
    ]
    lines = page_of(rows, 6).splitlines()
    counts = {line.split("|")[1].strip(): line.split("|")[2].strip() for line in lines if line.startswith("| ")}
    assert (counts["holds"], counts["refused"], counts["FAILED"], counts["not swept yet"]) == ("1", "1", "0", "2")
    assert "| bert |  | 2 | 2 | 60% | 1e-06 | 2e-06 |  |" in lines
    assert "| kosmos |  | layers.0: LayerNormalization a\\|b |" in lines
    assert "`resnet`" in lines
    assert [line.count(" 1 ") for line in lines if line.startswith(("| usual", "| pooled", "| bare"))] == [3, 0, 1]
