"""Sites are found in every family, with their kinds and sizes, for any inputs."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor

from compressor.errors import ErrorCode, InputError, SiteRefusedError
from compressor.units import Site, find_sites, hooked
from compressor.units.find import evaluation_mode
from tests.faults import fails_with
from tests.projection_zoo import FAMILIES as OUTSIDE_THE_INTERFACE
from tests.projection_zoo import WITHOUT_HEADS
from tests.units.families import families
from tests.units.states import are_equal, forward, recorder, snapshot
from tests.zoo import FAMILIES, pair, text

FOUR = (4, 4, 8)
GROUPED = (4, 2, 8)
ENCODER, DECODER, BOTH = ["bidirectional"] * 3, ["causal"] * 3, ["bidirectional"] * 2 + ["causal", "cross"] * 2
SITES: dict[str, tuple[list[str], str, tuple[int, int, int]]] = {
    "bert": (ENCODER, "bert.encoder.layer.0.attention.self", FOUR),
    "roberta": (ENCODER, "roberta.encoder.layer.0.attention.self", FOUR),
    "distilbert": (ENCODER, "distilbert.transformer.layer.0.attention", FOUR),
    "electra": (ENCODER, "electra.encoder.layer.0.attention.self", FOUR),
    "modernbert": (ENCODER, "model.layers.0.attn", FOUR),
    "gpt2": (DECODER, "transformer.h.0.attn", FOUR),
    "llama": (DECODER, "model.layers.0.self_attn", GROUPED),
    "qwen3": (DECODER, "model.layers.0.self_attn", GROUPED),
    "t5": (BOTH, "encoder.block.0.layer.0.SelfAttention", FOUR),
    "bart": (BOTH, "model.encoder.layers.0.self_attn", FOUR),
    "marian": (BOTH, "model.encoder.layers.0.self_attn", FOUR),
    "vit": (ENCODER, "vit.layers.0.attention", FOUR),
    "clip_text": (DECODER, "text_model.encoder.layers.0.self_attn", FOUR),
    "whisper": (BOTH, "model.encoder.layers.0.self_attn", FOUR),
    "all_attention": (DECODER, "model.layers.0.attention", FOUR),
    "transformer_xl": (DECODER, "model.layers.0.attention", FOUR),
}
SMALL: dict[str, Any] = {
    "vocab_size": 99,
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "intermediate_size": 44,
}


@pytest.mark.parametrize("name", families(FAMILIES, ("bert", "llama", "whisper", "all_attention")))
def test_sites_are_found_in_call_order(name: str) -> None:
    model, inputs = FAMILIES[name](0)
    kinds, first, sizes = SITES[name]
    sites = find_sites(model, inputs)
    assert [site.kind for site in sites] == kinds
    assert sites[0].name == first
    assert {(site.heads, site.kv_heads, site.head_dim) for site in sites} == {sizes}
    assert find_sites(model, inputs, attention="eager") == find_sites(model, inputs, attention="sdpa") == sites


def test_layers_that_share_weights_are_one_site() -> None:
    config = hf.AlbertConfig(**{**SMALL, "num_hidden_layers": 3}, embedding_size=20)
    model = hf.AlbertForSequenceClassification(config).eval()
    name = "albert.encoder.albert_layer_groups.0.albert_layers.0.attention"
    assert find_sites(model, text()) == [Site(name, "bidirectional", 4, 4, 8)]
    calls: list[str] = []
    with hooked(model, recorder(calls)):
        forward(model, text())
    assert calls == [name] * 3


@pytest.mark.parametrize("name", WITHOUT_HEADS)
def test_a_family_whose_heads_cannot_be_proven_is_refused(name: str) -> None:
    model, inputs = WITHOUT_HEADS[name].model(), WITHOUT_HEADS[name].inputs(3, 7)
    before = snapshot(model)
    with fails_with(ErrorCode.SITE_REFUSED, SiteRefusedError, family=name):
        find_sites(model, inputs)
    assert are_equal(before, snapshot(model))


def test_the_message_of_a_refusal_names_what_is_supported() -> None:
    with pytest.raises(SiteRefusedError) as error:
        find_sites(WITHOUT_HEADS["convbert"].model(), text())
    assert str(error.value) == (
        "convbert: no attention heads were recognized: no module calls transformers' attention interface, and no"
        " projection reads heads of a softmax; remove neurons by a budget instead, e.g. --macs 70%, or use a supported"
        " family: BERT, RoBERTa, DistilBERT, ELECTRA, ModernBERT, GPT-2, Llama, Qwen3, T5, BART, Marian, ViT, CLIP,"
        " Whisper, All-attention, Transformer-XL and every other family that calls transformers' attention interface"
    )


def test_a_model_that_is_not_of_transformers_is_refused() -> None:
    with fails_with(ErrorCode.UNSUPPORTED_MODEL, InputError, value="Linear"):
        find_sites(torch.nn.Linear(2, 2), {})


def test_a_mask_of_padding_only_is_not_causal() -> None:
    model = hf.LayoutLMModel(hf.LayoutLMConfig(**SMALL))
    assert [site.kind for site in find_sites(model, text())] == ["bidirectional"]


def test_cross_attention_is_recognized_at_equal_lengths() -> None:
    model, _ = FAMILIES["bart"](0)
    assert [site.kind for site in find_sites(model, pair(length=6, target=6))] == BOTH


@pytest.mark.parametrize("inputs", [text(1, 7), text(3, 2), {"input_ids": torch.full((2, 6), 8)}])
def test_sites_do_not_depend_on_the_inputs(inputs: dict[str, Tensor]) -> None:
    for name, kind in (("bert", "bidirectional"), ("gpt2", "causal")):
        assert {site.kind for site in find_sites(FAMILIES[name](0)[0], inputs)} == {kind}


def test_sites_are_those_without_a_cache() -> None:
    # FSMT's decoder is causal only without one.
    family = OUTSIDE_THE_INTERFACE["fsmt"]
    model, inputs = family.model(), family.inputs(2, 8)
    expected = find_sites(model, inputs)
    model.config.use_cache = True
    before = snapshot(model)
    assert find_sites(model, inputs) == expected
    assert are_equal(before, snapshot(model))


def test_wrappers_of_training_do_not_show_in_names() -> None:
    model, inputs = FAMILIES["bert"](0)
    wrapped = torch.nn.DataParallel(model)
    assert find_sites(wrapped, inputs) == find_sites(model, inputs)


def test_the_model_is_restored_after_an_error() -> None:
    model, _ = FAMILIES["t5"](0)
    before = snapshot(model.train())
    with fails_with(ErrorCode.UNSUPPORTED_MODEL, family="t5"):
        find_sites(model, {})
    assert are_equal(before, snapshot(model))


def test_what_a_module_cached_in_evaluation_is_dropped() -> None:
    """LeViT caches biases in evaluation; with gradients they are no leaves, which cannot be copied."""
    config = hf.LevitConfig(
        image_size=32, hidden_sizes=[16, 24], num_attention_heads=[2, 2], depths=[1, 1], key_dim=[8, 8]
    )
    config.down_ops = [["Subsample", 8, 2, 2, 2, 2], [""]]
    model = hf.LevitForImageClassification(config).eval()
    with evaluation_mode(model):
        expected = model(pixel_values=torch.ones(1, 3, 32, 32)).logits.detach()
    assert not any(module.training for module in model.modules())
    torch.testing.assert_close(copy.deepcopy(model)(pixel_values=torch.ones(1, 3, 32, 32)).logits, expected)


class Biases(torch.nn.Module):
    """Attention of LeViT as its authors wrote it: what a forward reads in evaluation is cached by `train`."""

    def train(self, mode: bool = True) -> Biases:
        super().train(mode)
        if mode:
            vars(self).pop("cached", None)
        else:
            self.cached = torch.ones(2)
        return self

    def forward(self, x: Tensor) -> Tensor:
        return x if self.training else x + self.cached


@pytest.mark.parametrize("training", [False, True])
def test_what_a_module_caches_for_evaluation_is_there_afterwards(training: bool) -> None:
    model, biases, zeros = FAMILIES["bert"](0)[0], Biases(), torch.zeros(2)
    model.add_module("biases", biases)
    model.train(training)
    expected = biases(zeros)
    for _ in range(2):
        with evaluation_mode(model):
            assert biases(zeros).tolist() == [1.0, 1.0]
    assert all(module.training is training for module in model.modules())
    assert torch.equal(biases(zeros), expected)
