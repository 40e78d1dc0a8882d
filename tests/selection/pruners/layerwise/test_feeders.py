"""Feeders of groups: the projections and up-projections that their units are made of, and their refit."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from compressor.progress import ignore_progress
from compressor.selection.pruners.layerwise.forwards import token_mask
from compressor.selection.pruners.layerwise.torch_network import feeders_of
from compressor.selection.pruners.reconstruct.pruner import ReconstructPruner
from compressor.units import find_groups
from tests.selection.pruners.pruning import family_inputs, random_counts, ranked
from tests.selection.pruners.reconstruct.shared import albert
from tests.selection.tiny import have_same_weights
from tests.zoo import FAMILIES, LENGTH, Case

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
