"""Instances of a served model and their threads: as requested, else as the throughput of the run suggests."""

from __future__ import annotations

from dataclasses import dataclass

from compressor.config.serve import Device, ServeRequest
from compressor.results import Report, Throughput


@dataclass(frozen=True)
class Placement:
    """How a model is spread over the processor.

    Attributes:
        instances: number of instances, on the CPU or on each GPU.
        threads: threads per call on the CPU; None: as the server's runtime decides.
        reason: what the number of instances is based on, in one line; empty where it was requested or nothing measured.
    """

    instances: int = 1
    threads: int | None = None
    reason: str = ""


def choose_placement(request: ServeRequest, report: Report, device: Device, *, serves_measured: bool) -> Placement:
    """One instance for each caller where several callers had more rows per second in the run, else one instance.

    Args:
        request: the request, whose numbers of instances and threads count first.
        report: the report of the run.
        device: device of the instances.
        serves_measured: whether the server runs the engine that the run measured.
    """
    requested = Placement(request.instances or 1, request.threads)
    rows = report.throughputs if serves_measured and device == "cpu" else ()
    if request.instances is not None or request.threads is not None or not rows:
        return requested
    single, several = max(rows, key=_one_caller), max(rows, key=_all_callers)
    if _all_callers(several) <= _one_caller(single):
        return Placement(1, None, f"one instance: {_rates(single, several)}")
    reason = f"one instance for each of {several.callers} cores, with one thread: {_rates(single, several)}"
    return Placement(several.callers, 1, reason)


def _one_caller(row: Throughput) -> float:
    return row.compressed.one_caller


def _all_callers(row: Throughput) -> float:
    return row.compressed.all_callers


def _rates(single: Throughput, several: Throughput) -> str:
    return (
        f"the run measured at most {_one_caller(single):.0f} rows per second with one caller on all cores, and at most"
        f" {_all_callers(several):.0f} with {several.callers} callers on one core each"
    )
