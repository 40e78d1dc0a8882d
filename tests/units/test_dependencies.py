"""Units count where an output that an exported graph keeps depends on them."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import _get_current_dispatch_mode
from transformers.utils import ModelOutput

from compressor.export import export_reference
from compressor.units import find_groups, find_sites, gated, keep_all
from compressor.units.dependencies import DependencyTracker, hidden_from_modes, kept_outputs, tracked_modules
from compressor.units.find import find_units
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
MPNET_SITE = "encoder.layer.0.attention.attn.o"


PATHS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "value": lambda x, y: x + y,
    "view": lambda x, y: x.view(3, 4)[1:].transpose(0, 1).reshape(-1),
    "index": lambda x, y: y[x.argmax()],
    "comparison": lambda x, y: torch.where(x > 0, y, -y),
    "place": lambda x, y: y.copy_(x),
    "detached": lambda x, y: x.detach() * 2,
    "number": lambda x, y: y * float(x[0]),
    "numpy": lambda x, y: torch.from_numpy(x.numpy() + 1),
    "numpy by DLPack": lambda x, y: torch.from_numpy(np.from_dlpack(x) + 1),
    "DLPack": lambda x, y: torch.from_dlpack(torch.to_dlpack(x)) + 1,
    "DLPack method": lambda x, y: torch.from_dlpack(x.__dlpack__()) + 1,
    "list of tensors": lambda x, y: torch.tensor([x[0], x.max()]),
    "as_tensor": lambda x, y: torch.as_tensor([[x[0]], [x.max()]]),
    "new_tensor": lambda x, y: y.new_tensor([x[0], x.max()]),
    "text": lambda x, y: y * len(repr(x)),
    "format": lambda x, y: y * len(f"{x}"),
    "equal": lambda x, y: y if torch.equal(x, y) else -y,
    "allclose": lambda x, y: y if torch.allclose(x, y) else -y,
    "nonzero": lambda x, y: y[: len((x > 0).nonzero())],
    "mask": lambda x, y: y.new_zeros(x[x > 0].numel()),
    "unique": lambda x, y: torch.arange(len(torch.unique(x))),
    "repeats": lambda x, y: torch.arange(len(y.repeat_interleave(x.abs().long() + 1))),
    "split": lambda x, y: torch.tensor_split(y, x.abs().long())[1],
    "split method": lambda x, y: y.tensor_split(x.abs().long())[1],
    "lengths": lambda x, y: nn.utils.rnn.pack_padded_sequence(y.view(4, 3), (x[:3] * 0 + 2).long()).data,
    "sparse": lambda x, y: torch.sparse.mm(x.view(3, 4).to_sparse(), y.view(4, 3)),
    "sparse rows": lambda x, y: x.view(3, 4).to_sparse_csr().to_dense(),
    "nested": lambda x, y: torch.nested.as_nested_tensor([x, x + 1]).to_padded_tensor(0.0),
    "jagged": lambda x, y: torch.nested.as_nested_tensor([x, x[:3]], layout=torch.jagged).to_padded_tensor(0.0),
    "mkldnn": lambda x, y: x.to_mkldnn().to_dense() if torch.backends.mkldnn.is_available() else x,
    "vmap": lambda x, y: torch.vmap(torch.mul)(x, y),
    "transform": lambda x, y: torch.func.grad(lambda a: (a * x).sum())(y),
    "address": lambda x, y: _copied(x),
}


def _copied(x: Tensor) -> Tensor:
    """A copy that no operation of PyTorch writes, as by a kernel that was compiled elsewhere."""
    y = torch.empty(x.shape)
    ctypes.memmove(y.data_ptr(), x.data_ptr(), x.numel() * x.element_size())
    return y


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.filterwarnings("ignore::UserWarning")  # some layouts are prototypes
def test_what_is_computed_from_a_marked_tensor_depends_on_it(path: str) -> None:
    x, y = torch.randn(12), torch.randn(12)
    with DependencyTracker() as tracker:
        tracker.mark("x", x)
        tracker.mark("unread", torch.ones(1))
        result = PATHS[path](x, y)
    assert tracker.names_of([result]) == {"x"}


def test_what_functions_in_arguments_capture_counts_as_read() -> None:
    x, y = torch.randn(12), torch.randn(12)
    with DependencyTracker() as tracker:
        tracker.mark("x", x)
        torch.cond(y.sum() > 0, lambda a: a * x, lambda a: a - x, (y,))
    assert tracker.names_of([]) == {"x"}


def test_shapes_and_parts_of_a_tensor_do_not_count_as_read() -> None:
    x, y = torch.randn(3, 4), torch.randn(3, 4)
    with DependencyTracker() as tracker:
        tracker.mark("x", x)
        first, *_ = x
        x.new_zeros(x.shape[0], len(x))[torch.arange(3), torch.tensor([0, 1, 2])] += first[:3]
        x[torch.arange(3), torch.tensor([0, 1, 2])].sum()
        y.expand_as(x), y.type_as(x), x.is_contiguous(), x.stride(), x.dtype
    assert tracker.names_of([y]) == set()


def test_memory_that_is_given_back_is_not_kept() -> None:
    x = torch.randn(1000)
    with DependencyTracker() as tracker:
        tracker.mark("x", x)
        memories = [StorageWeakRef((x + 1).untyped_storage()) for _ in range(100)]
        fresh = [torch.zeros(1000) for _ in range(100)]  # may be given the same memory
    assert all(memory.expired() for memory in memories)
    assert tracker.names_of(fresh) == set()


class Copying(nn.Module):
    """A kernel that neither modes nor autograd see."""

    def forward(self, x: Tensor) -> Tensor:
        with hidden_from_modes():
            return _copied(x.detach().contiguous())


def test_outputs_of_modules_depend_on_their_inputs() -> None:
    model, x = nn.Sequential(nn.Linear(3, 3), Copying()).requires_grad_(False), torch.randn(2, 3)
    with DependencyTracker() as tracker, tracked_modules(model, ["0"], tracker):
        y = model(x)
    assert tracker.names_of([y]) == {"0"}
    assert tracker.names_of([x]) == set()


def test_what_is_written_to_depends_on_the_values() -> None:
    x, y = torch.randn(2, 3), torch.zeros(4, 3)
    with DependencyTracker() as tracker:
        tracker.mark("x", x)
        y[1:3] = x
    assert tracker.names_of([y]) == {"x"}
    assert tracker.names_of([torch.zeros(1)]) == set()


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


class TwoMPNets(hf.MPNetModel):
    """Two encoders outside the interface of attention; the second one's states are a part of another output."""

    def __init__(self, config: hf.MPNetConfig) -> None:
        super().__init__(config, add_pooling_layer=False)
        self.second = hf.MPNetModel(config, add_pooling_layer=False)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> ModelOutput:
        states = super().forward(input_ids, attention_mask).last_hidden_state
        return _Output(states, self.second(inputs_embeds=states, attention_mask=attention_mask))


