"""The latency gate on a real Triton server: false alarms, slowdowns caught, and what its own client costs.

    python -m benchmarks.gate                      # 50 checks of a model against itself, 50 of one that is 10% slower
    python -m benchmarks.gate --checks 3 --seconds 5         # untold, a check times for 20 s, as `compress check` does

The server is that of `make .venv-triton/ready` (Triton's Python backend on the CPU). It serves the same model three
times, on rows of SST-2; the third one waits after each call for a tenth of the time that it took to compute, so that it
stays a tenth slower while the machine does other work too. A check against itself that fails is a false alarm; one of
the slower model that passes was missed; one that is broken off is neither. Any of the three is exit code 1, and so are
a check that takes longer than a minute, and a client that certainly costs more than 5% beside a bare one.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np

from benchmarks.machine import machine
from compressor import Recipe, compress
from compressor.config.serve import ServeRequest
from compressor.latency import CheckRequest, Verdict, check
from compressor.latency.request_batches import batches
from compressor.latency.triton_client import TritonModel
from compressor.measure.timing import alternate_calls, ratio_interval
from compressor.serving import export
from tests import triton

SHARED = Path(__file__).resolve().parents[2] / "shared"
MODEL, ROWS = SHARED / "models" / "minilm-sst2", SHARED / "data" / "sst2.tsv.xz"
SLOWER = 0.10
LONGEST, DEAREST = 60.0, 0.05
"""Seconds of a check, and what its client may cost, as a share of a call by Triton's client alone."""
_COLUMNS = (
    *("model", "checks", "failed", "broken off", "slowdown, % (least to most)", "width of the interval, points"),
    *("p50, ms", "longest check, s"),
)
_DELAY = f"""

class _Slow(TritonPythonModel):
    def execute(self, requests):
        began = time.perf_counter()
        answers, ready = super().execute(requests), time.perf_counter()
        while time.perf_counter() < ready + {SLOWER} * (ready - began):
            pass
        return answers


TritonPythonModel = _Slow
"""


def folder(scratch: Path, threads: int) -> Path:
    """An output folder of `compress`: MiniLM with every head."""
    compress(Recipe(model=MODEL, out=scratch / "out", batch=(1,), seq=(128,), seconds=1, threads=threads))
    return scratch / "out"


def repository(out: Path, place: Path, threads: int) -> None:
    """Three of the same model, the third of them slowed down."""
    for name in ("base", "same", "slow"):
        export(ServeRequest(out=out, repository=place, name=name, backend="python", threads=threads, device="cpu"))
    code = next((place / "slow").rglob("model.py"))
    code.write_text(code.read_text().replace("import json\n", "import json\nimport time\n", 1) + _DELAY)


def line(model: str, verdict: Verdict) -> str:
    """One check."""
    found = verdict.slowdown
    read = "" if found is None else f"{found.slowdown:+.2%} (95%: {found.low:+.2%} to {found.high:+.2%})"
    return f"{model}: {read}, {'right' if right(model, verdict) else 'wrong'} {verdict.interrupted}".rstrip()


def told(name: str, found: list[Verdict]) -> None:
    """One row of the table."""
    failed = sum(bool(verdict.failures) for verdict in found)
    broken = sum(bool(verdict.interrupted) for verdict in found)
    slowdowns = [verdict.slowdown for verdict in found if verdict.slowdown is not None]
    if not slowdowns:
        print(f"| {name} | {len(found)} | {failed} | {broken} | none was timed | | | |")
        return
    middle = [100 * one.slowdown for one in slowdowns]
    wide = [100 * (one.high - one.low) for one in slowdowns]
    print(
        f"| {name} | {len(found)} | {failed} | {broken} | {np.median(middle):+.2f} ({min(middle):+.2f} to"
        f" {max(middle):+.2f}) | {np.median(wide):.2f} | {np.median([one.baseline_p50 for one in slowdowns]):.2f} |"
        f" {max(verdict.seconds for verdict in found):.0f} |",
        flush=True,
    )


def right(model: str, verdict: Verdict) -> bool:
    """Whether a check found what is there, in time."""
    return verdict.seconds <= LONGEST and not verdict.interrupted and bool(verdict.failures) is (model == "slow")


def overhead(url: str, asked: CheckRequest, seconds: float) -> bool:
    """Whether the check's client certainly costs too much: calls by it and by Triton's client alone, in turn."""
    import tritonclient.grpc as client

    driver = TritonModel(url, "base", asked.deadline)
    feeds = batches(driver, asked)[0][0]
    prepared = driver.prepare(feeds)
    bare, address = [], url.partition("://")[2]
    for name, array in feeds.items():
        bare.append(client.InferInput(name, list(array.shape), "INT64"))
        bare[-1].set_data_from_numpy(array)
    connection = client.InferenceServerClient(address)
    calls = (lambda: driver.call(prepared), lambda: connection.infer("base", bare, client_timeout=asked.deadline))
    times = np.stack(list(alternate_calls(*calls, seconds, rest=driver.rest)), axis=1)
    low, high = ratio_interval(times, 0, 0.95)
    median = np.median(times, axis=(1, 2))
    print(
        f"client of check p50 {1e3 * median[0]:.3f} ms, bare tritonclient {1e3 * median[1]:.3f} ms:"
        f" {100 * (median[0] / median[1] - 1):+.2f}% (95%: {100 * (low - 1):+.2f} to {100 * (high - 1):+.2f})",
        flush=True,
    )
    return low - 1 > DEAREST


def main() -> int:
    """Print everything; how many goals were missed: every check is one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checks", type=int, default=50, help="of each kind")
    parser.add_argument("--seconds", type=float, default=CheckRequest.seconds, help="that a check times")
    parser.add_argument("--limit", type=float, default=0.05, help="slowdown allowed")
    parser.add_argument("--seq", type=int, default=128)
    parser.add_argument("--threads", type=int, default=1, help="of a call on the server")
    options = parser.parse_args()
    why = triton.missing() or (None if MODEL.exists() else f"{MODEL} is not on this machine")
    if why is not None:
        print(f"skipped: {why}")
        return 0
    print(f"machine: {machine('onnxruntime', 'tritonclient')}; {options.threads} threads a call on the server")
    with tempfile.TemporaryDirectory() as scratch:
        out, place = folder(Path(scratch), options.threads), Path(scratch) / "repository"
        repository(out, place, options.threads)
        with triton.Server(place) as server:
            url = f"grpc://{server.grpc}"
            timed = {"seq": options.seq, "seconds": options.seconds}
            asked = CheckRequest("same", "base", url, options.limit, inputs=ROWS, tokenizer=out, **timed)
            first = check(asked)
            print(f"{first.host}; {options.seq} tokens, {first.inputs}; limit {options.limit:.0%}")
            dear = overhead(url, asked, 2 * options.seconds)
            found: dict[str, list[Verdict]] = {"same": [], "slow": []}
            for seed in range(options.checks):
                for model, verdicts in found.items():
                    verdicts.append(check(replace(asked, model=model, seed=seed)))
                    print(line(model, verdicts[-1]), flush=True)
            print(f"\n| {' | '.join(_COLUMNS)} |\n|{'---|' * len(_COLUMNS)}")
            for model, verdicts in found.items():
                told(model, verdicts)
    return dear + sum(not right(model, verdict) for model, verdicts in found.items() for verdict in verdicts)


if __name__ == "__main__":
    began = time.perf_counter()
    wrong = main()
    print(f"{time.perf_counter() - began:.0f} s")
    sys.exit(f"{wrong} goals were missed" if wrong else 0)
