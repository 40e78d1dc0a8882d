"""Time the BLEU of a translator on Multi30k by engines with key/value caches, and by the engine that reads whole texts.

    python -m benchmarks.scored_translations --size paper          # random weights in a shape of benchmarks.translation
    python -m benchmarks.scored_translations --size opus --rows 32     # 6 + 6 layers of width 512
    python -m benchmarks.scored_translations --model build/translation/small/model --max-length 96

Both engines have every unit and are scored on the test rows as a run scores them: batches of 32 texts of similar
length, five beams. With random weights every text has `--max-length` tokens. The engine that reads whole texts, by
which a run with `--no-cache` scores, computes all tokens again for each new one. The texts of both are compared.
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from benchmarks.machine import machine
from benchmarks.translation import DATA, SIZES, Size, start
from compressor.config.sections import RowsConfig
from compressor.engines.score import forward_of
from compressor.export import export_reference
from compressor.generation.deliver import open_engines
from compressor.generation.export import export_generation
from compressor.model_folder import example_inputs, load
from compressor.silence_libraries import quiet_transformers
from compressor.targets import DEFAULT_TARGET, target
from compressor.targets.base import Engine
from compressor.tasks import Data, open_data
from compressor.tasks.metrics import bleu_counts
from compressor.tasks.scoring import BATCH_SIZE, indices_by_length
from compressor.units import find_groups, keep_all
from graph_passes import load as load_graph
from graph_passes import save
from graph_passes.shrink import shrink, shrink_parts

_SIZES = {**SIZES, "opus": Size(8000, 512, 6, 8, 2048, 0.0, 0, 1, 1, 0.0, None)}
"""Shapes of random models: the last is that of OPUS-MT, but for its larger vocabulary."""


def engines_of(folder: Any, scratch: Path, threads: int) -> dict[str, Engine]:
    """The engines of a model with every unit: with caches, and for whole texts."""
    inputs = example_inputs(folder, 2, 8)
    plan = keep_all(find_groups(folder.model, inputs))
    cached = scratch / "cached"
    cached.mkdir()
    files = export_generation(folder.model, plan, cached)
    for name, part in shrink_parts({name: load_graph(cached / name) for name in files}, plan).items():
        save(part.model, cached / name)
    target(DEFAULT_TARGET).build_sessions(cached, files, [(BATCH_SIZE, 16)], threads)
    whole = scratch / "whole.onnx"
    export_reference(folder.model, plan, inputs, whole)
    save(shrink(load_graph(whole), plan).model, whole)
    engine = target("ort").build(whole, scratch / "engine.onnx", provider="cpu", threads=threads)
    return {"with caches": open_engines(target(DEFAULT_TARGET), cached, threads), "whole texts": engine}


def translations(engine: Engine, data: Data, rows: int) -> tuple[list[str], float]:
    """The text of each test row, and the seconds that they took."""
    variant: Any = SimpleNamespace(engine=engine)
    forward, texts, began = forward_of(variant, data.task), dict[int, str](), time.perf_counter()
    test = data.test.select(range(min(rows, len(data.test))))
    for indices in indices_by_length(test, BATCH_SIZE):
        texts |= zip(indices, data.task.answers(forward, [test[index] for index in indices]), strict=True)
    return [texts[index] for index in sorted(texts)], time.perf_counter() - began


def main() -> None:
    """Print seconds, BLEU and the number of equal texts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="folder of an encoder-decoder; the default has random weights")
    parser.add_argument("--size", choices=_SIZES, default="paper")
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument("--max-length", type=int, default=16)
    parser.add_argument("--rows", type=int, default=1000, help="maximum number of test rows")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--cached-alone", action="store_true", help="leave out the engine that reads whole texts")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    print(machine("torch", "transformers", "onnxruntime"), flush=True)
    with tempfile.TemporaryDirectory() as name, quiet_transformers():
        scratch = Path(name)
        path = options.model or scratch / "model"
        if options.model is None:
            start(_SIZES[options.size], options.data, path)
        folder = load(path, task="translation")
        if options.model is None:  # with weights as small as those of an untrained model, scores of tokens are equal
            for parameter in (each for each in folder.model.parameters() if each.dim() > 1):
                torch.nn.init.normal_(parameter, std=0.1)
            folder.model.generation_config.min_new_tokens = options.max_length
        source = str(options.data)
        config = RowsConfig(data=source, test_data=source, text_columns=("de", "en"), max_length=options.max_length)
        data = open_data(config, folder)
        scored = {}
        engines = engines_of(folder, scratch, options.threads)
        for label, engine in list(engines.items())[: 1 if options.cached_alone else None]:
            texts, seconds = translations(engine, data, options.rows)
            pairs = zip(texts, data.test["reference"][:], strict=False)
            score = data.task.score(np.stack([bleu_counts(*pair) for pair in pairs]))
            print(f"{label}: {len(texts)} rows in {seconds:.1f} s, BLEU {score:.4f}", flush=True)
            scored[label] = texts
    for (first, before), (second, after) in itertools.combinations(scored.items(), 2):
        equal = sum(left == right for left, right in zip(before, after, strict=True))
        print(f"{first} and {second}: {equal} of {len(before)} texts are equal")


if __name__ == "__main__":
    main()
