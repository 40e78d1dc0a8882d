"""Check the law for every model type of the installed transformers, and write `docs/families.md`.

    python -m benchmarks.families                       # goes on where an earlier sweep ended
    python -m benchmarks.families --only bert llama     # these again
    python -m benchmarks.families --again FAILED        # those of an outcome again

Each family is built tiny with random weights, exported, cut by a random plan, and compared at several sizes, in a
process of its own. Beside the usual class of a family the sweep takes the bare model, one with a head that pools and
one with a head per token, where the family has them. The row of each is a file in `--work`.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import multiprocessing
import resource
import signal
import sys
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from pathlib import Path

from benchmarks.families_law import Outcome, Row, sweep_family
from benchmarks.families_page import page_of
from benchmarks.families_tiny import Form, forms_of, model_types
from compressor.silence_libraries import quiet_tools, quiet_transformers
from graph_passes.files import write_text

PAGE = Path(__file__).parents[1] / "docs" / "families.md"
_PATIENCE = 10
"""Wall-clock seconds for each second of the processor, after which a process that waits for something is ended."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Sweep the families that have no row yet, and write the page; return 1 if one of them failed."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.families", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", type=Path, default=Path("runs/families"), help="folder of the rows")
    parser.add_argument("--seconds", type=float, default=120.0, help="limit of a family in seconds of the processor")
    parser.add_argument("--jobs", type=int, default=2, help="families at a time")
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="FAMILY", help="families to sweep again, in this order"
    )
    parser.add_argument("--forms", nargs="+", type=Form, choices=list(Form), default=list(Form), help="classes to take")
    parser.add_argument("--again", nargs="+", default=[], metavar="OUTCOME", help="outcomes to sweep again")
    options = parser.parse_args(arguments)
    options.work.mkdir(parents=True, exist_ok=True)
    kept = {(row.family, row.form) for row in read_rows(options.work) if row.outcome not in options.again}
    pairs = [
        (family, form)
        for family in options.only or model_types()
        for form in forms_of(family)
        if form in options.forms and (options.only or (family, form) not in kept)
    ]
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([sweep_family.__module__, "openvino"])

    def sweep(pair: tuple[str, Form]) -> None:
        family, form = pair
        row = dataclasses.replace(run_in_process(context, family, options.seconds, form), swept=f"{date.today()}")
        name = family if form is Form.USUAL else f"{family}.{form}"
        write_text(options.work / f"{name}.json", json.dumps(dataclasses.asdict(row), indent=1))
        print(f"{name}: {row.outcome} {row.reason}".strip(), flush=True)

    with ThreadPoolExecutor(options.jobs) as pool:
        try:
            list(pool.map(sweep, pairs))
        except KeyboardInterrupt:
            print("interrupted: families that have begun are finished", flush=True)
            pool.shutdown(cancel_futures=True)
    rows = read_rows(options.work)
    models = Counter(form for family in model_types() for form in forms_of(family))
    PAGE.write_text(page_of(rows, models), encoding="utf-8")
    print(f"wrote {PAGE}")
    return int(any(row.outcome == Outcome.FAILED for row in rows))


def read_rows(work: Path) -> list[Row]:
    """The rows of earlier sweeps, by family."""
    rows = [Row(**json.loads(file.read_text())) for file in sorted(work.glob("*.json"))]
    return [dataclasses.replace(row, outcome=Outcome(row.outcome), form=Form(row.form)) for row in rows]


def run_in_process(context: ForkServerContext, family: str, seconds: float, form: Form = Form.USUAL) -> Row:
    """The row of a family, from a process of its own: an abort or too long a time is an outcome as well.

    The limit counts seconds of the processor, so that it does not depend on what else the machine does.
    """
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_send_row, args=(family, form, round(seconds), sender), daemon=True)
    process.start()
    sender.close()
    row = Row(family, form=form)
    try:
        while receiver.poll(_PATIENCE * seconds):
            row, is_last = receiver.recv()
            if is_last:
                return row
        return dataclasses.replace(row, reason=f"{row.reason}: no result after {_PATIENCE * seconds:g} s")
    except EOFError:
        process.join()
        code = process.exitcode or 0
        if code == -signal.SIGXCPU:
            return dataclasses.replace(
                row, reason=f"{row.reason}: over {seconds:g} s of the processor", seconds=seconds
            )
        ending = signal.Signals(-code).name if code < 0 else f"exit status {code}"
        return dataclasses.replace(row, outcome=Outcome.FAILED, reason=f"{row.reason}: abort, {ending}")
    finally:
        process.kill()
        process.join()


def _send_row(family: str, form: Form, seconds: int, sender: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C ends the sweep after this family
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 5))
    with quiet_tools(), quiet_transformers():
        row = sweep_family(family, lambda row: sender.send((row, False)), form=form)
    sender.send((row, True))


if __name__ == "__main__":
    sys.exit(main())
