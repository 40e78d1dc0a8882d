"""Export a model with gates to `reference.onnx`: the gated graph, whose gates are named initializers."""

from __future__ import annotations

import contextlib
import logging
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import onnx_ir as ir
import torch
from onnx_ir.passes.common import RemoveUnusedNodesPass
from torch import Tensor
from torch.export import Dim
from transformers import PreTrainedModel
from transformers.exporters import OnnxConfig, OnnxExporter

from compressor.errors import ErrorCode, InputError, UsageError
from compressor.models import SegmentConfig
from compressor.models.export_forms import any_length, with_other_form
from compressor.segment_memory import MAX_POSITIONS, MEMORY_LENGTH
from compressor.silence_libraries import quiet_tools
from compressor.targets.example_rows import ExampleRows, record_example_rows
from compressor.units.dependencies import kept_outputs
from compressor.units.find import evaluation_mode, find_units
from compressor.units.gating import gated
from compressor.units.hook import Attention, Call, family, intercepted, unwrap
from compressor.units.prunable import check_plan
from graph_passes import Plan, load, save
from graph_passes.attention.gate_initializers import find_gates, gate_content, set_gates
from graph_passes.errors import listed
from graph_passes.flow.sizes import record_example_sizes
from graph_passes.passes import NameSqueezedAxes
from graph_passes.passes.insert_gates import FINGERPRINT

logger = logging.getLogger(__name__)

OPSETS = (18, 23)
_EXPORTER_METADATA = ("pkg.torch.onnx.stack_trace", "pkg.torch.onnx.fx_node")
"""Metadata keys for the Python source of a node, which would be most of the file of a small model."""


def export_reference(
    model: PreTrainedModel,
    plan: Plan,
    inputs: Mapping[str, Tensor],
    path: str | os.PathLike[str],
    *,
    opset: int = 18,
    attention: Attention = "eager",
    fixed: Collection[str] = (),
    example: ExampleRows | None = None,
) -> None:
    """Write a gated model as ONNX: every head of every site is multiplied by its gate.

    Gates are initializers `<site>.head_gate` `[heads, 1]`; weights have the names of the state dict. Batch and sequence
    are dynamic. Language models are exported without key/value cache. Models with segment memory return new memories,
    of dynamic length, if `memory_0`, ... are among the inputs. Weights are in `<path>.data`.

    Args:
        model: a transformers model, whose state is restored.
        plan: one entry for each site of the model.
        inputs: keyword arguments of its forward, tensors only, e.g. `input_ids` `[batch, position]` with at least two
            positions; their names become the inputs of the graph.
        path: the file to write, e.g. `reference.onnx`.
        opset: 18, or 23, which has an `Attention` operator for `sdpa`.
        attention: the form of attention in the graph, `eager` (decomposed) or `sdpa`.
        fixed: names of inputs of which only the batch is dynamic, e.g. images of one size.
        example: examples that the graph carries, from which inputs of trials and timing are generated; None: these are
            random.

    Raises:
        UsageError: an unsupported opset, or a name in `fixed` that is not an input.
        InputError: the plan belongs to another model, or the model cannot be exported.
        SiteRefusedError: the attention of the family cannot be gated in this form.
        OSError: the disk is full or the folder cannot be written; no file remains.
    """
    if opset not in OPSETS:
        text = f"opset {opset} is not supported; use {OPSETS[0]} or {OPSETS[1]}"
        raise UsageError(text, code=ErrorCode.OUT_OF_RANGE, field="opset", value=opset)
    if unknown := sorted(set(fixed) - inputs.keys()):
        text = f"fixed: {listed(unknown)}: no such input; use names of the inputs, which are {listed(inputs)}"
        raise UsageError(text, code=ErrorCode.INVALID_VALUE, field="fixed", value=unknown)
    bare = unwrap(model)
    with deployment_mode(bare):
        check_plan(plan, find_units(bare, inputs, attention=attention).sites)
        sample = _dynamic_sample(inputs)
        axes = {name: range(1 if name in fixed else value.dim()) for name, value in sample.items()}
        dynamic_shapes = {name: dict.fromkeys(dims, Dim.AUTO) for name, dims in axes.items()} if fixed else None
        program = trace_gated(bare, plan, sample, dynamic_shapes, opset=opset, attention=attention)
    sizes = {name: tuple(value.shape) for name, value in sample.items()}
    _clean_up(program, bare, sizes)
    record_example_sizes(program, sizes)
    if example is not None:
        record_example_rows(program, example)
    if plan.model is not None:
        program.metadata_props[FINGERPRINT] = plan.model
    if isinstance(bare.config, SegmentConfig):
        limits = bare.config.limits
        program.metadata_props[MEMORY_LENGTH] = str(limits.memory_length)
        program.metadata_props[MAX_POSITIONS] = str(limits.max_positions)
    save(program, path)
    logger.debug("%s: exported %s with opset %d, attention %s", path, family(bare), opset, attention)


