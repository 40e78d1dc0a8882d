"""Engines of plans: the graph of any plan is cut from a graph that was quantized once."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnx_ir as ir
import pytest

import graph_passes
from compressor.config.sections import EngineConfig
from compressor.engines.build import ExportedGraph
from compressor.engines.choices import PORTABLE, SYMMETRIC, Choice
from compressor.export import export_reference
from compressor.measure import macs as measured_macs
from compressor.measure.costs import CostTable
from compressor.pruning.costs import PlanEngines, count_costs, keep_counts
from compressor.pruning.measure import equal_groups, measured_counts
from compressor.targets import BuildOptions
from compressor.targets.graph_facts import quantized_matmuls
from compressor.units import PrunableGroup, find_groups, keep_all
from graph_passes import Plan
from tests.law import references
from tests.projection_zoo import FAMILIES
from tests.run.budgets.budget_runs import exported
from tests.targets.graphs import parsed
from tests.zoo import GROUPED, text

CHOICES = {
    "": EngineConfig(),
    PORTABLE: EngineConfig(target="openvino", precision="int8"),
    SYMMETRIC: EngineConfig(target="trt", precision="int8"),
}


@pytest.fixture(scope="module")
def groups() -> list[PrunableGroup]:
    return references.reference("bert", 18, "eager").groups


@pytest.fixture(scope="module")
def reference(groups: list[PrunableGroup]) -> ExportedGraph:
    return exported(groups, references.reference("bert", 18, "eager").path)


@pytest.fixture(scope="module")
def counted(
    reference: ExportedGraph, groups: list[PrunableGroup], tmp_path_factory: pytest.TempPathFactory
) -> tuple[list[CostTable], int]:
    """Parameters and multiply-accumulates of every number of units, and in how many graphs they were counted."""
    engines, plans = plan_engines(reference, "", tmp_path_factory.mktemp("costs")), list[Plan]()

    def graph_of(plan: Plan) -> ir.Model:
        plans.append(plan)
        return engines.float_graph(plan)

    return count_costs(graph_of, reference.plan, groups, [(1, 7)], lambda finished, total: None), len(plans)


@pytest.fixture(scope="module")
def costs(counted: tuple[list[CostTable], int]) -> tuple[CostTable, CostTable]:
    (parameters, macs), _ = counted
    return parameters, macs


def plan_engines(reference: ExportedGraph, form: str, scratch: Path) -> PlanEngines:
    row = {name: value.numpy() for name, value in text(1, 7).items()}
    return PlanEngines(reference, Choice(CHOICES[form], form), BuildOptions(), row, True, scratch)


@pytest.mark.parametrize("form", ["", PORTABLE, pytest.param(SYMMETRIC, marks=pytest.mark.zoo)])
def test_the_graph_of_a_plan_holds_its_units(
    reference: ExportedGraph, groups: list[PrunableGroup], form: str, tmp_path: Path
) -> None:
    engines = plan_engines(reference, form, tmp_path)
    counts = {group.name: group.units // 4 for group in groups}
    whole, cut = (engines.graph(keep_counts(reference.plan, groups, kept)) for kept in ({}, counts))
    assert len(quantized_matmuls(cut)) == len(quantized_matmuls(whole))
    assert bool(quantized_matmuls(whole)) == bool(form)
    assert sum(size(cut)) < sum(size(whole))


@pytest.mark.zoo
def test_units_that_are_channels_of_a_convolution_are_removed(tmp_path: Path) -> None:
    family = FAMILIES["squeezebert"]
    model, inputs = family.model(), family.inputs(3, 7)
    groups = find_groups(model, inputs)
    export_reference(model, keep_all(groups), inputs, tmp_path / "graph.onnx")
    reference = exported(groups, tmp_path / "graph.onnx")
    engines = plan_engines(reference, "", tmp_path / "plans")
    half = {group.name: group.counts[len(group.counts) // 2] for group in groups}
    whole, cut = (engines.graph(keep_counts(reference.plan, groups, counts)) for counts in ({}, half))
    assert graph_passes.count_parameters(cut) < graph_passes.count_parameters(whole)
    assert any(node.op_type == "Conv" for node in cut.graph)


def size(model: ir.Model) -> list[int]:
    """Elements of the matrices of a graph."""
    tensors = [value.const_value for value in model.graph.initializers.values()]
    return [tensor.size for tensor in tensors if tensor is not None and len(tensor.shape) == 2]


def test_counts_are_linear_in_the_number_of_units(
    reference: ExportedGraph, groups: list[PrunableGroup], costs: tuple[CostTable, CostTable], tmp_path: Path
) -> None:
    engines = plan_engines(reference, "", tmp_path)
    parameters, macs = costs
    rng = np.random.default_rng(0)
    counts = {group.name: int(rng.integers(1, group.units)) for group in groups}
    graph = engines.float_graph(keep_counts(reference.plan, groups, counts))
    assert parameters.cost(counts) == pytest.approx(graph_passes.count_parameters(graph))
    assert macs.cost({}) == macs.whole
    last = [group for group in groups if group.name.startswith("bert.encoder.layer.2")]
    assert all(macs.saving(group.name, 0) > 0 for group in groups)
    # The last layer computes one position, so that its groups cost less than the others of their type.
    classes = equal_groups(groups, macs)
    assert sorted(len(members) for members in classes) == [1, 1, 2, 2]
    assert all([group] in classes for group in last)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.zoo) for seed in (1, 2, 3))])
def test_what_a_group_saves_does_not_depend_on_the_others(
    reference: ExportedGraph,
    groups: list[PrunableGroup],
    costs: tuple[CostTable, CostTable],
    tmp_path: Path,
    seed: int,
) -> None:
    engines = plan_engines(reference, "", tmp_path)
    _, macs = costs
    rng = np.random.default_rng(seed)
    # Without its last attentions, a graph would read fewer positions.
    counts = {group.name: int(rng.choice([0, group.units // 2, group.units])) for group in groups}
    graph = engines.graph(keep_counts(reference.plan, groups, counts))
    assert macs.cost(counts) == pytest.approx(measured_macs(graph, 1, 7))


def test_similar_layers_are_counted_once(groups: list[PrunableGroup], counted: tuple[list[CostTable], int]) -> None:
    assert counted[1] < 1 + len(groups)  # the whole model, and a graph for each group


@pytest.mark.parametrize("widths", [(3, 3, 3), (3, 5, 3), (5, 3, 3), (3, 4, 5, 3)])
def test_layers_that_only_look_similar_have_their_own_counts(widths: tuple[int, ...]) -> None:
    groups = [
        PrunableGroup(f"layer.{number}", "neurons", units=8, width=1, multiple=1, linear=None)
        for number in range(len(widths))
    ]

    def graph_of(plan: Plan) -> ir.Model:
        kept = [len(group.kept) for group in plan.groups]
        layers = range(len(widths))
        return parsed(
            "\n".join(f"y{layer} = MatMul(x{layer}, w{layer})" for layer in layers),
            ", ".join(
                f"float[B, {kept[layer]}] x{layer}, float[{kept[layer]}, {widths[layer]}] w{layer}" for layer in layers
            ),
            ", ".join(f"float[B, {widths[layer]}] y{layer}" for layer in layers),
        )

    _, table = count_costs(graph_of, keep_all(groups), groups, [(1, None)], lambda finished, total: None)
    assert [table.saving(group.name, 2) for group in groups] == [6 * width for width in widths]


@pytest.mark.zoo
def test_counts_of_query_heads_include_the_keys_that_go_with_the_last(tmp_path: Path) -> None:
    model, inputs = GROUPED(0)
    groups = find_groups(model, inputs, group_by="query")
    plan = keep_all(groups)
    engines = plan_engines(exported(groups, references.grouped(18, "eager")), "", tmp_path)
    heads = [group for group in groups if group.type == "heads"]
    parameters, macs = count_costs(engines.float_graph, plan, heads, [(1, 7)], lambda finished, total: None)
    for numbers in ((0, 2, 4), (6, 0, 8), (2, 2, 2)):
        counts = {group.name: count for group, count in zip(heads, numbers, strict=True)}
        graph = engines.float_graph(keep_counts(plan, heads, counts))
        assert parameters.cost(counts) == pytest.approx(graph_passes.count_parameters(graph))
        assert macs.cost(counts) == pytest.approx(measured_macs(graph, 1, 7))
    assert all(group.multiple in measured_counts(group, share) for group in heads for share in (0.01, 0.5))


def test_a_released_engine_is_built_again(
    reference: ExportedGraph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("compressor.pruning.costs.build_engine", lambda graph, *settings: SimpleNamespace(path=graph))
    engines = plan_engines(reference, "", tmp_path)
    engines.release()
    first = engines.whole
    engines.release()
    assert not first.path.exists()
    assert engines.whole is engines.whole is not first
    assert engines.whole.path.exists()
