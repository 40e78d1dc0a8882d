"""Measure wall time and peak memory of `compress apply` on a graph of BERT-large's shape.

    python -m benchmarks.apply

24 layers of 16 heads of 64, width 1024, random weights, about 1.3 GB of external data; half of the heads are removed.
The command runs in a process of its own, whose peak resident set is read when it ends. The peak includes the
interpreter with its libraries, and pages of weights that are mapped from their file, which the system may drop at any
time.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.machine import machine

LARGE: dict[str, Any] = {"hidden_size": 1024, "num_attention_heads": 16, "intermediate_size": 4096}
MAX_SECONDS, MAX_MEMORY = 30.0, 1.3
"""Maximum wall time in seconds, and maximum peak memory as a multiple of the size of the graph."""


def export(folder: Path, layers: int) -> None:
    """Write `dense.onnx` and a `plan.json` that drops half of the heads, unevenly over the layers."""
    import numpy as np
    import torch
    from transformers import BertConfig, BertForSequenceClassification

    from compressor.export import export_reference
    from compressor.units import find_sites, keep_all
    from graph_passes import Plan, SitePlan

    torch.manual_seed(0)
    model = BertForSequenceClassification(BertConfig(num_hidden_layers=layers, **LARGE)).eval()
    ids = torch.randint(5, 30000, (2, 8))
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    sites = find_sites(model, inputs)
    rng = np.random.default_rng(0)
    mask = rng.permutation(16 * layers) < 8 * layers
    kept = [tuple(np.flatnonzero(row).tolist()) for row in mask.reshape(layers, 16)]
    entries = [
        SitePlan(site.name, site.kind, site.heads, site.kv_heads, site.head_dim, heads)
        for site, heads in zip(sites, kept, strict=True)
    ]
    export_reference(model, keep_all(sites), inputs, folder / "dense.onnx")
    Plan(sites=tuple(entries)).save(folder / "plan.json")


def main() -> None:
    """Print times, peak memory and sizes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--export", type=Path, metavar="FOLDER", help="only write the graph and the plan")
    options = parser.parse_args()
    if options.export is not None:
        export(options.export, options.layers)
        return
    print(machine("onnx-ir", "numpy"))
    with tempfile.TemporaryDirectory() as name:
        # The graph is exported in another process, because the peak of a child starts from the memory of its parent.
        export_command = [sys.executable, "-m", "benchmarks.apply", "--layers", str(options.layers), "--export", name]
        subprocess.run(export_command, check=True, stderr=subprocess.DEVNULL)
        graph, plan = Path(name) / "dense.onnx", Path(name) / "plan.json"
        size = graph.stat().st_size + graph.with_name(f"{graph.name}.data").stat().st_size
        small = graph.with_name("small.onnx")
        command = [sys.executable, "-m", "compressor.cli", "apply", str(graph), "--plan", str(plan), "-o", str(small)]
        for _ in range(options.runs):
            start = time.perf_counter()
            child = subprocess.Popen([*command, "--force", "--quiet"], stdout=subprocess.DEVNULL)
            _, status, used = os.wait4(child.pid, 0)
            seconds = time.perf_counter() - start
            if status:
                sys.exit("compress apply failed")
            peak = used.ru_maxrss * 1024
            small_size = sum(file.stat().st_size for file in graph.parent.glob("small.onnx*"))
            print(
                f"{size / 1e9:.2f} GB to {small_size / 1e9:.2f} GB:"
                f" {seconds:.1f} s (allowed {MAX_SECONDS:g}), peak {peak / 1e9:.2f} GB = {peak / size:.2f} x the file"
                f" (allowed {MAX_MEMORY})",
                flush=True,
            )


if __name__ == "__main__":
    main()
