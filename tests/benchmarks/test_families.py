"""The sweep over families: tiny models by general rules, an outcome for every way to end, and the page."""

from __future__ import annotations

import multiprocessing
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from benchmarks.families import run_in_process
from benchmarks.families_law import Outcome, Row, padded_left, random_plan, require_gates, sweep_family
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
from compressor.engines.prove import Case
from compressor.units import find_groups, keep_all


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
    # A class that generates may be the usual one.
    forms = [form for form in forms_of(family) if form is not Form.GENERATES]
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


class _ReachedError(BaseException):
    """A stage of the sweep began, of which a test waits."""


def test_attention_forms_may_differ_where_a_model_reads_padding() -> None:
    """The first token of a row that is padded on the left sees no key in ModernBERT's windows."""

    def stop(row: Row) -> None:
        if row.outcome is Outcome.NOT_EXPORTABLE:
            raise _ReachedError

    with pytest.raises(_ReachedError):
        sweep_family("modernbert", stop, form=Form.POOLED)


def test_gates_that_change_a_model_that_reads_padding_are_wrong() -> None:
    def fresh() -> PreTrainedModel:
        return tiny_model("bert", form=Form.POOLED)

    mask = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]])
    inputs = {"input_ids": torch.arange(12).view(2, 6) * mask, "attention_mask": mask}
    case = Case({name: tensor.numpy() for name, tensor in inputs.items()}, "padded")
    groups = find_groups(fresh(), inputs, attention="eager")
    require_gates(fresh, keep_all(groups), [case])
    with pytest.raises(Exception, match="gates of one change logits"):
        require_gates(fresh, random_plan(groups, np.random.default_rng(0)), [case])


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
@pytest.mark.parametrize(
    ("family", "outcome"),
    [
        *((name, Outcome.HOLDS) for name in ("gpt2", "t5", "gptj", "doge", "bert", "gemma3")),
        ("diffllama", Outcome.IN_PART),
        *((name, Outcome.REFUSED) for name in ("jamba", "axk2", "canary", "fsmt", "rwkv")),
        ("led", Outcome.NOT_EXPORTABLE),
    ],
)
def test_a_family_that_generates_has_an_outcome(family: str, outcome: Outcome) -> None:
    row = sweep_family(family, lambda row: None, form=Form.GENERATES)
    assert row.outcome is outcome, row.reason


@pytest.mark.zoo
def test_a_process_without_a_result_is_an_outcome() -> None:
    context: Any = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([sweep_family.__module__])
    row = run_in_process(context, "no such family", 60)
    assert (row.outcome, row.family) == (Outcome.NOT_BUILT, "no such family")
    row = run_in_process(context, "bert", 1)
    assert row.outcome is not Outcome.HOLDS
    assert "over 1 s of the processor" in row.reason


def test_the_page_counts_outcomes_and_names_what_is_missing() -> None:
    numbers: dict[str, Any] = {"heads": 2, "neurons": 2, "parameters": (100, 60), "error": 1e-6, "openvino": 2e-6}
    rows = [
        Row("bert", Outcome.HOLDS, swept="2026-11-29", compared="all lengths", **numbers),
        Row("kosmos", Outcome.REFUSED, reason="layers.0: LayerNormalization a|b", swept="2026-11-26"),
        Row("resnet", Outcome.NO_ATTENTION, swept="2026-11-26"),
        Row("resnet", Outcome.NO_ATTENTION, form=Form.POOLED, swept="2026-11-29", compared="all lengths"),
    ]
    lines = page_of(rows, {**dict.fromkeys(Form, 0), Form.USUAL: 3, Form.BARE: 2, Form.POOLED: 1}).splitlines()
    table = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line.startswith("| ")]
    counts = {cells[0]: cells[1] for cells in table if len(cells) == 3}
    assert (counts["holds"], counts["refused"], counts["FAILED"]) == ("1", "1", "0")
    runs = [[cell for cell in cells if cell not in ("", "0")] for cells in table if cells[0] in [*Form]]
    assert runs == [
        ["usual", "2026-11-26", "1", "1"],
        ["usual", "2026-11-29", "1", "all lengths"],
        ["bare", "not yet: 2"],
        ["pooled", "2026-11-29", "1", "all lengths"],
    ]
    assert "| bert | usual |  | 2 | 2 | 60% | 1e-06 | 2e-06 |  |" in lines
    assert "| kosmos | usual |  | layers.0: LayerNormalization a\\|b |" in lines
    assert "`resnet` (usual), `resnet` (pooled)" in lines
