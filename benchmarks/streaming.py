"""Time the tokens that a Triton server streams, in turn with those that the same folder generates in this process.

    compress export-triton out/ -o repository/ && tritonserver --model-repository=repository
    python -m benchmarks.streaming out/ --url localhost:8001 --model out

Both generate as many tokens from the same prompt by greedy search. The time of a token is that between the first part
of the text and the last one, divided by the tokens between them; parts arrive over a gRPC stream.
"""

from __future__ import annotations

import argparse
import queue
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from tritonclient import grpc

from benchmarks.machine import machine
from compressor.generation.runner import load_engine

Generate = Callable[[str, int], list[float]]
"""Generates a number of tokens after a prompt; returns the time of each part of the text."""


def by_runner(folder: Path, threads: int) -> Generate:
    """The engine of a folder in this process."""
    runner = load_engine(folder, provider="cpu", threads=threads)

    def generate(prompt: str, tokens: int) -> list[float]:
        times = list[float]()
        runner.complete(
            [prompt], max_new_tokens=tokens, min_new_tokens=tokens, write=lambda _: times.append(time.perf_counter())
        )
        return times

    return generate


def by_triton(url: str, model: str) -> Generate:
    """A model of a server."""
    client = grpc.InferenceServerClient(url)
    parts: queue.Queue[tuple[float, object]] = queue.Queue()
    client.start_stream(lambda result, error: parts.put((time.perf_counter(), error or result)))

    def generate(prompt: str, tokens: int) -> list[float]:
        text = grpc.InferInput("text_input", [1], "BYTES")
        text.set_data_from_numpy(np.array([prompt.encode()], object))
        count = grpc.InferInput("max_tokens", [1], "INT32")
        count.set_data_from_numpy(np.array([tokens], np.int32))
        client.async_stream_infer(model, [text, count], enable_empty_final_response=True)
        times, generated = list[float](), 0
        while True:
            moment, result = parts.get()
            if isinstance(result, Exception):
                raise result
            assert isinstance(result, grpc.InferResult)
            if result.get_response().parameters["triton_final_response"].bool_param:
                if generated != tokens:
                    raise RuntimeError(f"the server ended the text after {generated} of {tokens} tokens")
                return times
            times.append(moment)
            generated = int(result.as_numpy("tokens").item())

    return generate


def main() -> None:
    """Print the median time of a token of each, and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--url", default="localhost:8001", help="gRPC address of the server")
    parser.add_argument("--model", default="out", help="name of the model on the server")
    parser.add_argument("--prompt", default="Once upon a time")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=10)
    options = parser.parse_args()
    print(f"machine: {machine('onnxruntime', 'transformers')}", flush=True)
    generators = {"local": by_runner(options.folder, options.threads), "server": by_triton(options.url, options.model)}
    for generate in generators.values():
        generate(options.prompt, options.tokens)
    seconds: dict[str, list[float]] = {name: [] for name in generators}
    for _ in range(options.rounds):
        for name, generate in generators.items():
            times = generate(options.prompt, options.tokens)
            seconds[name].append((times[-1] - times[0]) / (options.tokens - 1))
    medians = {name: 1e3 * statistics.median(values) for name, values in seconds.items()}
    print(", ".join(f"{name} {value:.2f} ms a token" for name, value in medians.items()), end="")
    print(f": the server adds {medians['server'] / medians['local'] - 1:+.1%}")


if __name__ == "__main__":
    main()
