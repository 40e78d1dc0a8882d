"""How far apart two arrays of outputs are, over the positions that anybody reads."""

from __future__ import annotations

import numpy as np

from compressor.targets.base import Feeds


def as_bytes(array: np.ndarray) -> np.ndarray:
    """Texts as bytes, which is how a server gives them; a runtime gives `str`. Arrays of numbers are left alone."""
    return _encoded(array) if array.dtype == np.object_ else array


_encoded = np.vectorize(lambda text: text.encode() if isinstance(text, str) else text, otypes=[np.object_])


def relative_error(reference: np.ndarray, other: np.ndarray, feeds: Feeds) -> float:
    """`max |reference - other| / max |reference|` over the positions that are not padding.

    Outputs of padded positions are left out: nobody reads them, and where a mask leaves a query no key at all its
    result is whatever the kernel makes of an empty softmax. An output has positions when its first two axes are those
    of a mask `[batch, length]`: the decoder's where the graph has a decoder, else the encoder's.

    Args:
        reference: what is right.
        other: what is compared with it.
        feeds: the inputs that both were computed from.

    Returns:
        The error; infinite where the shapes differ, either holds NaN, an infinity has no equal on the other side, or
        they are texts and differ.
    """
    if reference.shape != other.shape:
        return float("inf")
    valid = _valid(reference, feeds)
    if np.object_ in (reference.dtype, other.dtype):
        return 0.0 if np.array_equal(*(as_bytes(array)[valid] for array in (reference, other))) else float("inf")
    a, b = (array.astype(np.float64)[valid] for array in (reference, other))
    infinite = ~np.isfinite(a) | ~np.isfinite(b)
    if not np.array_equal(a[infinite], b[infinite]):  # NaN equals nothing
        return float("inf")
    a, b = a[~infinite], b[~infinite]
    largest = float(np.abs(a - b).max(initial=0.0))
    if largest == 0:
        return 0.0
    scale = float(np.abs(a).max(initial=0.0))
    return largest / scale if scale else float("inf")


def _valid(output: np.ndarray, feeds: Feeds) -> np.ndarray:
    """Positions to compare, as an index of the first axes: `[batch, length]` booleans, or all."""
    decodes = any(name.startswith("decoder_") for name in feeds)
    mask = feeds.get("decoder_attention_mask" if decodes else "attention_mask")
    if mask is None or mask.ndim != 2 or output.shape[:2] != mask.shape or output.ndim < 3:
        return np.ones(output.shape, bool)
    return mask != 0
