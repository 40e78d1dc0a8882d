"""The relative error of outputs against a reference, over the tokens that are not padding."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from compressor.targets.base import Feeds

Outputs = Mapping[str, np.ndarray]
"""Output -> its value for one batch."""
_UNUSUAL = 100.0
"""Ratio to the magnitude of the median batch above which numbers of a batch stand for minus infinity."""


def as_bytes(array: np.ndarray) -> np.ndarray:
    """An array of texts as bytes, since a runtime returns `str` and a server bytes. Numeric arrays stay unchanged."""
    return _encode(array) if array.dtype == np.object_ else array


_encode = np.vectorize(lambda text: text.encode() if isinstance(text, str) else text, otypes=[np.object_])


@dataclass(frozen=True)
class ReferenceOutputs:
    """Expected outputs of several batches, and the errors of other outputs against them.

    An error is relative to the largest magnitude that the output has in any batch, because rounding shifts outputs that
    are all close to zero, such as the logits of an undecided example, as much as larger ones. The magnitude of a batch
    with numbers that stand for minus infinity counts for the errors of this batch only.

    Attributes:
        outputs: the expected outputs of every batch.
        batches: the inputs that they were computed from.
    """

    outputs: Sequence[Outputs]
    batches: Sequence[Feeds]

    def error(self, number: int, name: str, output: np.ndarray) -> float:
        """The relative error of one output; see `relative_error`."""
        return relative_error(
            self.outputs[number][name],
            output,
            self.batches[number],
            scale=max(self._magnitudes[name][number], self._scales[name]),
            value_per_position=self._per_position[name],
        )

    @functools.cached_property
    def _per_position(self) -> dict[str, bool]:
        """Output -> whether it has a value for each token."""
        names = dict.fromkeys(name for outputs in self.outputs for name in outputs)
        return {
            name: has_value_per_position([outputs[name] for outputs in self.outputs if name in outputs], self.batches)
            for name in names
        }

    @functools.cached_property
    def _magnitudes(self) -> dict[str, dict[int, float]]:
        """Output -> number of the batch -> its largest finite magnitude there; 0 for texts."""
        magnitudes: dict[str, dict[int, float]] = {}
        for number, (outputs, feeds) in enumerate(zip(self.outputs, self.batches, strict=True)):
            for name, output in outputs.items():
                largest = 0.0
                if output.dtype.kind not in "OSU":
                    values = output[_valid_positions(output, feeds, self._per_position[name])].astype(np.float64)
                    largest = float(np.abs(values[np.isfinite(values)]).max(initial=0.0))
                magnitudes.setdefault(name, {})[number] = largest
        return magnitudes

    @functools.cached_property
    def _scales(self) -> dict[str, float]:
        """Output -> its largest magnitude over the batches without numbers that stand for minus infinity."""
        scales = {}
        for name, by_batch in self._magnitudes.items():
            magnitudes = sorted(by_batch.values())
            usual = magnitudes[(len(magnitudes) - 1) // 2]
            scales[name] = max(magnitude for magnitude in magnitudes if magnitude <= _UNUSUAL * usual)
        return scales


def relative_error(
    reference: np.ndarray,
    output: np.ndarray,
    feeds: Feeds,
    *,
    scale: float | None = None,
    value_per_position: bool = False,
) -> float:
    """`max |reference - output| / max |reference|` over the tokens that are not padding.

    Nothing uses the outputs of padding, and kernels disagree on the softmax of a query without any key. An output of
    three or more axes has values for tokens if its first two axes are those of a mask `[batch, length]`: the decoder's
    mask where the graph has a decoder, else the encoder's.

    Args:
        scale: what the difference is divided by; None: the largest magnitude of the reference.
        value_per_position: whether an output of two axes has values for tokens too; see `has_value_per_position`.

    Returns:
        The error; infinite where shapes differ, either array holds NaN, an infinity has no equal in the other array, or
        texts differ.
    """
    if reference.shape != output.shape:
        return float("inf")
    valid = _valid_positions(reference, feeds, value_per_position)
    if np.object_ in (reference.dtype, output.dtype):
        return 0.0 if np.array_equal(*(as_bytes(array)[valid] for array in (reference, output))) else float("inf")
    a, b = (array.astype(np.float64)[valid] for array in (reference, output))
    infinite = ~np.isfinite(a) | ~np.isfinite(b)
    if not np.array_equal(a[infinite], b[infinite]):  # NaN equals nothing
        return float("inf")
    a, b = a[~infinite], b[~infinite]
    largest = float(np.abs(a - b).max(initial=0.0))
    if largest == 0:
        return 0.0
    scale = scale or float(np.abs(a).max(initial=0.0))
    return largest / scale if scale else float("inf")


def has_value_per_position(outputs: Sequence[np.ndarray], batches: Sequence[Feeds]) -> bool:
    """Whether an output `[batch, n]` has a value for each token, as logits of the starts of answers do.

    With a single batch, n may equal the length by chance, so n has to be the length in several batches of different
    lengths.
    """
    masks = [_mask(feeds) for feeds in batches]
    shapes = [None if mask is None else mask.shape for mask in masks]
    return [output.shape for output in outputs] == shapes and len({shape[1] for shape in shapes if shape}) > 1


def is_defined(output: np.ndarray, feeds: Feeds) -> bool:
    """Whether an output has no NaN, and some finite number, over the tokens that are not padding.

    Some outputs have infinities by design, such as the scores of answers that are not allowed.
    """
    if not np.issubdtype(output.dtype, np.inexact):
        return True
    values = output[_valid_positions(output, feeds, value_per_position=False)]
    return not np.isnan(values).any() and (not values.size or bool(np.isfinite(values).any()))


def _valid_positions(output: np.ndarray, feeds: Feeds, value_per_position: bool) -> np.ndarray:
    """An index of the values to compare: booleans `[batch, length]`, or all values where they belong to no tokens."""
    mask = _mask(feeds)
    if mask is None or output.shape[:2] != mask.shape or (output.ndim < 3 and not value_per_position):
        return np.ones(output.shape, bool)
    return mask != 0


def _mask(feeds: Feeds) -> np.ndarray | None:
    """The mask `[batch, length]` of the tokens that outputs belong to, if the inputs have one."""
    decodes = any(name.startswith("decoder_") for name in feeds)
    mask = feeds.get("decoder_attention_mask" if decodes else "attention_mask")
    return None if mask is None or mask.ndim != 2 else mask
