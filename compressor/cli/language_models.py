"""Commands of language models: `compress generate`, with the engine of a folder, and `compress train`, with memory."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.text import Text

from compressor.cli.commands import FieldsCommand, common, option_of, options_of
from compressor.cli.console import Console
from compressor.config.request import GenerateRequest, Training
from compressor.errors import ErrorCode, InputError, UsageError

if TYPE_CHECKING:
    from compressor.generation.runner import Runner

_FIELDS = GenerateRequest.model_fields
_OPTIONS = ("max_new_tokens", "temperature", "top_p", "top_k")
"""Fields that are options of transformers' `generate`."""


@click.command(cls=FieldsCommand, short_help="Generate text with the engine of a model.")
@click.argument("folder", type=click.Path(path_type=Path))
@options_of(_FIELDS, without=("stop",))
@option_of("stop", _FIELDS["stop"], multiple=True)
@common
@click.pass_obj
def generate(console: Console, folder: Path, **fields: Any) -> None:
    """Generate text with the engine in FOLDER, which has decoder.onnx, and encoder.onnx with an encoder-decoder.

    compress generate out/ --prompt "Once upon a time" --max-new-tokens 64

    The text is printed while it is generated. --temperature, --top-p or --top-k sample tokens, --beams searches with
    beams; otherwise the most probable tokens are chosen.
    """
    request = GenerateRequest(**fields)
    prompts = _prompts(request)
    from compressor.generation.runner import load_engine

    with console.stage("loading the engine"):
        runner = load_engine(folder, provider=request.provider, threads=request.threads)
    ids = runner.tokenize(prompts, chat=request.chat)
    runner.new_tokens(ids, request.max_new_tokens)  # before anything is generated
    if request.batch_file is not None:
        for start in range(0, len(prompts), request.batch_size):
            batch = prompts[start : start + request.batch_size]
            for prompt, text in zip(batch, _complete(runner, request, batch), strict=True):
                _write(json.dumps({"prompt": prompt, "text": text}, ensure_ascii=False) + "\n")
    elif console.json:
        (text,) = _complete(runner, request, prompts)
        console.result(Text(text), {"prompt": prompts[0], "text": text})
    else:
        _complete(runner, request, prompts, write=_write)
        _write("\n")


def _complete(runner: Runner, request: GenerateRequest, prompts: list[str], **settings: Any) -> list[str]:
    options = {name: getattr(request, name) for name in _OPTIONS}
    return runner.complete(
        prompts, chat=request.chat, stop=request.stop, seed=request.seed, num_beams=request.beams, **options, **settings
    )


def _write(text: str) -> None:
    """Print a part of a text at once; raises BrokenPipeError for a reader that has gone."""
    sys.stdout.write(text)
    sys.stdout.flush()


def _prompts(request: GenerateRequest) -> list[str]:
    """The prompts that a request names."""
    if request.prompt is not None:
        return [request.prompt]
    if (path := request.batch_file) is not None:
        return list(_lines(path))
    if sys.stdin.isatty():
        raise UsageError(
            "no prompt; add --prompt TEXT, or write the text to stdin", code=ErrorCode.MISSING_VALUE, field="prompt"
        )
    text = _decoded(sys.stdin.buffer.read(), "stdin").removesuffix("\n")
    if not text:
        raise InputError("stdin: has no text; write the prompt to it", code=ErrorCode.MISSING_VALUE, field="prompt")
    return [text]


def _lines(path: Path) -> Iterator[str]:
    """The lines of a file."""
    if not path.is_file():
        raise InputError.of_file(path, "no such file; write one prompt a line", ErrorCode.FILE_MISSING)
    lines = _decoded(path.read_bytes(), str(path)).removesuffix("\n").split("\n")
    for number, line in enumerate(lines, 1):
        if not line.strip():
            problem = f"line {number} is empty; omit it" if len(lines) > 1 else "has no prompt; write one a line"
            raise InputError.of_file(path, f"{problem}", ErrorCode.INVALID_ROWS, row=number)
        yield line.removesuffix("\r")


def _decoded(content: bytes, source: str) -> str:
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        text = f"{source}: byte {error.start} is not UTF-8; convert the text, e.g. with iconv -t UTF-8"
        raise InputError(text, code=ErrorCode.FILE_UNREADABLE, source=source) from error


@click.command(cls=FieldsCommand, short_help="Train a language model with memory.")
@click.argument("out")
@options_of(Training, without=("out",))
@common
@click.pass_obj
def train(console: Console, out: str, **fields: Any) -> None:
    """Train a language model that reads its text in segments with a memory, and write the model folder OUT.

    The same command resumes an interrupted training. A token is a word or a character of the text.
    """
    training = Training(out=out, **fields)
    from compressor.results import Note, NoteCode
    from compressor.training.train import FILE_NAME
    from compressor.training.train import train as run

    result = run(training, console)
    summary = (
        f"{training.out}: {training.architecture} with {result.parameters / 1e6:.1f}M parameters"
        f" ({result.stack / 1e6:.1f}M without embeddings), {result.metric} {result.test:.4g} on the test text after"
        f" {training.steps} steps"
    )
    console.result(Text(summary), {"out": str(training.out), **asdict(result)})
    console.note(Note(text=f"the training curves are in {training.out / FILE_NAME}", code=NoteCode.FILE_WRITTEN))
