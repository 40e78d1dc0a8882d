"""Numbers and names as text, in one form for the verdict, the page and the terminal."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from compressor.results import Candidate, MetricUnit, Score, Speed, Throughput


def count(number: int | None) -> str:
    """`22713216` -> `22.7M`."""
    return _scaled(number, {"T": 1e12, "G": 1e9, "M": 1e6, "k": 1e3})


def size(number: int | None) -> str:
    """Bytes in decimal units: `91000000` -> `91 MB`."""
    return _scaled(number, {" GB": 1e9, " MB": 1e6, " kB": 1e3}, " B")


def _scaled(number: int | None, scales: Mapping[str, float], unit: str = "") -> str:
    """A number in the largest unit that it reaches, with three digits."""
    if number is None:
        return "not measured"
    name, scale = next(((name, scale) for name, scale in scales.items() if abs(number) >= 0.9995 * scale), ("", 1.0))
    return f"{number / scale:.3g}{name}" if name else f"{number}{unit}"


def ms(milliseconds: float) -> str:
    """`4.8312` -> `4.83 ms`."""
    return f"{significant(milliseconds)} ms"


def seconds(number: float) -> str:
    """`75.2` -> `1 min 15 s`."""
    if number < 60:
        return f"{significant(number)} s"
    minutes, whole_seconds = divmod(round(number), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {whole_seconds} s"


def significant(number: float) -> str:
    """Three significant digits without an exponent, with a true minus sign; words for infinity and NaN."""
    if not math.isfinite(number):
        return "not a number" if math.isnan(number) else "∞" if number > 0 else "−∞"
    digits = 2 - math.floor(math.log10(abs(number))) if number else 0
    return f"{number:.{min(max(digits, 0), 6)}f}".replace("-", "−")


def error(number: float) -> str:
    """A relative error: `3.1e-08`."""
    return f"{number:.2g}" if math.isfinite(number) else significant(number)


def change(dense: float | None, compressed: float | None) -> str:
    """Compressed against dense as a share: `−15.7%`."""
    if dense is None or compressed is None or not dense:
        return ""
    percent = 100 * (compressed / dense - 1)
    if abs(percent) < 0.05:
        return "same" if compressed == dense else f"{'+' if percent > 0 else '−'}<0.1%"
    return f"{signed(percent, 1)}%"


def range_text(low: float, high: float) -> str:
    """The ends of an interval: `1.28 to 1.34`."""
    return f"{low:.2f} to {high:.2f}".replace("-", "−")


def interval_text(ends: str, confidence: float) -> str:
    """`1.28 to 1.34` -> `95% interval 1.28 to 1.34`."""
    return f"{100 * confidence:g}% interval {ends}"


def ratio(speed: Speed) -> str:
    """`1.31× (95% interval 1.28 to 1.34)`."""
    return f"{speed.ratio:.2f}× ({interval_text(range_text(speed.low, speed.high), speed.confidence)})"


def metric_name(score: Score) -> str:
    """The name of a metric in words."""
    return score.metric.replace("_", " ")


def in_unit(value: float, unit: MetricUnit) -> str:
    """A value of a metric, in the unit that the metric declares."""
    return f"{unit.scale * value:.1f}" if unit is MetricUnit.POINTS else significant(value)


def signed(number: float, places: int) -> str:
    """A number with its sign, the minus a true one: `−0.6`, `+1.2`."""
    return f"{number:+.{places}f}".replace("-", "−")


def difference_and_range(score: Score) -> tuple[str, str]:
    """Compressed minus dense and its interval, in the unit of the metric: `−0.6 points`, `−1.4 to +0.2`."""
    scale, unit, places = score.unit.scale, "", _places(score.low, score.high)
    if score.unit is MetricUnit.POINTS:
        unit, places = " points", 1
    ends = (signed(scale * end, places) for end in (score.low, score.high))
    return f"{signed(scale * score.difference, places)}{unit}", " to ".join(ends)


def difference(score: Score) -> str:
    """`−0.6 points (95% interval −1.4 to +0.2)`."""
    points, ends = difference_and_range(score)
    return f"{points} ({interval_text(ends, score.confidence)})"


def _places(low: float, high: float) -> int:
    """Decimals that distinguish the ends of an interval: two significant digits of its width, at least two."""
    width = high - low
    return min(max(1 - math.floor(math.log10(width)), 2), 6) if 0 < width < math.inf else 3


def common_labels(names: Sequence[str]) -> tuple[list[str], str]:
    """The differing part of each module path, and the common pattern of all paths, with `*` for that part.

    The pattern is empty where the paths have nothing in common. At least one part of each path remains.
    """
    paths = [name.split(".") for name in names]
    limit = min(map(len, paths)) - 1 if len(paths) > 1 else 0
    before = next((part for part in range(limit) if len({path[part] for path in paths}) > 1), limit)
    limit -= before
    after = next((part for part in range(limit) if len({path[-1 - part] for path in paths}) > 1), limit)
    first = paths[0]
    pattern = ".".join([*first[:before], "*", *first[len(first) - after :]]) if before or after else ""
    return [".".join(path[before : len(path) - after]) for path in paths], pattern


def throughput_table(throughputs: Sequence[Throughput]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Headings and a row for each size: rows per second with one caller and with several, of both engines."""
    callers = " and ".join(dict.fromkeys(f"{row.callers} callers" for row in throughputs))
    headings = ("size", *(f"{engine}, {way}" for way in ("one caller", callers) for engine in ("dense", "compressed")))
    rows: list[tuple[str, ...]] = []
    for row in throughputs:
        rates = (row.dense.one_caller, row.compressed.one_caller, row.dense.all_callers, row.compressed.all_callers)
        rows.append((row.size_label, *map(significant, rates)))
    return headings, rows


