"""`compress bench`: build two graphs, or the graphs of a run for several runtimes, and time them in turn."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import pydantic
from rich.text import Text

from compressor.cli.commands import FieldsCommand, common, option_of, options_of
from compressor.cli.console import Console, text_table
from compressor.config.fields import flag_of, usage_error
from compressor.config.request import BenchConfig
from compressor.config.sections import EngineConfig, MeasureConfig, graph_of
from compressor.errors import ErrorCode, UsageError
from compressor.targets import DEFAULT_TARGET, target_of

if TYPE_CHECKING:
    from compressor.results import Report

_LENGTH = 128
_BUILT = ("precision", "provider", "kernel")
"""Options that only apply where engines are built from two graphs."""
_NAMES = (*_BUILT, "threads")
_FIELDS = {
    **BenchConfig.model_fields,
    **MeasureConfig.model_fields,
    **{name: EngineConfig.model_fields[name] for name in _NAMES},
}


@click.command(cls=FieldsCommand, short_help="Time two ONNX graphs, or the engines of a run, in turn.")
@click.argument("dense", type=click.Path(path_type=Path))
@click.argument("compressed", type=click.Path(path_type=Path), required=False)
@options_of(_FIELDS, without=("seq",))
@option_of(
    "seq", _FIELDS["seq"], help_text="lengths to time in tokens, separated by commas; default: those of the run, or 128"
)
@common
@click.pass_obj
def bench(console: Console, dense: Path, compressed: Path | None = None, **fields: Any) -> None:
    """Build DENSE and COMPRESSED, two ONNX files or folders of one with the same inputs, and time them in turn.

    The ratio is the dense median time divided by the compressed one, with a 95% bootstrap interval. Graphs of compress
    are run on the example rows in their metadata, other graphs on random inputs.

    DENSE alone may be the output folder of a run: its engine, and engines of its graphs for each target in fp32 and, if
    the run has it, int8, are timed in turn: compress bench out/ --target ort,openvino --batch 1,8 --seq 128

    With --prompt-tokens the engines of models that generate are timed: of the output folder of a run, in turn with
    those of the model that it compressed, or of two folders: compress bench out/ --prompt-tokens 128,1024 --new-tokens
    64 --batch 1,8
    """
    request, measure, engine = _configs(fields)
    engine.require_definite()
    if measure.prompt_tokens is None:
        reason = "only engines that generate make new tokens; add --prompt-tokens, or omit it"
        _refuse((measure,), ("new_tokens",), reason)
    else:
        reason = "the engines in folders that generate are timed as they are, for each --prompt-tokens; omit it"
        _refuse((request, measure, engine), (*_BUILT, "target", "callers", "seq"), reason)
        folders = (dense,) if compressed is None else (dense, compressed)
        _bench_generation(console, folders, measure.prompt_tokens, measure, engine)
        return
    if compressed is None:
        _bench_folder(console, dense, request, measure, engine)
    else:
        _bench_graphs(console, dense, compressed, request, measure, engine)


def _refuse(configs: Sequence[pydantic.BaseModel], names: Sequence[str], reason: str) -> None:
    """Raise UsageError where an option is set that would change nothing."""
    unused = [name for config in configs for name in names if name in config.model_fields_set]
    if unused:
        raise UsageError(f"{flag_of(unused[0])}: {reason}", code=ErrorCode.CONTRADICTION, field=unused[0])


def _bench_folder(
    console: Console, out: Path, request: BenchConfig, measure: MeasureConfig, engine: EngineConfig
) -> None:
    """Time the engines of a run."""
    if not out.is_dir():
        problem = (
            "name two ONNX files, or the output folder of a run" if out.exists() else "no such folder; check the path"
        )
        raise UsageError(f"{out}: {problem}", code=ErrorCode.MISSING_VALUE, field="compressed")
    _refuse(
        (engine,), _BUILT, "the engines of a run are built in fp32 and int8 on the CPU; omit it, or name two ONNX files"
    )
    from compressor.measure import bench_folder
    from compressor.report import JSON_NAME, load

    report = load(out) if (out / JSON_NAME).is_file() else None
    rows = bench_folder(
        out,
        request.target if report is None or "target" in request.model_fields_set else (report.target,),
        measure.batch,
        measure.seq or _lengths(report),
        callers=request.callers,
        threads=engine.threads,
        seconds=measure.seconds,
        report=report,
        listener=console,
    )
    has_attentions = any(row.fused[1] for row in rows if not row.failure)
    further = (*(["rows/s, callers"] if request.callers > 1 else []), *(["attentions fused"] if has_attentions else []))
    table = text_table("engine", "batch", "tokens", "p50", "rows/s", *further)
    for row in rows:
        if row.failure:
            table.add_row(row.label, Text(row.failure))
            continue
        label = f"{row.label}, delivered" if row.delivered else row.label
        cells = [label, str(row.batch), str(row.seq or "-"), f"{row.p50:.2f} ms", f"{row.throughput:.1f}"]
        if row.throughput_of_callers is not None:
            cells.append(f"{row.throughput_of_callers:.1f} ({row.callers})")
        if has_attentions:
            cells.append(f"{row.fused[0]} of {row.fused[1]}")
        table.add_row(*cells)
    console.result(table, [dataclasses.asdict(row) for row in rows])


def _bench_generation(
    console: Console, folders: Sequence[Path], lengths: Sequence[int], measure: MeasureConfig, engine: EngineConfig
) -> None:
    """Time the engines that generate of one run, or of two."""
    from compressor.generation.bench import bench_generation
    from compressor.generation.workload import NEW_TOKENS, Workload
    from compressor.run.rebuild import whole_engines

    workload = Workload(tuple(itertools.product(measure.batch, lengths)), measure.new_tokens or NEW_TOKENS)
    threads, seconds = engine.threads, measure.seconds
    whole = nullcontext() if len(folders) > 1 else whole_engines(folders[0], workload, threads, console)
    with whole as dense:
        timed = folders if dense is None else (dense, *folders)
        rows = bench_generation(timed, workload, threads=threads, seconds=seconds, listener=console)
    rows = [dataclasses.replace(row, folder=Path("dense")) if row.folder == dense else row for row in rows]
    table = text_table(
        "folder", "precision", "batch", "prompt tokens", "prompt", "token", "tokens/s", "cache, bytes a token"
    )
    for row in rows:
        times = f"{row.prompt_ms:.2f} ms", f"{row.token_ms:.2f} ms", f"{row.tokens_per_second:.1f}"
        sizes = str(row.batch), str(row.prompt_tokens)
        table.add_row(str(row.folder), row.precision, *sizes, *times, f"{row.cache_bytes:,}")
    console.result(table, [{**dataclasses.asdict(row), "folder": str(row.folder)} for row in rows])


def _lengths(report: Report | None) -> tuple[int, ...]:
    """The lengths in tokens at which engines of a run were compared, else those of its last build; else 128."""
    if report is None:
        return (_LENGTH,)
    compared = dict.fromkeys(row.seq for row in (*report.speeds, *report.throughputs) if row.seq is not None)
    return tuple(compared) or tuple(report.recipe.get("seq") or (_LENGTH,))


def _bench_graphs(
    console: Console, dense: Path, compressed: Path, request: BenchConfig, measure: MeasureConfig, engine: EngineConfig
) -> None:
    """Time two graphs."""
    if len(request.target) > 1 or request.callers > 1:
        raise UsageError(
            "several targets or callers are for the folder of a run; with two graphs, name one target and no --callers",
            code=ErrorCode.CONTRADICTION,
            fields=("target", "callers"),
        )
    dense, compressed = (graph_of(path) or path for path in (dense, compressed))
    for path in (dense, compressed):
        if (runtime := target_of(path)).name != DEFAULT_TARGET:
            raise UsageError(
                f"{path}: is an engine of {runtime.title}, but bench builds engines from graphs; name its graph, e.g."
                " model.onnx in its folder",
                code=ErrorCode.INVALID_VALUE,
                value=str(path),
            )
    from compressor.measure import bench as run

    result = run(
        dense,
        compressed,
        measure.batch,
        measure.seq or (_LENGTH,),
        runtime=request.target[0],
        precision=engine.definite_precision,
        provider=engine.provider,
        threads=engine.threads,
        kernel=engine.kernel,
        seconds=measure.seconds,
        listener=console,
    )
    table = text_table("batch", "tokens", "dense p50", "compressed p50", "ratio", "95% interval")
    for row in result.speeds:
        interval = f"[{row.low:.2f}, {row.high:.2f}]" + (f" void: {row.void}" if row.void else "")
        cells = (f"{row.dense.p50:.2f} ms", f"{row.compressed.p50:.2f} ms", f"{row.ratio:.2f}")
        table.add_row(str(row.batch), str(row.seq or "-"), *cells, Text(interval))
    data = dataclasses.asdict(result)
    for name in ("dense", "compressed"):
        data[name] = getattr(result, name).model_dump(mode="json")
    data["speeds"] = [row.model_dump(mode="json") for row in result.speeds]
    console.result(table, data)


def _configs(fields: dict[str, Any]) -> tuple[BenchConfig, MeasureConfig, EngineConfig]:
    bench, measure, engine = (
        {name: value for name, value in fields.items() if name in names}
        for names in (BenchConfig.model_fields, MeasureConfig.model_fields, _NAMES)
    )
    try:
        return BenchConfig(**bench), MeasureConfig(**measure), EngineConfig(**engine)
    except pydantic.ValidationError as error:
        raise usage_error(error, _FIELDS, flag_of) from error
