"""Test the latency check on a real Triton server: false alarms, missed slowdowns, and the cost of its own client.

    python -m benchmarks.latency_check             # 50 checks of a model against itself, 50 of one that is 10% slower
    python -m benchmarks.latency_check --checks 3 --seconds 5       # default: 20 s per check, as `compress check`

The server is that of `make .venv-triton/ready` (Triton's Python backend on the CPU). It serves one model under three
names, on rows of SST-2. After each call the third waits for a tenth of the time of the computation, so that it is a
tenth slower even while the machine does other work. A check of equal models that fails is a false alarm; a check of the
slower model that passes is a miss; an interrupted check is neither. The exit code is 1 after any of the three, after a
check that takes longer than a minute, and where the client certainly costs more than 5% over Triton's client alone.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from benchmarks.machine import machine
from compressor import Recipe, compress
from compressor.config.request import ServeRequest
from compressor.latency import CheckRequest, Outcome, Verdict, check
from compressor.latency.request_batches import load_batches
from compressor.latency.triton import TritonModel
from compressor.measure.timing import alternate_calls, ratio_interval
from compressor.serving import export
from tests.serving import triton_server

SHARED = Path(__file__).resolve().parents[2] / "shared"
MODEL, ROWS = SHARED / "models" / "minilm-sst2", SHARED / "data" / "sst2.tsv.xz"
DELAY = 0.10
MAX_SECONDS, MAX_OVERHEAD = 60.0, 0.05
"""Maximum seconds of a check, and maximum cost of its client as a share of a call with Triton's client alone."""
EXPECTED = {"same": Outcome.PASSED, "slow": Outcome.FAILED}
_COLUMNS = (
    *("model", "checks", "failed", "interrupted", "slowdown, % (least to most)", "width of the interval, points"),
    *("p50, ms", "longest check, s"),
)
_DELAYED_MODEL = f"""

class _Delayed(TritonPythonModel):
    def execute(self, requests):
        start = time.perf_counter()
        responses, ready = super().execute(requests), time.perf_counter()
        while time.perf_counter() < ready + {DELAY} * (ready - start):
            pass
        return responses


TritonPythonModel = _Delayed
"""


def run_folder(scratch: Path, threads: int) -> Path:
    """An output folder of `compress`: MiniLM with every head."""
    compress(Recipe(model=MODEL, out=scratch / "out", batch=(1,), seq=(128,), seconds=1, threads=threads))
    return scratch / "out"


def write_repository(out: Path, repository: Path, threads: int) -> None:
    """Write a repository with the same model under three names, the third of them delayed."""
    for name in ("base", *EXPECTED):
        export(ServeRequest(out=out, repository=repository, name=name, backend="python", threads=threads, device="cpu"))
    code = next((repository / "slow").rglob("model.py"))
    code.write_text(code.read_text().replace("import json\n", "import json\nimport time\n", 1) + _DELAYED_MODEL)


def is_right(model: str, verdict: Verdict) -> bool:
    """Whether a check has the expected outcome within the time limit."""
    return verdict.seconds <= MAX_SECONDS and verdict.outcome is EXPECTED[model]


def summary(model: str, verdict: Verdict) -> str:
    """One check as a line of text."""
    slow = verdict.slowdown
    measured = "" if slow is None else f"{slow.slowdown:+.2%} (95%: {slow.low:+.2%} to {slow.high:+.2%})"
    return f"{model}: {measured}, {'right' if is_right(model, verdict) else 'wrong'} {verdict.interrupted}".rstrip()


def print_row(model: str, verdicts: list[Verdict]) -> None:
    """Print one row of the table."""
    failed = sum(bool(verdict.failures) for verdict in verdicts)
    interrupted = sum(verdict.outcome is Outcome.INTERRUPTED for verdict in verdicts)
    slowdowns = [verdict.slowdown for verdict in verdicts if verdict.slowdown is not None]
    if not slowdowns:
        print(f"| {model} | {len(verdicts)} | {failed} | {interrupted} | none was timed | | | |")
        return
    percent = [100 * slow.slowdown for slow in slowdowns]
    widths = [100 * (slow.high - slow.low) for slow in slowdowns]
    p50 = np.median([slow.baseline_p50 for slow in slowdowns])
    print(
        f"| {model} | {len(verdicts)} | {failed} | {interrupted} | {np.median(percent):+.2f} ({min(percent):+.2f} to"
        f" {max(percent):+.2f}) | {np.median(widths):.2f} | {p50:.2f} |"
        f" {max(verdict.seconds for verdict in verdicts):.0f} |",
        flush=True,
    )


