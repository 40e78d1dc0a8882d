"""`compress check`: the latency gate of a server's model, or of a graph here."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.text import Text

from compressor.cli.comma_list import CommaList
from compressor.cli.command_group import common
from compressor.cli.console import Console
from compressor.errors import UsageError

if TYPE_CHECKING:
    from compressor.config.check import Scenario


class _Share(click.ParamType):
    """A share: `5%` or 0.05."""

    name = "share"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        text = str(value).strip()
        try:
            found = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
        except ValueError:
            found = -1.0
        if not 0 <= found < float("inf") or (found >= 1 and not text.endswith("%")):
            raise UsageError(f"--max-slowdown {value!r}: give a share of the baseline's time, as in 5% or 0.05")
        return found


class _Milliseconds(click.ParamType):
    """A time: `10ms`, `0.5s`, or a number of milliseconds."""

    name = "time"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        text = str(value).strip()
        number, scale = (
            (text[:-2], 1) if text.endswith("ms") else (text.removesuffix("s"), 1000 if text[-1:] == "s" else 1)
        )
        try:
            found = float(number) * scale
        except ValueError:
            found = 0.0
        if not 0 < found < float("inf"):
            raise UsageError(f"--p99 {value!r}: give a time above zero, as in 10ms")
        return found


SHARE, MILLISECONDS = _Share(), _Milliseconds()


def scenarios(ctx: click.Context | None, param: click.Parameter | None, value: str) -> tuple[Scenario, ...]:
    """LoadGen's scenarios from their names, divided by commas."""
    from compressor.config.check import SCENARIOS

    known = {scenario.lower(): scenario for scenario in SCENARIOS}
    names = [name.strip().lower() for name in value.split(",") if name.strip()]
    for name in names:
        if name not in known:
            raise UsageError(f"--scenario {name!r}: there is no such scenario; use {', '.join(known)}")
    return tuple(known[name] for name in dict.fromkeys(names))


_FILE = click.Path(path_type=Path, dir_okay=False)


@click.command(short_help="Gate on the latency of a served model, or of a graph.")
@click.argument("path", required=False, metavar="[MODEL.onnx]")
@click.option("--server", metavar="URL", help="grpc://HOST:PORT or http://HOST:PORT of an inference server")
@click.option("--model", metavar="NAME", help="the model on the server, or NAME:VERSION")
@click.option("--baseline", required=True, metavar="NAME", help="what it is compared with: a model, or a saved .json")
@click.option("--max-slowdown", type=SHARE, default=0.05, help="of the baseline's p50, e.g. 5% [5%]")
@click.option("--p99", type=MILLISECONDS, help="bound on the 99th percentile, e.g. 10ms")
@click.option("--scenario", "scenarios", callback=scenarios, default="", help="singlestream, server, offline")
@click.option("--rate", type=click.FloatRange(min=0, min_open=True), help="queries a second of the server scenario")
@click.option("--inputs", type=click.Path(path_type=Path), help="real inputs: .npz of arrays, or rows of text")
@click.option("--tokenizer", type=click.Path(path_type=Path), help="folder with the tokenizer of the texts")
@click.option("--text-columns", type=CommaList(), default=(), metavar="COLUMNS", help="columns of the texts")
@click.option("--batch", type=click.IntRange(min=1), default=1, help="rows of a call [1]")
@click.option("--seq", type=click.IntRange(min=1), default=128, help="tokens of a row; texts are cut or padded [128]")
@click.option("--seconds", type=click.FloatRange(min=0, min_open=True), default=20.0, help="how long to time [20]")
@click.option("--load-seconds", type=click.FloatRange(min=0, min_open=True), default=5.0, help="of a scenario [5]")
@click.option("--expect", metavar="WHOSE", help="right answers: baseline, any, an .npz, an ONNX file, a folder")
@click.option("--tolerance", type=click.FloatRange(min=0), help="largest relative error of an answer")
@click.option("--deadline", type=click.FloatRange(min=0, min_open=True), default=10.0, help="seconds of a call [10]")
@click.option("--threads", type=click.IntRange(min=1), help="threads of engines here; else one a core")
@click.option("--kernel", type=click.Path(path_type=Path), help="of engines here: library of compress kernel")
@click.option("--seed", type=int, default=0, help="of what is drawn [0]")
@click.option("--force", is_flag=True, help="compare with a baseline of another machine all the same")
@click.option("--save-baseline", type=_FILE, help="file to keep what is measured of the model in")
@click.option("--junit", type=_FILE, help="JUnit XML to write")
@click.option("--history", type=_FILE, help="file that a line is added to, for each check")
@click.option("--plot", type=_FILE, help="picture of the history, .svg or .png")
@common
@click.pass_obj
def check(
    view: Console,
    path: str | None,
    model: str | None,
    junit: Path | None,
    history: Path | None,
    plot: Path | None,
    **options: Any,
) -> None:
    """Compare a model's answers, then its times, with a baseline's: 0 as fast, 7 slower than allowed, 5 wrong answers.

    compress check --server grpc://localhost:8001 --model small --baseline dense --inputs rows.tsv --tokenizer out

    compress check small.onnx --baseline dense.onnx --max-slowdown 5% --p99 10ms
    """
    from compressor.latency import CheckArtifacts, CheckRequest, gated
    from compressor.latency import check as run

    name = model if options["server"] else path
    if not name or (model and path):
        raise UsageError("check: name an ONNX file, or --server and --model")
    gated(
        CheckArtifacts(junit, history, plot),
        f"{name} against {options['baseline']}",
        lambda: run(CheckRequest(model=name, **options), view),
        lambda found: view.result(
            Text("\n".join(found.lines())), {**found.model_dump(mode="json"), "passed": found.passed}
        ),
    )
