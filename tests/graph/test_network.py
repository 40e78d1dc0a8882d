"""A network computes what its graph computes, learns, and is written back."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
from transformers import AlbertConfig, AlbertForSequenceClassification

import graph_passes
from compressor.graph.config import GraphConfig
from compressor.graph.file import GraphFile
from compressor.graph.program import Program
from compressor.model_folder.access import access_of
from compressor.selection.pruners.layerwise.layer_run import LayerwiseRun
from compressor.units import find_groups, gated, keep_all
from compressor.units.prunable import LinearWeights
from graph_passes import Plan, RefusalCode
from tests import folders
from tests.exported_graphs import Inputs, Session
from tests.graph.files import classifier, halve
from tests.graph_passes.exporters import export, trace
from tests.graph_passes.graphs import graph
from tests.zoo import FAMILIES, VOCABULARY, text

QUICK: dict[str, tuple[str, ...]] = {"legacy": ("bert", "gpt2"), "dynamo": ()}
"""Families of quick tests; `test_whole_graphs.py` has one of dynamo."""
TOLERANCE = 1e-5


def load_file(path: Path) -> GraphFile:
    return GraphFile(Program.of(path), GraphConfig())


def load_network(path: Path) -> Any:
    return load_file(path).network


def legacy(name: str, folder: Path) -> tuple[Path, Inputs]:
    """The graph of a family as torch's older exporter writes it, and its inputs."""
    model, inputs = FAMILIES[name](0)
    path = folder / f"{name}.onnx"
    trace(model, inputs, path, opset=14, attention="eager")
    return path, inputs


def error(actual: torch.Tensor, expected: np.ndarray) -> float:
    return float(np.abs(actual.detach().numpy() - expected).max() / np.abs(expected).max())


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Inputs]:
    return legacy("bert", tmp_path_factory.mktemp("bert"))


def test_a_file_in_half_precision_is_computed_in_float32(bert: tuple[Path, Inputs], tmp_path: Path) -> None:
    path, inputs = bert
    arrays = {name: value.numpy() for name, value in inputs.items()}
    whole, half = load_file(path).forward(), load_file(halve(path, tmp_path / "half.onnx"))
    sessions = half.forward()(arrays)
    assert half.network is not None
    for name, values in half.run(arrays).items():  # by the network
        assert sessions[name].dtype == np.float32
        assert error(torch.from_numpy(sessions[name]), values) <= 1e-4  # the network has no constants of a GELU
        assert error(torch.from_numpy(values), whole(arrays)[name]) <= 1e-2


@pytest.mark.parametrize(
    ("exporter", "name"),
    [
        pytest.param(exporter, name, marks=() if name in quick else pytest.mark.zoo)
        for exporter, quick in QUICK.items()
        for name in FAMILIES
    ],
)
def test_a_network_equals_its_graph(name: str, exporter: str, tmp_path: Path) -> None:
    model, inputs = FAMILIES[name](0)
    path = tmp_path / "model.onnx"
    try:
        if exporter == "legacy":
            trace(model, inputs, path, opset=14, attention="eager")
        else:
            export(model, inputs, path, opset=18, attention="eager")
    except Exception as failure:
        pytest.skip(f"the exporter fails: {failure}")
    network = load_network(path)
    expected = Session(path).run(inputs)
    with torch.no_grad():
        actual = network(**{key: value for key, value in inputs.items() if key in network.input_specs})
    assert all(error(actual[key], array) <= TOLERANCE for key, array in expected.items())
    least = model.config.get_text_config().num_hidden_layers if name == "bert" else 1
    assert len(network.graph_layers) >= least


def test_a_graph_declares_its_file_and_a_model_of_pytorch_has_none(bert: tuple[Path, Inputs]) -> None:
    path, _ = bert
    file, model = load_file(path), folders.bert()
    assert access_of(file) is file
    assert (file.file, file.precision) == (path, "fp32")
    wrapped = access_of(torch.nn.DataParallel(model))
    assert (wrapped.file, wrapped.network) == (None, model)


