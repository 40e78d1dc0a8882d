"""The divergence of outputs of a graph from those of the whole graph, on arrays.

`compressor.training.divergence` has the same divergences as tensors of PyTorch, with gradients.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from compressor.answers import EMBEDDING, RANKING, SPAN_ENDS, AnswerKind, scored_mask

_WITHOUT_KIND = (*SPAN_ENDS, RANKING)
"""Outputs that are distributions whatever the answers of the model are."""
_SMALLEST_VARIANCE = 1e-12
Arrays = Mapping[str, np.ndarray]


def divergence(
    dense: Arrays,
    outputs: Arrays,
    names: Sequence[str],
    batch: Arrays,
    variance: np.ndarray | None = None,
    *,
    kind: AnswerKind | None = None,
    temperature: float = 1.0,
) -> np.ndarray:
    """KL(dense || outputs) of each example of a batch, in nats; see `compressor.training.divergence.divergence`.

    Args:
        dense: outputs of the whole graph.
        outputs: outputs of the changed graph on the same batch.
        names: the scored outputs, see `Task.outputs`.
        batch: the inputs, whose masks and labels mark padded positions.
        variance: variance of the dense outputs of a regression over all examples, `[numbers]`; None: over this batch.
        kind: the kind of the answers (`several_answers`); None: the axes of the outputs determine it.
        temperature: T, by which logits are divided; the divergence of logits is multiplied by its square.

    Returns:
        `[batch]`, float64; zero for an example without scored positions.
    """

    def of(name: str, p: np.ndarray, q: np.ndarray) -> np.ndarray:
        if p.ndim < 3 or kind is AnswerKind.VECTOR or name == EMBEDDING:
            p, q = p.astype(np.float64), q.astype(np.float64)
        if name == EMBEDDING:
            return np.square(_normalized(p) - _normalized(q)).sum(-1) / 2
        if kind is AnswerKind.VECTOR:
            x, y = _vectors(p, batch), _vectors(q, batch)
            return np.square(x - y).sum(-1) / np.maximum(2 * np.square(x).sum(-1), _SMALLEST_VARIANCE)
        if _are_numbers(p, name, kind):
            scale = _variances(p) if variance is None else variance
            squares = np.square(p - q).reshape(len(p), -1)
            return (squares / np.maximum(scale, _SMALLEST_VARIANCE)).sum(-1)
        if name in SPAN_ENDS:
            mask = scored_mask(batch, *p.shape)
            values = _kl(*(np.where(mask, x / temperature, np.finfo(np.float64).min) for x in (p, q)))
        elif name not in _WITHOUT_KIND and kind is AnswerKind.CLASSES and p.ndim == 2:
            values = _kl(*(np.stack([np.zeros_like(x), x / temperature], axis=-1) for x in (p, q))).sum(-1)
        elif p.ndim == 2:
            values = _kl(p / temperature, q / temperature)
        else:  # for each example, since these outputs are large
            mask = scored_mask(batch, *p.shape[:2])
            rows = zip(p, q, mask, strict=True)
            wide = ((a[kept].astype(np.float64), b[kept].astype(np.float64)) for a, b, kept in rows)
            sums = [_kl(a / temperature, b / temperature).sum() for a, b in wide]
            values = np.array(sums) / np.maximum(mask.sum(1), 1)
        return temperature**2 * values

    parts = [of(name, dense[name], outputs[name]) for name in names]
    return np.asarray(np.stack(parts).sum(0))


def variance_of(dense: Sequence[Arrays], names: Sequence[str], kind: AnswerKind | None) -> np.ndarray | None:
    """The variance of each output of a regression over all batches, `[numbers]`; None for other tasks."""
    if len(names) > 1 or not dense or not _are_numbers(dense[0][names[0]], names[0], kind):
        return None
    return _variances(np.concatenate([outputs[names[0]] for outputs in dense]))


def _are_numbers(output: np.ndarray, name: str, kind: AnswerKind | None) -> bool:
    """Whether an output is a number, `[batch]` or `[batch, 1]`, or, of the kind `NUMBERS`, several."""
    if name in SPAN_ENDS or (name not in _WITHOUT_KIND and kind is AnswerKind.CLASSES and output.ndim == 2):
        return False
    is_several = name not in _WITHOUT_KIND and kind is AnswerKind.NUMBERS and output.ndim == 2
    return is_several or output.ndim == 1 or (output.ndim == 2 and output.shape[1] == 1)


def _variances(outputs: np.ndarray) -> np.ndarray:
    return np.asarray(outputs.astype(np.float64).reshape(len(outputs), -1).var(0))


def _normalized(vectors: np.ndarray) -> np.ndarray:
    return np.asarray(vectors / np.maximum(np.linalg.norm(vectors, axis=-1, keepdims=True), _SMALLEST_VARIANCE))


def _vectors(values: np.ndarray, batch: Arrays) -> np.ndarray:
    """Values `[batch, ...]` as `[batch, numbers]`, with zeros at the padded positions of `[batch, position, ...]`."""
    if values.ndim > 2:
        mask = scored_mask(batch, *values.shape[:2])
        values = np.where(mask.reshape(*mask.shape, *(1,) * (values.ndim - 2)), values, 0)
    return values.reshape(len(values), -1)


def _kl(dense: np.ndarray, logits: np.ndarray) -> np.ndarray:
    """KL over the last axis of logits; rounding never makes it negative."""
    p, q = log_softmax(dense), log_softmax(logits)
    return np.asarray(np.maximum((np.exp(p) * (p - q)).sum(-1), 0))


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """The logarithm of the softmax over the last axis."""
    shifted = logits - logits.max(-1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(-1, keepdims=True)))
