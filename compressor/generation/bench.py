"""Time the engines of folders that generate: a prompt, and one token after it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from compressor.errors import ErrorCode, UsageError
from compressor.generation import ENCODER
from compressor.generation.sessions import OrtSessions, Sessions
from compressor.generation.steps import MASK, TARGET, TEXT, begin, step
from compressor.measure.timing import alternate_calls
from compressor.progress import Listener
from compressor.results import size_label
from compressor.targets.base import Feeds
from compressor.targets.trial_inputs import trial_feeds
from graph_passes import load


@dataclass(frozen=True)
class GenerationRow:
    """Times of the engine of a folder at one size.

    Attributes:
        folder: the folder.
        batch: number of texts.
        prompt_tokens: length of each text before the token.
        prompt_ms: median milliseconds of reading the texts, with the encoder where there is one.
        token_ms: median milliseconds of one more token of each text.
        tokens_per_second: tokens of all texts a second, once the texts are read.
        cache_bytes: bytes of keys and values that a token adds to the cache of a text.
    """

    folder: Path
    batch: int
    prompt_tokens: int
    prompt_ms: float
    token_ms: float
    tokens_per_second: float
    cache_bytes: int


def prompt_call(sessions: Sessions, feeds: Feeds, length: int) -> Callable[[], object]:
    """A function that reads the first `length` tokens of texts."""
    return lambda: step(sessions, feeds, 0, length, begin(sessions, feeds))


def token_call(sessions: Sessions, feeds: Feeds, length: int) -> Callable[[], object]:
    """A function that computes one more token of texts after `length` tokens."""
    _, caches = step(sessions, feeds, 0, length, begin(sessions, feeds))
    return lambda: step(sessions, feeds, length, length + 1, caches)


def bench_generation(
    folders: Sequence[Path],
    batches: Iterable[int],
    lengths: Sequence[int],
    *,
    threads: int | None = None,
    seconds: float = 10.0,
    listener: Listener,
) -> list[GenerationRow]:
    """Time the engines of one folder, or those of two in turn, on random tokens.

    Args:
        folders: one or two folders with `decoder.onnx`.
        batches: numbers of texts.
        lengths: lengths of the texts before the token.
        threads: threads per call; None: one per core.
        seconds: approximate duration of each measurement.
        listener: receives the progress.

    Raises:
        InputError: a folder has no graphs that generate, or they do not run at a length.
        UsageError: a folder is named that is no folder.
    """
    for folder in folders:
        if not folder.is_dir():
            raise UsageError(
                f"{folder}: no folder; name output folders of runs on models that generate",
                code=ErrorCode.INVALID_VALUE,
                field="prompt_tokens",
                value=str(folder),
            )
    engines = [OrtSessions(folder, provider="cpu", threads=threads) for folder in folders]
    rows = []
    for batch in batches:
        for length in lengths:
            feeds = [
                random_texts(folder, engine, batch, length) for folder, engine in zip(folders, engines, strict=True)
            ]
            medians = []
            for phase, call in (("prompt", prompt_call), ("token", token_call)):
                with listener.stage(f"time {phase}, {size_label(batch, length)}") as on_progress:
                    calls = [call(engine, text, length) for engine, text in zip(engines, feeds, strict=True)]
                    pairs = alternate_calls(calls[0], calls[-1], seconds, on_progress=on_progress)
                    medians.append(1e3 * np.median(np.stack(list(pairs), axis=1), axis=(1, 2)))
            for number, (folder, engine) in enumerate(zip(folders, engines, strict=True)):
                prompt, token = (float(times[number]) for times in medians)
                rate = 1e3 * batch / token
                rows.append(GenerationRow(folder, batch, length, prompt, token, rate, engine.bytes_per_token))
    return rows


def random_texts(folder: Path, engine: OrtSessions, batch: int, length: int, new: int = 1, *, seed: int = 0) -> Feeds:
    """Random texts without padding, for the engine of a folder.

    Args:
        folder: the folder.
        engine: its engine.
        batch: number of texts.
        length: tokens of what an encoder reads.
        new: tokens of what a decoder reads, beyond `length`.
        seed: seed of the tokens.
    """
    ids = np.random.default_rng(seed).integers(0, engine.vocabulary, (batch, length + new))
    if not (folder / ENCODER).is_file():
        return {TEXT: ids, MASK: np.ones_like(ids)}
    read = trial_feeds(load(folder / ENCODER), batch, length, seed=seed)
    return {name: np.ones_like(array) if name == MASK else array for name, array in read.items()} | {TARGET: ids}