def test_weights_are_the_same_before_and_after_a_network_has_them(bert: tuple[Path, Inputs]) -> None:
    path, inputs = bert
    file, feeds = load_file(path), {name: value.numpy() for name, value in inputs.items()}
    linear = file.group_names[0]
    before = file.linear(linear)
    file.set_linear(linear, LinearWeights(before.weight / 2, before.bias))
    state, signature, outputs = file.copy_state(), file.fingerprint(), file.forward()(feeds)
    with torch.no_grad():
        computed = file.network(**inputs)["logits"]
    assert error(computed, outputs["logits"]) <= TOLERANCE
    assert file.fingerprint() == signature
    assert state.keys() == file.state().keys()
    assert all(np.array_equal(values, state[name]) for name, values in file.state().items())
    file.load_state({name: np.zeros_like(values) for name, values in state.items()})
    assert not any(values.any() for values in file.state().values())
    file.load_state(state)
    assert file.fingerprint() == signature != load_file(path).fingerprint()


def test_groups_of_a_network_are_its_linears(bert: tuple[Path, Inputs]) -> None:
    network = load_network(bert[0])
    groups = find_groups(network, bert[1])
    assert groups
    assert all(network.get_submodule(str(group.linear)).in_features == group.units * group.width for group in groups)
    assert {group.type for group in groups} == {"heads", "neurons"}


def test_paths_of_groups_may_be_those_of_a_model_without_a_head(tmp_path: Path) -> None:
    model, inputs = FAMILIES["llama"](0)
    written = tmp_path / "model.onnx"
    whole = trace(model, inputs, written, opset=17, attention="eager")
    for node in whole.graph:
        node.name = (node.name or "").replace("/model/model/", "/")
        node.metadata_props.clear()
    graph_passes.save(whole, tmp_path / "bare.onnx")
    network = load_network(tmp_path / "bare.onnx")
    assert "layers.0.self_attn.o_proj" in network.group_names
    assert all(isinstance(network.get_submodule(name), torch.nn.Linear) for name in network.group_names)


def test_a_copy_shares_parameters_and_computes_the_same(bert: tuple[Path, Inputs]) -> None:
    path, inputs = bert
    network = load_network(path)
    copied = copy.deepcopy(network, {id(parameter): parameter for parameter in network.parameters()})
    shared = {id(parameter) for parameter in network.parameters()}
    assert all(id(parameter) in shared for parameter in copied.parameters())
    with torch.no_grad():
        assert torch.equal(network(**inputs)["logits"], copied(**inputs)["logits"])


def test_a_pass_that_starts_at_a_later_layer_returns_the_same(bert: tuple[Path, Inputs]) -> None:
    path, inputs = bert
    network = load_network(path)
    linear = str(find_groups(network, inputs)[-1].linear)
    seen: list[torch.Tensor] = []
    module = network.get_submodule(linear)
    with module.register_forward_hook(lambda *arguments: seen.append(arguments[2])), torch.no_grad():
        network(**inputs)
    run = LayerwiseRun(network, [inputs])
    run.advance(run.layers_of(linear).start)
    (calls,) = run.observe({linear: None})
    assert calls[0].output is not None
    assert torch.equal(calls[0].output, seen[0])


def test_trained_weights_are_written_back(bert: tuple[Path, Inputs], tmp_path: Path) -> None:
    path, inputs = bert
    file = load_file(path)
    network: Any = file.network
    optimizer = torch.optim.SGD(network.parameters(), lr=0.05)
    before = file.copy_state()
    network(**inputs)["logits"].square().sum().backward()
    optimizer.step()
    changed = [name for name, value in file.state().items() if not np.array_equal(value, before[name])]
    assert len(changed) > 0.8 * len(before)
    graph_passes.save(file.with_weights(), tmp_path / "trained.onnx")
    expected = Session(tmp_path / "trained.onnx").run(inputs)
    with torch.no_grad():
        assert error(network(**inputs)["logits"], expected["logits"]) <= TOLERANCE


