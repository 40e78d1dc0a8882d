"""Server-sent events: parsed in any pieces; every fault of a server is one error with a code, and nothing hangs."""

from __future__ import annotations

import io
import json
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from compressor.config.check import CheckRequest
from compressor.errors import CompressorError, ErrorCode, ServerError, UsageError
from compressor.latency.event_streams import EventSource, read_events
from compressor.latency.streams import Stream, read_stream
from tests.latency.event_server import DONE, TEXT, Piece, completion, event, message, serving_events, usage

_LINES = st.text(st.characters(codec="utf-8", exclude_characters="\r\n\ufeff"), max_size=8)
_EVENTS = st.lists(st.tuples(_LINES.map(str.strip), st.lists(_LINES, min_size=1, max_size=3)), max_size=4)


class Pieces(io.BufferedIOBase):
    """Content that arrives in pieces."""

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self.pieces = [piece for piece in pieces if piece]

    def readable(self) -> bool:
        return True

    def read1(self, size: int = -1) -> bytes:
        return self.pieces.pop(0) if self.pieces else b""


def parsed(content: bytes, cuts: Sequence[int] = ()) -> list[tuple[str, str]]:
    ends = sorted({*(min(cut, len(content)) for cut in cuts), len(content)})
    return list(read_events(Pieces([content[start:end] for start, end in zip([0, *ends], ends, strict=False)])))


@given(_EVENTS, st.sampled_from(["\n", "\r\n", "\r"]), st.lists(st.integers(0, 200), max_size=6), st.booleans())
def test_events_are_read_in_any_pieces(
    events: list[tuple[str, list[str]]], end: str, cuts: list[int], has_mark: bool
) -> None:
    lines = list[str]()
    for name, data in events:
        lines += [
            ": a comment",
            f"event: {name}",
            "id: 7",
            "retry: 5",
            "unknown",
            *(f"data: {line}" for line in data),
            "",
        ]
    content = end.join([*lines, "data: of no complete event"])
    expected = [(name, "\n".join(data)) for name, data in events]
    assert parsed((b"\xef\xbb\xbf" if has_mark else b"") + content.encode(), cuts) == expected


@given(st.binary(max_size=200) | st.text("dataevnt: \r\n", max_size=200).map(str.encode), st.lists(st.integers(0, 200)))
@example(b"data: a\r\n\r\ndata: b\r\n\r\n", [8, 9, 10])
def test_pieces_change_nothing_about_any_bytes(content: bytes, cuts: list[int]) -> None:
    assert parsed(content, cuts) == parsed(content)


def test_a_line_without_an_end_is_refused() -> None:
    with pytest.raises(ValueError, match="characters"):
        parsed(b"data: " + b"x" * (1 << 21))


def request_for(url: str, path: str = "/v1/completions", **fields: Any) -> CheckRequest:
    lengths = {"prompt_tokens": 5, "new_tokens": 4, "deadline": 5.0, **fields}
    return CheckRequest(model=url + path, baseline=url + path, **lengths)


def source_of(url: str, path: str = "/v1/completions", **fields: Any) -> EventSource:
    request = request_for(url, path, **fields)
    return EventSource(request, request.model)


def stream_of(url: str, path: str = "/v1/completions", **fields: Any) -> Stream:
    source = source_of(url, path, **fields)
    return read_stream(source, source.prompt(0))


