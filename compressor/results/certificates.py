"""The loss of accuracy that is certified, and what the certificate holds for."""

from __future__ import annotations

from typing import Literal

from compressor.results.rows import Row


class CertificateScope(Row):
    """What a certificate holds for.

    It bounds the loss of the model as `engine` computes it in `precision`, on rows drawn like the evaluation rows with
    the hash `rows`, which `seed` divided into those of the search and those of the test. It assumes that the model was
    not tuned on these rows, which its folder does not say, and that it is the only certificate that they are used for:
    `earlier` certificates on this machine used some of them.
    """

    rows: str
    seed: int
    engine: Literal["pytorch"] = "pytorch"
    precision: Literal["fp32", "bf16"] = "fp32"
    tuned_on_rows: Literal["unknown"] = "unknown"
    earlier: int = 0

    def __str__(self) -> str:
        text = (
            f"it holds for the model in PyTorch ({self.precision}), for rows drawn like these evaluation rows"
            f" ({self.rows[:19]}), if the model was not tuned on them and this is their only certificate"
        )
        if self.earlier:
            text += f"; {self.earlier} others on this machine used some of them, which lowers the confidence"
        return text


class CertifiedLoss(Row):
    """The loss of accuracy that is certified.

    With the `confidence`, the accuracy falls by at most `max_drop` where `removed` of `total` units (`heads`, or `heads
    and neurons`) are gone; with none removed, nothing is certified. It fell by `drop` on the `unseen_rows` of the test,
    with the p-value `p_value`; the search saw `searched_rows` others.
    """

    max_drop: float
    confidence: float
    units: str
    removed: int
    total: int
    drop: float
    p_value: float
    searched_rows: int
    unseen_rows: int
    scope: CertificateScope
