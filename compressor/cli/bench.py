"""`compress bench`: build two graphs with the same settings and time them in turn."""

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
from compressor.cli.field_options import FieldsCommand, options_of
from compressor.config.fields import flag_of, usage_error
from compressor.config.sections import EngineConfig, MeasureConfig

_NAMES = ("target", "precision", "provider", "threads", "kernel")
_FIELDS = {**MeasureConfig.model_fields, **{name: EngineConfig.model_fields[name] for name in _NAMES}}


@click.command(cls=FieldsCommand, fields=_FIELDS, short_help="Time two ONNX graphs in turn.")
@click.argument("dense", type=click.Path(path_type=Path))
@click.argument("compressed", type=click.Path(path_type=Path))
@options_of(_FIELDS)
@common
@click.pass_obj
def bench(console: Console, dense: Path, compressed: Path, **flags: Any) -> None:
    """Build DENSE and COMPRESSED, two ONNX files with the same inputs, and time them in turn on random inputs.

    The ratio is the dense median time over the compressed one, with a 95% bootstrap interval.
    """
    measure, engine = _configs({name: value for name, value in flags.items() if value is not None})
    engine.require_definite()
    from compressor.measure import bench as run

    result = run(
        dense,
        compressed,
        measure.batch,
        measure.seq or (128,),
        runtime=engine.target,
        precision=engine.definite_precision,
        provider=engine.provider,
        threads=engine.threads,
        kernel=engine.kernel,
        seconds=measure.seconds,
        listener=console,
    )
    table = Table("batch", "tokens", "dense p50", "compressed p50", "ratio", "95% interval", box=None, pad_edge=False)
    for row in result.speeds:
        interval = f"[{row.low:.2f}, {row.high:.2f}]" + (f" void: {row.void}" if row.void else "")
        cells = (f"{row.dense.p50:.2f} ms", f"{row.compressed.p50:.2f} ms", f"{row.ratio:.2f}")
        table.add_row(str(row.batch), str(row.seq), *cells, Text(interval))
    data = dataclasses.asdict(result)
    for name in ("dense", "compressed"):
        data[name] = getattr(result, name).model_dump(mode="json")
    data["speeds"] = [row.model_dump(mode="json") for row in result.speeds]
    console.result(table, data)


def _configs(fields: dict[str, Any]) -> tuple[MeasureConfig, EngineConfig]:
    try:
        return (
            MeasureConfig(**{name: value for name, value in fields.items() if name not in _NAMES}),
            EngineConfig(**{name: value for name, value in fields.items() if name in _NAMES}),
        )
    except pydantic.ValidationError as error:
        raise usage_error(error, _FIELDS, flag_of) from error
