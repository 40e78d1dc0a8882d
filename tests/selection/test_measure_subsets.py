"""Replayed forwards: for every family and any change of gates, the outputs of the whole model."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from compressor.selection.measure_subsets import ActivationCache, NotRowsError, PartialForward
from compressor.units import Site, find_sites, hooked
from compressor.units.layers import outermost_layers
from tests.selection import tiny
from tests.zoo import FAMILIES


def whole_output(model: PreTrainedModel, sites: Sequence[Site], inputs: dict[str, Tensor], gates: Tensor) -> Tensor:
    """The first output of a forward without replay, with gates `[heads]`."""
    sizes = [site.heads for site in sites]
    gate_of = dict(zip((site.name for site in sites), gates.split(sizes), strict=True))
    with torch.no_grad(), hooked(model.eval(), lambda name, out: out * gate_of[name][:, None]):
        return model(**inputs)[0]


QUICK = ("bert", "gpt2", "t5", "vit", "modernbert")


@pytest.mark.parametrize(
    "family", [name if name in QUICK else pytest.param(name, marks=pytest.mark.zoo) for name in FAMILIES]
)
def test_every_family_can_be_replayed(family: str) -> None:
    model, inputs = FAMILIES[family](0)
    sites = find_sites(model, inputs)
    forward, cache = PartialForward(model, sites), ActivationCache()
    base = torch.ones(1, sum(site.heads for site in sites))
    base[0, 1] = 0
    output = forward.run(inputs, base, record=cache)[0]
    assert torch.equal(output, whole_output(model, sites, inputs, base[0]))
    assert len(cache.layers) > 1
    draw = torch.Generator().manual_seed(0)
    first = 0
    for site in sites:
        changed = base.repeat(2, 1)
        changed[0, first] = 1 - changed[0, first]
        changed[1, first + torch.randint(site.heads, (1,), generator=draw)] = 0.5
        changed[1, first + site.heads :] = 0.25
        call = cache.first_call({site.name})
        expected = [whole_output(model, sites, inputs, gates) for gates in changed]
        replayed = [forward.run(inputs, gates[None], base=cache, call=call)[0] for gates in changed]
        assert all(torch.equal(*pair) for pair in zip(expected, replayed, strict=True))
        together = forward.run(inputs, changed, base=cache, call=call)[0]
        torch.testing.assert_close(together, torch.cat(expected))
        first += site.heads
    # Everything before the layer of the last site is replayed.
    assert cache.start(len(cache.sites) - 1) >= len(cache.layers) // 2


def test_a_record_of_a_replay_equals_that_of_a_whole_run() -> None:
    model = tiny.classifier()
    sites, inputs = tiny.sites_of(model), {"input_ids": torch.arange(8).reshape(2, 4)}
    forward, base, whole, replayed = PartialForward(model, sites), *(ActivationCache() for _ in range(3))
    forward.run(inputs, torch.ones(1, tiny.HEADS), record=base)
    gates = torch.ones(1, tiny.HEADS)
    gates[0, -1] = 0
    forward.run(inputs, gates, record=whole)
    forward.run(inputs, gates, base=base, call=base.first_call({sites[1].name}), record=replayed)
    assert (replayed.sites, replayed.ends) == (whole.sites, whole.ends)
    assert all(torch.equal(*pair) for pair in zip(replayed.heads, whole.heads, strict=True))
    assert whole.nbytes > 0


def test_half_precision_applies_to_products() -> None:
    model, inputs = tiny.classifier(), {"input_ids": torch.arange(8).reshape(2, 4)}
    sites, gates = tiny.sites_of(model), torch.ones(1, tiny.HEADS)
    whole, half = (PartialForward(model, sites, precision).run(inputs, gates)[0] for precision in ("no", "bf16"))
    assert not torch.equal(whole, half.float())
    torch.testing.assert_close(whole, half.float(), rtol=0.05, atol=0.05)


def test_the_model_is_not_changed() -> None:
    model = tiny.classifier().train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    forward = PartialForward(model, tiny.sites_of(model))
    forward.run({"input_ids": torch.arange(8).reshape(2, 4)}, torch.zeros(2, tiny.HEADS))
    assert model.training
    assert not any("forward" in vars(module) for module in model.modules())
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_outputs_that_are_not_rows_are_not_shared() -> None:
    model = tiny.classifier()
    forward, cache = PartialForward(model, tiny.sites_of(model)), ActivationCache()
    inputs = {"input_ids": torch.arange(8).reshape(2, 4)}
    forward.run(inputs, torch.ones(1, tiny.HEADS), record=cache)
    cache.layers[0] = cache.layers[0].transpose(0, 1)[:3]
    with pytest.raises(NotRowsError):
        forward.run(inputs, torch.ones(2, tiny.HEADS), base=cache, call=len(cache.sites))


def test_layers_are_the_outermost() -> None:
    model, _ = FAMILIES["bert"](0)
    assert len(outermost_layers(model)) == model.config.num_hidden_layers
