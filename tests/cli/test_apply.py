"""`compress apply` on graphs of other exporters: neurons go, refitted weights arrive, and nothing is guessed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from safetensors.torch import load_file, save_file

from compressor.errors import ErrorCode
from compressor.model_folder import example_inputs, load
from compressor.model_folder.fingerprints import record_weights, weight_fingerprints
from compressor.units import find_groups, gated
from graph_passes import GraphErrorCode, Plan
from tests import folders
from tests.command import compress
from tests.graph_passes.exporters import trace
from tests.graph_passes.graphs import error, graph, run
from tests.graph_passes.test_shrink_exports import feeds
from tests.random_plans import random_groups

Cap = pytest.CaptureFixture[str]
NEURONS = "bert.encoder.layer.0.output.dense"


@pytest.fixture(scope="module")
def refitted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `original.onnx`, `fitted.onnx`, and `out`: a plan with the weights that were refitted with it."""
    root = tmp_path_factory.mktemp("refitted")
    torch.manual_seed(0)
    model = folders.bert()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    folder = load(folders.save(model, root / "model"))
    network, inputs = folder.model, example_inputs(folder, 2, 8)
    groups, original = find_groups(network, inputs), weight_fingerprints(folder.access)
    trace(network, inputs, root / "original.onnx", opset=17, attention="eager")
    with torch.no_grad():
        for group in groups:
            linear = network.get_submodule(str(group.linear))
            for parameter in linear.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
    trace(network, inputs, root / "fitted.onnx", opset=17, attention="eager")
    network.save_pretrained(root / "out")
    plan = random_groups(groups, np.random.default_rng(4))
    halves = []
    for planned in plan.groups:
        kept = tuple(range(0, planned.units, 2))
        halves.append(replace(planned, kept=kept, scale=tuple(0.8 + 0.05 * unit for unit in kept)))
    record_weights(plan.replace_groups(halves), original, folder.access).save(root / "out" / "plan.json")
    return root


