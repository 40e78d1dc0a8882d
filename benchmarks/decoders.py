"""Times of a decoder with every unit and without a third of its heads and neurons, in fp32 and with rounded weights.

    python -m benchmarks.decoders --threads 2 --work runs/decoders
    python -m benchmarks.decoders --work runs/decoders --genai --batch 1 8 --prompt-tokens 128 2048

The model is a Llama of the shape of 135 million parameters (width 576, 9 query and 3 key/value heads of 64) with random
weights: times do not depend on their values. It is exported with caches, shrunk, and built for ONNX Runtime; a further
call finds the engines in the folder. Each engine is timed in turn with that of every unit in fp32. The export takes
minutes.

With `--half-heads`, the model has 8 query and 4 key/value heads, of which half are removed, and all neurons stay. The
shares of the time and of the bytes that a token saves then are printed; it reads weights and caches.

With `--genai`, onnxruntime-genai's own engine of every unit in 4 bits generates tokens in turn with the engines of 4
bits, by greedy search; it has to be installed. Prompts are read once and not timed: each round goes on where the one
before has ended. For several texts, our engines read one prompt and repeat its keys and values, since times do not
depend on them; onnxruntime-genai reads all prompts.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from compressor.generation.bench import bench_generation
from compressor.generation.export import export_generation
from compressor.generation.weights import Rounding
from compressor.generation.workload import Workload
from compressor.progress import NullListener
from compressor.targets import DEFAULT_TARGET, WEIGHT_BITS, target
from compressor.targets.caches import DECODER
from compressor.targets.onnxruntime.sessions import OrtSessions, engine_of
from compressor.units import find_groups, keep_all
from graph_passes import load, save
from graph_passes.attention.gate_initializers import set_gates
from graph_passes.shrink import shrink_parts

_FOLDERS = ("dense", "small", *(f"{name}-{bits}" for name, bits in itertools.product(("dense", "small"), WEIGHT_BITS)))
_CHUNK = 128
"""Tokens of a prompt that are read at once: the logits of long prompts would not fit into the memory."""
_VOCABULARY = 49_152


def main() -> None:
    """Print a row for each engine and size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--batch", type=int, nargs="+", default=[1])
    parser.add_argument("--prompt-tokens", type=int, nargs="+", default=[128])
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--work", type=Path, help="folder of the engines, for further calls")
    parser.add_argument("--half-heads", action="store_true", help="remove half of the heads and no neurons")
    parser.add_argument("--genai", action="store_true", help="compare with onnxruntime-genai in 4 bits")
    parser.add_argument(
        "--rounds", type=int, default=5, help="how often each engine generates, with --genai or --half-heads"
    )
    options = parser.parse_args()
    workload = Workload(tuple(itertools.product(options.batch, options.prompt_tokens)), options.new_tokens)
    with tempfile.TemporaryDirectory() as scratch:
        work = options.work or Path(scratch)
        if not (work / "ready").is_file():
            _prepare(work, options.layers, options.half_heads, workload, options.threads)
        if options.genai:
            _compare_with_genai(work, workload, options.threads, options.rounds)
            return
        if options.half_heads:
            _print_shares(work, workload, options.threads, options.rounds)
            return
        for name in _FOLDERS[1:]:
            rows = bench_generation(
                (work / "dense", work / name),
                workload,
                threads=options.threads,
                seconds=options.seconds,
                listener=NullListener(),
            )
            for row in rows:
                size = f"batch {row.batch}, {row.prompt_tokens} tokens"
                times = f"prompt {row.prompt_ms:.1f} ms, token {row.token_ms:.2f} ms"
                print(f"{row.folder.name}: {size}: {times}, cache {row.cache_bytes:,} bytes a token", flush=True)


