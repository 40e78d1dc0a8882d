"""KServe's `InferenceService` of a Triton repository."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from compressor.errors import InputError
from compressor.serving import config, tensorrt_engines
from compressor.silence_libraries import one_line
from compressor.targets.tensorrt.metadata import read

FILE_NAME = "kserve.yaml"
_HEAD = """\
# Written with each model of the repository: storageUri as it was named, memory and processors estimated from the
# models' files, instances and threads (measure them under load). All else stays as it is found here.
"""
_LONGEST = 63 - len("-predictor-default-00001")
"""Letters of a name, to which KServe and Knative append such."""
_GIB = 1 << 30
_CORES = 4
"""Of a model on the CPU whose threads are not bounded; of the server's own, where all models are on GPUs, half."""


def service(repository: Path, models: Sequence[Path], storage_uri: str | None, runtime_version: str | None) -> str:
    """The YAML of a service of all models of a repository: KServe's Triton runtime on it, with the GPUs, the memory and
    the arguments that they need beside the runtime's own. What a YAML that is there says beside them is kept.

    Source: KServe's `ClusterServingRuntime` `kserve-tritonserver`, whose format `triton` is a whole repository.

    Args:
        repository: the models' folder.
        models: folders of all of them.
        storage_uri: where the cluster finds it; None: as the YAML that is there says, else made up.
        runtime_version: tag of Triton's image; None: as the YAML that is there says, else the runtime's own.

    Raises:
        InputError: a model's configuration, or the YAML that is there, cannot be read.
    """
    made, predictor = _found(repository)
    if storage_uri:
        predictor["storageUri"] = storage_uri
    if runtime_version:
        predictor["runtimeVersion"] = runtime_version
    wide = any(
        read(papers.with_suffix("")).version_compatible for model in models for papers in model.glob("*/*.plan.json")
    )
    args = [arg for arg in predictor.pop("args", None) or () if arg not in tensorrt_engines.VERSION_COMPATIBLE]
    if args or wide:
        predictor["args"] = [*args, *(tensorrt_engines.VERSION_COMPATIBLE if wide else ())]
    needed = _resources(models)
    predictor["resources"] = {"requests": needed, "limits": dict(needed)}
    return _HEAD + yaml.safe_dump(made, sort_keys=False)


def is_placeholder(repository: Path) -> str:
    """Where a cluster would find the repository if nobody says."""
    return f"pvc://models/{repository.resolve().name}"


def _found(repository: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The YAML that is there, else a new one, and what it says of the server."""
    path = repository / FILE_NAME
    try:
        made = yaml.safe_load(path.read_text(encoding="utf-8"))
        made["spec"]["predictor"]["model"].setdefault("storageUri", is_placeholder(repository))
        return made, made["spec"]["predictor"]["model"]
    except FileNotFoundError:
        predictor: dict[str, Any] = {
            "modelFormat": {"name": "triton", "version": "2"},
            "protocolVersion": "v2",
            "runtime": "kserve-tritonserver",
            "storageUri": is_placeholder(repository),
        }
        made = {
            "apiVersion": "serving.kserve.io/v1beta1",
            "kind": "InferenceService",
            "metadata": {"name": service_name(repository.resolve().name)},
            "spec": {"predictor": {"model": predictor}},
        }
        return made, predictor
    except (OSError, ValueError, TypeError, KeyError, AttributeError, yaml.YAMLError) as error:
        raise InputError(f"{path}: is no InferenceService ({one_line(error)}); move it away") from error


def _resources(models: Sequence[Path]) -> dict[str, str]:
    """What the server needs for all models: each instance loads the weights anew."""
    cores, size, gpus = 0, 0, 0
    for path in models:
        model = config.load(path / config.FILE_NAME)
        files = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
        for group in model.instance_group or (config.pb.ModelInstanceGroup(),):
            count = max(1, group.count)
            size += files * (1 + count)
            if group.kind == config.pb.ModelInstanceGroup.KIND_GPU:
                gpus = max(gpus, 1, *(gpu + 1 for gpu in group.gpus))
            else:
                cores += count * int(model.parameters["intra_op_thread_count"].string_value or _CORES)
    needed = {"cpu": str(cores or _CORES // 2), "memory": f"{math.ceil(2 + size / _GIB)}Gi"}
    return needed | ({"nvidia.com/gpu": str(gpus)} if gpus else {})


def service_name(repository: str) -> str:
    """The repository's name as Kubernetes takes it (RFC 1035): small letters, digits and `-`, a letter first."""
    name = re.sub(r"[^a-z0-9]+", "-", repository.lower()).strip("-")
    return (name if name[:1].isalpha() else f"model-{name}").strip("-")[:_LONGEST].strip("-")
