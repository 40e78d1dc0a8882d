"""An engine that generates on this machine, as a source of tokens for a check."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from compressor.config.check import CheckRequest
from compressor.errors import ErrorCode, InputError
from compressor.generation.steps import TARGET, begin, decoded_ids, run_in_steps, step
from compressor.generation.workload import random_texts
from compressor.latency.streams import PROMPTS, Part
from compressor.measure import timing
from compressor.targets import TOLERANCE, Feeds, cached_target
from compressor.targets.relative_error import Outputs


class LocalGenerator:
    """The graphs of a folder that generates, which choose the most probable tokens; see `TokenSource`.

    Args:
        request: the check: threads, lengths and seed.
        folder: a folder with `decoder.onnx`, and `encoder.onnx` where the model has an encoder.

    Raises:
        InputError: the folder has no graphs that generate.
    """

    def __init__(self, request: CheckRequest, folder: Path) -> None:
        if not folder.is_dir():
            text = (
                "no such folder; name the output folders of two runs on models that generate, or omit --prompt-tokens"
                " to time a graph"
            )
            raise InputError.of_file(folder, text, ErrorCode.FILE_MISSING, field="prompt_tokens")
        self.name, self.graph, self._lengths = str(folder), folder, request.lengths
        self._sessions = cached_target(folder).open_sessions(folder, threads=request.threads)
        self.host = self._sessions.host
        # Kernels for rounded weights round activations to 8 bits.
        self.tolerance = TOLERANCE["fp32" if self._sessions.precision == "fp32" else "int8"]
        self.vocabulary = self._sessions.vocabulary
        prompt, new = request.lengths
        self._prompts = [
            random_texts(folder, self.vocabulary, 1, prompt, prompt + new, seed=request.seed + number)
            for number in range(PROMPTS)
        ]

    def prompt(self, number: int) -> Feeds:
        """Random tokens of a prompt, and of the text after it, which `stream` replaces.

        An engine remembers no earlier prompt, so that they repeat.
        """
        return self._prompts[number % PROMPTS]

    def stream(self, prompt: Feeds) -> Iterator[Part]:
        """The most probable token after each position, by its id."""
        length, new = self._lengths
        texts = {name: array.copy() for name, array in prompt.items()}
        start, stop, caches = 0, 1 if TARGET in texts else length, begin(self._sessions, texts)
        for number in range(1, new + 1):
            logits, caches = step(self._sessions, texts, start, stop, caches)
            token = int(logits[0, -1].argmax())
            decoded_ids(texts)[0, stop] = token
            yield Part(f"{token} ", number)
            start, stop = stop, stop + 1

    def infer(self, prompt: Feeds) -> Outputs:
        """The logits of prompt and text, which are read in steps."""
        return run_in_steps(self._sessions, prompt)

    def wait_until_idle(self) -> None:
        """Wait until no thread of this process computes."""
        timing.wait_until_idle()
