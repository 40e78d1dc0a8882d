"""A model of PyTorch behind the interface of a refit: divergences of partial forwards, and feeders."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from compressor.answers import IGNORED
from compressor.progress import ignore_progress
from compressor.selection.pruners.layerwise.layer_run import token_mask
from compressor.selection.pruners.layerwise.torch_network import TEMPERATURE, PartialKL, feeders_of, with_weight
from compressor.selection.pruners.reconstruct.pruner import ReconstructPruner
from compressor.training.divergence import divergence
from compressor.units import find_groups
from tests.selection.pruners.pruning import family_inputs, random_counts, ranked
from tests.selection.pruners.reconstruct.shared import CASES, albert, bert, bert_spans, linears_in_layers
from tests.selection.tiny import have_same_weights
from tests.unchanged import unchanged
from tests.zoo import FAMILIES, LENGTH, Case, text

QUICK = ("bert", "gpt2", "llama", "shared_llama", "t5", "vit")


def halved(module: nn.Module) -> tuple[Tensor, Tensor | None]:
    """The weight `[out, in]` of a linear without half of its inputs, and its bias plus one."""
    assert isinstance(module.weight, Tensor)
    weight = module.weight.detach().clone()
    weight = weight.T.contiguous() if isinstance(module, Conv1D) else weight
    weight[:, ::2] = 0
    return weight, None if module.bias is None else module.bias.detach() + 1  # type: ignore[operator]


def whole(model: PreTrainedModel, batch: dict[str, Tensor], linear: str, names: tuple[str, ...]) -> Tensor:
    module = model.get_submodule(linear)
    weight, bias = halved(module)
    with torch.no_grad():
        dense = model(**batch)
        with with_weight(module, weight, bias):
            return divergence(dense, model(**batch), names, batch, temperature=TEMPERATURE)


def check(case: Case, names: tuple[str, ...] = ("logits",)) -> None:
    model, batch = case
    with unchanged(model):
        partial = PartialKL(model, [batch, batch], names)
        for linear in linears_in_layers(model)[-4::-5]:
            expected = whole(model, batch, linear, names)
            rows = partial.rows(linear, *halved(model.get_submodule(linear)))
            torch.testing.assert_close(rows, torch.cat([expected, expected]), rtol=1e-3, atol=1e-6)
            assert float(expected.mean()) > 1e-6


@pytest.mark.parametrize(
    "family",
    [
        name if name in QUICK else pytest.param(name, marks=pytest.mark.zoo)
        for name in sorted(CASES.keys() - {"clip_text"})
    ],
)
def test_equal_to_whole_forwards(family: str) -> None:
    check(CASES[family]())


def test_regression_and_spans() -> None:
    check((bert(1), text()))
    check((bert_spans(), text()), ("start_logits", "end_logits"))


def test_positions_without_a_label_do_not_count() -> None:
    model, batch = CASES["llama"]()
    labels = torch.full_like(batch["input_ids"], IGNORED)
    labels[:, 1] = 1
    check((model, {**batch, "labels": labels}))


def test_the_variance_of_a_regression_is_over_all_rows() -> None:
    model, batch = bert(1), text()
    rows = [{name: value[index : index + 1] for name, value in batch.items()} for index in range(3)]
    linear = "bert.encoder.layer.1.output.dense"
    change = halved(model.get_submodule(linear))
    together = PartialKL(model, [batch], ("logits",)).rows(linear, *change)
    torch.testing.assert_close(PartialKL(model, rows, ("logits",)).rows(linear, *change), together, rtol=1e-3, atol=0)


@pytest.mark.parametrize("family", ["bert", "gpt2"])
def test_batches_beyond_the_memory_are_computed_from_the_first_layer(family: str) -> None:
    model, batch = CASES[family]()
    batches = [batch, {name: value[:1] for name, value in batch.items()}]
    linear = linears_in_layers(model)[-1]
    change = halved(model.get_submodule(linear))
    limited, recorded = (PartialKL(model, batches, ("logits",), memory) for memory in (1, 2**30))
    ran: list[int] = []
    first = model.get_submodule(linears_in_layers(model)[0])
    first.register_forward_hook(lambda module, args, output: ran.append(len(output)))
    expected = recorded.rows(linear, *change)
    assert not ran
    torch.testing.assert_close(limited.rows(linear, *change), expected)
    assert set(ran) == {1}, "the first batch is recorded, the second is not"


def test_layers_before_the_linear_are_not_run() -> None:
    model, batch = bert(2), text()
    partial = PartialKL(model, [batch], ("logits",))
    ran: list[int] = []
    for number in range(3):
        module = model.get_submodule(f"bert.encoder.layer.{number}.output.dense")
        module.register_forward_hook(lambda *args, number=number: ran.append(number))
    linear = "bert.encoder.layer.2.output.dense"
    partial.rows(linear, *halved(model.get_submodule(linear)))
    assert ran == [2]


@pytest.mark.parametrize("module", [nn.Linear(4, 3), Conv1D(3, 4)], ids=["Linear", "Conv1D"])
def test_a_replaced_weight_is_restored_after_an_error(module: nn.Module) -> None:
    assert isinstance(module.weight, Tensor)
    before, pointer = module.weight.detach().clone(), module.weight.data_ptr()
    x, weight = torch.randn(5, 4), torch.randn(3, 4)
    with with_weight(module, weight, torch.ones(3)):
        torch.testing.assert_close(module(x), x @ weight.T + 1)
    with pytest.raises(RuntimeError, match="cannot be multiplied"), with_weight(module, weight):
        module(x.T)
    assert module.weight.data_ptr() == pointer
    assert torch.equal(module.weight, before)


LAYERS = {
    "bert": ["query key value", "dense"],
    "gpt2": ["c_attn", "c_fc"],
    "llama": ["q_proj k_proj v_proj", "gate_proj up_proj"],
    "distilbert": ["q_lin k_lin v_lin", "lin1"],
}
"""Names of the feeders of heads and of neurons in a layer."""


def feeders(case: Case) -> list[list[str]]:
    """Names of the feeders of each group in order."""
    model, inputs = case
    ends = [str(group.linear) for group in find_groups(model, inputs)]
    return [[path.rpartition(".")[2] for path in paths] for paths in feeders_of(model, ends, inputs).values()]


@pytest.mark.parametrize("family", LAYERS)
def test_feeders_are_those_of_the_same_layer(family: str) -> None:
    names = feeders(FAMILIES[family](0))
    assert names == [layer.split() for layer in LAYERS[family]] * (len(names) // 2)


def test_shared_layers_have_their_feeders_once() -> None:
    assert feeders(albert()) == [["query", "key", "value"], ["ffn"]]


def test_feeders_of_neurons_alone_end_at_what_they_read() -> None:
    model, inputs = FAMILIES["bert"](0)
    ends = [str(group.linear) for group in find_groups(model, inputs) if group.type == "neurons"]
    names = [[path.rpartition(".")[2] for path in paths] for paths in feeders_of(model, ends, inputs).values()]
    assert names == [["dense"]] * len(names)
    assert all("intermediate" in path for paths in feeders_of(model, ends, inputs).values() for path in paths)


@pytest.mark.parametrize("length", [None, LENGTH])
def test_keys_of_a_cross_attention_are_no_feeders(length: int | None) -> None:
    model, inputs = FAMILIES["t5"](0)
    if length is not None:  # source and target have equal lengths
        inputs = {**inputs, "decoder_input_ids": inputs["input_ids"]}
    ends = [str(group.linear) for group in find_groups(model, FAMILIES["t5"](0)[1])]
    feeders = feeders_of(model, ends, inputs)
    cross = [paths for end, paths in feeders.items() if "EncDecAttention" in end]
    assert [[path.rpartition(".")[2] for path in paths] for paths in cross] == [["q"]] * len(cross)


@pytest.mark.parametrize("family", ["bert", *(pytest.param(name, marks=pytest.mark.zoo) for name in ("llama", "t5"))])
def test_refitted_feeders_are_closer_to_the_dense_model(family: str, tmp_path: Path) -> None:
    inputs = family_inputs(family, tmp_path)
    dense = copy.deepcopy(inputs.model)
    pruner = ranked(ReconstructPruner, inputs)
    pruner.finish(random_counts(inputs.groups), ignore_progress)
    ends = [str(group.linear) for group in inputs.groups]
    changed, before, after = 0, 0.0, 0.0
    for paths in feeders_of(dense, ends, inputs.statistics[0]).values():
        for path in paths:
            if have_same_weights(inputs.model.get_submodule(path), dense.get_submodule(path)):
                continue
            changed += 1
            with_own = copy.deepcopy(inputs.model)
            with_own.get_submodule(path).load_state_dict(dense.get_submodule(path).state_dict())
            expected = outputs(dense, path, inputs.statistics)
            refitted, original = (
                float((outputs(model, path, inputs.statistics) - expected).square().mean())
                for model in (inputs.model, with_own)
            )
            assert refitted < 1.01 * original + 1e-9
            before, after = before + original, after + refitted
    assert changed
    assert after < 0.9 * before


def test_a_plan_that_removes_nothing_changes_no_feeder(tmp_path: Path) -> None:
    inputs = family_inputs("bert", tmp_path)
    dense = copy.deepcopy(inputs.model)
    pruner = ranked(ReconstructPruner, inputs)
    pruner.finish({group.name: group.units for group in inputs.groups}, ignore_progress)
    for paths in feeders_of(dense, [str(group.linear) for group in inputs.groups], inputs.statistics[0]).values():
        for path in paths:
            assert have_same_weights(inputs.model.get_submodule(path), dense.get_submodule(path))


def outputs(model: PreTrainedModel, path: str, batches: Sequence[Mapping[str, Tensor]]) -> Tensor:
    """The outputs of a linear on batches, flattened, without padding."""
    recorded: list[Tensor] = []
    hook = model.get_submodule(path).register_forward_hook(lambda module, args, output: recorded.append(output))
    with torch.no_grad():
        for batch in batches:
            model.eval()(**batch)
    hook.remove()
    masks = [token_mask(model, path, batch, output.shape[:-1]) for batch, output in zip(batches, recorded, strict=True)]
    return torch.cat([output[mask].flatten() for output, mask in zip(recorded, masks, strict=True)])