@pytest.mark.parametrize("is_chunked", [False, True])
@pytest.mark.parametrize(
    ("path", "pieces", "tokens"),
    [
        ("/v1/completions", TEXT, 3),
        ("/v1/completions", (*TEXT[:-1], usage(7), DONE), 7),
        (
            "/v1/completions",
            (b": ping\n\n", *TEXT[:3], completion(" three", usage=None), event({"choices": []}), DONE),
            3,
        ),
        ("/v1/chat/completions", (message(None), *map(message, ("one", " two", " three")), DONE), 3),
        ("/v2/models/m/generate_stream", [event({"text_output": text}) for text in ("one", " two", " three")], 3),
        (
            "/v2/models/m/generate_stream",
            [event({"text_output": t, "tokens": n}) for t, n in (("", 1), ("one", 2), (" two three", 5))],
            5,
        ),
    ],
)
def test_a_text_is_read_with_its_tokens(path: str, pieces: Sequence[Piece], tokens: int, is_chunked: bool) -> None:
    with serving_events(pieces, is_chunked=is_chunked) as url:
        stream = stream_of(url, path)
    assert (stream.text, stream.tokens, len(stream.arrivals)) == ("one two three", tokens, 3)
    assert (np.diff(stream.arrivals) >= 0).all()
    assert stream.per_token == pytest.approx(stream.gaps.sum() / (tokens - 1))


def test_a_text_may_end_with_a_reason_alone() -> None:
    last = event({"choices": [{"text": "", "finish_reason": "length"}]})
    with serving_events([*TEXT[:-1], last]) as url:
        assert stream_of(url).tokens == 3


def test_a_request_asks_for_what_is_measured() -> None:
    requests: list[dict[str, Any]] = []
    with serving_events(requests=requests) as url:
        source = source_of(url)
        texts = [source.prompt(number)["prompt"].item() for number in range(5)]
        again = source_of(url, seed=0).prompt(3)["prompt"].item()
    assert len(set(texts)) == 5
    assert texts[3] == again
    assert {len(text.split()) for text in texts} == {5}
    for body in requests:
        assert body["prompt"] in texts
        assert (body["model"], body["max_tokens"], body["temperature"], body["stream"]) == ("small", 4, 0, True)
        assert body["stream_options"] == {"include_usage": True}


def test_options_that_a_server_refuses_are_omitted() -> None:
    requests: list[dict[str, Any]] = []
    with serving_events(refused=["ignore_eos"], requests=requests) as url:
        assert stream_of(url).tokens == 3
    assert ["ignore_eos" in body for body in requests] == [True, False, False]


