"""Time the engines of folders that generate: a prompt, and one token after it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from compressor.errors import ErrorCode, UsageError
from compressor.generation.workload import CALLS, Call, Workload
from compressor.measure.timing import alternate_calls
from compressor.progress import Listener
from compressor.results import Size, size_label
from compressor.targets import cached_target


@dataclass(frozen=True)
class GenerationRow:
    """Times of the engine of a folder at one size.

    Attributes:
        folder: the folder.
        precision: precision of the decoder's engine, or of its weights alone, e.g. `int4w`.
        batch: number of texts.
        prompt_tokens: length of each text before the token.
        prompt_ms: median milliseconds of reading the texts, with the encoder where there is one.
        token_ms: median milliseconds of one token of each text, in the middle of those that are generated.
        tokens_per_second: tokens of all texts a second, once the texts are read.
        cache_bytes: bytes of keys and values that a token adds to the cache of a text.
    """

    folder: Path
    precision: str
    batch: int
    prompt_tokens: int
    prompt_ms: float
    token_ms: float
    tokens_per_second: float
    cache_bytes: int


def bench_generation(
    folders: Sequence[Path],
    workload: Workload,
    *,
    threads: int | None = None,
    seconds: float = 10.0,
    listener: Listener,
) -> list[GenerationRow]:
    """Time the engines of one folder, or the engines of two folders in turn, on random tokens.

    Args:
        folders: one or two folders with `decoder.onnx`.
        workload: prompts, and numbers of texts and of new tokens.
        threads: threads per call; None: one per core.

    Raises:
        InputError: a folder has no graphs that generate, or they do not run at a length.
        UsageError: a folder is named that is no folder.
    """
    for folder in folders:
        if not folder.is_dir():
            text = f"{folder}: no such folder; name output folders of runs on models that generate"
            raise UsageError(text, code=ErrorCode.INVALID_VALUE, field="prompt_tokens", value=str(folder))
    engines = [cached_target(folder).open_sessions(folder, provider="cpu", threads=threads) for folder in folders]
    texts = [workload.feeds(folder, engine.vocabulary) for folder, engine in zip(folders, engines, strict=True)]
    medians = dict[Size, np.ndarray]()
    for size in texts[0]:
        with listener.stage(f"time {size_label(*size)}") as on_progress:
            calls = [Call(engine, feeds[size]) for engine, feeds in zip(engines, texts, strict=True)]
            pairs = alternate_calls(calls[0], calls[-1], seconds, on_progress=on_progress)
            medians[size] = 1e3 * np.median(np.stack(list(pairs), axis=1), axis=(1, 2))
    rows = []
    for batch, prompt in workload.sizes:
        for number, (folder, engine) in enumerate(zip(folders, engines, strict=True)):
            first, token = (float(medians[Size(batch, prompt, phase)][number]) for phase in CALLS)
            rate = 1e3 * batch / token
            measured = batch, prompt, first, token, rate, engine.bytes_per_token
            rows.append(GenerationRow(folder, engine.precision, *measured))
    return rows
