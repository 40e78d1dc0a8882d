"""Generate text with the engine of a folder: texts in and out around the `generate` of transformers."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, StoppingCriteria, TextStreamer
from transformers.utils import GENERATION_CONFIG_NAME

from compressor.errors import ErrorCode, InputError, UsageError
from compressor.generation.engine_model import EngineModel, refuse
from compressor.silence_libraries import one_line
from compressor.targets.base import Provider
from compressor.targets.caches import Sessions

NEW_TOKENS = 64
"""Maximum number of new tokens where neither the caller nor generation_config.json sets it."""
SAMPLING = ("temperature", "top_p", "top_k")
"""Options with which tokens are drawn; without them the most probable are chosen."""
_ONE_TEXT = {"num_return_sequences": 1, "return_dict_in_generate": False}
"""Options with which each prompt has one text, whatever generation_config.json says."""
_REFUSED = ("assistant_model", "prompt_lookup_num_tokens", "cache_implementation", "inputs_embeds")
"""Options of `generate` that need more of a cache or a network than an engine has."""


class Runner:
    """A folder with the graphs of a model that generates, loaded; `compressor.load_engine` returns it.

    Attributes:
        folder: the folder.
        model: a model of transformers whose network is the engine. Every function that takes such a model to generate
            with it, such as a pipeline, takes this.
        processor: the tokenizer of the folder, or the processor of sounds; None: it has none.
        limit: positions of the model; None: memory alone limits them.
    """

    def __init__(self, folder: Path, model: EngineModel, processor: Any, limit: int | None) -> None:
        self.folder, self.model, self.processor, self.limit = folder, model, processor, limit

    @property
    def sessions(self) -> Sessions:
        """The graphs, loaded."""
        return self.model.sessions

    def generate(self, *inputs: Tensor, **options: Any) -> Any:
        """Generate tokens: `generate` of transformers, from the same inputs and with the same options and results.

        Decoder-only models need batches with padding on the left. Sampling draws from the generator of PyTorch.

        Args:
            *inputs: ids `[text, position]`, or features of sounds `[sound, channel, frame]`.
            **options: any option of `generate`, e.g. `attention_mask`, `max_new_tokens`, `num_beams`, `do_sample`,
                `streamer` or `generation_config`.

        Returns:
            Ids `[text, position]`, or an object of transformers with `return_dict_in_generate`.

        Raises:
            InputError: an option needs more than an engine has: its keys and values only grow, and it returns neither
                attention weights nor hidden states.
            UsageError: there are more beams than tokens, or none.
            ValueError: transformers refuses an option.
        """
        settings = options.get("generation_config") or self.model.generation_config
        for source in (options, vars(settings)):
            refuse({name: source.get(name) for name in _REFUSED})
        self._beams(options)
        if options.get("stop_strings", settings.stop_strings) is not None:
            options.setdefault("tokenizer", getattr(self.processor, "tokenizer", self.processor))
        return self.model.generate(*inputs, **options)

    def complete(
        self,
        prompts: Sequence[str],
        *,
        chat: bool = False,
        stop: Sequence[str] = (),
        seed: int | None = None,
        write: Callable[[str], None] | None = None,
        **options: Any,
    ) -> list[str]:
        """Generate the text that follows each prompt; an encoder-decoder generates the answer to it.

        The most probable tokens are chosen, unless `temperature`, `top_p` or `top_k` is passed.

        Args:
            prompts: the prompts, as one batch.
            chat: whether each prompt is the message of a user, which the chat template of the tokenizer formats.
            stop: texts at which a result ends, without them.
            seed: seed of the draws; None: the state of PyTorch's generator.
            write: is called with each part of the text when it is complete; for a single prompt. A beam search has one
                part.
            **options: further options of `generate`, e.g. `max_new_tokens` or `num_beams`; those that are None have no
                effect.

        Returns:
            The text of each prompt, without special tokens.

        Raises:
            InputError: the folder has no tokenizer or no chat template, a prompt is empty, prompt and new tokens
                together exceed the positions of the model, or transformers refuses an option, also one of
                generation_config.json.
            UsageError: an option is contradictory or out of range.
        """
        if "" in stop:
            problem = "a stop text is empty, which every text contains; omit it"
            raise UsageError(problem, code=ErrorCode.OUT_OF_RANGE, field="stop")
        options = {name: value for name, value in options.items() if value is not None}
        ids = self.tokenize(prompts, chat=chat)
        options["max_new_tokens"] = self.new_tokens(ids, options.get("max_new_tokens"))
        draws = any(name in options for name in SAMPLING)
        defaults = {"do_sample": draws, **({"num_beams": 1} if draws else {}), **_ONE_TEXT}
        options = {**defaults, "pad_token_id": self._padding, **options}
        beams, start = self._beams(options), 0 if self.model.config.is_encoder_decoder else max(map(len, ids))
        if stop:
            options["stopping_criteria"] = [*options.get("stopping_criteria", ()), _Stop(self.processor, stop, start)]
        text = _Text(self.processor, stop, write)
        if write is not None and beams == 1:
            options["streamer"] = text
        with _seeded(seed), self._refusals():
            results = self.generate(**self._padded(ids), **options)
        texts = [text.cut(part) for part in self.processor.batch_decode(results[:, start:], skip_special_tokens=True)]
        if write is not None and beams > 1:
            write(texts[0])
        return texts

    def tokenize(self, prompts: Sequence[str], *, chat: bool = False) -> list[list[int]]:
        """The ids of each prompt.

        Raises:
            InputError: the folder has no tokenizer or no chat template, the model reads no text, or a prompt is empty.
            UsageError: an encoder-decoder has no chats.
        """
        if self.processor is None:
            from compressor.model_folder.processor import require_processor

            require_processor(None, self.folder)
        if self.model.main_input_name != "input_ids":
            text = (
                f"{self.folder}: the model reads {self.model.main_input_name}, not text; pass arrays to"
                " compressor.load_engine(folder).generate in Python"
            )
            raise InputError(text, code=ErrorCode.UNSUPPORTED_MODEL, path=self.folder)
        if chat:
            prompts = [self._message(prompt) for prompt in prompts]
        ids: list[list[int]] = self.processor(list(prompts), add_special_tokens=not chat)["input_ids"]
        if empty := [number for number, tokens in enumerate(ids, 1) if not tokens]:
            text = f"prompt {empty[0]}: has no token; write some text"
            raise InputError(text, code=ErrorCode.MISSING_VALUE, field="prompt", row=empty[0])
        return ids

    def new_tokens(self, ids: Sequence[Sequence[int]], requested: int | None = None) -> int:
        """Number of new tokens at most.

        Args:
            requested: the number that the caller wants; None: the number in generation_config.json, else `NEW_TOKENS`,
                limited by the model's positions.

        Raises:
            InputError: the model has too few positions, or the prompt is as long as `max_length` in
                generation_config.json.
            UsageError: the caller wants no token.
        """
        if requested is not None and requested < 1:
            text = f"{requested} new tokens: nothing to generate; use at least 1"
            raise UsageError(text, code=ErrorCode.OUT_OF_RANGE, field="max_new_tokens", value=requested)
        length, limit, config = max(map(len, ids)), self.limit, self.model.generation_config
        earlier = 1 if self.model.config.is_encoder_decoder else length
        new = requested or config.max_new_tokens or (config.max_length or earlier + NEW_TOKENS) - earlier
        if limit is not None and (length > limit or earlier + (requested or 1) > limit):
            text = (
                f"a prompt of {length} tokens and {requested or 1} new tokens exceed the model's {limit} positions;"
                " shorten the prompt, or generate fewer tokens"
            )
            raise InputError(text, code=ErrorCode.TOO_LONG, length=length, new=requested, maximum=limit)
        if new < 1:
            text = (
                f"max_length {config.max_length} in {GENERATION_CONFIG_NAME} permits no token after {earlier} tokens;"
                " set the number of new tokens (max_new_tokens)"
            )
            raise InputError(text, code=ErrorCode.TOO_LONG, length=length, maximum=config.max_length)
        return new if limit is None else min(new, limit - earlier)

    @contextlib.contextmanager
    def _refusals(self) -> Iterator[None]:
        """Inside, errors of transformers become errors of this package: it refuses options by errors of many types."""
        try:
            yield
        except (UnicodeError, torch.OutOfMemoryError):  # of a terminal, and of the machine
            raise
        except (ArithmeticError, RuntimeError, TypeError, ValueError) as error:
            raise InputError(
                f"{self.folder}: transformers cannot generate with these options and those of {GENERATION_CONFIG_NAME}"
                f" ({one_line(error)}); change them",
                code=ErrorCode.INVALID_VALUE,
                path=self.folder / GENERATION_CONFIG_NAME,
                reason=one_line(error),
            ) from error

    def _beams(self, options: Mapping[str, Any]) -> int:
        """Number of beams that options of `generate` ask for; UsageError if there is none, or too many."""
        settings = options.get("generation_config") or self.model.generation_config
        requested = [beams for beams in (options.get("num_beams"), settings.num_beams) if beams is not None]
        beams, size = next(iter(requested), 1), self.sessions.vocabulary
        if not 1 <= beams <= size:
            text = f"{beams} beams: the vocabulary has {size} tokens; use 1 to {size} beams"
            raise UsageError(text, code=ErrorCode.OUT_OF_RANGE, field="beams", value=beams, maximum=size)
        return int(beams)

    def _message(self, prompt: str) -> str:
        """A prompt as the message of a user, in the format of the chats that the model was trained on."""
        if self.model.config.is_encoder_decoder:
            text = f"{self.folder}: an encoder-decoder has no chat template; pass the text without the chat option"
            raise UsageError(text, code=ErrorCode.CONTRADICTION, field="chat")
        if not getattr(self.processor, "chat_template", None):
            text = (
                f"{self.folder}: the tokenizer has no chat template; copy chat_template.jinja of the model there, or"
                " pass the text as it is"
            )
            raise InputError(text, code=ErrorCode.FILE_MISSING, path=self.folder / "chat_template.jinja")
        messages = [{"role": "user", "content": prompt}]
        try:
            return str(self.processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
        except Exception as error:  # a template can raise any error
            text = f"{self.folder}: the chat template cannot be used ({one_line(error)}); correct it"
            raise InputError(
                text, code=ErrorCode.FILE_UNREADABLE, path=self.folder / "chat_template.jinja", reason=one_line(error)
            ) from error

    @property
    def _padding(self) -> int:
        """The id before and after texts that are shorter than others, which decoding skips."""
        ids = (self.processor.pad_token_id, self.processor.eos_token_id, 0)
        return next(id_ for id_ in ids if id_ is not None)

    def _padded(self, ids: Sequence[Sequence[int]]) -> dict[str, Tensor]:
        """Ids and mask `[text, position]`, padded before the texts that a decoder continues, and behind others."""
        shape = len(ids), (length := max(map(len, ids)))
        batch = {"input_ids": torch.full(shape, self._padding), "attention_mask": torch.zeros(shape)}
        for row, tokens in enumerate(ids):
            part = slice(len(tokens)) if self.model.config.is_encoder_decoder else slice(length - len(tokens), length)
            batch["input_ids"][row, part] = torch.tensor(tokens)
            batch["attention_mask"][row, part] = 1
        return {name: tensor.long() for name, tensor in batch.items()}


def load_engine(
    folder: str | os.PathLike[str], *, provider: Provider | None = None, threads: int | None = None
) -> Runner:
    """Load the graphs of a model that generates.

    Args:
        folder: a folder with `decoder.onnx`, with `encoder.onnx` where the model has an encoder, and with the
            configuration and the tokenizer or processor of the model. No weights are read.
        provider: device to run on; None: CUDA where this machine has it, else the CPU.
        threads: threads per call; None: one per core.

    Returns:
        The loaded engine, whose `generate` is that of transformers.

    Raises:
        InputError: the folder has no model that generates, lacks a graph, or has a file that cannot be read.
        TargetMissingError: the device is missing.
    """
    from compressor.targets import cached_target  # a served model has copies of this package

    folder = Path(folder)
    return runner_of(folder, lambda: cached_target(folder).open_sessions(folder, provider=provider, threads=threads))


def runner_of(folder: Path, open_sessions: Callable[[], Sessions]) -> Runner:
    """The runner of a folder with the sessions that a function loads.

    Args:
        folder: the folder with the configuration and the tokenizer or processor of the model.
        open_sessions: loads the sessions, once the model is known to generate.

    Raises:
        InputError: the folder has no model that generates, or has a file that cannot be read.
    """
    # A served model has no folder of weights to read.
    from compressor.model_folder.files import damaged, load_config, read_config
    from compressor.model_folder.model_class import model_class
    from compressor.model_folder.processor import load_processor
    from compressor.model_folder.text_limits import token_limit

    read_config(folder)
    config = load_config(folder, False)
    network, _ = model_class(folder, config, None, False)
    if not network.can_generate():
        text = f"{folder}: {network.__name__} generates no text; use a model with a language model head"
        raise InputError(text, code=ErrorCode.UNSUPPORTED_MODEL, path=folder, model_class=network.__name__)
    model = EngineModel.of(network, config, open_sessions())
    try:
        read_generation_config(model, folder)
    except Exception as error:  # any value can raise any error
        raise damaged(folder / GENERATION_CONFIG_NAME, error) from error
    return Runner(folder, model, load_processor(folder), token_limit(model))


def read_generation_config(model: EngineModel, folder: Path) -> None:
    """Let a model generate with the defaults in a folder, if it has any."""
    if (folder / GENERATION_CONFIG_NAME).is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder, local_files_only=True)
    model.generation_config.cache_implementation = None  # of PyTorch's memory


class _Stop(StoppingCriteria):
    """Ends texts that have a stop text. Transformers' own compares it with tokens, of some tokenizers only."""

    def __init__(self, tokenizer: Any, stop: Sequence[str], start: int) -> None:
        self._tokenizer, self._stop, self._start = tokenizer, stop, start

    def __call__(self, input_ids: Tensor, scores: Any, **options: Any) -> Tensor:
        texts = self._tokenizer.batch_decode(input_ids[:, self._start :], skip_special_tokens=True)
        return torch.tensor([any(stop in text for stop in self._stop) for text in texts])


class _Text(TextStreamer):
    """Texts that end before a stop text, and the stream of one, whose parts `write` gets when they are certain."""

    def __init__(self, tokenizer: Any, stop: Sequence[str], write: Callable[[str], None] | None) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self._stop, self._write = tuple(stop), write
        self._text, self._written = "", 0

    def cut(self, text: str) -> str:
        """A text up to the first stop text."""
        return text[: min((text.find(stop) for stop in self._stop if stop in text), default=len(text))]

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        """Write what no later token can turn into the beginning of a stop text."""
        assert self._write is not None
        self._text += text
        end = len(certain := self.cut(self._text))
        if not stream_end and end == len(self._text):
            begun = (n for stop in self._stop for n in range(1, len(stop)) if certain.endswith(stop[:n]))
            end -= max(begun, default=0)
        if end > self._written:
            self._write(self._text[self._written : end])
            self._written = end


@contextlib.contextmanager
def _seeded(seed: int | None) -> Iterator[None]:
    """Inside, PyTorch draws with a seed; None: as it would."""
    if seed is None:
        yield
        return
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield
