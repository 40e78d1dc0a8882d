"""Compare MiniLM as people run it today with what `compress` makes of it, in one table and one picture.

    python -m benchmarks.rivals sst2                                  # every row; finished rows are not repeated
    python -m benchmarks.rivals sst2 --rows openvino-int8 distilled   # some rows
    python -m benchmarks.rivals sst2 --rows distilled --seeds 3       # and their metric with further seeds
    python -m benchmarks.rivals sst2 --picture rivals.png             # and the picture
    python -m benchmarks.rivals sst2 --points rivals.json             # and a file for compress --compare-points

Each row is made once, in a folder of `--out`/SET/rivals, and scored in a process of its own: the metric on test rows
with a paired 95% interval of the difference from the whole model, the size of its files, and the memory that loading
and running it adds to a process at its peak. The time of a call, in turn with ONNX Runtime's own fused fp32 engine at
batch 1 and 8, is measured in three rounds over all rows, in a process of its own each time: speeds are medians and
ranges. Rows of further seeds are made and scored, and not timed. Stored rows are those of the version that made them.
Other tools are installed in the versions of `pins`, into `--out`/tools. A row that cannot be made or measured here says
why, and the others go on.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from benchmarks.machine import machine
from benchmarks.rivals.measure import score, time_calls
from benchmarks.rivals.points import points_of
from benchmarks.rivals.rows import RIVALS, folder_name, make
from benchmarks.speed import median_and_range, table
from benchmarks.text_sets import SETS
from graph_passes.files import write_text

COLUMNS = (
    *("model and engine", "metric", "difference (95%)", "all seeds"),
    *("batch 1, ms", "batch 1", "batch 8, ms", "batch 8", "MB", "memory, MB", "minutes"),
)


def make_row(name: str, folder: str, root: Path) -> dict[str, Any]:
    """Make a row if it is missing; return the minutes that it took."""
    return {"minutes": make(name, folder, root)}


STEPS: dict[str, Callable[[str, str, Path], dict[str, Any]]] = {"make": make_row, "score": score, "time": time_calls}
"""What a process of its own does for a row; it prints the result as its last line."""
_TIMINGS = 3
"""Rounds over the rows that time them: a machine has slow phases, which a row should not meet alone."""


def numbers_file(name: str, folder: str, out: Path) -> Path:
    """The file with the numbers of a row."""
    return out / name / "rivals" / f"{folder}.json"


def score_row(name: str, folder: str, out: Path) -> dict[str, Any]:
    """The numbers of a row without its times: stored, or made and scored; or `failed`, why it cannot be.

    Args:
        name: key of `SETS`.
        folder: name of the folder of the row (`rows.folder_name`).
        out: folder of all sets.
    """
    file = numbers_file(name, folder, out)
    if file.is_file():
        stored: dict[str, Any] = json.loads(file.read_text())
        return stored
    numbers: dict[str, Any] = {"timings": []}
    for step in ("make", "score"):
        numbers |= run_step(step, name, folder, out)
        if "failed" in numbers:
            return numbers
    write_text(file, json.dumps(numbers))
    return numbers


def time_rows(name: str, rows: Mapping[str, dict[str, Any]], out: Path) -> None:
    """Time every row that is not timed yet, in rounds over all of them; numbers are stored after each timing.

    Args:
        name: key of `SETS`.
        rows: row -> its numbers, which get the times, or `failed`.
        out: folder of all sets.
    """
    for number in range(_TIMINGS):
        for row, numbers in rows.items():
            if "failed" in numbers or len(numbers["timings"]) > number:
                continue
            timing = run_step("time", name, row, out)
            if "failed" in timing:
                numbers["failed"] = timing["failed"]
                continue
            numbers["timings"].append(timing)
            write_text(numbers_file(name, row, out), json.dumps(numbers))


def all_seeds(name: str, row: str, numbers: Mapping[str, Any], seeds: int, out: Path) -> dict[str, Any]:
    """The numbers of a row, and those of all its seeds where it chooses units or trains by drawn rows."""
    if "failed" in numbers or seeds < 2 or not RIVALS[row].draws:
        return dict(numbers)
    further = [score_row(name, folder_name(row, seed), out) for seed in range(1, seeds)]
    return {**numbers, "seeds": [numbers, *further]}


def run_step(step: str, name: str, folder: str, out: Path) -> dict[str, Any]:
    """The result of a step in a process of its own, or `failed`."""
    command = [sys.executable, "-m", "benchmarks.rivals", name, "--out", str(out), "--step", step, "--folder", folder]
    process = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    try:
        result: dict[str, Any] = json.loads(process.stdout.splitlines()[-1])
    except (IndexError, json.JSONDecodeError):
        return {"failed": f"exit code {process.returncode}"}
    return result


def print_step(step: str, name: str, folder: str, out: Path) -> int:
    """Print the result of a step, or why it failed; return the exit code."""
    try:
        result = STEPS[step](name, folder, out / name)
    except Exception as error:  # whatever a tool raises is the reason why its row is missing
        traceback.print_exc()
        lines = str(error).strip().splitlines()
        result = {"failed": f"{type(error).__name__}: {lines[0] if lines else 'no message'}"}
    print(json.dumps(result))
    return int("failed" in result)


def timed(numbers: Mapping[str, Any], key: str) -> list[float]:
    """A number of each of the processes that timed a row."""
    return [timing[key] for timing in numbers["timings"]]


def as_cells(row: str, numbers: Mapping[str, Any]) -> dict[str, str]:
    """A row of the table as text."""
    title = {**dict.fromkeys(COLUMNS, ""), "model and engine": RIVALS[row].title}
    if "failed" in numbers:
        return {**title, "metric": f"not made: {numbers['failed']}".replace("|", "/")}
    scale, digits = numbers["scale"], 1 if numbers["scale"] > 1 else 3
    difference, low, high = (f"{scale * numbers[key]:+.{digits}f}" for key in ("difference", "low", "high"))
    differences = ", ".join(
        f"not made: {seed['failed']}" if "failed" in seed else f"{scale * seed['difference']:+.{digits}f}"
        for seed in numbers.get("seeds", ())
    )
    return {
        **title,
        "metric": f"{scale * numbers['metric']:.{digits}f}",
        "difference (95%)": f"{difference} ({low} to {high})",
        "all seeds": differences,
        "batch 1, ms": f"{np.median(timed(numbers, 'p50-1')):.2f}",
        "batch 1": median_and_range(timed(numbers, "ratio-1"), "x"),
        "batch 8, ms": f"{np.median(timed(numbers, 'p50-8')):.1f}",
        "batch 8": median_and_range(timed(numbers, "ratio-8"), "x"),
        "MB": f"{numbers['bytes'] / 1e6:.0f}",
        "memory, MB": f"{numbers['memory'] / 1e6:.0f}",
        "minutes": f"{numbers['minutes']:.1f}",
    }


def print_table(name: str, rows: Mapping[str, Mapping[str, Any]]) -> None:
    """Print the table of a set."""
    measured = [numbers for numbers in rows.values() if "failed" not in numbers]
    metric = f", {measured[0]['heading']}, {measured[0]['rows']} test rows" if measured else ""
    print(f"\n{name}{metric}, {SETS[name].max_length} tokens\n", flush=True)
    cells = [as_cells(row, numbers) for row, numbers in rows.items()]
    empty = {column for column in COLUMNS if not any(row[column] for row in cells)}
    print(table([{column: row[column] for column in COLUMNS if column not in empty} for row in cells]), flush=True)


def draw(name: str, rows: Mapping[str, Mapping[str, Any]], path: Path) -> None:
    """The speeds of every row, and how far its metric is from the whole model's; rows of compress are coloured."""
    measured = {row: numbers for row, numbers in rows.items() if "failed" not in numbers}
    if not measured:
        return
    speeds = {
        row: {batch: float(np.median(timed(numbers, f"ratio-{batch}"))) for batch in (1, 8)}
        for row, numbers in measured.items()
    }
    order = sorted(measured, key=lambda row: speeds[row][8])
    figure = Figure((9.5, 1.0 + 0.3 * len(order)), layout="constrained")
    axes = figure.add_subplot()
    for height, row in enumerate(order):
        numbers = measured[row]
        color = "#0b7a75" if RIVALS[row].title.startswith("compress") else "#b4bac3"
        axes.barh(height, speeds[row][8], 0.62, color=color)
        axes.plot(speeds[row][1], height, "D", color="#1f2937", markersize=4)
        digits = 1 if numbers["scale"] > 1 else 3
        text = f"{speeds[row][8]:.1f}×,  {numbers['scale'] * numbers['difference']:+.{digits}f}"
        end = max(speeds[row].values()), height
        axes.annotate(text.replace("-", "−"), end, (6, 0), textcoords="offset points", va="center", fontsize=8)
    axes.set_yticks(range(len(order)), [RIVALS[row].title for row in order], fontsize=8)
    axes.set_xlim(0, 1.25 * speeds[order[-1]][8])
    heading = next(iter(measured.values()))["heading"]
    axes.set_xlabel(
        f"times as fast as ONNX Runtime in fp32, {SETS[name].max_length} tokens\n(bar: batch 8, diamond: batch 1),"
        f" and difference from\nthe whole model ({name}, {heading})",
        fontsize=8,
    )
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150, metadata={"Software": None})


def _file_of_set(path: Path, name: str, sets: Sequence[str]) -> Path:
    """A file to write for a set; with several sets, each has one: NAME-SET.png."""
    return path.with_stem(f"{path.stem}-{name}") if len(sets) > 1 else path


def main() -> int:
    """Print the table of each set that is named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sets", nargs="+", choices=list(SETS))
    parser.add_argument("--rows", nargs="+", choices=list(RIVALS), default=list(RIVALS))
    parser.add_argument(
        "--seeds", type=int, default=1, help="number of seeds of rows that choose units or train by drawn rows"
    )
    parser.add_argument("--picture", type=Path, help="a PNG to write; with several sets, one for each: NAME-SET.png")
    parser.add_argument("--points", type=Path, help="a JSON file of points to write, likewise")
    parser.add_argument("--out", type=Path, default=Path("build/quantization"))
    parser.add_argument("--step", choices=list(STEPS), help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.step:
        return print_step(args.step, args.sets[0], args.folder, args.out)
    print(f"machine: {machine('torch', 'onnxruntime', 'openvino', 'nncf')}", flush=True)
    for name in args.sets:
        (args.out / name / "rivals").mkdir(parents=True, exist_ok=True)
        rows = {row: score_row(name, row, args.out) for row in args.rows}
        time_rows(name, rows, args.out)
        rows = {row: all_seeds(name, row, numbers, args.seeds, args.out) for row, numbers in rows.items()}
        print_table(name, rows)
        if args.picture is not None:
            draw(name, rows, _file_of_set(args.picture, name, args.sets))
        if args.points is not None:
            _file_of_set(args.points, name, args.sets).write_text(json.dumps(points_of(name, rows), indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
