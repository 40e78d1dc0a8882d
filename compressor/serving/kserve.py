"""The `InferenceService` of KServe for a Triton repository."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from compressor.errors import ErrorCode, InputError
from compressor.serving import tensorrt_engines, triton_config
from compressor.silence_libraries import one_line
from compressor.targets.tensorrt.metadata import read_metadata

FILE_NAME = "kserve.yaml"
_HEADER = """\
# Written with each model of the repository. --storage-uri sets storageUri; CPUs and memory are estimated from files,
# instances and threads of the models (measure them under load). All other content of this file is kept.
"""
_MAX_NAME = 63 - len("-predictor-default-00001")
"""Maximum characters of a name, to which KServe and Knative append such a suffix."""
_GIB = 1 << 30
_CORES = 4
"""CPUs of an instance whose threads are not limited; a server of models on GPUs only needs half as many."""


def service(repository: Path, models: Sequence[Path], storage_uri: str | None, runtime_version: str | None) -> str:
    """The YAML of a service for all models of a repository.

    It requests KServe's Triton runtime with the GPUs, the memory and the arguments that the models need. All other
    content of an existing YAML is kept.

    Source: KServe's `ClusterServingRuntime` `kserve-tritonserver`, whose format `triton` is a whole repository.

    Args:
        storage_uri: URI of the repository for the cluster; None: as in the existing YAML, else a placeholder.
        runtime_version: tag of Triton's image; None: as in the existing YAML, else the runtime's default.

    Raises:
        InputError: a model's configuration, or the existing YAML, cannot be read.
    """
    document = _read_or_create(repository)
    predictor = document["spec"]["predictor"]["model"]
    if storage_uri:
        predictor["storageUri"] = storage_uri
    if runtime_version:
        predictor["runtimeVersion"] = runtime_version
    args = [arg for arg in predictor.pop("args", None) or () if arg not in tensorrt_engines.VERSION_COMPATIBLE]
    engines = (file.with_suffix("") for model in models for file in model.glob("*/*.plan.json"))
    if any(read_metadata(engine).version_compatible for engine in engines):
        args += tensorrt_engines.VERSION_COMPATIBLE
    if args:
        predictor["args"] = args
    resources = _resources(models)
    predictor["resources"] = {"requests": resources, "limits": dict(resources)}
    return _HEADER + yaml.safe_dump(document, sort_keys=False)


def placeholder_uri(repository: Path) -> str:
    """The storage URI of a repository for which none is set."""
    return f"pvc://models/{repository.resolve().name}"


def service_name(repository: str) -> str:
    """The repository's name as a Kubernetes name (RFC 1035): lower-case letters, digits and `-`, a letter first."""
    name = re.sub(r"[^a-z0-9]+", "-", repository.lower()).strip("-")
    return (name if name[:1].isalpha() else f"model-{name}").strip("-")[:_MAX_NAME].strip("-")


def _read_or_create(repository: Path) -> dict[str, Any]:
    path = repository / FILE_NAME
    try:
        document: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
        document["spec"]["predictor"]["model"].setdefault("storageUri", placeholder_uri(repository))
        return document
    except FileNotFoundError:
        predictor = {
            "modelFormat": {"name": "triton", "version": "2"},
            "protocolVersion": "v2",
            "runtime": "kserve-tritonserver",
            "storageUri": placeholder_uri(repository),
        }
        return {
            "apiVersion": "serving.kserve.io/v1beta1",
            "kind": "InferenceService",
            "metadata": {"name": service_name(repository.resolve().name)},
            "spec": {"predictor": {"model": predictor}},
        }
    except (OSError, ValueError, TypeError, KeyError, AttributeError, yaml.YAMLError) as error:
        text = f"not a readable InferenceService ({one_line(error)}); correct it or move it away"
        raise InputError.of_file(path, text, ErrorCode.FILE_UNREADABLE) from error


def _resources(models: Sequence[Path]) -> dict[str, str]:
    """CPUs, memory and GPUs for all models; each instance loads the weights."""
    cores, size, gpus = 0, 0, 0
    for path in models:
        model = triton_config.load(path / triton_config.FILE_NAME)
        files = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
        for group in model.instance_group or (triton_config.pb.ModelInstanceGroup(),):
            count = max(1, group.count)
            size += files * (1 + count)
            if group.kind == triton_config.pb.ModelInstanceGroup.KIND_GPU:
                gpus = max(gpus, 1, *(gpu + 1 for gpu in group.gpus))
            else:
                cores += count * int(model.parameters["intra_op_thread_count"].string_value or _CORES)
    resources = {"cpu": str(cores or _CORES // 2), "memory": f"{math.ceil(2 + size / _GIB)}Gi"}
    return resources | ({"nvidia.com/gpu": str(gpus)} if gpus else {})
