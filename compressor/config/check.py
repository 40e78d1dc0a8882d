"""The configuration of `compress check`: what it compares and which files it writes. Each field is a flag."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, SecretStr

from compressor.config.fields import InvalidValueError, Rule, as_list, config_field
from compressor.config.request import OutputFile, Request
from compressor.config.values import AbsolutePath, Count, Names, NonNegative, Positive, Seed, Threads, as_milliseconds
from compressor.errors import ErrorCode, suggestion

Scenario = Literal["SingleStream", "Server", "Offline"]
SCENARIOS: tuple[Scenario, ...] = get_args(Scenario)
PROMPT_TOKENS, NEW_TOKENS = 128, 32
"""Default lengths of a prompt and of the text that is generated from it."""
models_field, inputs_field, outputs_field, timing_field, files_field = (
    partial(config_field, heading) for heading in ("Models", "Inputs", "Outputs", "Timing", "Files")
)


def _as_slowdown(value: Any) -> float:
    """The share that `5%` or 0.05 stands for. From 1 on the percent sign is required, since 5 probably means 5%."""
    text = str(value).strip()
    try:
        share = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError as error:
        raise InvalidValueError("not a share; give a percentage such as 5%, or a number such as 0.05") from error
    if not 0 <= share < float("inf") or (share >= 1 and not text.endswith("%")):
        raise InvalidValueError(
            "out of range; give a percentage such as 5%, or a number below 1 such as 0.05", ErrorCode.OUT_OF_RANGE
        )
    return share


def _as_milliseconds(value: Any) -> float:
    """The milliseconds that `10ms`, `800us`, `0.5s` or a number of milliseconds stands for."""
    text = str(value).strip()
    return as_milliseconds(text if text.endswith("s") else f"{text}ms")


def _as_scenarios(value: Any) -> tuple[Scenario, ...]:
    """Scenarios by name in any case, each once."""
    by_name = {scenario.lower(): scenario for scenario in SCENARIOS}
    names = [str(name).lower() for name in as_list(value)]
    for name in names:
        if name not in by_name:
            raise InvalidValueError(
                f"unknown scenario {name}; {suggestion(name, list(by_name))}", ErrorCode.UNKNOWN_NAME
            )
    return tuple(by_name[name] for name in dict.fromkeys(names))


def _as_headers(value: Any) -> tuple[SecretStr, ...]:
    """Headers of the form `NAME: VALUE`, in ASCII.

    Others are refused here: the errors of the clients for what HTTP or gRPC cannot send show the values of all headers.
    """
    headers = [value] if isinstance(value, (str, SecretStr)) else value
    texts = [header.get_secret_value() if isinstance(header, SecretStr) else str(header) for header in headers]
    for text in texts:
        name, _, content = text.partition(":")
        is_binary = name.lower().endswith("-bin")  # gRPC's name for bytes
        if not _HEADER_NAME.fullmatch(name) or is_binary or not content.strip():
            raise InvalidValueError("not a header; give 'NAME: VALUE', such as 'Authorization: Bearer TOKEN'")
        if not (content.isascii() and content.isprintable()):
            raise InvalidValueError(f"the value of {name} has characters that no header may have; use printable ASCII")
    return tuple(map(SecretStr, texts))


def _with_suffix(*suffixes: str) -> Callable[[Path], Path]:
    """A validator of the name of a file that is recognized by its suffix."""

    def check(path: Path) -> Path:
        if path.suffix.lower() not in suffixes:
            raise InvalidValueError(f"the name has to end in {' or '.join(suffixes)}; rename it")
        return path

    return check


_STREAMS = ("is_url", "prompt_tokens")
"""Facts of a request for the times of tokens."""
_HEADER_NAME = re.compile(r"[\w.-]+", re.ASCII)
Headers = Annotated[tuple[SecretStr, ...], BeforeValidator(_as_headers)]
Name = Annotated[str, BeforeValidator(lambda value: os.fspath(value) if isinstance(value, os.PathLike) else value)]
"""Name of a model on a server, or path of a file."""
Slowdown = Annotated[float, BeforeValidator(_as_slowdown)]
Milliseconds = Annotated[float, BeforeValidator(_as_milliseconds)]
BaselineFile = Annotated[OutputFile, AfterValidator(_with_suffix(".json"))]
PictureFile = Annotated[OutputFile, AfterValidator(_with_suffix(".svg"))]
Scenarios = Annotated[tuple[Scenario, ...], BeforeValidator(_as_scenarios)]


class CheckRequest(Request):
    """What to check and against which bounds.

    Raises:
        UsageError: a value is invalid, two fields contradict each other, or a file cannot be written.
    """

    # The value of a header would be in the error of pydantic, which --debug shows.
    model_config = ConfigDict(hide_input_in_errors=True)

    model: Name = models_field(
        "model to check, as an ONNX file, an engine of TensorRT (.plan) or OpenVINO (.xml), the output folder of a run"
        " for the engine that its report names, the URL of an endpoint that streams text, or with --server as NAME or"
        " NAME:VERSION",
        required=True,
        is_basic=True,
    )
    baseline: Name = models_field(
        "model to compare with, as --model, or a .json file of --save-baseline", required=True, is_basic=True
    )
    server: str | None = models_field(
        "inference server: grpc://HOST:PORT, http://HOST:PORT, or encrypted grpcs:// or https://", is_basic=True
    )
    header: Headers = models_field(
        "header of every call to the server, 'NAME: VALUE'; may be repeated; no file of a check has the value",
        (),
        is_secret=True,
        is_basic=True,
    )
    certificate: AbsolutePath | None = models_field(
        "PEM file of the authority that signed the certificate of the server; default: those of this machine"
    )
    gzip: bool = models_field("compress requests to the server and its responses", False)
    deadline: Positive = models_field("maximum seconds of a call to the server", 10.0)
    threads: Threads | None = models_field("threads of an engine on this machine; default: one per core", is_basic=True)
    kernel: AbsolutePath | None = models_field("library that compress kernel built, for a graph on this machine")

    inputs: Path | None = inputs_field(
        ".npz file with an array [example, ...] per input, or a file of texts or images; default: random inputs",
        is_basic=True,
    )
    tokenizer: Path | None = inputs_field(
        "folder of the tokenizer of the texts, or of the image processor", is_basic=True
    )
    text_columns: Names = inputs_field("columns of the texts; default: recognized by name", ())
    image_column: str | None = inputs_field("column of images, or of paths of image files; default: recognized by name")
    batch: Count = inputs_field("examples per call", 1, is_basic=True)
    seq: Count = inputs_field("tokens per example; texts are cut or padded", 128, is_basic=True)
    prompt_tokens: Count | None = inputs_field(
        "tokens of the prompts of two folders or endpoints that generate, whose first token and further tokens are"
        f" timed; default for endpoints: {PROMPT_TOKENS}",
        is_basic=True,
    )
    new_tokens: Annotated[int, Field(ge=2)] | None = inputs_field(
        f"tokens to generate from each prompt; default: {NEW_TOKENS}", is_basic=True
    )
    seed: Seed = inputs_field("seed of random inputs and of the bootstrap", 0)

    expect: Name | None = outputs_field(
        "expected outputs: baseline, any (shapes and types only), an .npz, an ONNX file or an output folder; default:"
        " the graph's own outputs without optimization, or the baseline's for a server's model",
        is_basic=True,
    )
    tolerance: NonNegative | None = outputs_field(
        "maximum relative error of an output; default: by the precision of the model", is_basic=True
    )

    max_slowdown: Slowdown = timing_field(
        "maximum slowdown of the p50 against the baseline: 5% or 0.05", 0.05, is_basic=True
    )
    seconds: Positive = timing_field("approximate seconds of the comparison", 20.0, is_basic=True)
    p99: Milliseconds | None = timing_field("bound on the 99th percentile: 10ms, 0.5s", is_basic=True)
    scenario: Scenarios = timing_field(
        "scenarios of MLCommons LoadGen, separated by commas: singlestream, server, offline; default: singlestream"
        " with --p99",
        (),
        is_basic=True,
    )
    rate: Positive | None = timing_field(
        "queries per second of the server scenario; default: half of what one caller of the baseline can send"
    )
    load_seconds: Positive = timing_field("minimum seconds of a scenario", 5.0)

    save_baseline: BaselineFile | None = files_field(
        ".json file for the times and outputs of a model that passes", is_basic=True
    )
    force: bool = files_field("accept a saved baseline that was measured on another machine", False)

    facts: ClassVar[Mapping[str, str]] = {
        "reads_rows": "inputs",
        "is_unencrypted": "server",
        "is_http": "server",
        "is_url": "model",
        "is_mixed": "baseline",
        "expects_file": "expect",
        "is_offline": "scenario",
        "has_queries": "scenario",
        "scenarios": "scenario",
    }
    rules = (
        Rule(
            "server",
            "a model that streams text is named by its URL: compress check http://HOST:PORT/v1/completions, or"
            " http://HOST:PORT/v2/models/NAME/generate_stream on Triton; omit it",
            excludes=("is_url", "prompt_tokens"),
        ),
        *(
            Rule(name, "a model that generates reads one random prompt at a time; omit it", excludes=_STREAMS)
            for name in ("gzip", "kernel", "inputs", "tokenizer", "text_columns", "image_column", "batch", "seq")
        ),
        *(
            Rule(name, "times of tokens are only compared with those of a model; omit it", excludes=_STREAMS)
            for name in ("p99", "scenario", "rate", "load_seconds", "save_baseline", "force")
        ),
        Rule("new_tokens", "no tokens are generated; add <prompt_tokens>, or omit it", needs=_STREAMS),
        Rule(
            "is_mixed",
            "model and baseline have to be two endpoints, by their URLs, or two output folders that generate",
        ),
        Rule(
            "expects_file",
            "the text of an endpoint is compared with that of the baseline only; give <expect> baseline, or omit it",
            excludes=("is_url",),
        ),
        Rule("tolerance", "texts are equal or not; omit it", excludes=("is_url",)),
        Rule("threads", "the server decides its threads; omit one of them", excludes=("server", "is_url")),
        *(
            Rule(name, "only a server is called with it; name one (<server>), or omit it", needs=("server", "is_url"))
            for name in ("header", "certificate", "gzip")
        ),
        Rule(
            "certificate",
            "the connection is not encrypted; name the server with grpcs:// or https://, or omit <certificate>",
            excludes=("is_unencrypted",),
        ),
        Rule("tolerance", "outputs are not compared; omit one of them", excludes=("expect=any",)),
        *(
            Rule(name, "no rows of text or images are read; name some (<inputs>), or omit it", needs=("reads_rows",))
            for name in ("tokenizer", "text_columns", "image_column")
        ),
        Rule(
            "p99",
            "the offline scenario has no latency bound; add singlestream or server to <scenario>",
            excludes=("is_offline",),
        ),
        Rule("rate", "this is the rate of the server scenario; add server to <scenario>", needs=("has_queries",)),
        Rule("kernel", "a kernel is for graphs on this machine; omit one of them", excludes=("server",)),
        Rule(
            "is_http",
            "LoadGen's scenarios need concurrent calls, and the HTTP client makes one call at a time; use grpc://",
            excludes=("scenarios",),
            fields=("server", "scenario", "p99"),
        ),
    )

    @property
    def reads_rows(self) -> bool:
        """Whether the inputs are made of rows of text or images."""
        return self.inputs is not None and self.inputs.suffix != ".npz"

    @property
    def is_unencrypted(self) -> bool:
        """Whether a server is called without encryption."""
        urls = (self.model, self.baseline) if self.is_url else (self.server,)
        return any(url is not None and not str(url).startswith(("grpcs://", "https://")) for url in urls)

    @property
    def is_http(self) -> bool:
        """Whether a server is called by HTTP."""
        return self.server is not None and self.server.startswith("http")

    @property
    def is_url(self) -> bool:
        """Whether the model is the URL of an endpoint that streams text."""
        return "://" in self.model

    @property
    def streams(self) -> bool:
        """Whether the models generate, and the times of their tokens are compared."""
        return self.is_url or self.prompt_tokens is not None

    @property
    def is_mixed(self) -> bool:
        """Whether a baseline of another kind is named than a model that generates needs."""
        return self.is_url != ("://" in self.baseline) or (self.streams and self.baseline_file is not None)

    @property
    def expects_file(self) -> bool:
        """Whether outputs are expected that a file has."""
        return self.expect not in (None, "any", "baseline")

    @property
    def lengths(self) -> tuple[int, int]:
        """Tokens of a prompt, and of the text that is generated from it."""
        return self.prompt_tokens or PROMPT_TOKENS, self.new_tokens or NEW_TOKENS

    @property
    def is_offline(self) -> bool:
        """Whether the offline scenario is the only one."""
        return self.scenario == ("Offline",)

    @property
    def has_queries(self) -> bool:
        """Whether the server scenario is one of those requested."""
        return "Server" in self.scenario

    @property
    def headers(self) -> dict[str, str]:
        """Name of a header -> its value, which is a secret."""
        pairs = (header.get_secret_value().partition(":") for header in self.header)
        return {name.strip(): value.strip() for name, _, value in pairs}

    @property
    def scenarios(self) -> tuple[Scenario, ...]:
        """The scenarios to run: those requested, or SingleStream where there is only a bound."""
        return self.scenario or (("SingleStream",) if self.p99 is not None else ())

    @property
    def baseline_file(self) -> Path | None:
        """The file of a saved baseline; None where the baseline is a model."""
        return Path(self.baseline) if self.baseline.endswith(".json") else None


class CheckArtifacts(Request):
    """Files in which checks are recorded.

    Raises:
        UsageError: a file cannot be written, or a plot is requested without a history.
    """

    junit: OutputFile | None = files_field("JUnit XML file for this check", is_basic=True)
    history: OutputFile | None = files_field("JSONL file to which every timed check appends a line", is_basic=True)
    plot: PictureFile | None = files_field("picture of the history, .svg")

    rules = (Rule("plot", "the picture shows a history; give <history>", needs=("history",)),)