@pytest.fixture
def folder(refitted: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    return shutil.copytree(refitted, tmp_path / "copy")


def expected(folder: Path) -> np.ndarray:
    """The logits of the refitted model with the dropped units gated to zero."""
    model = load(folder / "out", needs_processor=False)
    with torch.no_grad(), gated(model.model, Plan.load(folder / "out" / "plan.json"), attention="eager"):
        return model.model(**inputs_of(folder)).logits.numpy()


def inputs_of(folder: Path) -> dict[str, torch.Tensor]:
    return dict(example_inputs(load(folder / "model"), 3, 6))


@pytest.mark.parametrize("source", ["original", "fitted"])
def test_the_small_graph_computes_with_the_weights_of_the_plan(
    capfd: Cap, refitted: Path, tmp_path: Path, source: str
) -> None:
    plan = Plan.load(refitted / "out" / "plan.json")
    out = tmp_path / "small.onnx"
    file = refitted / f"{source}.onnx"
    result = compress(capfd, "apply", file, "--plan", refitted / "out" / "plan.json", "-o", out, "--json")
    assert result.code == 0, result.err
    changed = {name for name, record in plan.weights.items() if record.is_changed}
    assert changed == {
        f"{linear}.{parameter}"
        for linear in (NEURONS, "bert.encoder.layer.0.attention.output.dense")
        for parameter in ("weight", "bias")
    }
    assert set(result.json["transferred"]) == (changed if source == "original" else set())
    assert (result.json["kept"], result.json["neurons_kept"]) == (plan.heads_kept, plan.neurons_kept)
    small = ir.load(out)
    assert error(run(small, feeds(inputs_of(refitted), small)), [expected(refitted)]) <= 1e-5


def test_a_plan_that_records_no_weights_is_known_by_those_beside_it(capfd: Cap, folder: Path, tmp_path: Path) -> None:
    plan = Plan.load(folder / "out" / "plan.json")
    plan.model_copy(update={"weights": {}}).save(folder / "out" / "plan.json")
    command: list[str | Path] = ["--plan", folder / "out" / "plan.json", "-o", tmp_path / "small.onnx", "--quiet"]
    refused = compress(capfd, "apply", folder / "original.onnx", *command)
    assert (refused.code, refused.details["cause"]) == (3, GraphErrorCode.MODEL_MISMATCH)
    assert compress(capfd, "apply", folder / "fitted.onnx", *command).code == 0
    small = ir.load(tmp_path / "small.onnx")
    assert error(run(small, feeds(inputs_of(folder), small)), [expected(folder)]) <= 1e-5


def without_weights(folder: Path) -> None:
    (folder / "out" / "model.safetensors").unlink()


def damaged_weights(folder: Path) -> None:
    (folder / "out" / "model.safetensors").write_bytes(b"\x08")


def other_weights(folder: Path) -> None:
    path = folder / "out" / "model.safetensors"
    weights = load_file(path)
    weights[f"{NEURONS}.weight"] += 1
    save_file(weights, path)


def another_model(folder: Path) -> None:
    torch.manual_seed(1)
    model = folders.bert()
    inputs = example_inputs(load(folder / "model"), 2, 8)
    trace(model, inputs, folder / "original.onnx", opset=17, attention="eager")


def another_group(folder: Path) -> None:
    path = folder / "out" / "plan.json"
    plan = json.loads(path.read_text())
    (neurons,) = [group for group in plan["groups"] if group["type"] == "neurons"]
    neurons.update(name="bert.encoder.layer.1.output.dense")
    path.write_text(json.dumps(plan))


BAD_FOLDERS: dict[str, tuple[Callable[[Path], None], GraphErrorCode, str]] = {
    "no weights beside the plan": (without_weights, GraphErrorCode.WEIGHTS_MISSING, "model.safetensors"),
    "damaged weights": (damaged_weights, GraphErrorCode.FILE_UNREADABLE, "model.safetensors"),
    "weights of another run": (other_weights, GraphErrorCode.MODEL_MISMATCH, NEURONS),
    "graph of another model": (another_model, GraphErrorCode.MODEL_MISMATCH, "original.onnx"),
    "feed-forward that the graph lacks": (another_group, GraphErrorCode.SITE_MISSING, "layer.1"),
}


@pytest.mark.parametrize("case", BAD_FOLDERS)
def test_what_does_not_fit_is_refused_in_one_line(capfd: Cap, folder: Path, case: str) -> None:
    damage, cause, text = BAD_FOLDERS[case]
    damage(folder)
    before = sorted(folder.rglob("*"))
    result = compress(
        capfd,
        "apply",
        folder / "original.onnx",
        "--plan",
        folder / "out" / "plan.json",
        "-o",
        folder / "small.onnx",
        "--quiet",
    )
    assert (result.code, result.error_code, result.details["cause"]) == (3, ErrorCode.FILE_MISMATCH, cause)
    assert text in result.error
    assert sorted(folder.rglob("*")) == before


@pytest.mark.parametrize("name", ["original.onnx.data", "out/plan.json", "out/model.safetensors"])
def test_files_that_are_read_are_not_replaced(capfd: Cap, folder: Path, name: str) -> None:
    graph, plan = folder / "original.onnx", folder / "out" / "plan.json"
    onnx.save(onnx.load(graph), graph, save_as_external_data=True, location="original.onnx.data", size_threshold=0)
    content = (folder / name).read_bytes()
    result = compress(capfd, "apply", graph, "--plan", plan, "-o", folder / name, "--force", "--quiet")
    assert (result.code, result.error_code) == (2, ErrorCode.CONTRADICTION)
    assert (folder / name).read_bytes() == content


@pytest.mark.parametrize(
    ("layers", "code", "text"),
    [
        ("u = MatMul (x, U) s = Softmax (u) e = MatMul (s, D) y = Add (e, x)", 8, "Softmax"),
        (
            "u = MatMul (x, U) r = Relu (u) e = MatMul (r, D) f = Add (e, x)"
            " v = MatMul (f, U) q = Relu (v) g = MatMul (q, E) y = Add (g, f)",
            3,
            "D, E",
        ),
    ],
)
def test_a_feed_forward_that_cannot_be_cut_or_told_apart_is_refused(
    capfd: Cap, tmp_path: Path, layers: str, code: int, text: str
) -> None:
    model = graph(layers, "float[8, 6] U", "float[6, 8] D", "float[6, 8] E")
    ir.save(model, tmp_path / "graph.onnx")
    group = {"type": "neurons", "name": "mlp", "units": 6, "kept": [0, 3]}
    (tmp_path / "plan.json").write_text(json.dumps({"version": 2, "groups": [group]}))
    result = compress(
        capfd,
        "apply",
        tmp_path / "graph.onnx",
        "--plan",
        tmp_path / "plan.json",
        "-o",
        tmp_path / "small.onnx",
        "--quiet",
    )
    assert result.code == code
    assert text in result.error
    assert not (tmp_path / "small.onnx").exists()
