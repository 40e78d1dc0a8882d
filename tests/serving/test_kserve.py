"""KServe's service: all models of a repository, and edits by users."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from compressor.config.request import ServeRequest
from compressor.errors import ErrorCode, InputError
from compressor.results import NoteCode
from compressor.serving import export, kserve


@given(st.text(min_size=1, max_size=80))
def test_kubernetes_accepts_the_name_of_any_repository(name: str) -> None:
    service = kserve.service_name(name)
    assert len(f"{service}-predictor-default-00001") <= 63, "KServe and Knative append a suffix"
    assert service[0].isalpha()
    assert service[-1].isalnum()
    assert set(service) <= set("abcdefghijklmnopqrstuvwxyz0123456789-")


def test_a_service_covers_all_models_of_a_repository(out: Path, tmp_path: Path) -> None:
    repository = tmp_path / "r"
    first = export(
        ServeRequest(out=out, repository=repository, name="a", threads=3, instances=2, storage_uri="s3://there")
    )
    second = export(
        ServeRequest(out=out, repository=repository, name="b", device="gpu", gpus=(1,), runtime_version="25.06-py3")
    )
    assert second.service == first.service
    assert NoteCode.STORAGE_URI not in {note.code for note in second.notes}, "it was set before"
    model = yaml.safe_load(second.service.read_text())["spec"]["predictor"]["model"]
    assert (model["storageUri"], model["runtimeVersion"]) == ("s3://there", "25.06-py3")
    assert model["resources"]["limits"] == {"cpu": "6", "memory": "3Gi", "nvidia.com/gpu": "2"}


def test_edits_by_users_are_kept(out: Path, tmp_path: Path) -> None:
    exported = export(ServeRequest(out=out, repository=tmp_path / "r", name="a", storage_uri="s3://there"))
    edited = yaml.safe_load(exported.service.read_text())
    edited["metadata"]["namespace"] = "mine"
    edited["spec"]["predictor"]["model"] |= {
        "ports": [{"name": "h2c", "containerPort": 9000}],
        "args": ["--log-verbose=1"],
    }
    exported.service.write_text(yaml.safe_dump(edited))
    export(ServeRequest(out=out, repository=tmp_path / "r", name="b", threads=6))
    resources = {"cpu": "10", "memory": "3Gi"}
    edited["spec"]["predictor"]["model"]["resources"] = {"requests": resources, "limits": resources}
    assert yaml.safe_load(exported.service.read_text()) == edited


def test_a_service_of_an_earlier_version_is_kept(out: Path, tmp_path: Path) -> None:
    (tmp_path / "r").mkdir()
    service = tmp_path / "r" / "kserve.yaml"
    service.write_text(
        "# Written with each model of the repository: storageUri as it was named, memory and processors estimated\n"
        "apiVersion: serving.kserve.io/v1beta1\nkind: InferenceService\nmetadata: {name: mine}\n"
        "spec: {predictor: {model: {modelFormat: {name: triton, version: '2'}, storageUri: 's3://there'}}}\n"
    )
    export(ServeRequest(out=out, repository=tmp_path / "r"))
    document = yaml.safe_load(service.read_text())
    assert document["metadata"] == {"name": "mine"}
    assert document["spec"]["predictor"]["model"]["storageUri"] == "s3://there"


@pytest.mark.parametrize("content", ["odd: [", "kind: Pod\n", "[]", "\x00"])
def test_another_file_is_refused(content: str, out: Path, tmp_path: Path) -> None:
    (tmp_path / "r").mkdir()
    service = tmp_path / "r" / "kserve.yaml"
    service.write_text(content)
    with pytest.raises(InputError) as error:
        export(ServeRequest(out=out, repository=tmp_path / "r", name="c"))
    assert (error.value.code, error.value.details["path"]) == (ErrorCode.FILE_UNREADABLE, service)
    assert [path.name for path in (tmp_path / "r").iterdir()] == ["kserve.yaml"]
    assert service.read_text() == content
