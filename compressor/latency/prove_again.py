"""Engines proven on another instruction set or runtime version: what differs, and proofs of engines below fp32 here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from compressor import report as reports
from compressor.environment import INSTRUCTIONS, machine
from compressor.errors import InputError
from compressor.latency.local_engine import LocalEngine
from compressor.progress import Listener
from compressor.results import Note, NoteCode, Proof, ProofStage, Report
from compressor.targets import QUANTIZED, BuildOptions, target


def prove_again(engine: LocalEngine, listener: Listener) -> tuple[Proof, ...]:
    """The proofs of a run's engine in 8 bits or bfloat16, run again where this machine differs from the run's.

    Args:
        engine: an engine; one that is not in the folder of the run that built it has no proofs.
        listener: receives a note about what differs.

    Returns:
        The proofs, which hold; empty where nothing differs, and for engines in fp32 or fp16.

    Raises:
        MismatchError: the engine computes something else on this machine.
    """
    report = _report_of(Path(engine.name))
    changes = [] if report is None else list(changes_since(report, machine(), engine.engine.session))
    if report is None or not changes:
        return ()
    proofs: tuple[Proof, ...] = ()
    outcome = "its numbers are compared with those of its graph only"
    if engine.precision in QUANTIZED or report.compressed.reduced_products:
        try:
            with listener.stage(f"proving the {engine.precision} engine on this machine"):
                proofs = _prove(engine, report)
            outcome = f"its {engine.precision} proofs were run again on this machine, and hold"
        except InputError as error:
            outcome = f"its {engine.precision} proofs cannot be run again on this machine: {error}"
    text = f"{engine.name} was proven on another machine ({'; '.join(changes)}); {outcome}"
    listener.note(Note(code=NoteCode.PROVEN_ELSEWHERE, text=text))
    return proofs


def changes_since(report: Report, present: Mapping[str, str], session: Mapping[str, Any]) -> Iterator[str]:
    """What differs between the machine of a report and the present one, in a few words each.

    Args:
        report: the report of the run that proved the engine.
        present: facts about this machine, as in `Report.machine`.
        session: runtime and options of the engine on this machine.
    """
    pairs = {
        "runtime": (report.session.get("runtime"), session.get("runtime")),
        "inference_precision": (report.session.get("inference_precision"), session.get("inference_precision")),
    }
    if "CPU" in str(session.get("provider")):
        pairs |= {name: (report.machine.get(name), present.get(name)) for name in INSTRUCTIONS}
    for name, (before, now) in pairs.items():
        if before is not None and before != now:
            yield f"{name}: {before} there, {now} here"


def _report_of(path: Path) -> Report | None:
    """The report of the run that built an engine; None where the file is not the engine of a run."""
    if not (path.parent / reports.JSON_NAME).is_file():
        return None
    report = reports.load(path.parent)
    return report if report.compressed.file == path.name else None


def _prove(engine: LocalEngine, report: Report) -> tuple[Proof, ...]:
    """The proofs of an engine in 8 bits or bfloat16; here it may compute in fp32.

    Raises:
        InputError: a file of the run is missing, or is not the proven one.
        MismatchError: a proof does not hold, or products are computed in floats.
    """
    # A check that proves nothing, and the process of each of its scenarios, need not wait for PyTorch and transformers.
    from compressor.run.finished_run import load_run
    from compressor.run.variant import prove_build, require_precision

    path = Path(engine.name)
    run = load_run(path.parent, {})
    stages = {proof.stage for proof in report.proofs if proof.variant == "compressed"}
    config = run.recipe.engine
    file = target(config.target).quantized_graph(config.definite_precision)
    quantized = path.with_name(file) if file is not None and ProofStage.PRODUCTS in stages else None
    require_precision(engine.engine, config)
    graph = run.graphs["compressed"]
    products = engine.engine.quantized
    options = BuildOptions(float_widths=frozenset(() if products is None else products.float_widths))
    return prove_build(engine.engine, graph, config, options, run.cases, "compressed", quantized=quantized)