def rewrite_reference(
    source: str | os.PathLike[str], model: PreTrainedModel, plan: Plan, path: str | os.PathLike[str]
) -> bool:
    """Write the gated graph of a plan from that of another plan of the same model, without an export.

    The operators of a gated graph depend on a plan only through its masks. Gates and weights are initializers, which
    get the values of the plan and of the model, whose weights may have been trained since.

    Args:
        source: a gated graph of the model, whose plan has no masks.
        model: the model.
        plan: an entry for each site of the model.
        path: the file to write.

    Returns:
        Whether the file was written. If not, the plan has masks, or the graph lacks a gate of the plan or has a weight
        of another size, and `export_reference` is needed. The caller has to compare the file with the gated model,
        since an exporter may have computed a constant from a weight.

    Raises:
        OSError: the disk is full or the folder cannot be written; no file remains.
    """
    if plan.masks:
        return False
    program = load(source)
    gates = find_gates(program.graph)
    if any(group.name not in gates or gate_content(group, gates[group.name]) is None for group in plan.groups):
        return False
    set_gates(program.graph, plan)
    initializers = program.graph.initializers
    for name, weight in unwrap(model).state_dict().items():
        value = initializers.get(name)
        if value is None or value.const_value is None:
            continue
        if tuple(value.const_value.shape.numpy()) != tuple(weight.shape):
            return False
        value.const_value = ir.tensor_adapters.TorchTensor(weight.detach().cpu().contiguous(), name=name)
    if plan.model is not None:
        program.metadata_props[FINGERPRINT] = plan.model
    save(program, path)
    return True


def trace_gated(
    model: PreTrainedModel,
    plan: Plan,
    sample: Mapping[str, Any],
    dynamic_shapes: dict[str, Any] | None = None,
    *,
    opset: int,
    attention: Attention,
) -> ir.Model:
    """The graph of a model whose units are multiplied by their gates, as transformers' exporter returns it.

    Args:
        model: the model, in `deployment_mode`.
        plan: one entry for each site of the model.
        sample: arguments of the model's forward.
        dynamic_shapes: the free axes of each argument, as `torch.export` takes them; None: all.
        opset: version of the ONNX operator set.
        attention: the form of attention in the graph.

    Raises:
        InputError: the exporter fails; the error names the other form of attention where that can be exported.
    """

    def trace(form: Attention) -> ir.Model:
        with (
            gated(model, plan, attention=form),
            intercepted(model, _run_with_full_mask, form),
            any_length(model),
            quiet_tools(),
        ):
            return _export(model, dict(sample), opset, dynamic_shapes)  # the exporter may add inputs of its own

    try:
        return trace(attention)
    except InputError as error:
        raise with_other_form(error, trace, attention) from error


def _export(
    model: PreTrainedModel, sample: dict[str, Any], opset: int, dynamic_shapes: dict[str, Any] | None
) -> ir.Model:
    """Export a model with the inputs `sample`; raise InputError if transformers' exporter fails."""
    config = OnnxConfig(dynamic=True, dynamic_shapes=dynamic_shapes, optimize=False, opset_version=opset)
    try:
        return OnnxExporter().export(model, sample, config).program
    except Exception as error:  # model code can raise any type while torch traces it
        cause: BaseException = error  # torch.onnx wraps what names the operator
        while cause.__cause__ is not None:
            cause = cause.__cause__
        reason = (str(cause).strip() or "no message").splitlines()[0]
        text = f"{family(model)}: the model cannot be exported ({type(cause).__name__}: {reason})"
        raise InputError(text, code=ErrorCode.EXPORT_FAILED, family=family(model), reason=reason) from error


