"""Weights as integers with a scale per block, in the format of ONNX Runtime's `MatMulNBits`.

A matrix `[input, output]` is divided along its inputs into blocks (`block_of`); the last one may be shorter, and is
padded with zeros. An integer `q` of a block with the scale `s` represents `(q - 2**(bits - 1)) * s`.
"""

from __future__ import annotations

import numpy as np

BLOCKS = (128, 64, 32)
"""Numbers of inputs that may share a scale. Kernels read fewer bytes with fewer scales; docs/generation.md shows the
loss by rounding."""
_PADDING = 1 / 8
"""Maximum share of zeros that are added to the inputs; the kernels multiply by them, too."""
BITS = (4, 8)
"""Numbers of bits that weights are rounded to."""
_SHRINKAGES = (1.0, 0.95, 0.9, 0.85, 0.8)
"""Scales that are tried for 4 bits, as shares of the scale that represents the largest magnitude of a block. With 16
levels, clipping that magnitude may cost less than a coarser grid for all remaining weights."""
_CHUNK = 1024
"""Outputs that are rounded at once, so that intermediate results stay small."""


def block_of(inputs: int) -> int:
    """Number of the inputs of a matrix that share a scale: the largest in `BLOCKS` that adds few zeros."""
    return next((block for block in BLOCKS if -inputs % block <= _PADDING * inputs), BLOCKS[-1])


def round_blocks(weights: np.ndarray, bits: int) -> tuple[np.ndarray, np.ndarray]:
    """Round a matrix to integers; of the scales that are tried for a block, the least squared error decides.

    Args:
        weights: a matrix `[input, output]`.
        bits: 4 or 8.

    Returns:
        The integers `[output, block, bytes]` (uint8; with 4 bits, the lower half of a byte comes first), and the scales
        `[output, block]` (float32).
    """
    inputs, outputs = weights.shape
    block = block_of(inputs)
    blocks = -(-inputs // block)
    packed = np.empty((outputs, blocks, block * bits // 8), np.uint8)
    scales = np.empty((outputs, blocks), np.float32)
    for start in range(0, outputs, _CHUNK):
        columns = np.asarray(weights[:, start : start + _CHUNK].T, np.float32)
        padded = np.zeros((len(columns), blocks * block), np.float32)
        padded[:, :inputs] = columns
        part = slice(start, start + len(columns))
        levels, scales[part] = _round(padded.reshape(len(columns), blocks, block), bits)
        packed[part] = levels if bits == 8 else levels[..., ::2] | levels[..., 1::2] << 4
    return packed, scales


def _round(blocks: np.ndarray, bits: int) -> tuple[np.ndarray, np.ndarray]:
    """The levels of blocks `[output, block, input]`, and their scales `[output, block]`."""
    half = 2 ** (bits - 1)
    extremes = np.take_along_axis(blocks, np.abs(blocks).argmax(-1, keepdims=True), -1)
    widest = extremes / -half  # the largest magnitude becomes the lowest level, of which there is one more
    best = np.full(blocks.shape[:2], np.inf, np.float32)
    levels, scales = np.zeros(blocks.shape, np.uint8), np.zeros(blocks.shape[:2], np.float32)
    for share in _SHRINKAGES if bits == 4 else (1.0,):
        scale = np.float32(share) * widest
        divisors = np.where(scale == 0, np.float32(1), scale)
        integers = np.clip(np.rint(blocks / divisors), -half, half - 1)
        errors = np.square(integers * scale - blocks).sum(-1)
        is_better = errors < best
        best = np.where(is_better, errors, best)
        scales = np.where(is_better, scale[..., 0], scales)
        levels = np.where(is_better[..., None], (integers + half).astype(np.uint8), levels)
    return levels, scales


def floats_of_blocks(packed: np.ndarray, scales: np.ndarray, bits: int, inputs: int) -> np.ndarray:
    """The matrix `[input, output]` that integers and scales stand for.

    Args:
        packed: the integers, see `round_blocks`.
        scales: the scales `[output, block]`, in any shape of as many elements.
        bits: 4 or 8.
        inputs: number of inputs, without padding.
    """
    outputs, blocks, _ = packed.shape
    levels = packed if bits == 8 else np.stack([packed & 15, packed >> 4], axis=-1).reshape(outputs, blocks, -1)
    floats = (levels.astype(np.float32) - 2 ** (bits - 1)) * scales.reshape(outputs, blocks, 1)
    return np.ascontiguousarray(floats.reshape(outputs, -1)[:, :inputs].T)
