"""Write the graph of a file with its gates, and prove it against the file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from compressor.config.sections import ExportConfig
from compressor.engines.build import ExportedGraph
from compressor.engines.prove import Case, case_name, prove_outputs, require, unoptimized
from compressor.errors import ErrorCode, InputError
from compressor.model_folder import ModelFolder, example_rows
from compressor.results import Proof, ProofStage, VariantName
from compressor.targets.base import TOLERANCE, Feeds
from compressor.targets.relative_error import Outputs, is_defined
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
    """Write the graph with its gates, and prove it; see `engines.export.export_graph`.

    The reference is the file, in whose weights the gates are folded. A graph is written as fast as it is rewritten, so
    that no template is used.

    Raises:
        InputError: the graph does not run on a case, or the file's own outputs are not finite.
        MismatchError: the graph computes something else than the file.
    """
    export_unproven(folder, plan, config, out)
    file = folder.model
    with file.reference(plan) as run:

        def run_file(feeds: Feeds) -> Outputs:
            try:
                outputs: Outputs = run(feeds)
            except InputError as error:
                text = f"the graph does not run on {case_name(feeds)} ({error}); give rows that it reads"
                raise InputError.of_file(file.file, text, ErrorCode.TENSOR_MISMATCH, case=case_name(feeds)) from error
            undefined = next((name for name, array in outputs.items() if not is_defined(array, feeds)), None)
            if undefined is not None:
                text = (
                    f"the output {undefined} of the graph is NaN or infinite on {case_name(feeds)}; check its weights,"
                    " or give rows that it reads"
                )
                raise InputError.of_file(file.file, text, ErrorCode.NOT_FINITE, output=undefined)
            return outputs

        expected = [run_file(case.feeds) for case in cases]
    tolerance = TOLERANCE[file.precision]
    return require(prove_outputs(ProofStage.EXPORT, name, cases, expected, unoptimized(out), tolerance))


def export_unproven(folder: ModelFolder, plan: Plan, config: ExportConfig, out: Path) -> None:
    """Write the graph with its gates, to count what it consists of."""
    folder.model.write_gated(plan, out, example_rows(folder))
