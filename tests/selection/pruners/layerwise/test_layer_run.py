"""Layer by layer runs see what hooks on whole forwards see."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from compressor.selection.pruners.layerwise.layer_run import LayerwiseRun, find_sum
from tests.selection.pruners.reconstruct.shared import CASES, linears_in_layers
from tests.unchanged import unchanged

QUICK = ("bert", "shared_llama", "t5")
Seen = dict[str, list[tuple[Tensor, Tensor]]]


def flipped(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Another batch: the rows in reverse order, without the last."""
    return {name: value.flip(0)[:-1] for name, value in batch.items()}


def whole_forward(model: PreTrainedModel, batch: dict[str, Tensor], linears: Sequence[str]) -> Seen:
    """Input and output of each call of some linears in a plain forward."""
    seen: Seen = {name: [] for name in linears}
    handles = [
        model.get_submodule(name).register_forward_hook(
            lambda module, args, output, name=name: seen[name].append((args[0], output))
        )
        for name in linears
    ]
    with torch.no_grad():
        model(**batch)
    for handle in handles:
        handle.remove()
    return seen


def last_module(model: PreTrainedModel, batch: dict[str, Tensor]) -> str:
    """Module path of the last module without children that a forward calls."""
    called: list[str] = []
    leaves = [(name, module) for name, module in model.named_modules() if not any(module.children())]
    handles = [module.register_forward_hook(lambda *args, name=name: called.append(name)) for name, module in leaves]
    with torch.no_grad():
        model(**batch)
    for handle in handles:
        handle.remove()
    return called[-1]


@pytest.mark.parametrize(
    ("family", "at_once"),
    [
        *(pytest.param(name, True, id=f"{name}, in one pass") for name in CASES),
        *(
            pytest.param(name, False, id=f"{name}, in two passes", marks=() if name in QUICK else pytest.mark.zoo)
            for name in CASES
        ),
    ],
)
def test_inputs_and_outputs_are_those_of_whole_forwards(family: str, *, at_once: bool) -> None:
    model, batch = CASES[family]()
    batches, linears = [batch, flipped(batch)], linears_in_layers(model)
    expected = [whole_forward(model, item, linears) for item in batches]
    model.train()
    with unchanged(model):
        run = LayerwiseRun(model, batches)
        for layer in range(run.end):
            here = [name for name in linears if run.layers_of(name).start == layer]
            observed = run.observe(dict.fromkeys(here), advance_to=layer + 1 if at_once else None)
            for seen, calls in zip(expected, observed, strict=True):
                assert sorted((call.linear, call.number) for call in calls) == sorted(
                    (name, number) for name in here for number in range(len(seen[name]))
                )
                for call in calls:
                    x, y = seen[call.linear][call.number]
                    torch.testing.assert_close((call.input, call.output), (x, y))
                    assert call.sum is None
            run.advance(layer + 1)


@pytest.mark.parametrize(
    "family", [name if name in QUICK else pytest.param(name, marks=pytest.mark.zoo) for name in CASES]
)
def test_a_model_that_changes_on_the_way_ends_as_the_changed_model(family: str) -> None:
    model, batch = CASES[family]()
    batches, linears = [batch, flipped(batch)], linears_in_layers(model)
    run = LayerwiseRun(model, batches)
    for layer in range(run.end):
        with torch.no_grad():
            for name in linears:
                if run.layers_of(name).start == layer:
                    next(model.get_submodule(name).parameters())[::2] *= 0.5
        run.advance(layer + 1)
    last = last_module(model, batch)
    assert run.layers_of(last).start == run.end
    for item, (call,) in zip(batches, run.observe({last: None}), strict=True):
        ((_, output),) = whole_forward(model, item, [last])[last]
        torch.testing.assert_close(call.output, output)


@pytest.mark.parametrize(
    ("family", "linear", "norm"),
    [
        ("bert", "bert.encoder.layer.1.output.dense", "bert.encoder.layer.1.output.LayerNorm"),
        ("llama", "model.layers.0.mlp.down_proj", "model.layers.1.input_layernorm"),
        ("llama", "model.layers.2.mlp.down_proj", "model.norm"),
        ("t5", "decoder.block.0.layer.2.DenseReluDense.wo", "decoder.block.1.layer.0.layer_norm"),
        ("bart", "model.decoder.layers.1.fc2", "model.decoder.layers.1.final_layer_norm"),
        (
            "albert",
            "albert.encoder.albert_layer_groups.0.albert_layers.0.ffn_output",
            "albert.encoder.albert_layer_groups.0.albert_layers.0.full_layer_layer_norm",
        ),
    ],
)
def test_sums_are_the_inputs_of_norms(family: str, linear: str, norm: str) -> None:
    model, batch = CASES[family]()
    inputs = whole_forward(model, batch, [norm])[norm]
    run = LayerwiseRun(model, [batch])
    run.advance(run.layers_of(linear).start)
    (calls,) = run.observe({linear: find_sum(model, batch, linear)})
    torch.testing.assert_close([call.sum for call in calls], [x for x, _ in inputs])


