"""Export a model of PyTorch with its gates, and prove its graph against the model, loaded afresh."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from compressor.config.sections import ExportConfig
from compressor.engines.build import ExportedGraph
from compressor.engines.prove import Case
from compressor.engines.prove_export import prove_export, require_export
from compressor.export import export_reference, rewrite_reference
from compressor.model_folder import ModelFolder, example_inputs, example_rows, fresh_model
from compressor.model_folder.input_rules import IMAGES
from compressor.results import Proof, VariantName
from graph_passes import Plan


def export_proven(
    name: VariantName,
    folder: ModelFolder,
    plan: Plan,
    config: ExportConfig,
    cases: Sequence[Case],
    out: Path,
    template: ExportedGraph | None,
) -> Proof:
    """Export the gated model, with every unit still in it, and prove the graph; see `engines.export.export_graph`.

    The reference of the proof is the folder, loaded afresh: with its own weights for the dense variant, and with those
    of the model for others, which may have been trained.

    Tracing the model takes most of the time of an export. A graph of the same model with a different plan is therefore
    reused, with new gates and weights, if the proof then holds.

    Raises:
        InputError: the graph computes something else than the model, which changes at an input, or chooses among equal
            scores.
        MismatchError: the graph computes something else than the model.
    """
    model = fresh_model(folder, trained=name != "dense")
    if template is not None and rewrite_reference(template.path, folder.model, plan, out):
        proof = prove_export(model, plan, out, cases, name, attention=config.attention)
        if proof.holds:
            return proof
    export_unproven(folder, plan, config, out)
    prove = partial(prove_export, model, plan, out, cases, name, attention=config.attention)
    return require_export(prove, model, cases)


def export_unproven(folder: ModelFolder, plan: Plan, config: ExportConfig, out: Path) -> None:
    """Export the gated model, with every unit still in it, to count what it consists of."""
    inputs = example_inputs(folder, batch=2, seq=8)
    fixed = () if folder.image_size is None else (IMAGES,)
    export_reference(
        folder.model,
        plan,
        inputs,
        out,
        opset=config.opset,
        attention=config.attention,
        fixed=fixed,
        example=example_rows(folder),
    )
