"""A process with the bindings of one TensorRT: it measures a cost table by the target's own engines on the stand-ins.

An engine is the graph that was parsed, and a call takes a nanosecond for each of its multiply-accumulates.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from compressor.config.sections import EngineConfig
from compressor.engines.choices import SYMMETRIC, Choice
from compressor.progress import NullListener, RunLog
from compressor.pruning import measure as times_module
from compressor.pruning.costs import PlanEngines, count_costs, keep_counts
from compressor.pruning.measure import CostSource
from compressor.results import Size
from compressor.store import Store
from compressor.targets import BuildOptions, Engine, Feeds
from compressor.units import keep_all
from tests.law import references
from tests.run.budgets.budget_runs import exported, seconds_by_macs
from tests.targets.tensorrt import stand_ins
from tests.targets.tensorrt.stand_ins import REQUESTED
from tests.zoo import text

SIZE = (2, 7)
"""Batch size and length."""
CHOICES = {
    "fp16": Choice(EngineConfig(target="trt", precision="fp16")),
    "int8": Choice(EngineConfig(target="trt", precision="int8"), SYMMETRIC),
}


def main(precision: str, folder: str) -> dict[str, Any]:
    sys.modules["tensorrt"] = module = importlib.import_module("tensorrt_bindings")
    stand_ins.install(module)
    table_module = cast(Any, times_module)
    table_module.paired_times = lambda engines, *args: [seconds_by_macs(engine, *SIZE) for engine in engines]
    table_module.paired_ratios = _ratios
    return table(CHOICES[precision], Path(folder))


def _ratios(engines: Sequence[Engine], feeds: Feeds, seconds: float) -> list[tuple[float, float]]:
    control, *times = (seconds_by_macs(engine, *SIZE) for engine in engines)
    return [(time / control, 1e-3) for time in times]


def table(choice: Choice, folder: Path) -> dict[str, Any]:
    """What the table of a choice predicts for plans, in ms, and what their engines take."""
    reference = references.reference("bert", 18, "eager")
    groups, plan = reference.groups, keep_all(reference.groups)
    feeds = {name: value.numpy() for name, value in text(*SIZE).items()}
    options = BuildOptions(batch=(1, 2, 4), seq=(1, 7, 16), workspace=64 << 20, timing_cache=folder / "timings")
    engines = PlanEngines(exported(groups, reference.path), choice, options, feeds, True, folder)
    _, counted = count_costs(engines.float_graph, plan, groups, [SIZE], lambda finished, total: None)
    built = list[int]()
    partial = Store(folder / "parts", version=1)
    source = CostSource("bert", groups, engines, engines.whole, {Size(*SIZE): feeds}, RunLog(NullListener()))
    (costs,) = source.measured_tables(counted, partial, lambda finished, total: built.append(finished))
    plans = [{group.name: part * group.units // 4 for group in groups} for part in range(5)]
    left = sorted(path.name for path in folder.iterdir() if path.is_dir())
    rebuilt = [engines.build(keep_counts(plan, groups, counts)) for counts in plans]
    return {
        "label": costs.engine,
        "profile": REQUESTED["profile"],
        "built": built[-1],
        "left": left,
        "predicted": [costs.cost(counts) for counts in plans],
        "measured": [1e3 * seconds_by_macs(engine, *SIZE) for engine in rebuilt],
    }


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))
