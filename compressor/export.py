"""From a gated model to `reference.onnx`: the graph that the shrunk one must equal, gates as named initializers."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import onnx_ir as ir
import torch
from onnx_ir.passes.common import RemoveUnusedNodesPass
from torch import Tensor
from transformers import PreTrainedModel
from transformers.exporters import OnnxConfig, OnnxExporter

from compressor.errors import InputError, UsageError
from compressor.models import SegmentConfig
from compressor.segment_memory import MAX_POSITIONS, MEMORY_LENGTH
from compressor.silence_libraries import quiet_tools
from compressor.units.find import find_sites
from compressor.units.gating import check_plan, gated
from compressor.units.hook import Attention, Call, configs, family, intercepted, unwrap
from graph_passes import Plan, save
from graph_passes.passes.insert_gates import FINGERPRINT

OPSETS = (18, 23)
_BY_PRODUCTS = (
    "past_key_values",
    "memories",
    "hidden_states",
    "attentions",
    "encoder_",
    "decoder_",
    "cross_attentions",
)
"""Outputs that no task reads: caches, what `output_*` flags add, and the encoder's states beside a decoder's logits.

New memories are among them only where no memory goes in.
"""
_NOTES = ("pkg.torch.onnx.stack_trace", "pkg.torch.onnx.fx_node")
"""What the exporter writes on each node about the Python that made it: most of the file of a small model."""


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
    sequence are dynamic. Language models are written without key/value cache; one that reads segment by segment gives
    new memories out where `memory_0`, ... are among the inputs, of any length. Weights lie in `<path>.data`.

    Args:
        model: a transformers model; left as it was.
        plan: one entry for each of its sites.
        inputs: keyword arguments of its forward, tensors only; their values matter little, their names do.
        path: the file to write, e.g. `reference.onnx`.
        opset: 18, or 23 (which has an `Attention` op for `sdpa`).
        attention: the form in which attention is written, `eager` (decomposed) or `sdpa`.

    Raises:
        UsageError: an opset that is not offered.
        InputError: the plan is another model's, or the model cannot be exported.
        SiteRefusedError: the family's attention cannot be gated in this form.
        OSError: the disk is full or the folder cannot be written; nothing is left behind.
    """
    if opset not in OPSETS:
        raise UsageError(f"opset {opset} is not offered; use {OPSETS[0]} or {OPSETS[1]}")
    bare = unwrap(model)
    with _as_deployed(bare):
        check_plan(plan, find_sites(bare, inputs, attention=attention))
        sample = _sample(inputs)
        with gated(bare, plan, attention=attention), intercepted(bare, _with_whole_mask, attention), quiet_tools():
            program = _exported(bare, sample, opset)
    _tidy(program)
    if plan.model is not None:
        program.metadata_props[FINGERPRINT] = plan.model
    if isinstance(bare.config, SegmentConfig):
        limits = bare.config.limits
        program.metadata_props.update(
            {MEMORY_LENGTH: str(limits.memory_length), MAX_POSITIONS: str(limits.max_positions)}
        )
    save(program, path)


def _exported(model: PreTrainedModel, sample: dict[str, Any], opset: int) -> ir.Model:
    config = OnnxConfig(dynamic=True, optimize=False, opset_version=opset)
    try:
        return OnnxExporter().export(model, sample, config).program
    except Exception as error:  # torch's exporters raise whatever the model's code runs into
        why = (str(error).strip() or "no message").splitlines()[0]
        raise InputError(
            f"{family(model)}: the model cannot be exported ({type(error).__name__}: {why}); try the other "
            "form of attention, eager or sdpa"
        ) from error


def _sample(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Inputs that keep every axis and every input in the graph.

    An axis of length one is taken for a constant, and a mask of ones is taken for no mask at all: a single row is
    doubled and the last row's last position is masked. Memories of one position or none become two, which a model that
    remembers one is never given where it runs: nothing in the graph counts them.
    """
    sample = {name: value.clone() for name, value in inputs.items()}
    if all(len(value) == 1 for value in sample.values()):
        sample = {name: torch.cat([value, value]) for name, value in sample.items()}
    for name, value in sample.items():
        if value.dim() == 2 and value.shape[1] == 1:
            raise InputError(f"{name}: one position would be fixed in the graph; give inputs of two or more")
        if name.startswith("memory_") and value.shape[1] < 2:
            sample[name] = value.new_zeros(len(value), 2, value.shape[2])
        if name.endswith("attention_mask") and value.dim() == 2 and bool((value != 0).all()):
            value[-1, -1] = 0
    return sample


def _with_whole_mask(call: Call) -> tuple[Tensor, Tensor | None]:
    """A mask that says the same for every query, `[batch, 1, 1, key]`, written out for ONNX Runtime."""
    mask = call.mask
    if mask is not None and mask.dim() == 4 and mask.shape[2] == 1 and call.implementation == "sdpa":
        call = replace(call, mask=mask.expand(-1, -1, call.query.shape[2], -1))
    return call.run()


@contextlib.contextmanager
def _as_deployed(model: PreTrainedModel) -> Iterator[None]:
    """Evaluation mode without key/value cache; restored on exit, and what the exporter leaves on the model removed."""
    modes = [(module, module.training) for module in model.modules()]
    caches = [(config, config.use_cache) for config in configs(model) if hasattr(config, "use_cache")]
    had_forward = "forward" in vars(model)
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
        if not had_forward:
            vars(model).pop("forward", None)


def _tidy(program: ir.Model) -> None:
    """Keep the outputs of the task, name the axes, drop what the exporter notes about its own run."""
    outputs = program.graph.outputs
    kept = [value for value in outputs if not (value.name or "").startswith(_BY_PRODUCTS)]
    if kept and len(kept) < len(outputs):
        outputs[:] = kept
        RemoveUnusedNodesPass()(program)
    names = _axis_names(program.graph.inputs)
    nodes = list(program.graph.all_nodes())
    values = {value for node in nodes for value in (*node.inputs, *node.outputs) if value is not None}
    for value in {*values, *program.graph.inputs, *outputs}:
        if value.shape is not None:
            value.shape = ir.Shape([_renamed(dim, names) for dim in value.shape])
    program.graph.metadata_props.clear()
    for node in program.graph.all_nodes():
        for key in _NOTES:
            node.metadata_props.pop(key, None)


def _axis_names(inputs: Iterable[ir.Value]) -> dict[str, str]:
    """torch's symbols (`s72`) to the words users know: `batch`, `sequence`, `decoder_sequence`, `memory`."""
    names: dict[str, str] = {}
    for value in inputs:
        side = "decoder_" if (value.name or "").startswith("decoder_") else ""
        for axis, dim in enumerate(value.shape or ()):
            if isinstance(dim, ir.SymbolicDim) and dim.value is not None:
                if axis == 0:
                    names.setdefault(dim.value, "batch")
                elif axis == 1 and (value.name or "").startswith("memory_"):
                    names.setdefault(dim.value, "memory")
                elif axis == 1 and (len(value.shape or ()) == 2 or value.name == "inputs_embeds"):
                    names.setdefault(dim.value, f"{side}sequence")
    return names


def _renamed(dim: int | ir.SymbolicDim, names: Mapping[str, str]) -> int | ir.SymbolicDim:
    if isinstance(dim, int) or dim.value is None:
        return dim
    if dim.value.isdecimal():  # an axis found to be fixed after it was named
        return int(dim.value)
    return ir.SymbolicDim(re.sub(r"\w+", lambda word: names.get(word[0], word[0]), dim.value))