def _dynamic_sample(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies of the inputs, changed so that every batch and sequence axis and every mask remains in the graph.

    The exporter treats an axis of length one as a constant, and a mask of ones as no mask. Therefore a single example
    is duplicated, the last position of the last example is masked, and memories get at least two positions.
    """
    sample = {name: value.clone() for name, value in inputs.items()}
    if all(len(value) == 1 for value in sample.values()):
        sample = {name: torch.cat([value, value]) for name, value in sample.items()}
    for name, value in sample.items():
        if value.dim() == 2 and value.shape[1] == 1:
            text = f"{name}: an axis of one position would be constant in the graph; give inputs of two or more"
            raise InputError(text, code=ErrorCode.OUT_OF_RANGE, input=name, value=1, minimum=2)
        if name.startswith("memory_") and value.shape[1] < 2:
            sample[name] = value.new_zeros(len(value), 2, value.shape[2])
        if name.endswith("attention_mask") and value.dim() == 2 and bool((value != 0).all()):
            value[-1, -1] = 0
    return sample


def _run_with_full_mask(call: Call) -> tuple[Tensor, Tensor | None]:
    """Run attention; for SDPA, expand a mask `[batch, 1, 1, key]` over all queries, as ONNX Runtime requires."""
    mask = call.mask
    if mask is not None and mask.dim() == 4 and mask.shape[2] == 1 and call.implementation == "sdpa":
        call = replace(call, mask=mask.expand(-1, -1, call.query.shape[2], -1))
    return call.run()


@contextlib.contextmanager
def deployment_mode(model: PreTrainedModel) -> Iterator[None]:
    """Inside, the model is in evaluation mode; on exit its state is restored, without additions of the exporter."""
    had_forward = "forward" in vars(model)
    try:
        with evaluation_mode(model):
            yield
    finally:
        if not had_forward:
            vars(model).pop("forward", None)


def _clean_up(program: ir.Model, model: PreTrainedModel, sizes: Mapping[str, Sequence[int]]) -> None:
    """Drop outputs that no task reads, name axes by the shapes of inputs, and remove the exporter's metadata."""
    outputs = program.graph.outputs
    kept = kept_outputs(model, [value.name or "" for value in outputs])
    if len(kept) < len(outputs):
        outputs[:] = [value for value in outputs if value.name in kept]
        RemoveUnusedNodesPass()(program)
    for value in program.graph.inputs:
        # The exporter prefixes an input that the model returns too; the output is gone.
        value.name = (value.name or "").removeprefix("input.")
    NameSqueezedAxes()(program)
    axes = _axis_names(program.graph.inputs, sizes)
    nodes = list(program.graph.all_nodes())
    values = {value for node in nodes for value in (*node.inputs, *node.outputs) if value is not None}
    for value in {*values, *program.graph.inputs, *outputs}:
        if value.shape is not None:
            value.shape = ir.Shape([_rename(dim, axes) for dim in value.shape])
    drop_exporter_metadata(program)


def drop_exporter_metadata(program: ir.Model) -> None:
    """Remove what the exporter notes of Python in a graph."""
    program.graph.metadata_props.clear()
    for node in program.graph.all_nodes():
        for key in _EXPORTER_METADATA:
            node.metadata_props.pop(key, None)


def _axis_names(inputs: Iterable[ir.Value], sizes: Mapping[str, Sequence[int]]) -> dict[str, str]:
    """Readable names of torch's symbols (`s72`): `batch`, and lengths such as `sequence` and `memory`.

    Two symbols get the same name only if both axes have the same size: a runtime reuses buffers by names.
    """
    names: dict[str, str] = {}
    size_of: dict[str, int | None] = {}
    for value in inputs:
        for axis, dim in enumerate(value.shape or ()):
            name = _axis_name(value, axis)
            size = dict(enumerate(sizes.get(value.name or "", ()))).get(axis)
            if name is not None and isinstance(dim, ir.SymbolicDim) and size_of.setdefault(name, size) == size:
                names.setdefault(str(dim.value), name)
    return names


def _axis_name(value: ir.Value, axis: int) -> str | None:
    """The name of an axis of an input, or None."""
    side = (value.name or "").partition("_")[0]
    is_length = axis == 1 and (side == "memory" or len(value.shape or ()) == 2 or value.name == "inputs_embeds")
    return "batch" if axis == 0 else _LENGTHS.get(side, "sequence") if is_length else None


_LENGTHS = {"memory": "memory", "decoder": "decoder_sequence", "qformer": "qformer_sequence"}
"""First word of an input's name -> the name of its length, if that is not the length of the text."""


def _rename(dim: int | ir.SymbolicDim, names: Mapping[str, str]) -> int | ir.SymbolicDim:
    """A dimension with the symbols of its expression renamed."""
    if isinstance(dim, int) or dim.value is None:
        return dim
    if dim.value.isdecimal():  # a symbolic axis that the exporter knows to be constant
        return int(dim.value)
    return ir.SymbolicDim(re.sub(r"\w+", lambda word: names.get(word[0], word[0]), dim.value))
