"""A tiny model and its graph, and exports that runs share."""

from __future__ import annotations

from pathlib import Path

import pytest

from compressor.model_folder import example_inputs, load
from compressor.units import find_sites, keep_all
from graph_passes import Plan
from tests import folders
from tests.shared_exports import shared_export


@pytest.fixture(scope="session", autouse=True)
def _exports(shared_exports: None) -> None:
    """Runs share exports."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folders.save(folders.bert(), tmp_path_factory.mktemp("bert"))


@pytest.fixture(scope="module")
def graph(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A graph with every head, and a plan in the same folder that drops the first head."""
    path = tmp_path_factory.mktemp("graph") / "dense.onnx"
    folder = load(model)
    inputs = example_inputs(folder, 2, 8)
    plan = keep_all(find_sites(folder.model, inputs))
    shared_export(folder.model, plan, inputs, path)
    drop_first_head(plan).save(path.with_name("plan.json"))
    return path


def drop_first_head(plan: Plan) -> Plan:
    sites = tuple(
        type(site)(site.name, site.kind, site.heads, site.kv_heads, site.head_dim, tuple(range(1, site.heads)))
        for site in plan.sites
    )
    return plan.replace_groups(sites)