class Unfollowed(TwoMPNets):
    """Does not run under a mode."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> ModelOutput:
        if _get_current_dispatch_mode() is not None:
            raise NotImplementedError
        return super().forward(input_ids, attention_mask)


class Branching(TwoTowers):
    """The second encoder reads one of two tensors that are computed from the states of the first one."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> ModelOutput:
        states = hf.BertModel.forward(self, input_ids, attention_mask).last_hidden_state
        states = torch.cond(states.sum() > 0, lambda x: x * 2, lambda x: x * 3, (states,))
        return self.second(inputs_embeds=states, attention_mask=attention_mask)


class Kernels(TwoTowers):
    """The first encoder ends with a kernel that no mode sees."""

    def __init__(self, config: hf.BertConfig) -> None:
        super().__init__(config)
        self.encoder.layer[0].output.LayerNorm = Copying()


def test_heads_outside_the_interface_that_only_a_dropped_output_reads_are_no_sites() -> None:
    model = TwoMPNets(hf.MPNetConfig(**SMALL)).eval()
    assert [site.name for site in find_sites(model, text())] == [MPNET_SITE]


def test_a_forward_that_cannot_be_followed_lists_everything(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "compressor")
    model = Unfollowed(hf.MPNetConfig(**SMALL)).eval()
    units = find_units(model, text())
    assert [site.name for site in units.sites] == [MPNET_SITE, f"second.{MPNET_SITE}"]
    linears = {name for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    assert linears
    assert linears <= units.read
    assert "cannot be followed" in caplog.text


@pytest.mark.parametrize("model_class", [Branching, Kernels])
def test_units_of_models_with_unusual_operators_are_sites(model_class: type[TwoTowers]) -> None:
    sites = find_sites(model_class(hf.BertConfig(**SMALL)).eval(), text())
    expected = ["encoder", "second"] if model_class is Branching else ["encoder"]
    assert [site.name.partition(".")[0] for site in sites] == expected


def test_units_that_only_a_dropped_output_reads_are_no_groups() -> None:
    model, inputs = TwoTowers(hf.BertConfig(**SMALL)).eval(), text()
    groups, names = find_groups(model, inputs), ["encoder.layer.0.attention.self", "encoder.layer.0.output.dense"]
    assert [group.name for group in groups] == names
    assert [site.name for site in find_sites(model, inputs)] == names[:1]
    plan = keep_all(groups)
    with torch.no_grad():
        expected = model(**inputs).last_hidden_state
        with gated(model, plan):
            assert torch.equal(model(**inputs).last_hidden_state, expected)


@pytest.mark.zoo
def test_a_graph_has_the_gates_of_the_units_that_it_reads(tmp_path: Path) -> None:
    model, inputs = TwoTowers(hf.BertConfig(**SMALL)).eval(), text()
    groups = find_groups(model, inputs)
    export_reference(model, keep_all(groups), inputs, tmp_path / "reference.onnx")
    assert set(find_gates(load(tmp_path / "reference.onnx").graph)) == {group.name for group in groups}


def test_units_that_choose_what_is_read_are_groups() -> None:
    groups = find_groups(Choosing(hf.BertConfig(**SMALL)).eval(), text())
    assert [group.name.partition(".")[0] for group in groups] == ["encoder", "encoder", "second", "second"]


def test_by_products_and_parts_are_left_out() -> None:
    names = ["logits", "past_key_values.0", "hidden_states.0", "encoder_last_hidden_state", "part.pooler_output"]
    assert kept_outputs(nn.Identity(), names) == ["logits"]
    assert kept_outputs(nn.Identity(), names[1:]) == names[1:]


def test_a_model_may_list_its_outputs() -> None:
    model = nn.Identity()
    model.graph_outputs = ("last_hidden_state",)  # type: ignore[assignment]
    assert kept_outputs(model, ["embedding", "last_hidden_state"]) == ["last_hidden_state"]
