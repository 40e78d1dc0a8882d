"""`compress generate` prints text while it is generated; `compress train` prints the result of a training."""

from __future__ import annotations

import io
import json
import signal
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from compressor.cli.language_models import train
from compressor.config.fields import flag_of
from compressor.config.request import Training
from compressor.errors import ErrorCode
from tests import language
from tests.command import compress, enable_ctrl_c
from tests.generation.counting import POSITIONS, SIZE, TEMPLATE, write_decoder_only, write_encoder_decoder
from tests.generation.exported import exported

Cap = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder whose engine counts."""
    return write_decoder_only(tmp_path_factory.mktemp("counting"), template=TEMPLATE)


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an encoder-decoder."""
    return write_encoder_decoder(tmp_path_factory.mktemp("answering"))


class Stdin(io.TextIOWrapper):
    """Text that a process writes to stdin, or a terminal."""

    def __init__(self, content: bytes, *, terminal: bool = False) -> None:
        super().__init__(io.BytesIO(content))
        self.terminal = terminal

    def isatty(self) -> bool:
        return self.terminal


def test_a_prompt_is_continued(capfd: Cap, out: Path) -> None:
    result = compress(capfd, "generate", out, "--prompt", "two", "--max-new-tokens", "3", "--quiet")
    assert (result.code, result.out, result.err) == (0, "three four five\n", "")


def test_the_prompt_is_read_from_stdin(capfd: Cap, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", Stdin(b"two\nthree\n"))
    assert compress(capfd, "generate", out, "--max-new-tokens", "2").out == "four five\n"


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--beams", "3"], "three four five"),
        (["--temperature", "0.01", "--seed", "1"], "three four five"),
        (["--top-k", "1"], "three four five"),
        (["--top-p", "0.01"], "three four five"),
        (["--stop", "five", "--stop", "nine"], "three four "),
        (["--chat"], "three four five"),
        (["--threads", "1", "--provider", "cpu"], "three four five"),
    ],
)
def test_flags_reach_the_search(capfd: Cap, out: Path, flags: list[str], text: str) -> None:
    assert compress(capfd, "generate", out, "--prompt", "two", "--max-new-tokens", "3", *flags).out == f"{text}\n"


def test_results_are_json(capfd: Cap, out: Path) -> None:
    result = compress(capfd, "generate", out, "--prompt", "nine", "--json", "--quiet")
    assert result.json == {"prompt": "nine", "text": "ten"}


def test_a_file_gives_a_line_for_each_prompt_in_order(capfd: Cap, out: Path, tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text("\ufeffone\r\ntwo three four\nnine\n", encoding="utf-8")
    command: list[str | Path] = [
        "generate",
        out,
        "--batch-file",
        tmp_path / "prompts.txt",
        "--max-new-tokens",
        "2",
        "--batch-size",
        "2",
    ]
    lines = [json.loads(line) for line in compress(capfd, *command).out.splitlines()]
    assert lines == [
        {"prompt": "one", "text": "two three"},
        {"prompt": "two three four", "text": "five six"},
        {"prompt": "nine", "text": "ten"},
    ]


def test_a_prompt_that_is_too_long_ends_before_a_line_is_printed(capfd: Cap, out: Path, tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text("one\n" + "one " * POSITIONS)
    result = compress(capfd, "generate", out, "--batch-file", tmp_path / "prompts.txt", "--batch-size", "1")
    assert (result.code, result.out, result.error_code) == (3, "", ErrorCode.TOO_LONG)


BAD_FILES = {
    "empty": (b"", ErrorCode.INVALID_ROWS),
    "blank": (b"one\n\ntwo\n", ErrorCode.INVALID_ROWS),
    "not UTF-8": (b"one\n\xff\n", ErrorCode.FILE_UNREADABLE),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_a_bad_file_is_refused(capfd: Cap, out: Path, tmp_path: Path, name: str) -> None:
    content, code = BAD_FILES[name]
    (tmp_path / "prompts.txt").write_bytes(content)
    result = compress(capfd, "generate", out, "--batch-file", tmp_path / "prompts.txt")
    assert (result.code, result.error_code) == (3, code)
    assert result.error
    missing = compress(capfd, "generate", out, "--batch-file", tmp_path / "nowhere.txt")
    assert (missing.code, missing.error_code) == (3, ErrorCode.FILE_MISSING)


@pytest.mark.parametrize(
    ("stdin", "exit_code", "code"),
    [
        (Stdin(b"", terminal=True), 2, ErrorCode.MISSING_VALUE),
        (Stdin(b"\n"), 3, ErrorCode.MISSING_VALUE),
        (Stdin(b"\xff"), 3, ErrorCode.FILE_UNREADABLE),
    ],
    ids=["terminal", "empty", "not UTF-8"],
)
def test_a_prompt_is_needed(
    capfd: Cap, out: Path, monkeypatch: pytest.MonkeyPatch, stdin: Stdin, exit_code: int, code: ErrorCode
) -> None:
    monkeypatch.setattr(sys, "stdin", stdin)
    result = compress(capfd, "generate", out)
    assert (result.code, result.error_code) == (exit_code, code)
    assert result.error


BAD_FLAGS = {
    "--beams 2 --top-k 3": ErrorCode.CONTRADICTION,
    "--seed 1": ErrorCode.CONTRADICTION,
    "--batch-size 2": ErrorCode.CONTRADICTION,
    "--batch-file prompts.txt": ErrorCode.CONTRADICTION,
    "--temperature 0": ErrorCode.OUT_OF_RANGE,
    "--top-p 1.5": ErrorCode.OUT_OF_RANGE,
    "--max-new-tokens 0": ErrorCode.OUT_OF_RANGE,
    "--stop=": ErrorCode.INVALID_VALUE,
    f"--beams {SIZE + 1}": ErrorCode.OUT_OF_RANGE,
}


@pytest.mark.parametrize("flags", BAD_FLAGS)
def test_flags_that_contradict_are_refused(capfd: Cap, out: Path, flags: str) -> None:
    result = compress(capfd, "generate", out, "--prompt", "one", "--quiet", *flags.split(" "))
    assert (result.code, result.error_code) == (2, BAD_FLAGS[flags])
    assert result.error


def test_an_encoder_decoder_answers_and_has_no_chats(capfd: Cap, answers: Path) -> None:
    command: list[str | Path] = ["generate", answers, "--prompt", "nine", "--max-new-tokens", "2", "--quiet"]
    assert compress(capfd, *command).out == "one two\n"
    refused = compress(capfd, *command, "--chat")
    assert (refused.code, refused.error_code) == (2, ErrorCode.CONTRADICTION)


def test_a_folder_that_generates_nothing_is_refused(capfd: Cap, model: Path) -> None:
    result = compress(capfd, "generate", model, "--prompt", "one", "--quiet")
    assert (result.code, result.error_code) == (3, ErrorCode.UNSUPPORTED_MODEL)
    assert result.error


def process(out: Path, *flags: str | Path) -> subprocess.Popen[bytes]:
    """A process that generates more than a pipe holds."""
    code = "from compressor.cli import main; main()"
    return subprocess.Popen(
        [sys.executable, "-c", code, "generate", out, "--quiet", *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=enable_ctrl_c,
    )


@pytest.fixture
def many(tmp_path: Path) -> Path:
    """A file of more prompts than are completed within a test."""
    file = tmp_path / "prompts.txt"
    file.write_text("one\n" * 100_000)
    return file


@pytest.mark.zoo
def test_a_reader_that_leaves_ends_the_command(out: Path, many: Path) -> None:
    with process(out, "--batch-file", many, "--max-new-tokens", "2") as running:
        assert running.stdout is not None
        assert running.stderr is not None
        assert json.loads(running.stdout.readline())["text"] == "two three"
        running.stdout.close()
        assert running.wait(timeout=60) == 141
        assert running.stderr.read() == b""


def test_an_interrupt_has_its_code(capfd: Cap, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*arguments: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("compressor.generation.runner.Runner.complete", interrupted)
    result = compress(capfd, "generate", out, "--prompt", "one", "--quiet")
    assert (result.code, result.out, result.error) == (130, "", "interrupted")


@pytest.mark.zoo
def test_ctrl_c_ends_the_command(out: Path, many: Path) -> None:
    with process(out, "--batch-file", many, "--max-new-tokens", "2", "--batch-size", "1") as running:
        assert running.stdout is not None
        running.stdout.readline()
        running.send_signal(signal.SIGINT)
        _, err = running.communicate(timeout=60)
        assert running.returncode == 130
        assert err.count(b"\n") == 1


@pytest.mark.zoo
def test_prompts_and_tokens_are_timed(capfd: Cap) -> None:
    folder = exported("gpt2")
    result = compress(
        capfd,
        "bench",
        folder,
        "--prompt-tokens",
        "4,6",
        "--new-tokens",
        "4",
        "--batch",
        "2",
        "--seconds",
        "0.01",
        "--json",
    )
    assert result.code == 0
    assert [(row["batch"], row["prompt_tokens"]) for row in result.json] == [(2, 4), (2, 6)]
    assert {row["cache_bytes"] for row in result.json} == {2 * 2 * 2 * 8 * 4}
    assert all(row["prompt_ms"] > 0 and row["token_ms"] > 0 for row in result.json)
    file = compress(capfd, "bench", folder / "decoder.onnx", "--prompt-tokens", "4")
    assert (file.code, file.details["field"]) == (2, "prompt_tokens")


TINY = "--layers 1 --hidden 16 --heads 4 --persistent 8 --memory 8 --segment 6 --batch-size 2 --steps 2 --evaluations 1"


def test_every_field_is_one_flag() -> None:
    flags = {str(option.name): option.opts for option in train.params if isinstance(option, click.Option)}
    assert set(flags) - {"quiet", "debug", "json"} == set(Training.model_fields) - {"out"}
    assert all(flag_of(name) in opts for name, opts in flags.items())
    output = CliRunner().invoke(train, ["--help"]).output
    assert all(heading in output for heading in ("Data:", "Model:", "Training:", "Output:"))


def test_the_result_is_printed(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "train.txt").write_text(language.text(30))
    data, out = tmp_path / "train.txt", tmp_path / "out"
    result = compress(capfd, "train", out, "--data", data, *TINY.split(), "--json")
    assert result.code == 0, result.err
    record = json.loads((out / "training.json").read_text())
    assert result.json == {"out": str(out), **record["result"]}
    assert f"the training curves are in {out / 'training.json'}" in result.err


def test_a_missing_text_is_a_usage_error(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    result = compress(capfd, "train", tmp_path / "out")
    assert (result.code, result.error_code, result.details["field"]) == (2, ErrorCode.MISSING_VALUE, "data")