def test_gates_in_weights_equal_inserted_gates(bert: tuple[Path, Inputs], tmp_path: Path) -> None:
    path, inputs = bert
    file = load_file(path)
    groups = file.groups({}, "eager")
    plan = keep_all(groups).replace_groups(group.plan(group.first(group.units // 2)) for group in groups)
    file.write_gated(plan, tmp_path / "gated.onnx")
    gated = Session(tmp_path / "gated.onnx").run(inputs)
    with file.reference(plan) as run:
        folded = run({name: value.numpy() for name, value in inputs.items()})
    assert all(np.abs(gated[name] - folded[name]).max() <= TOLERANCE * np.abs(folded[name]).max() for name in gated)
    whole = Session(path).run(inputs)
    assert np.abs(gated["logits"] - whole["logits"]).max() > 0.01


@pytest.mark.zoo
def test_calls_of_one_module_share_a_linear_where_an_exporter_copies_its_weight(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = AlbertForSequenceClassification(
        AlbertConfig(
            vocab_size=VOCABULARY,
            embedding_size=8,
            hidden_size=16,
            num_hidden_layers=3,
            num_attention_heads=2,
            intermediate_size=24,
        )
    ).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    inputs, path = text(), tmp_path / "albert.onnx"
    export(model, inputs, path, opset=18, attention="eager")
    graph = graph_passes.load(path)
    for node in list(graph.graph):
        weight = node.inputs[1] if node.op_type == "MatMul" else None
        if weight is not None and weight.const_value is not None and len(list(weight.uses())) > 1:
            copied = ir.Value(name=f"{node.name}.weight", type=weight.type, shape=weight.shape)
            copied.const_value = ir.Tensor(weight.const_value.numpy().copy(), name=copied.name)
            graph.graph.register_initializer(copied)
            node.replace_input_with(1, copied)
    graph_passes.save(graph, path)
    file = load_file(path)
    network: Any = file.network
    groups = find_groups(network, inputs)
    assert any(len(group.weights) > 1 for group in Program.of(path).search.groups)
    plan = keep_all(groups).replace_groups(group.plan(group.first(group.units // 2)) for group in groups)
    file.write_gated(plan, tmp_path / "gated.onnx")
    with file.reference(plan) as run:
        expected = run({name: value.numpy() for name, value in inputs.items()})
    with torch.no_grad(), gated(network, plan):
        assert error(network(**inputs)["logits"], expected["logits"]) <= TOLERANCE
    actual = Session(tmp_path / "gated.onnx").run(inputs)
    assert np.abs(actual["logits"] - expected["logits"]).max() <= TOLERANCE * np.abs(expected["logits"]).max()


def test_the_last_heads_are_removed_with_neurons(tmp_path: Path) -> None:
    def shrunk(path: Path, heads: int, neurons: int) -> Path:
        kept = {"heads": heads, "neurons": neurons}
        groups = graph_passes.find_groups(graph_passes.load(path)).groups
        plan = Plan(groups=tuple(group.plan(range(min(group.units, kept[group.type]))) for group in groups))
        out = path.with_name(f"{heads} heads.onnx")
        graph_passes.save(graph_passes.shrink(graph_passes.load(path), plan).model, out)
        return out

    single = shrunk(classifier(tmp_path / "model.onnx"), 1, 20)
    before = graph_passes.find_groups(graph_passes.load(single)).groups
    assert {group.units for group in before if group.type == "heads"} == {1}
    after = graph_passes.find_groups(graph_passes.load(shrunk(single, 0, 5))).groups
    assert {group.units for group in after} == {5}


def test_a_reference_runs_the_file_and_not_what_was_read_of_it(bert: tuple[Path, Inputs]) -> None:
    path, inputs = bert
    arrays = {name: value.numpy() for name, value in inputs.items()}
    file = load_file(path)
    expected = load_file(path).run(arrays)["logits"]
    node = next(node for node in reversed(list(file._program.graph)) if node.op_type == "Softmax")
    node.attributes["axis"] = ir.AttrInt64("axis", 0)  # a fault of what reads the file
    with file.reference(Plan(groups=())) as run:
        np.testing.assert_allclose(run(arrays)["logits"], expected, rtol=1e-4, atol=1e-5)
    assert np.abs(file.run(arrays)["logits"] - expected).max() > 1e-3
    linear = str(file.groups(arrays, "eager")[0].linear)
    file.set_linear(linear, LinearWeights(np.zeros_like(file.linear(linear).weight), None))
    intact = load_file(path)
    intact.set_linear(linear, LinearWeights(np.zeros_like(intact.linear(linear).weight), None))
    with file.reference(Plan(groups=())) as run:
        np.testing.assert_allclose(run(arrays)["logits"], intact.run(arrays)["logits"], rtol=1e-4, atol=1e-5)


def test_the_structure_of_a_file_has_attributes_and_sizes(tmp_path: Path) -> None:
    def file(hidden: int = 16, negative: float = 0.1, parts: int = 2) -> GraphFile:
        model = graph(
            "h = MatMul(x, up)  r = LeakyRelu <alpha = 0.5> (h)  p = Reshape(r, split)  t = Softmax <axis = -1> (p)"
            "  j = Reshape(t, join)  d = MatMul(j, down)  y = Add(d, x)",
            f"float[{hidden}, 6] up, float[6, {hidden}] down, int64[4] split = {{0, 0, {parts}, -1}},"
            " int64[3] join = {0, 0, 6}",
            inputs=f"float[B, S, {hidden}] x",
            outputs=f"float[B, S, {hidden}] y",
        )
        model.graph[1].attributes["alpha"] = ir.AttrFloat32("alpha", negative)
        graph_passes.save(model, tmp_path / "model.onnx")
        return load_file(tmp_path / "model.onnx")

    whole = file()
    assert (whole.structure, whole.fingerprint()) == (file().structure, file().fingerprint())
    assert whole.structure != file(hidden=24).structure
    assert whole.structure != file(negative=0.2).structure
    assert whole.fingerprint() != file(negative=0.2).fingerprint()
    assert whole.structure != file(parts=3).structure


def test_heads_that_two_weights_read_are_no_group(tmp_path: Path) -> None:
    body = """q = Reshape(qp, split)  qt = Transpose <perm = [0, 2, 1, 3]> (q)
        s = MatMul(qt, kt)  a = Softmax <axis = -1> (s)  o = MatMul(a, qt)
        t = Transpose <perm = [0, 2, 1, 3]> (o)  h = Reshape(t, join)
        d = MatMul(h, first)  e = MatMul(h, second)  f = Add(d, e)  y = Add(f, x)"""
    body = f"qp = MatMul(x, up)  {body.replace('s = MatMul', 'kt = Transpose <perm = [0, 1, 3, 2]> (qt)  s = MatMul')}"
    sizes = "int64[4] split = {0, 0, 4, 3}, int64[3] join = {0, 0, 12}"
    weights = f"float[8, 12] up, float[12, 8] first, float[12, 8] second, {sizes}"
    graph_passes.save(graph(body, weights), tmp_path / "model.onnx")
    program = Program.of(tmp_path / "model.onnx")
    assert [group.units for group in program.search.groups] == [4]  # shrinking the graph takes both
    assert program.groups == []
    assert [obstacle.code for obstacle in program.obstacles] == [RefusalCode.NO_RULE]
    x = np.random.default_rng(0).normal(size=(2, 5, 8)).astype(np.float32)
    expected = load_file(tmp_path / "model.onnx").run({"x": x})["y"]
    with torch.no_grad():
        assert error(load_network(tmp_path / "model.onnx")(x=torch.from_numpy(x))["y"], expected) <= TOLERANCE


def test_a_graph_in_double_precision_runs_as_a_network(tmp_path: Path) -> None:
    body = "h = MatMul(x, up)  r = Tanh(h)  d = MatMul(r, down)  y = Add(d, x)"
    weights = "double[8, 6] up, double[6, 8] down"
    model = graph(body, weights, inputs="double[B, S, 8] x", outputs="double[B, S, 8] y")
    graph_passes.save(model, tmp_path / "model.onnx")
    x = np.random.default_rng(0).normal(size=(2, 3, 8))
    expected = load_file(tmp_path / "model.onnx").run({"x": x})["y"]
    with torch.no_grad():
        np.testing.assert_allclose(load_network(tmp_path / "model.onnx")(x=torch.from_numpy(x))["y"], expected)
