"""What is measured, and where it is written."""

from __future__ import annotations

from pathlib import Path

from compressor.config.fields import Config, config_field
from compressor.config.sections.headings import MEASURING, OUTPUT
from compressor.config.values import Natural, Positive, Sizes


class MeasureConfig(Config):
    """The sizes at which engines are timed, and the time spent on each."""

    batch: Sizes = config_field(MEASURING, "batch sizes to time, separated by commas", (1, 8), is_basic=True)
    seq: Sizes | None = config_field(
        MEASURING,
        "lengths to time in tokens, separated by commas; default: 128 or the model's maximum; with masks, the"
        " length of the longest example",
        is_basic=True,
    )
    seconds: Positive = config_field(MEASURING, "approximate seconds per size, for at least ten pairs of rounds", 10.0)


class OutputConfig(Config):
    """The folder to write, and what its report shows of the rows."""

    out: Path = config_field(OUTPUT, "folder to write", Path("out"), is_path=True, is_basic=True)
    force: bool = config_field(
        OUTPUT, "replace the output folder, and what an interrupted run with another recipe left", False, is_basic=True
    )
    save_dense: bool = config_field(
        OUTPUT, "write the graph of the whole model as dense.onnx too, for comparisons on another machine", False
    )
    report_rows: Natural = config_field(
        OUTPUT, "test examples that the report shows with the answers of both engines, their texts cut; 0: none", 8
    )
