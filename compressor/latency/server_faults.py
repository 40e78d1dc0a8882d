"""Faults of an inference server: their kinds, what an error says about each, and secrets that no error shows."""

from __future__ import annotations

import os
import re
import ssl
from collections.abc import Mapping
from enum import Enum
from http.client import HTTPException
from pathlib import Path

from compressor.config.check import CheckRequest
from compressor.errors import ErrorCode, InputError
from compressor.silence_libraries import one_line

UNTRUSTED = "CERTIFICATE_VERIFY_FAILED"
"""OpenSSL's name of the error for a certificate that it does not trust, in the errors of every client."""
MALFORMED = (ValueError, KeyError, TypeError, AttributeError, RecursionError, HTTPException)
"""Exceptions of a client for a response that is not HTTP, not JSON, or lacks required keys."""
_LONG = 8
"""Length from which a part of a header, such as a cookie, counts as a secret."""


class Fault(Enum):
    """The kind of fault that a client's exception reports: the code of the error, the fault, and how to mend it."""

    REFUSED = (
        ErrorCode.REQUEST_REFUSED,
        "the server refuses the request",
        "its inputs have the names, types and shapes that the server lists, so see the server's log",
    )
    TIMEOUT = ErrorCode.SERVER_TIMEOUT, "no response within {seconds:g} s", "allow more with --deadline"
    UNREACHABLE = (
        ErrorCode.SERVER_UNREACHABLE,
        "no connection",
        "check that the server runs, and its port and protocol",
    )
    MALFORMED = ErrorCode.SERVER_ERROR, "the response is not of the protocol", "check the port"
    FORBIDDEN = (
        ErrorCode.ACCESS_DENIED,
        "the server denies access",
        'give the header that it needs, as in --header "Authorization: Bearer TOKEN"',
    )
    """The server, or a proxy before it, wants credentials."""
    UNTRUSTED = (
        ErrorCode.CERTIFICATE_UNTRUSTED,
        "the server's certificate is not trusted",
        "name the file of the authority that signed it (--certificate)",
    )
    NO_STREAM = (
        ErrorCode.SERVER_ERROR,
        "the response is no stream of events",
        "name an endpoint that streams text, such as http://HOST:PORT/v1/completions",
    )
    ENDED = ErrorCode.SERVER_ERROR, "the stream ends before its text is complete", "see the server's log"
    SERVER_FAILED = ErrorCode.SERVER_ERROR, "", "see the server's log"
    """The server reports an internal error or an unknown status."""

    def describe(self, reason: str, request: CheckRequest) -> str:
        """The fault on one line, with the text of the server or the client, without secrets."""
        _, fact, _ = self.value
        reason = without_secrets(one_line(reason), request.headers)
        return f"{fact.format(seconds=request.deadline)} ({reason})" if fact else reason


HTTP_FAULTS: Mapping[int, Fault] = {
    **dict.fromkeys((400, 413, 415, 422), Fault.REFUSED),
    **dict.fromkeys((401, 403, 407), Fault.FORBIDDEN),
    **dict.fromkeys((408, 504), Fault.TIMEOUT),
}
"""Status of a response -> the kind of fault; all remaining statuses are errors of the server."""


def connection_fault(error: Exception) -> Fault:
    """The fault that an exception of a socket, or of code that reads a response from it, reports."""
    if UNTRUSTED in str(error):
        return Fault.UNTRUSTED
    if isinstance(error, TimeoutError):
        return Fault.TIMEOUT
    return Fault.UNREACHABLE if isinstance(error, OSError) else Fault.MALFORMED


def certificate_file(path: Path | None) -> str | None:
    """The path of a file of certificates, for a client; raises InputError if it has none."""
    if path is None:
        return None
    try:
        ssl.create_default_context(cafile=os.fspath(path))
    except OSError as error:  # SSLError is one
        raise InputError(
            f"--certificate {path}: no certificates can be read from it ({error}); name a PEM file with the "
            f"certificate of the authority that signed the server's certificate",
            code=ErrorCode.FILE_UNREADABLE if path.is_file() else ErrorCode.FILE_MISSING,
            field="certificate",
            path=path,
        ) from error
    return os.fspath(path)


def without_secrets(text: str, headers: Mapping[str, str]) -> str:
    """A text without the values of headers, their last words, such as tokens, and their longer parts."""
    secrets: set[str] = set()
    for value in headers.values():
        parts = re.split(r"[\s;,=]+", value)
        secrets |= {value, value.split()[-1], *(part for part in parts if len(part) >= _LONG)}
    for secret in sorted(secrets, key=len, reverse=True):
        text = text.replace(secret, "***")
    return text