def test_the_last_reader_of_a_shared_layer_is_the_final_norm() -> None:
    model, batch = CASES["shared_llama"]()
    linear = "model.layers.0.mlp.down_proj"
    run = LayerwiseRun(model, [batch])
    assert run.layers_of(linear) == range(3)
    (calls,) = run.observe({linear: find_sum(model, batch, linear)})
    ((last, _),) = whole_forward(model, batch, ["model.norm"])["model.norm"]
    assert [call.number for call in calls] == [0, 1, 2]
    torch.testing.assert_close(calls[-1].sum, last)


def test_a_correction_of_the_output_restores_the_dense_sum() -> None:
    model, batch = CASES["bert"]()
    pruned = copy.deepcopy(model)
    first, second = (f"bert.encoder.layer.{layer}.output.dense" for layer in (0, 1))
    with torch.no_grad():
        pruned.get_parameter(f"{first}.weight")[:, ::2] = 0
    readers = {second: find_sum(model, batch, second)}
    runs = [LayerwiseRun(model, [batch]), LayerwiseRun(pruned, [batch])]
    for run in runs:
        run.advance(1)
    ((dense,), (changed,)) = (next(run.observe(readers)) for run in runs)
    assert dense.sum is not None
    assert changed.sum is not None
    assert changed.output is not None
    target = dense.sum - (changed.sum - changed.output)
    handle = pruned.get_submodule(second).register_forward_hook(lambda *args: target)
    with torch.no_grad():
        torch.testing.assert_close(pruned(**batch).logits, model(**batch).logits)
    handle.remove()


def test_gates_of_others_are_part_of_the_model() -> None:
    model, batch = CASES["bert"]()
    name = "bert.encoder.layer.0.output.dense"
    linear = model.get_submodule(name)
    assert isinstance(linear, nn.Linear)
    handle = linear.register_forward_pre_hook(lambda module, args: (args[0] * 0,))
    ((call,),) = LayerwiseRun(model, [batch]).observe({name: None})
    handle.remove()
    assert call.input.count_nonzero() == 0
    assert call.output is not None
    torch.testing.assert_close(call.output, linear.bias.expand_as(call.output))


def test_layers_behind_are_not_run_again() -> None:
    model, batch = CASES["bert"]()
    run = LayerwiseRun(model, [batch])
    run.advance(2)
    ran: list[int] = []
    for number in range(3):
        linear = model.get_submodule(f"bert.encoder.layer.{number}.output.dense")
        linear.register_forward_hook(lambda *args, number=number: ran.append(number))
    list(run.observe({"bert.encoder.layer.2.attention.output.dense": None}))
    assert ran == []
    list(run.observe({"classifier": None}))
    assert ran == [2]


def test_linears_whose_outputs_are_not_observed_do_not_run() -> None:
    model, batch = CASES["bert"]()
    first, last = (f"bert.encoder.layer.1.attention.self.{part}" for part in ("query", "value"))
    run = LayerwiseRun(model, [batch])
    run.advance(1)
    ((query, value),) = run.observe({first: None, last: None})
    model.get_submodule(last).register_forward_hook(lambda *args: pytest.fail("it runs"))
    calls = next(run.observe({first: None, last: None}, with_outputs=False))
    assert [(call.linear, call.output) for call in calls] == [(first, None), (last, None)]
    torch.testing.assert_close([call.input for call in calls], [query.input, value.input])


def test_misuse() -> None:
    model, batch = CASES["bert"]()
    run = LayerwiseRun(model, [batch])
    run.advance(2)
    with pytest.raises(ValueError, match="called in layer call 0, but the run is at 2"):
        next(run.observe({"bert.encoder.layer.0.output.dense": None}))
    with pytest.raises(ValueError, match="layer call 1: use one of 2 to 3"):
        run.advance(1)
    with pytest.raises(ValueError, match=r"bert\.encoder\.layer\.9"):
        run.layers_of("bert.encoder.layer.9")
    assert run.layers_of("classifier") == range(3, 4)


