"""The rows of certificates: compared with training rows, and recorded in the user's cache.

A certificate holds with its confidence once for a set of rows. The best of several certificates, of other seeds or
models, holds with less confidence. Each certificate therefore states how many earlier ones used some of its rows.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset

from compressor.errors import ErrorCode, InputError
from compressor.targets.machine import user_cache
from compressor.tasks import Data
from graph_passes.files import atomic_replace


def check_rows_unseen(data: Data) -> None:
    """Check that no evaluation row is a training row, by the tokens of the rows.

    Searches read the training rows, and models are tuned on them.

    Raises:
        InputError: some rows are both.
    """
    overlap = int(np.isin(_digests(data.eval), _digests(data.train)).sum())
    if overlap:
        raise InputError(
            f"--certify: {overlap} of the {len(data.eval)} evaluation rows have the content of training rows, so they"
            " certify nothing about unseen ones; remove these rows, or name others (--eval-data)",
            code=ErrorCode.ROWS_OVERLAP,
            field="eval_data",
            rows=len(data.eval),
            overlap=overlap,
        )


def record_certificate(rows: Dataset, request: Mapping[str, Any]) -> int:
    """Record a certificate, and count the earlier ones that used some of its rows; the same one again does not count.

    Args:
        rows: the evaluation rows, those of the search and those of the test.
        request: what else decides the certificate: model, method, seed, ...
    """
    digests, folder = np.unique(_digests(rows)), user_cache() / "certificates"
    key = json.dumps(request, sort_keys=True, default=str).encode() + digests.tobytes()
    path = folder / f"{hashlib.sha256(key).hexdigest()[:16]}.npy"
    stored = (_stored_digests(file) for file in folder.glob("*.npy") if file.name != path.name)
    earlier = sum(bool(np.isin(digests, certified).any()) for certified in stored)
    with contextlib.suppress(OSError):  # a cache that cannot be written must not cost a finished search
        folder.mkdir(parents=True, exist_ok=True)
        with atomic_replace(path) as temporary, temporary.open("wb") as file:
            np.save(file, digests)
    return earlier


def _stored_digests(file: Path) -> np.ndarray:
    """The digests in a file; none where it cannot be read."""
    try:
        digests: np.ndarray = np.load(file)
    except (OSError, EOFError, ValueError):
        return np.array([], np.uint64)
    return digests


def _digests(rows: Dataset) -> np.ndarray:
    """A number for the tokens of each row, uint64 `[rows]`."""
    digests = [
        int.from_bytes(hashlib.sha256(np.asarray(ids, dtype=np.int64).tobytes()).digest()[:8], "little")
        for ids in (rows["input_ids"][:] if len(rows) else ())
    ]
    return np.array(digests, dtype=np.uint64)