FAULTS: dict[str, tuple[dict[str, Any], ErrorCode]] = {
    "error in the stream": ({"pieces": [TEXT[0], event({"error": {"message": "no luck"}})]}, ErrorCode.SERVER_ERROR),
    "event of an error": ({"pieces": [TEXT[0], event("{}", "error")]}, ErrorCode.SERVER_ERROR),
    "event of an error in words": ({"pieces": [TEXT[0], event("no luck", "error")]}, ErrorCode.SERVER_ERROR),
    "end without a reason": ({"pieces": TEXT[:-1]}, ErrorCode.SERVER_ERROR),
    "cut in a chunk": ({"pieces": TEXT[:-1], "is_chunked": True, "is_cut": True}, ErrorCode.SERVER_ERROR),
    "empty": ({"pieces": []}, ErrorCode.SERVER_ERROR),
    "no stream": ({"kind": "application/json", "pieces": [b"{}"]}, ErrorCode.SERVER_ERROR),
    "a single part": ({"pieces": [completion("one two three"), DONE]}, ErrorCode.SERVER_ERROR),
    "no text": ({"pieces": [DONE]}, ErrorCode.SERVER_ERROR),
    "too many tokens": ({"pieces": [TEXT[0]] * 100}, ErrorCode.SERVER_ERROR),
    "impossible usage": ({"pieces": [*TEXT[:-1], usage(10**30), DONE]}, ErrorCode.SERVER_ERROR),
    "no JSON": ({"pieces": [b"data: {\n\n"]}, ErrorCode.SERVER_ERROR),
    "deep JSON": ({"pieces": [b"data: " + b"[" * 200_000 + b"\n\n"]}, ErrorCode.SERVER_ERROR),
    "other JSON": ({"pieces": [event([]), DONE]}, ErrorCode.SERVER_ERROR),
    "other choices": ({"pieces": [event({"choices": [7]}), DONE]}, ErrorCode.SERVER_ERROR),
    "other usage": ({"pieces": [*TEXT[:-1], event({"usage": {"completion_tokens": "x"}})]}, ErrorCode.SERVER_ERROR),
    "refused": ({"status": 422, "pieces": [b'{"detail": "no luck"}']}, ErrorCode.REQUEST_REFUSED),
    "failed": ({"status": 503, "pieces": [b"<h1>no luck</h1>"]}, ErrorCode.SERVER_ERROR),
    "denied": ({"headers": {"Authorization": "Bearer x"}}, ErrorCode.ACCESS_DENIED),
    "silence": ({"pieces": [TEXT[0], 1.0]}, ErrorCode.SERVER_TIMEOUT),
    "comments for ever": ({"pieces": [b": ping\n\n", 0.05] * 20}, ErrorCode.SERVER_TIMEOUT),
    "bytes for ever": ({"pieces": [b"d", 0.05] * 20}, ErrorCode.SERVER_TIMEOUT),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_every_fault_is_one_line_with_a_code(fault: str) -> None:
    served, code = FAULTS[fault]
    start = time.monotonic()
    with serving_events(**served) as url, pytest.raises(ServerError) as error:
        source_of(url, deadline=0.3)
    assert (error.value.code, error.value.exit_code) == (code, 10)
    assert "\n" not in str(error.value)
    assert str(error.value).startswith(f"{url}/v1/completions: ")
    assert time.monotonic() - start < 10
    if any(b"no luck" in piece for piece in served.get("pieces", ()) if isinstance(piece, bytes)):
        assert "no luck" in str(error.value)


@settings(deadline=None, max_examples=25)
@given(st.lists(st.binary(max_size=60) | st.sampled_from([*TEXT, event([]), b"\n\n"]), max_size=8))
def test_no_bytes_of_a_server_crash(pieces: list[bytes]) -> None:
    with serving_events(pieces) as url:
        try:
            result: Stream | CompressorError = stream_of(url, deadline=1.0)
        except ServerError as error:
            result = error
    assert isinstance(result, Stream) or "\n" not in str(result)


def test_a_server_that_is_gone_is_unreachable() -> None:
    with serving_events() as url:
        source = source_of(url)
    with pytest.raises(ServerError) as error:
        read_stream(source, source.prompt(1))
    assert error.value.code is ErrorCode.SERVER_UNREACHABLE


@pytest.mark.parametrize("models", [None, {"data": []}, {"data": [{"id": "a"}, {"id": "b"}]}, [], {"data": 7}])
def test_one_of_several_models_is_named_after_the_url(models: Any) -> None:
    requests: list[dict[str, Any]] = []
    with serving_events(models=models, requests=requests) as url:
        with pytest.raises(UsageError) as error:
            source_of(url)
        assert error.value.code is ErrorCode.MISSING_VALUE
        assert source_of(url, "/v1/completions#b").host.startswith("b at ")
    assert {body["model"] for body in requests} == {"b"}


@pytest.mark.parametrize(
    "url", ["http://h:1/v1", "ftp://h/v1/completions", "http:///v1/completions", "http://h:x/completions"]
)
def test_a_url_of_no_known_endpoint_is_refused(url: str) -> None:
    with pytest.raises(UsageError) as error:
        EventSource(CheckRequest(model=url, baseline=url), url)
    assert error.value.code is ErrorCode.INVALID_VALUE


def test_a_header_is_sent_and_shown_nowhere() -> None:
    token = "a-secret-0123456789"
    with serving_events(headers={"Authorization": f"Bearer {token}"}) as url:
        assert stream_of(url, header=f"Authorization: Bearer {token}").tokens == 3
        with pytest.raises(ServerError) as error:
            stream_of(url, header=f"Authorization: Bearer {token}x")
    assert error.value.code is ErrorCode.ACCESS_DENIED
    assert token not in str(error.value)
    assert token not in json.dumps(error.value.details, default=str)
