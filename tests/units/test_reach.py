"""Units count where an output that an exported graph keeps depends on them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor
from transformers.utils import ModelOutput

from compressor.export import export_reference
from compressor.units import find_groups, find_sites, gated, keep_all
from compressor.units.reach import Reach
from graph_passes import load
from graph_passes.attention.gate_initializers import find_gates
from tests.zoo import text

SMALL: dict[str, Any] = {
    "vocab_size": 99,
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "intermediate_size": 44,
}
PATHS: dict[str, Callable[[Tensor, Tensor], Tensor | None]] = {
    "value": lambda x, y: x + y,
    "view": lambda x, y: x.view(3, 4)[1:].transpose(0, 1).reshape(-1),
    "index": lambda x, y: y[x.argmax()],
    "comparison": lambda x, y: torch.where(x > 0, y, -y),
    "place": lambda x, y: y.copy_(x),
    "detached": lambda x, y: x.detach() * 2,
    "number": lambda x, y: y * float(x[0]),
    "numpy": lambda x, y: torch.from_numpy(x.numpy() + 1),
}


@pytest.mark.parametrize("path", PATHS)
def test_what_is_computed_from_a_marked_tensor_depends_on_it(path: str) -> None:
    x, y = torch.randn(12), torch.randn(12)
    with Reach() as reach:
        reach.mark("x", x)
        reach.mark("unread", torch.ones(1))
        result = PATHS[path](x, y)
    assert reach.names([result] if result is not None else []) == {"x"}


def test_what_is_written_to_depends_on_the_values() -> None:
    x, y = torch.randn(2, 3), torch.zeros(4, 3)
    with Reach() as reach:
        reach.mark("x", x)
        y[1:3] = x
    assert reach.names([y]) == {"x"}
    assert reach.names([torch.zeros(1)]) == set()


@dataclass
class _Output(ModelOutput):
    last_hidden_state: Tensor | None = None
    part: ModelOutput | None = None


class TwoTowers(hf.BertModel):
    """An encoder whose states are an output, and a second one, whose states are a part of another output."""

    def __init__(self, config: hf.BertConfig) -> None:
        super().__init__(config, add_pooling_layer=False)
        self.second = hf.BertModel(config, add_pooling_layer=False)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> ModelOutput:
        states = super().forward(input_ids, attention_mask).last_hidden_state
        return _Output(states, self.second(inputs_embeds=states, attention_mask=attention_mask))


class Choosing(TwoTowers):
    """The first encoder chooses, without a derivative, which embeddings the second one reads."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> ModelOutput:
        states = hf.BertModel.forward(self, input_ids, attention_mask).last_hidden_state
        return self.second(states.argmax(-1), attention_mask)


def test_units_that_only_a_dropped_output_reads_are_no_groups(tmp_path: Path) -> None:
    model, inputs = TwoTowers(hf.BertConfig(**SMALL)).eval(), text()
    groups = find_groups(model, inputs)
    names = ["encoder.layer.0.attention.self", "encoder.layer.0.output.dense"]
    assert [group.name for group in groups] == names
    assert [site.name for site in find_sites(model, inputs)] == names[:1]
    plan = keep_all(groups)
    with torch.no_grad():
        expected = model(**inputs).last_hidden_state
        with gated(model, plan):
            assert torch.equal(model(**inputs).last_hidden_state, expected)
    export_reference(model, plan, inputs, tmp_path / "reference.onnx")
    assert set(find_gates(load(tmp_path / "reference.onnx").graph)) == set(names)


def test_units_that_choose_what_is_read_are_groups() -> None:
    groups = find_groups(Choosing(hf.BertConfig(**SMALL)).eval(), text())
    assert [group.name.partition(".")[0] for group in groups] == ["encoder", "encoder", "second", "second"]