def client_overhead(url: str, request: CheckRequest, seconds: float) -> float:
    """Lower bound of the cost of the check's client, as a share of a call with Triton's client alone, timed in turn."""
    import tritonclient.grpc as client

    model = TritonModel(request, "base")
    feeds = load_batches(model, request).feeds[0]
    encoded = model.encode(feeds)
    bare = []
    for name, array in feeds.items():
        bare.append(client.InferInput(name, list(array.shape), "INT64"))
        bare[-1].set_data_from_numpy(array)
    connection = client.InferenceServerClient(url.partition("://")[2])
    calls = (lambda: model.call(encoded), lambda: connection.infer("base", bare, client_timeout=request.deadline))
    times = np.stack(list(alternate_calls(*calls, seconds, wait=model.wait_until_idle)), axis=1)
    low, high = ratio_interval(times, 0)
    median = np.median(times, axis=(1, 2))
    print(
        f"client of check p50 {1e3 * median[0]:.3f} ms, bare tritonclient {1e3 * median[1]:.3f} ms:"
        f" {100 * (median[0] / median[1] - 1):+.2f}% (95%: {100 * (low - 1):+.2f} to {100 * (high - 1):+.2f})",
        flush=True,
    )
    return low - 1


def main() -> int:
    """Start the server, run all checks and print them; return the number of missed goals, one per check."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checks", type=int, default=50, help="checks of each model")
    default_seconds = CheckRequest.model_fields["seconds"].default
    parser.add_argument("--seconds", type=float, default=default_seconds, help="seconds that a check times")
    parser.add_argument("--limit", type=float, default=0.05, help="maximum slowdown")
    parser.add_argument("--seq", type=int, default=128)
    parser.add_argument("--threads", type=int, default=1, help="threads of a call on the server")
    options = parser.parse_args()
    reason = triton_server.missing() or (None if MODEL.exists() else f"{MODEL} is not on this machine")
    if reason is not None:
        print(f"skipped: {reason}")
        return 0
    print(f"machine: {machine('onnxruntime', 'tritonclient')}; {options.threads} threads a call on the server")
    with tempfile.TemporaryDirectory() as scratch:
        out, repository = run_folder(Path(scratch), options.threads), Path(scratch) / "repository"
        write_repository(out, repository, options.threads)
        with triton_server.Server(repository) as server:
            return check_models(f"grpc://{server.grpc}", out, options)


def check_models(url: str, out: Path, options: argparse.Namespace) -> int:
    """Check both models as often as requested and print the table; return the number of missed goals."""
    request = CheckRequest(
        model="same",
        baseline="base",
        server=url,
        max_slowdown=options.limit,
        inputs=ROWS,
        tokenizer=out,
        seq=options.seq,
        seconds=options.seconds,
    )
    first = check(request)
    print(f"{first.host}; {options.seq} tokens, {first.inputs}; limit {options.limit:.0%}")
    missed = int(client_overhead(url, request, 2 * options.seconds) > MAX_OVERHEAD)
    verdicts: dict[str, list[Verdict]] = {model: [] for model in EXPECTED}
    for seed in range(options.checks):
        for model, records in verdicts.items():
            records.append(check(request.model_copy(update={"model": model, "seed": seed})))
            print(summary(model, records[-1]), flush=True)
    print(f"\n| {' | '.join(_COLUMNS)} |\n|{'---|' * len(_COLUMNS)}")
    for model, records in verdicts.items():
        print_row(model, records)
    return missed + sum(not is_right(model, verdict) for model, records in verdicts.items() for verdict in records)


if __name__ == "__main__":
    start = time.perf_counter()
    goals_missed = main()
    print(f"{time.perf_counter() - start:.0f} s")
    sys.exit(f"{goals_missed} goals were missed" if goals_missed else 0)