def _print_shares(work: Path, workload: Workload, threads: int, rounds: int) -> None:
    """Print what half of the heads save of the time of a token, and of the bytes that it reads."""
    sessions = {name: OrtSessions(work / name, provider="cpu", threads=threads) for name in _FOLDERS}
    engines = {name: _Ours(each) for name, each in sessions.items()}
    for batch, prompt, medians in _token_times(engines, workload, rounds):
        for small, dense in ((name, name.replace("small", "dense")) for name in _FOLDERS if name.startswith("small")):
            read = [
                batch * prompt * sessions[name].bytes_per_token + _weight_bytes(work / name) for name in (dense, small)
            ]
            saved = f"{1 - medians[small] / medians[dense]:.1%} of the time, {1 - read[1] / read[0]:.1%} of the bytes"
            times = f"token {medians[dense]:.2f} to {medians[small]:.2f} ms"
            print(f"{small}: batch {batch}, {prompt} tokens: {times}, saves {saved}", flush=True)


def _weight_bytes(folder: Path) -> int:
    """Bytes of the weights that a token reads: without the table of embeddings, unless it is also the last matmul's."""
    size = engine_of(folder / DECODER).with_suffix(".onnx.data").stat().st_size
    return size - (4 * 576 * _VOCABULARY if folder.name.endswith("w") else 0)


def _prepare(work: Path, layers: int, is_half: bool, workload: Workload, threads: int) -> None:
    """Write the model and its engines, and print what the parts of that take."""
    torch.manual_seed(0)
    heads, groups = (8, 4) if is_half else (9, 3)
    sizes: dict[str, Any] = {"hidden_size": 576, "intermediate_size": 1536, "head_dim": 64}
    sizes |= {"num_attention_heads": heads, "num_key_value_heads": groups}
    sizes |= {"vocab_size": _VOCABULARY, "bos_token_id": 1, "eos_token_id": 2}
    sizes |= {"num_hidden_layers": layers, "max_position_embeddings": 4096, "tie_word_embeddings": True}
    model = LlamaForCausalLM(LlamaConfig(**sizes)).eval()
    for name in ("gated", *_FOLDERS):
        (work / name).mkdir(parents=True, exist_ok=True)
    words = Tokenizer(WordLevel({f"w{number}": number for number in range(_VOCABULARY)}, unk_token="w0"))
    model.save_pretrained(work / "model")
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0", eos_token="w2").save_pretrained(work / "model")
    start = time.perf_counter()
    whole = keep_all(find_groups(model, {"input_ids": torch.arange(32).reshape(2, 16) + 5}))
    print(f"finding units: {time.perf_counter() - start:.1f} s", flush=True)
    start = time.perf_counter()
    files = export_generation(model, whole, work / "gated")
    print(f"export with caches: {time.perf_counter() - start:.1f} s", flush=True)
    kept = {"heads": range(4 if is_half else 6), "neurons": range(1536 if is_half else 1024)}
    pruned = whole.replace_groups(replace(group, kept=tuple(kept[group.type]), scale=()) for group in whole.groups)
    for name, plan in (("dense", whole), ("small", pruned)):
        graphs = {file: load(work / "gated" / file) for file in files}
        for graph in graphs.values():
            set_gates(graph.graph, plan)
        for file, part in shrink_parts(graphs, plan).items():
            save(part.model, work / name / file)
        start = time.perf_counter()
        target(DEFAULT_TARGET).build_sessions(work / name, files, workload.contexts, threads)
        print(f"{name}: engine: {time.perf_counter() - start:.1f} s", flush=True)
        for precision in WEIGHT_BITS:
            out = work / f"{name}-{precision}"
            engine = target(DEFAULT_TARGET).round_weights(work / name, Rounding(precision).apply, out)
            save(load(engine), out / DECODER)
    (work / "ready").touch()


def _compare_with_genai(work: Path, workload: Workload, threads: int, rounds: int) -> None:
    """Print the median time of a token of each engine in 4 bits, which generate in turn."""
    from onnxruntime_genai import Model

    folder = work / "genai"
    if not folder.is_dir():
        builder = (sys.executable, "-m", "onnxruntime_genai.models.builder")
        subprocess.run(
            [*builder, "-m", work / "model", "-o", folder, "-p", "int4", "-e", "cpu"], check=True, capture_output=True
        )
    settings = folder / "genai_config.json"
    config = json.loads(settings.read_text())
    config["model"]["decoder"]["session_options"]["intra_op_num_threads"] = threads
    settings.write_text(json.dumps(config))
    engines: dict[str, Generator] = {"genai": _Genai(Model(str(folder)))}
    for name in ("dense-int4w", "small-int4w"):
        engines[name] = _Ours(OrtSessions(work / name, provider="cpu", threads=threads))
    for batch, prompt, medians in _token_times(engines, workload, rounds):
        texts = [f"{name} {value:.2f} ms ({medians['genai'] / value:.2f}x)" for name, value in medians.items()]
        print(f"batch {batch}, {prompt} tokens: token: {', '.join(texts)}", flush=True)


Generator = Callable[[np.ndarray, int], Callable[[], object]]
"""Reads prompts `[text, token]` with room for a number of new tokens; returns what generates the next token of each."""


def _token_times(
    engines: Mapping[str, Generator], workload: Workload, rounds: int
) -> Iterator[tuple[int, int, dict[str, float]]]:
    """Texts, tokens of their prompts, and the median milliseconds of a token of each engine, which generate in turn."""
    for batch, prompt in workload.sizes:
        ids = np.random.default_rng(0).integers(3, _VOCABULARY, (batch, prompt))
        steps = {name: engine(ids, rounds * workload.new_tokens) for name, engine in engines.items()}
        seconds: Mapping[str, list[float]] = {name: [] for name in engines}
        for name in [name for _ in range(rounds) for name in engines]:
            for _ in range(workload.new_tokens):
                start = time.perf_counter()
                steps[name]()
                seconds[name].append(time.perf_counter() - start)
        yield batch, prompt, {name: 1e3 * statistics.median(values) for name, values in seconds.items()}


class _Genai:
    """onnxruntime-genai's engine, which generates by greedy search."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def __call__(self, ids: np.ndarray, new_tokens: int) -> Callable[[], object]:
        """Read prompts `[text, token]`; returns what generates the next token of each."""
        from onnxruntime_genai import Generator, GeneratorParams

        parameters = GeneratorParams(self._model)
        length = ids.shape[1] + new_tokens + 2
        parameters.set_search_options(max_length=length, min_length=length, do_sample=False, batch_size=len(ids))
        generator = Generator(self._model, parameters)
        generator.append_tokens(ids.astype(np.int32))
        generator.generate_next_token()
        step: Callable[[], object] = generator.generate_next_token
        return step


class _Ours:
    """The engine of a folder, with greedy search."""

    def __init__(self, sessions: OrtSessions) -> None:
        self._sessions = sessions

    def __call__(self, ids: np.ndarray, new_tokens: int) -> Callable[[], object]:
        """Read the first of some prompts `[text, token]` for each; returns what generates the next token of each."""
        sessions, (batch, prompt) = self._sessions, ids.shape
        total = prompt + new_tokens + 2
        mask, positions = np.ones((batch, total), np.int64), np.tile(np.arange(total), (batch, 1))
        caches, end = sessions.start(1), 0

        def read(tokens: np.ndarray) -> np.ndarray:
            nonlocal caches, end
            texts, start, end = len(tokens), end, end + tokens.shape[1]
            logits, caches = sessions.decode(tokens, mask[:texts, :end], positions[:texts, start:end], caches)
            return logits[:, -1].argmax(-1)[:, None]

        for start in range(0, prompt, _CHUNK):
            following = read(ids[:1, start : start + _CHUNK])
        caches, following = caches.select(np.zeros(batch, np.int64)), following.repeat(batch, axis=0)

        def step() -> None:
            nonlocal following
            following = read(following)

        return step


if __name__ == "__main__":
    main()
