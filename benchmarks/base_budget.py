"""Measure the time and the memory that a budget takes for the shape of BERT-base: statistics, losses, costs, refit.

    python -m benchmarks.base_budget                   # half of the time of ONNX Runtime's fused fp32
    python -m benchmarks.base_budget --target openvino --precision int8

The weights are random, which changes neither times nor memory; rows are those of SST-2. The run is that of a user:
`compress model/ --data rows.tsv --speedup 2 --prune-rows 1024`, with rows of up to 128 tokens. Its stages are printed
with the largest memory that the process had in each (on Linux).
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from transformers import AutoTokenizer, BertConfig, BertForSequenceClassification

from benchmarks.machine import machine
from benchmarks.speed import SHAPES, table
from benchmarks.text_sets import ENCODER, rows_file
from compressor import compress
from compressor.cli.console import Console
from compressor.config.run import Recipe
from compressor.progress import ProgressCallback
from compressor.silence_libraries import quiet_transformers

LENGTH = 128


class MemoryConsole(Console):
    """A console that records the largest memory of each stage, `peaks`, in GiB."""

    def __init__(self) -> None:
        super().__init__()
        self.peaks: dict[str, float] = {}

    @contextmanager
    def stage(self, name: str) -> Iterator[ProgressCallback]:
        """Show a stage, and record its largest memory."""
        Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
        try:
            with super().stage(name) as progress:
                yield progress
        finally:
            status = Path("/proc/self/status").read_text()
            kilobytes = int(status.partition("VmHWM:")[2].split()[0])
            self.peaks[name] = max(self.peaks.get(name, 0.0), kilobytes / 2**20)


def base_model(folder: Path) -> Path:
    """A folder with a random classifier of BERT-base's shape and the tokenizer of MiniLM."""
    path = folder / "model"
    if not path.exists():
        torch.manual_seed(0)
        tokenizer = AutoTokenizer.from_pretrained(ENCODER)
        config = BertConfig(**SHAPES["base"], vocab_size=len(tokenizer))
        with quiet_transformers():
            BertForSequenceClassification(config).save_pretrained(path)
        tokenizer.save_pretrained(path)
    return path


def main() -> None:
    """Run the budget and print its stages."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="ort", choices=("ort", "openvino"))
    parser.add_argument("--precision", default="fp32", choices=("fp32", "int8"))
    parser.add_argument("--speedup", type=float, default=2.0)
    parser.add_argument("--out", type=Path, default=Path("build/quantization"))
    args = parser.parse_args()
    print(f"machine: {machine('torch', 'onnxruntime', 'openvino', 'nncf')}", flush=True)
    folder = args.out / "base"
    folder.mkdir(parents=True, exist_ok=True)
    (args.out / "sst2").mkdir(parents=True, exist_ok=True)
    recipe = Recipe(
        model=base_model(folder),
        data=str(rows_file("sst2", args.out / "sst2")),
        max_length=LENGTH,
        target=args.target,
        precision=args.precision,
        shapes=(f"1x{LENGTH}",) if args.target == "openvino" else (),
        batch=(1,),
        seq=(LENGTH,),
        speedup=args.speedup,
        prune_rows=1024,
        seconds=3.0,
        out=folder / f"{args.target}-{args.precision}",
        force=True,
    )
    console = MemoryConsole()
    report = compress(recipe, console)
    rows = [
        {"stage": stage, "seconds": f"{seconds:.0f}", "GiB": f"{console.peaks[stage]:.1f}"}
        for stage, seconds in report.seconds.items()
    ]
    print(table(rows))
    peak = max(console.peaks.values())
    print(f"\n{sum(report.seconds.values()) / 60:.1f} minutes in all; at most {peak:.1f} GiB of memory")


if __name__ == "__main__":
    main()
