"""Plans: a file that cannot be used is refused with its path, the field and the value; former files are still read."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import pydantic
import pytest
from hypothesis import strategies as st

from graph_passes import BlockMask, GroupPlan, NeuronPlan, Plan, PlanError, SitePlan
from graph_passes.errors import GraphErrorCode
from tests.graph_passes.graphs import plan, site

Edit = Callable[[dict[str, Any]], object]
"""An edit that makes the JSON of a plan invalid."""

INVALID: dict[str, tuple[Edit, str, object]] = {
    "no sites": (lambda fields: fields.pop("groups"), "groups", None),
    "no heads": (lambda fields: fields["groups"][0].pop("heads"), "groups[0].heads", None),
    "another version": (lambda fields: fields.update(version=3), "version", 3),
    "an unknown key": (lambda fields: fields.update(kept=3), "kept", 3),
    "an unknown key of a site": (lambda fields: fields["groups"][0].update(keep=3), "groups[0].keep", 3),
    "a head out of range": (lambda fields: fields["groups"][0].update(kept=[0, 4], scale=[]), "groups[0]", None),
    "a head below zero": (lambda fields: fields["groups"][0].update(kept=[-1, 2]), "groups[0].kept[0]", -1),
    "heads that are not ascending": (lambda fields: fields["groups"][0].update(kept=[2, 0]), "groups[0]", None),
    "words for heads": (lambda fields: fields["groups"][0].update(heads="many"), "groups[0].heads", "many"),
    "an unknown kind": (lambda fields: fields["groups"][0].update(kind="both"), "groups[0].kind", "both"),
    "heads without scales": (lambda fields: fields["groups"][0].update(scale=[1.0]), "groups[0]", None),
    "key/value heads that do not divide": (lambda fields: fields["groups"][0].update(kv_heads=3), "groups[0]", None),
    "a weight without a fingerprint": (
        lambda fields: fields.update(weights={"a": {"original": "sha256:1", "fitted": "sha256:2"}}),
        "weights.a.original",
        "sha256:1",
    ),
    "a site twice": (lambda fields: fields["groups"].append(fields["groups"][0]), "", None),
}


def write_plan(tmp_path: Path, edit: Edit) -> Path:
    fields = plan([0, 2]).model_dump(mode="json")
    edit(fields)
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(fields))
    return path


def load_error(path: Path) -> PlanError:
    """The error of a plan that cannot be loaded: one line that names the path once."""
    with pytest.raises(PlanError) as error:
        Plan.load(path)
    assert str(error.value).count(str(path)) == 1
    assert "\n" not in str(error.value)
    assert error.value.details["path"] == path
    return error.value


@pytest.mark.parametrize("name", INVALID)
def test_a_plan_that_breaks_the_schema_is_refused_with_its_field_and_value(name: str, tmp_path: Path) -> None:
    edit, field, value = INVALID[name]
    error = load_error(write_plan(tmp_path, edit))
    assert (error.code, error.details["field"]) == (GraphErrorCode.INVALID_PLAN, field)
    if value is not None:
        assert error.details["value"] == value


@pytest.mark.parametrize("content", [b"{", b"[]"])
def test_a_file_without_a_json_object_is_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_bytes(content)
    error = load_error(path)
    assert (error.code, error.details["field"]) == (GraphErrorCode.INVALID_PLAN, "")


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    assert load_error(tmp_path / "none.json").code is GraphErrorCode.FILE_MISSING
    assert load_error(tmp_path).code is GraphErrorCode.FILE_UNREADABLE
    (tmp_path / "plan.json").write_bytes(b"\xff")
    assert load_error(tmp_path / "plan.json").code is GraphErrorCode.FILE_UNREADABLE


def test_messages_state_the_fault_and_the_remedy(tmp_path: Path) -> None:
    edits = [INVALID[name][0] for name in ("no heads", "another version", "a head out of range", "words for heads")]
    remedy = "correct the plan or learn it again"
    path = tmp_path / "plan.json"
    assert [str(load_error(write_plan(tmp_path, edit))).removeprefix(f"{path}: ") for edit in edits] == [
        f"groups[0].heads is missing; {remedy}",
        f"version 3 cannot be read, only versions 1 and 2; {remedy}",
        f"a: head 4 is out of range, the group has heads 0 to 3; {remedy}",
        f"groups[0].heads is 'many' and should be a valid integer, unable to parse string as an integer; {remedy}",
    ]


def version_1(tmp_path: Path, **changes: object) -> Path:
    """A plan file of version 1, whose only site has other fields."""
    path = write_plan(tmp_path, lambda fields: fields["groups"][0].update(changes))
    fields = json.loads(path.read_text())
    fields["version"], fields["sites"] = 1, fields.pop("groups")
    del fields["sites"][0]["type"]
    path.write_text(json.dumps(fields))
    return path


def test_a_plan_of_version_1_is_read(tmp_path: Path) -> None:
    assert Plan.load(version_1(tmp_path)) == plan([0, 2])
    error = load_error(version_1(tmp_path, kept=[-1]))
    assert (error.code, error.details["field"]) == (GraphErrorCode.INVALID_PLAN, "sites[0].kept[0]")


NEURONS = st.builds(
    lambda name, units, kept, scale: NeuronPlan(
        name, units, tuple(sorted(unit for unit in kept if unit < units)), (scale,) * sum(unit < units for unit in kept)
    ),
    st.text(min_size=1, max_size=5),
    st.integers(1, 40),
    st.sets(st.integers(0, 39)),
    st.floats(0.1, 2),
)
SITES = st.builds(
    lambda name, kind, heads, width, kept: SitePlan(
        name, kind, heads, heads, width, tuple(sorted(head for head in kept if head < heads))
    ),
    st.text(min_size=1, max_size=5),
    st.sampled_from(["bidirectional", "causal", "cross"]),
    st.integers(1, 6),
    st.integers(1, 64),
    st.sets(st.integers(0, 5)),
)


@hypothesis.settings(deadline=None, derandomize=True, max_examples=20)
@hypothesis.given(
    groups=st.lists(SITES | NEURONS, max_size=4, unique_by=lambda entry: entry.name), seed=st.none() | st.integers(0)
)
def test_a_saved_plan_is_read_without_a_change(
    groups: list[GroupPlan], seed: int | None, tmp_path_factory: pytest.TempPathFactory
) -> None:
    original = Plan(groups=tuple(groups), method="dsp", options={"tau": 0.5}, seed=seed)
    path = tmp_path_factory.mktemp("saved") / "plan.json"
    original.save(path)
    content = path.read_bytes()
    assert Plan.load(path) == original
    original.save(path)
    assert path.read_bytes() == content


def masked() -> Plan:
    kept = np.arange(4 * 2 * 3).reshape(4, 2, 3) % 2 == 0
    return plan([0, 2]).masked({"a": BlockMask(kept, 8, memory=8)})


def test_masks_are_saved_beside_the_plan(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    masked().save(path)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["plan.json", "plan.safetensors"]
    loaded = Plan.load(path)
    assert (loaded, loaded.masks) == (masked(), masked().masks)


def test_masks_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    path, tensors = tmp_path / "plan.json", tmp_path / "plan.safetensors"
    masked().save(path)
    tensors.write_bytes(b"no tensors")
    error = mask_error(path)
    assert (error.code, error.details["path"]) == (GraphErrorCode.FILE_UNREADABLE, tensors)
    tensors.unlink()
    error = mask_error(path)
    assert (error.code, error.details["path"]) == (GraphErrorCode.FILE_MISSING, tensors)


@pytest.mark.parametrize(
    ("change", "code"), [({"mask": "b"}, GraphErrorCode.MASK_MISSING), ({"block": 12}, GraphErrorCode.INVALID_PLAN)]
)
def test_masks_that_do_not_fit_the_plan_file_are_refused(
    change: dict[str, object], code: GraphErrorCode, tmp_path: Path
) -> None:
    path = tmp_path / "plan.json"
    masked().save(path)
    fields = json.loads(path.read_text())
    fields["groups"][0].update(change)
    path.write_text(json.dumps(fields))
    error = mask_error(path)
    assert (error.code, error.details["site"]) == (code, "a")


def mask_error(path: Path) -> PlanError:
    with pytest.raises(PlanError) as error:
        Plan.load(path)
    return error.value


def test_masks_of_other_sites_or_other_heads_are_refused() -> None:
    mask = BlockMask(np.ones((3, 2, 2), np.bool_), 8)
    with pytest.raises(PlanError) as error:
        plan([0]).masked({"b": mask})
    assert (error.value.code, error.value.details) == (GraphErrorCode.SITE_MISSING, {"site": "b"})
    with pytest.raises(PlanError) as error:
        plan([0]).masked({"a": mask})
    assert (error.value.code, error.value.details) == (GraphErrorCode.SITE_MISMATCH, {"site": "a", "heads": 3})


def test_a_plan_counts_its_heads_and_finds_its_sites() -> None:
    both = plan(site([1], scale=[0.5]), site([0, 1], name="b", heads=2))
    assert (both.heads, both.heads_kept) == (6, 3)
    assert both["a"].dropped == (0, 2, 3)
    assert both["a"].gate == (0.0, 0.5, 0.0, 0.0)
    with pytest.raises(KeyError):
        both["c"]


def test_a_plan_counts_its_neurons() -> None:
    both = Plan(groups=(site([1]), NeuronPlan("mlp", 6, (0, 5))))
    assert (both.heads, both.heads_kept, both.neurons, both.neurons_kept) == (4, 1, 6, 2)
    assert both.counts == {"a": 1, "mlp": 2}
    assert both.drops_any
    whole = both.replace_groups([site([0, 1, 2, 3]), NeuronPlan("mlp", 6, tuple(range(6)))])
    assert not whole.drops_any
    assert [group.name for group in whole.groups] == ["a", "mlp"]
    assert (whole.sites[0].units, whole.feed_forwards[0].width) == (4, 1)


@pytest.mark.parametrize("fields", [{"kept": (6,)}, {"kept": (2, 1)}, {"kept": (0, 1), "scale": (1.0,)}])
def test_neurons_that_do_not_exist_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(pydantic.ValidationError):
        NeuronPlan("mlp", 6, **fields)


def test_a_plan_from_json_alone_lacks_its_masks() -> None:
    masked().require_masks()
    with pytest.raises(PlanError) as error:
        Plan.model_validate_json(masked().model_dump_json()).require_masks()
    assert (error.value.code, error.value.details) == (GraphErrorCode.MASK_MISSING, {"site": "a"})


def test_groups_that_a_plan_lacks_replace_none() -> None:
    with pytest.raises(ValueError, match="b"):
        plan([0]).replace_groups([site([1], name="b", heads=2)])
