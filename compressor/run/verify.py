"""Proof that each stage computes the function of the one before: rows of the report, and an error where it does not."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

from compressor.errors import MismatchError
from compressor.results import Proof
from compressor.targets.base import TOLERANCE, Engine, Feeds
from compressor.targets.relative_error import relative_error

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

    from compressor.units.hook import Attention
    from graph_passes import Plan

VariantName = Literal["dense", "compressed"]
Outputs = Mapping[str, np.ndarray]

_SIZES = ((1, 5), (2, 17), (3, 32))
"""Batch and length of the inputs tried. Rows of padded batches differ in length."""


@dataclass(frozen=True)
class Case:
    """One batch to try.

    Attributes:
        feeds: array by name of input.
        name: the batch in words: `batch 2, length 17, padded`.
    """

    feeds: Feeds
    name: str


def cases(
    inputs: Callable[[int, int, int], Mapping[str, Tensor]], *, longest: int | None = None, reach: int | None = None
) -> tuple[Case, ...]:
    """Batches of several sizes, alone and padded; where there are memories, empty, half full and full.

    Args:
        inputs: makes a batch of the model's inputs from (batch size, length, seed), its last row padded.
        longest: most positions that the model has, or None.
        reach: positions that the masks of a plan reach over, where it has any: no batch is longer, and one is as long.
    """
    sizes = _SIZES if reach is None else (*_SIZES, (2, reach))
    longest = min((size for size in (longest, reach) if size is not None), default=None)
    found: dict[tuple[tuple[str, tuple[int, ...]], ...], Case] = {}
    for seed, (batch, seq) in enumerate(sizes):
        made = inputs(batch, seq if longest is None else min(seq, longest), seed)
        feeds = {name: value.numpy() for name, value in made.items()}
        for name in (name for name in feeds if name.startswith("memory_")):
            feeds[name] = feeds[name][:, : seed * feeds[name].shape[1] // (len(sizes) - 1)]
        # A model whose inputs have one length only would be tried on the same sizes again.
        found.setdefault(tuple((name, array.shape) for name, array in feeds.items()), Case(feeds, name_of(feeds)))
    return tuple(found.values())


def name_of(feeds: Feeds) -> str:
    """A batch in words: `batch 2, length 17, padded`."""
    first = next(iter(feeds.values()))
    words = [f"batch {first.shape[0]}"]
    if first.ndim == 2:
        words.append(f"length {first.shape[1]}")
    if any("mask" in name and not array.all() for name, array in feeds.items()):
        words.append("padded")
    if "memory_0" in feeds:
        words.append(f"memory {feeds['memory_0'].shape[1]}")
    return ", ".join(words)


def prove_export(
    model: PreTrainedModel, plan: Plan, graph: Path, tried: Sequence[Case], side: VariantName, *, attention: Attention
) -> Proof:
    """Stage 1: the gated model against the reference graph."""
    import torch

    from compressor.units import gated

    expected: list[Outputs] = []
    with gated(model.eval(), plan, attention=attention) as live, torch.no_grad():
        for case in tried:
            outputs = live(**{name: torch.from_numpy(array) for name, array in case.feeds.items()})
            expected.append({name: value.numpy() for name, value in outputs.items() if torch.is_tensor(value)})
    return _prove("gated model = reference graph", side, tried, expected, _graph(graph), TOLERANCE["fp32"])


def prove_shrunk(reference: Path, shrunk: Path, tried: Sequence[Case], side: VariantName) -> Proof:
    """Stage 2: the reference graph against the shrunk one, both as they are written: the runtime optimizes neither."""
    expected = _outputs(reference, tried)
    return _prove("reference graph = shrunk graph", side, tried, expected, _graph(shrunk), TOLERANCE["fp32"])


def prove_engine(shrunk: Path, engine: Engine, tried: Sequence[Case], side: VariantName) -> Proof:
    """Stage 3: the shrunk graph as it is written against the engine built from it."""
    from compressor.targets.tensorrt.graph import is_quantized
    from graph_passes import load

    expected = _outputs(shrunk, tried)
    # Kernels of integers round where the graph's own steps do not.
    precision = "fp16" if engine.precision == "fp32" and is_quantized(load(shrunk)) else engine.precision
    return _prove("shrunk graph = engine", side, tried, expected, engine.run, TOLERANCE[precision])


def require(proof: Proof) -> Proof:
    """The proof, if it holds.

    Raises:
        MismatchError: it does not.
    """
    if not proof.holds:
        raise MismatchError(
            f"{proof.side}: {proof.stage} does not hold: relative error {proof.error:.3g}, at most {proof.tolerance:g} "
            f"is allowed, on {'; '.join(proof.cases)}; the result is not to be used: please report the model's family"
        )
    return proof


def _graph(path: Path) -> Callable[[Feeds], Outputs]:
    from compressor.targets.onnxruntime import ort_session

    options = {**ort_session.describe("cpu", None), "graph_optimization": "none"}
    loaded = ort_session.open_session(path, options)
    return lambda feeds: ort_session.run(loaded, feeds)


def _outputs(path: Path, tried: Sequence[Case]) -> list[Outputs]:
    run = _graph(path)
    return [run(case.feeds) for case in tried]


def _prove(
    stage: Literal["gated model = reference graph", "reference graph = shrunk graph", "shrunk graph = engine"],
    side: VariantName,
    tried: Sequence[Case],
    expected: Iterable[Outputs],
    run: Callable[[Feeds], Outputs],
    tolerance: float,
) -> Proof:
    if not tried:
        raise MismatchError(f"{side}: {stage}: there is nothing to try it on; export the graph with free axes")
    worst = 0.0
    for case, wanted in zip(tried, expected, strict=True):
        outputs = run(case.feeds)
        missing = set() if stage == "gated model = reference graph" and outputs else wanted.keys() - outputs.keys()
        if missing and outputs.keys() <= wanted.keys():
            raise MismatchError(f"{side}: {stage}: the output {min(missing)} is missing; export again")
        for name, got in outputs.items():
            if name not in wanted:
                raise MismatchError(
                    f"{side}: {stage}: there is an output {name}, where {', '.join(wanted)} were expected; export again"
                )
            worst = max(worst, relative_error(wanted[name], got, case.feeds))
    return Proof(stage=stage, side=side, error=worst, tolerance=tolerance, cases=tuple(case.name for case in tried))
