"""KServe's `InferenceService` of a Triton repository."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from compressor.serving.asked import Asked
from compressor.serving.source import Source

_HEAD = "# storageUri is where the cluster finds the repository{made_up}.\n"
_LONGEST = 63 - len("-predictor-default-00001")
"""Letters of a name, to which KServe and Knative append such."""


def service(asked: Asked, source: Source) -> str:
    """The YAML of the service: KServe's Triton runtime on the repository, with as many GPUs as the model names and
    the arguments that its server needs beside the runtime's own.

    Source: KServe's `ClusterServingRuntime` `kserve-tritonserver`, whose format `triton` is a whole repository.
    """
    predictor: dict[str, Any] = {
        "modelFormat": {"name": "triton", "version": "2"},
        "protocolVersion": "v2",
        "runtime": "kserve-tritonserver",
        "storageUri": asked.storage_uri or f"pvc://models/{asked.repository.resolve().name}",
    }
    if source.server_args:
        predictor["args"] = list(source.server_args)
    if source.device == "gpu":
        predictor["resources"] = {"limits": {"nvidia.com/gpu": str(max(asked.gpus, default=0) + 1)}}
    made = {
        "apiVersion": "serving.kserve.io/v1beta1",
        "kind": "InferenceService",
        "metadata": {"name": service_name(asked.model)},
        "spec": {"predictor": {"model": predictor}},
    }
    made_up = "" if asked.storage_uri else ": this one is made up, name it (--storage-uri)"
    return _HEAD.format(made_up=made_up) + yaml.safe_dump(made, sort_keys=False)


def service_name(model: str) -> str:
    """The model's name as Kubernetes takes it (RFC 1035): small letters, digits and `-`, a letter first."""
    name = re.sub(r"[^a-z0-9]+", "-", model.lower()).strip("-")
    return (name if name[:1].isalpha() else f"model-{name}").strip("-")[:_LONGEST].strip("-")


def place(repository: Path, model: str) -> Path:
    """The file beside the model's folder; the server reads folders alone."""
    return repository / f"{model}.kserve.yaml"
