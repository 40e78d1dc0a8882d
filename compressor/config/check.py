"""What to check and how: one field a flag of `compress check`, checked where it is made."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import numpy as np

from compressor.errors import UsageError

Scenario = Literal["SingleStream", "Server", "Offline"]
SCENARIOS: tuple[Scenario, ...] = get_args(Scenario)


@dataclass(frozen=True)
class CheckRequest:
    """What to check.

    Attributes:
        model, baseline: names of models on the server; without one, ONNX files. A baseline may be the `.json` that an
            earlier check saved.
        server: `grpc://host:port` or `http://host:port`.
        max_slowdown: largest that is allowed, as a share: 0.05.
        p99: bound on the 99th percentile, in milliseconds.
        scenarios: of LoadGen; with a bound and none named, SingleStream.
        rate: queries a second of the Server scenario.
        inputs: `.npz` with an array `[row, ...]` for every input; or rows of text (TSV, CSV, JSONL, ...), for which a
            tokenizer is needed; None: drawn at random.
        tokenizer: a folder that has one, e.g. an output folder of `compress`.
        text_columns: of the rows of text; else found by name.
        batch, seq: rows of a batch; tokens of a row, that texts are cut or padded to.
        seconds: about how long the two are timed.
        load_seconds: least duration of a scenario.
        expect, tolerance: see `compressor.latency.output_check.judge`.
        deadline: seconds that any one call to the server may take.
        threads, kernel: of the engines on this machine; see `compressor.targets.Tuning`.
        seed: of what is drawn.
        force: compare with a baseline that another machine measured.
        save_baseline: file to keep what is measured of the model in.

    Raises:
        UsageError: a number that is none or out of range, a file that cannot be written or would not be known again, or
            options that say nothing together.
    """

    model: str
    baseline: str
    server: str | None = None
    max_slowdown: float = 0.05
    p99: float | None = None
    scenarios: tuple[Scenario, ...] = ()
    rate: float | None = None
    inputs: Path | None = None
    tokenizer: Path | None = None
    text_columns: tuple[str, ...] = ()
    batch: int = 1
    seq: int = 128
    seconds: float = 20.0
    load_seconds: float = 5.0
    expect: str | None = None
    tolerance: float | None = None
    deadline: float = 10.0
    threads: int | None = None
    kernel: Path | None = None
    seed: int = 0
    force: bool = False
    save_baseline: Path | None = None

    def __post_init__(self) -> None:
        least = {"max_slowdown": 0.0, "seconds": 0.0, "load_seconds": 0.0, "deadline": 0.0, "batch": 1, "seq": 1}
        least |= {"p99": 0.0, "rate": 0.0, "tolerance": 0.0}
        for name, low in least.items():
            value = getattr(self, name)
            zero = value == 0 and name not in ("max_slowdown", "tolerance")
            if value is not None and (not np.isfinite(value) or value < low or zero):
                raise UsageError(f"{name} {value!r}: give a finite number {'from' if not zero else 'above'} {low:g}")
        if self.p99 is not None and self.scenarios == ("Offline",):
            raise UsageError("p99: the offline scenario has no bound; add singlestream or server")
        if self.rate is not None and "Server" not in self.scenarios:
            raise UsageError("rate: it is that of the server scenario; add it (--scenario server)")
        if self.server and self.kernel is not None:
            raise UsageError(f"--kernel {self.kernel}: is for engines on this machine; leave it out, or --server")
        if self.server and self.server.startswith("http://") and self.loads:
            raise UsageError("LoadGen's scenarios need calls side by side, which the HTTP client has not; use grpc://")
        if self.save_baseline is not None:
            writable(self.save_baseline)
            if self.save_baseline.suffix != ".json":
                raise UsageError(
                    f"--save-baseline {self.save_baseline}: give a name that ends in .json; --baseline knows it by that"
                )

    @property
    def loads(self) -> tuple[Scenario, ...]:
        """The scenarios to run."""
        return self.scenarios or (("SingleStream",) if self.p99 is not None else ())


def writable(file: Path) -> None:
    """Raise UsageError where there is no folder to write a file to: better before a check than after it."""
    if not file.absolute().parent.is_dir():
        raise UsageError(f"{file}: there is no folder {file.parent} to write it to; make it first")
