"""`compress bench`: two graphs, built alike and timed in turn."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import click
import pydantic
from rich.table import Table
from rich.text import Text

from compressor.cli.command_group import common
from compressor.cli.console import Console
from compressor.config.sections import EngineConfig, MeasureConfig
from compressor.config.values import Sizes
from compressor.errors import UsageError

_SIZES = pydantic.TypeAdapter(Sizes)


class _SizesType(click.ParamType):
    """A list of sizes, divided by commas."""

    name = "sizes"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            return _SIZES.validate_python(value)
        except pydantic.ValidationError as error:
            name = param.opts[0] if param else "sizes"
            raise UsageError(f"{name} {value!r}: give whole numbers above 0, divided by commas") from error


@click.command(short_help="Time two ONNX graphs in turn.")
@click.argument("dense", type=click.Path(path_type=Path))
@click.argument("compressed", type=click.Path(path_type=Path))
@click.option("--batch", type=_SizesType(), default="1,8", metavar="BATCH", help="batch sizes, divided by commas [1,8]")
@click.option("--seq", type=_SizesType(), default="128", metavar="SEQ", help="lengths, divided by commas [128]")
@click.option(
    "--seconds",
    type=click.FloatRange(min=0, min_open=True),
    default=10.0,
    help=f"{MeasureConfig.model_fields['seconds'].description} [10]",
)
@click.option("--target", "runtime", default="ort", metavar="ort|trt", help="the runtime to build for [ort]")
@click.option("--precision", type=click.Choice(["fp32", "fp16"]), default="fp32", help="numbers computed in [fp32]")
@click.option("--provider", type=click.Choice(["cpu", "cuda"]), help="where it runs; else CUDA where there is one")
@click.option("--threads", type=click.IntRange(min=1), help="threads of the engines; else one a core")
@click.option("--kernel", type=click.Path(path_type=Path), help=EngineConfig.model_fields["kernel"].description)
@common
@click.pass_obj
def bench(view: Console, dense: Path, compressed: Path, batch: Any, seq: Any, **options: Any) -> None:
    """Build DENSE and COMPRESSED, two ONNX files of the same inputs, and time them in turn on random inputs.

    The ratio is the dense median time over the compressed one, with a 95% bootstrap interval.
    """
    from compressor.measure import bench as run

    found = run(dense, compressed, batch, seq, listener=view, **options)
    table = Table("batch", "tokens", "dense p50", "compressed p50", "ratio", "95% interval", box=None, pad_edge=False)
    for row in found.speeds:
        cells = (f"{row.dense.p50:.2f} ms", f"{row.compressed.p50:.2f} ms", f"{row.ratio:.2f}")
        between = f"[{row.low:.2f}, {row.high:.2f}]" + (f" void: {row.void}" if row.void else "")
        table.add_row(str(row.batch), str(row.seq), *cells, Text(between))
    data = dataclasses.asdict(found)
    for name in ("dense", "compressed"):
        data[name] = getattr(found, name).model_dump(mode="json")
    data["speeds"] = [row.model_dump(mode="json") for row in found.speeds]
    view.result(table, data)
