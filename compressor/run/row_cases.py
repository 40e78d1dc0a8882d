"""Proof cases from the rows of the user: the inputs that the model really gets."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from compressor.engines.prove import Case, Inputs, case_name

if TYPE_CHECKING:
    from compressor.tasks import Data


def row_cases(data: Data, inputs: Inputs, *, longest: int | None = None) -> tuple[Case, ...]:
    """A row of median length alone, and the shortest with the longest row; none where a graph has another batch size.

    Args:
        data: the rows; those of the last split that is not empty are taken: test, evaluation or training rows.
        inputs: makes up the inputs of the graph, of which rows may lack some, e.g. those of a decoder.
        longest: rows with more tokens are left out; None: none are.
    """
    rows = next((rows for rows in (data.test, data.eval, data.train) if len(rows)), None)
    if rows is None:
        return ()
    lengths = np.asarray(rows["length"][:])
    order = [int(row) for row in np.argsort(lengths, kind="stable") if longest is None or lengths[row] <= longest]
    batches = [order[len(order) // 2 :][:1], list(dict.fromkeys((*order[:1], *order[-1:])))]
    cases = []
    for batch in (batch for batch in batches if batch):
        encoded = data.task.model_inputs(data.task.collate([rows[row] for row in batch]))
        first = next(iter(encoded.values()))
        made_up = {name: np.asarray(value) for name, value in inputs(len(first), first.shape[-1], 0).items()}
        if any(name in encoded and len(encoded[name]) != len(value) for name, value in made_up.items()):
            continue  # a graph of another batch size
        feeds = {name: np.asarray(encoded.get(name, value)) for name, value in made_up.items()}
        cases.append(Case(feeds, f"rows: {case_name(feeds)}"))
    return tuple(cases)
