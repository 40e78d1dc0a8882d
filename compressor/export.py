"""From a gated model to `reference.onnx`: the graph that the shrunk one must equal, gates as named initializers."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path

import onnx_ir as ir
import torch
from onnx_ir.passes.common import RemoveUnusedNodesPass
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.exporters import OnnxConfig, OnnxExporter

from compressor.errors import UsageError
from compressor.sites.find import find_sites
from compressor.sites.gates import check_plan, gated
from compressor.sites.hook import Attention, configs, unwrap
from graph_passes import Plan

OPSETS = (18, 23)
FINGERPRINT = "compressor.fingerprint"
_BY_PRODUCTS = ("past_key_values", "hidden_states", "attentions", "encoder_", "decoder_", "cross_attentions")
"""Outputs that no task reads: caches, what `output_*` flags add, and the encoder's states beside a decoder's logits."""


def export_reference(
    model: PreTrainedModel,
    plan: Plan,
    inputs: Mapping[str, Tensor],
    path: str | os.PathLike[str],
    *,
    opset: int = 18,
    attention: Attention = "eager",
) -> None:
    """Write the gated model as ONNX: every head still there, each site multiplied by its gate.

    The gates are initializers `<site>.head_gate` `[heads, 1]`; weights keep the names of the state dict. Batch and
    sequence are dynamic. Language models are written without key/value cache. Weights lie in `<path>.data`.

    Args:
        model: a transformers model; left as it was.
        plan: one entry for each of its sites.
        inputs: keyword arguments of its forward, tensors only; their values matter little, their names do.
        path: the file to write, e.g. `reference.onnx`.
        opset: 18, or 23 (which has an `Attention` op for `sdpa`).
        attention: the form in which attention is written, `eager` (decomposed) or `sdpa`.

    Raises:
        UsageError: an opset that is not offered.
        InputError: the plan is another model's.
        SiteRefusedError: the family's attention cannot be gated in this form.
    """
    if opset not in OPSETS:
        raise UsageError(f"opset {opset} is not offered; use {OPSETS[0]} or {OPSETS[1]}")
    bare = unwrap(model)
    sample = _sample(inputs)
    check_plan(plan, find_sites(bare, sample, attention=attention))
    with _still(bare), gated(bare, plan, attention=attention), _quiet():
        program = (
            OnnxExporter().export(bare, sample, OnnxConfig(dynamic=True, optimize=False, opset_version=opset)).program
        )
    _drop_by_products(program)
    if plan.model is not None:
        program.metadata_props[FINGERPRINT] = plan.model
    ir.save(program, os.fspath(path), external_data=f"{Path(path).name}.data")


def _sample(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Inputs that keep every axis and every input in the graph.

    An axis of length one is taken for a constant, and a mask of ones is taken for no mask at all: a single row is
    doubled and the last row's last position is masked.
    """
    sample = {name: value.clone() for name, value in inputs.items()}
    if all(len(value) == 1 for value in sample.values()):
        sample = {name: torch.cat([value, value]) for name, value in sample.items()}
    for name, value in sample.items():
        if name.endswith("attention_mask") and value.dim() == 2 and bool((value != 0).all()):
            value[-1, -1] = 0
    return sample


@contextlib.contextmanager
def _still(model: nn.Module) -> Iterator[None]:
    """Evaluation mode without cache, restored on exit."""
    modes = [(module, module.training) for module in model.modules()]
    caches = [(config, config.use_cache) for config in configs(model) if hasattr(config, "use_cache")]
    model.eval()
    for config, _ in caches:
        config.use_cache = False
    try:
        yield
    finally:
        for config, use_cache in caches:
            config.use_cache = use_cache
        for module, training in modes:
            module.training = training


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """The exporter tells its progress by print, by logging and by warnings; none of it is for the user."""
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)


def _drop_by_products(program: ir.Model) -> None:
    outputs = program.graph.outputs
    kept = [value for value in outputs if not (value.name or "").startswith(_BY_PRODUCTS)]
    if kept and len(kept) < len(outputs):
        outputs[:] = kept
        RemoveUnusedNodesPass()(program)