def candidate_table(candidates: Sequence[Candidate]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Headings and a row for each engine that was tried: settings, times by size, speed over dense, ..., outcome."""
    sizes = tuple(dict.fromkeys(size for row in candidates for size in row.milliseconds))
    pruned = next((row.pruned_text for row in candidates if row.speed_pruned), "")
    speeds = ("speed", *filter(None, [pruned]))
    headings = ("engine", *sizes, *speeds, "metric, evaluation rows", "equal answers", "size", "memory", "proofs")
    return (*headings, "outcome"), [_candidate_row(row, sizes, has_pruned=bool(pruned)) for row in candidates]


def _candidate_row(row: Candidate, sizes: Sequence[str], *, has_pruned: bool) -> tuple[str, ...]:
    speeds = (row.speed, row.speed_pruned) if has_pruned else (row.speed,)
    return (
        row.label,
        *(ms(row.milliseconds[size]) if size in row.milliseconds else "" for size in sizes),
        *("" if speed is None else f"{speed:.2f}×" for speed in speeds),
        "" if row.metric is None or row.difference is None else _metric_change(row.metric, row.difference, row.unit),
        "" if row.agreement is None else f"{100 * row.agreement:.1f}%",
        "" if row.file_bytes is None else size(row.file_bytes),
        "" if row.peak_memory_bytes is None else size(row.peak_memory_bytes),
        f"{sum(proof.holds for proof in row.proofs)} of {len(row.proofs)}" if row.proofs else "",
        row.failure or ("chosen" if row.chosen else "" if row.holds else "loses too much"),
    )


def _metric_change(value: float, difference: float, unit: MetricUnit) -> str:
    """A metric in its unit, and its difference to dense: `91.7 (−0.92 points)`."""
    text = f"{signed(100 * difference, 2)} points" if unit is MetricUnit.POINTS else signed(difference, 4)
    return f"{in_unit(value, unit)} ({text})"


def toml(recipe: Mapping[str, Any]) -> str:
    """A recipe as the text of `compress.toml`; fields that are None are omitted, since TOML has no such value."""
    return "".join(f"{_key(key)} = {_value(value)}\n" for key, value in recipe.items() if value is not None)


def _key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else _value(key)


def _value(value: object) -> str:
    if isinstance(value, Mapping):
        pairs = (f"{_key(str(key))} = {_value(item)}" for key, item in value.items() if item is not None)
        return f"{{{', '.join(pairs)}}}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(_value(item) for item in value if item is not None)}]"
    if isinstance(value, float) and not math.isfinite(value):
        return f"{value}"
    # Strings, numbers and booleans are written alike in JSON and TOML, except the delete character, which TOML escapes.
    return json.dumps(value, ensure_ascii=False, default=str).replace("\x7f", "\\u007f")
