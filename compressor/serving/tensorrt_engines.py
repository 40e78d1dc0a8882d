"""TensorRT plans for one GPU or several, as their metadata tells of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx_ir as ir

from compressor.errors import InputError, UsageError
from compressor.targets.tensor_specs import FREE, TensorSpec
from compressor.targets.tensorrt.metadata import Metadata, follows, graph_digest, papers_of, parts, read

VERSION_COMPATIBLE = ("--backend-config=tensorrt,version-compatible=true",)
"""What `tritonserver` must be told: plans for several versions bring code of their own, which it must allow."""


@dataclass(frozen=True)
class Plans:
    """Plans of one graph, each for another GPU.

    Attributes:
        papers: metadata by file, in the order given.
    """

    papers: dict[Path, Metadata]

    @property
    def first(self) -> Metadata:
        return next(iter(self.papers.values()))

    @property
    def names(self) -> dict[Path, str]:
        """Name of each in the version folder."""
        if len(self.papers) == 1:
            return dict.fromkeys(self.papers, "model.plan")
        return {path: f"model.sm{''.join(map(str, one.capability))}.plan" for path, one in self.papers.items()}

    @property
    def files(self) -> dict[str, Path]:
        """The plans and their metadata, by name in the version folder."""
        found = {name: path for path, name in self.names.items()}
        return found | {papers_of(Path(name)).name: papers_of(path) for name, path in found.items()}

    @property
    def default(self) -> str:
        """What GPUs load that none was built for: one that runs on others too, where there is one."""
        wide = (path for path, one in self.papers.items() if one.hardware_compatible)
        return self.names[next(wide, next(iter(self.papers)))]

    @property
    def by_capability(self) -> dict[str, str]:
        """Name of the plan for each compute capability, `8.0`."""
        return {".".join(map(str, one.capability)): self.names[path] for path, one in self.papers.items()}

    @property
    def max_batch(self) -> int:
        """Rows that every plan takes; 1 where no input has a batch axis."""
        return min(shapes[2][0] for one in self.papers.values() for shapes in one.profiles.values() if shapes[2])

    @property
    def lengths(self) -> tuple[int, int]:
        """Tokens that every plan takes, at least and at most."""
        found = [
            (shapes[0][1], shapes[2][1])
            for one in self.papers.values()
            for name, shapes in one.profiles.items()
            if len(shapes[0]) == 2 and name.endswith("input_ids")
        ] or [(1, 128)]
        return max(least for least, _ in found), min(most for _, most in found)

    @property
    def newest(self) -> str:
        """The version of TensorRT that the server needs."""
        return max((one.tensorrt for one in self.papers.values()), key=parts)

    @property
    def notes(self) -> tuple[str, ...]:
        wide = [one.version_compatible for one in self.papers.values()]
        later = "or a later one that runs its version-compatible engines" if all(wide) else "by which it was built"
        asked = VERSION_COMPATIBLE if any(wide) else ()
        return (
            f"a plan needs a server with TensorRT {self.newest}, {later}",
            *(f"the server must be started with {arg}, or it refuses the plan" for arg in asked),
        )

    def inputs(self) -> tuple[TensorSpec, ...]:
        """As the plans take them: integers may be narrower than the graph's."""
        return tuple(
            TensorSpec(name, _type(self.first.inputs[name]), _dims(least, most))
            for name, (least, _, most) in self.first.profiles.items()
        )

    def outputs(self, of_graph: Sequence[TensorSpec]) -> tuple[TensorSpec, ...]:
        """The graph's outputs, in the types that the plans give: integers may be narrower."""
        return tuple(
            TensorSpec(tensor.name, _type(self.first.outputs[tensor.name]), tensor.dims) for tensor in of_graph
        )


def find(out: Path, more: Sequence[Path]) -> tuple[Path, ...]:
    """The plans of an out folder, by name, and those named beside it, each once."""
    return tuple({path.resolve(): path for path in (*sorted(out.glob("*.plan")), *more)}.values())


def load(out: Path, paths: Sequence[Path]) -> Plans:
    """Read and check the plans' metadata. TensorRT is not needed, nor a GPU.

    Raises:
        InputError: there is no plan, one has no metadata, is damaged, or was built from another graph than `out`'s.
        UsageError: two are for the same GPU, or cannot stand behind one configuration or in one server.
    """
    if not paths:
        raise InputError(
            f"{out}: holds no TensorRT plan; build one on a machine with the server's GPU: compress build {out}"
            " --target trt, or use --backend onnxruntime"
        )
    found = Plans({path: read(path) for path in paths})
    graph = graph_digest(out / "model.onnx")
    for path, papers in found.papers.items():
        papers.check_file(path)
        if papers.model != graph:
            raise InputError(f"{path}: was built from another graph than {out / 'model.onnx'}; build it from that one")
    if len(found.by_capability) < len(paths):
        raise UsageError("--plan: two are for GPUs of the same compute capability; the server would load but one")
    for path, papers in found.papers.items():
        first, newest = found.first, found.newest
        same = papers.tensorrt == newest or (papers.version_compatible and follows(newest, papers.tensorrt))
        if not same:
            raise UsageError(
                f"{path}: runs with TensorRT {papers.tensorrt} and another plan with {newest}, and a server has one;"
                " build all of them with one version, or with --version-compatible"
            )
        if papers.precision != first.precision:
            raise UsageError(
                f"{path}: computes in {papers.precision} and another plan in {first.precision}, so that answers would"
                " depend on the GPU; build all of them in one (--precision)"
            )
        if (papers.inputs, papers.outputs) != (first.inputs, first.outputs):
            raise UsageError(
                f"{path}: has other types of inputs or outputs than another plan, and a configuration has one of each;"
                " build all of them with one version of TensorRT"
            )
        if _shape(papers) != _shape(first):
            raise UsageError(
                f"{path}: has other fixed sizes than another plan, and a configuration has one of each; build all of"
                " them for sizes of the same kind (--batch, --seq)"
            )
    least, most = found.lengths
    if least > most:
        raise UsageError(
            f"--plan: no number of tokens runs on every plan, one takes {least} at least and one {most} at most; build"
            " all of them for sizes in common (--seq)"
        )
    return found


def _shape(papers: Metadata) -> dict[str, tuple[int, ...]]:
    return {name: _dims(least, most) for name, (least, _, most) in papers.profiles.items()}


def _type(name: str) -> ir.DataType:
    return ir.DataType.from_numpy(np.dtype(name))


def _dims(least: Sequence[int], most: Sequence[int]) -> tuple[int, ...]:
    return tuple(one if one == other else FREE for one, other in zip(least, most, strict=True))