def test_the_model_is_restored_after_an_error() -> None:
    model, batch = CASES["bert"]()
    run = LayerwiseRun(model, [batch, {"input_ids": batch["input_ids"] + 10_000}])
    with unchanged(model), pytest.raises(IndexError):
        run.advance(1)


READERS = [
    ("bert", "bert.encoder.layer.0.attention.output.dense", "bert.encoder.layer.0.attention.output.LayerNorm"),
    ("bert", "bert.encoder.layer.2.output.dense", "bert.encoder.layer.2.output.LayerNorm"),
    ("distilbert", "distilbert.transformer.layer.1.attention.out_lin", "distilbert.transformer.layer.1.sa_layer_norm"),
    ("modernbert", "model.layers.1.attn.Wo", "model.layers.1.mlp_norm"),
    ("modernbert", "model.layers.2.mlp.Wo", "model.final_norm"),
    ("gpt2", "transformer.h.0.attn.c_proj", "transformer.h.0.ln_2"),
    ("gpt2", "transformer.h.0.mlp.c_proj", "transformer.h.1"),
    ("llama", "model.layers.0.self_attn.o_proj", "model.layers.0.post_attention_layernorm"),
    ("llama", "model.layers.0.mlp.down_proj", "model.layers.1"),
    ("qwen3", "model.layers.2.mlp.down_proj", "model.norm"),
    ("t5", "encoder.block.1.layer.1.DenseReluDense.wo", "encoder.final_layer_norm"),
    ("t5", "decoder.block.0.layer.1.EncDecAttention.o", "decoder.block.0.layer.2"),
    ("bart", "model.decoder.layers.0.encoder_attn.out_proj", "model.decoder.layers.0.encoder_attn_layer_norm"),
    ("marian", "model.decoder.layers.1.fc2", "model.decoder.layers.1.final_layer_norm"),
    ("vit", "vit.layers.0.attention.o_proj", "vit.layers.0.layernorm_after"),
    ("clip_text", "text_model.encoder.layers.0.mlp.fc2", "text_model.encoder.layers.1"),
    ("whisper", "model.encoder.layers.1.fc2", "model.encoder.layer_norm"),
]


@pytest.mark.parametrize(("family", "linear", "reader"), READERS)
def test_reader_of_each_family(family: str, linear: str, reader: str) -> None:
    model, inputs = CASES[family]()
    with unchanged(model):
        assert find_sum(model, inputs, linear) == ((reader, 1),)


@pytest.mark.parametrize(
    ("family", "linear"),
    [
        ("llama", "model.layers.0.mlp.gate_proj"),
        ("bert", "bert.encoder.layer.0.attention.self.query"),
        ("bert", "bert.encoder.layer.0.intermediate.dense"),
        ("bert", "bert.pooler.dense"),
    ],
)
def test_linears_inside_a_sublayer_have_no_sum(family: str, linear: str) -> None:
    model, inputs = CASES[family]()
    assert find_sum(model, inputs, linear) is None


def test_each_call_of_a_shared_layer_has_a_reader() -> None:
    model, inputs = CASES["shared_llama"]()
    linear = "model.layers.0.mlp.down_proj"
    calls = (("model.layers.0", 1), ("model.layers.0", 1), ("model.norm", 1))
    assert find_sum(model, inputs, linear) == calls


def test_a_scaled_residual_branch_has_no_sum() -> None:
    model, inputs = CASES["llama"]()
    linear = "model.layers.0.self_attn.o_proj"

    def scale(module: object, args: object, output: Tensor) -> Tensor:
        return output * torch.tensor(0.5)

    handle = model.get_submodule(linear).register_forward_hook(scale)
    assert find_sum(model, inputs, linear) is None
    handle.remove()
    assert find_sum(model, inputs, linear) is not None


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_any_precision(dtype: torch.dtype) -> None:
    model, inputs = CASES["llama"]()
    model.to(dtype)  # type: ignore[arg-type]
    linear = "model.layers.1.self_attn.o_proj"
    reader = (("model.layers.1.post_attention_layernorm", 1),)
    assert find_sum(model, inputs, linear) == reader
    assert find_sum(model, inputs, "model.layers.1.mlp.gate_proj") is None
