"""Forwards that compute logits of scored positions alone."""

from __future__ import annotations

import pytest
import torch
import transformers as hf
from torch import Tensor, nn
from transformers import PreTrainedModel

from compressor.answers import IGNORED
from compressor.models.forwards import scored_logits_only
from tests.projection_models import SIZES
from tests.zoo import VOCABULARY, text


def models() -> dict[str, PreTrainedModel]:
    torch.manual_seed(0)
    gpt2 = hf.GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=70)
    t5 = hf.T5Config(vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=44, num_layers=2, num_heads=4)
    return {
        "bert": hf.BertForMaskedLM(hf.BertConfig(**SIZES)).eval(),
        "roberta": hf.RobertaForMaskedLM(hf.RobertaConfig(**SIZES)).eval(),
        "llama": hf.LlamaForCausalLM(hf.LlamaConfig(**SIZES)).eval(),
        "gpt2": hf.GPT2LMHeadModel(gpt2).eval(),
        "t5": hf.T5ForConditionalGeneration(t5).eval(),
    }


def batch_of(model: PreTrainedModel) -> dict[str, Tensor]:
    """Rows of which some positions have labels; a decoder reads as many positions."""
    batch = text()
    ids = batch["input_ids"]
    labels = torch.full_like(ids, IGNORED)
    labels[0, 1:3], labels[1, 0] = ids[0, 1:3], ids[1, 0]
    decoder = {"decoder_input_ids": ids} if model.config.is_encoder_decoder else {}
    return {**batch, **decoder, "labels": labels}


class Wrapped(nn.Module):
    """As a distributed wrapper holds a model."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


@pytest.mark.parametrize("name", ["bert", "roberta", "llama", "gpt2", "t5"])
def test_logits_of_scored_positions_are_those_of_the_model_and_others_are_zero(name: str) -> None:
    model = models()[name]
    batch = batch_of(model)
    inputs = {key: value for key, value in batch.items() if key != "labels"}
    scored = batch["labels"] != IGNORED
    computed: list[int] = []
    head = model.get_output_embeddings()
    assert isinstance(head, nn.Module)
    with torch.no_grad():
        expected = model(**inputs).logits
        with scored_logits_only(Wrapped(model), batch):
            hook = head.register_forward_hook(lambda module, args, output: computed.append(args[0].numel() // 32))
            logits = model(**inputs).logits
            hook.remove()
        after = model(**inputs).logits
    assert computed == [int(scored.sum())]
    torch.testing.assert_close(logits[scored], expected[scored])
    assert not logits[~scored].any()
    torch.testing.assert_close(after, expected)


def test_a_batch_without_labels_scores_what_is_no_padding() -> None:
    model = models()["bert"]
    batch = text()
    mask = batch["attention_mask"] != 0
    assert not mask.all()
    with torch.no_grad(), scored_logits_only(model, batch):
        logits = model(**batch).logits
    assert logits[mask].any(-1).all()
    assert not logits[~mask].any()


def test_a_model_without_a_vocabulary_and_one_whose_forward_fails_keep_no_hooks() -> None:
    model = models()["bert"]
    classifier = hf.BertForSequenceClassification(hf.BertConfig(**SIZES)).eval()
    for network in (model, classifier):
        hooks = [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in network.modules()]
        with pytest.raises(ValueError, match="input_ids"), scored_logits_only(network, text()):
            network(input_ids=None)
        assert hooks == [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in network.modules()]


def test_gradients_are_those_of_the_whole_product() -> None:
    model = models()["bert"]
    batch = batch_of(model)
    inputs = {key: value for key, value in batch.items() if key != "labels"}
    scored = batch["labels"] != IGNORED
    gradients = []
    for part in (batch, {**inputs, "labels": torch.zeros_like(batch["labels"])}):
        model.zero_grad()
        with scored_logits_only(model, part):
            model(**inputs).logits[scored].log_softmax(-1)[:, 0].sum().backward()
        gradients.append([parameter.grad for parameter in model.parameters() if parameter.grad is not None])
    torch.testing.assert_close(*gradients)
