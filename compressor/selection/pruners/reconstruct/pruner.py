"""The method `reconstruct`: units by second order, losses by divergence, and a refit from first layer to last."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Literal

from pydantic import Field

from compressor.errors import ErrorCode, UsageError
from compressor.progress import ProgressCallback, ignore_progress, tracked
from compressor.results import Note, NoteCode
from compressor.selection.allocation import Curve, require_finite_losses
from compressor.selection.options import MethodOptions
from compressor.selection.pruners.base import Pruner, PruningInputs
from compressor.selection.pruners.layerwise.refit import Gram, StoredGrams, write_grams
from compressor.selection.pruners.layerwise.session_network import sessions_of
from compressor.selection.pruners.reconstruct.method import (
    Damping,
    Divergence,
    GroupChoice,
    Network,
    choices_of,
    loss_curve,
    refit_in_order,
    require_tokens,
)
from compressor.store import File, Json, digest, versioned
from compressor.units import PrunableGroup

_GRAMS = "grams"
_GRAMS_FILE = File[Mapping[str, Gram]]("grams.safetensors", write_grams, StoredGrams)
_CURVE = Json[Curve](dict[int, float])


class ReconstructOptions(MethodOptions):
    """Options of `reconstruct`."""

    damp: float = Field(
        0.01, gt=0, description="share of the mean diagonal of a Gram matrix that is added to its diagonal"
    )
    ridge: float = Field(
        0.2,
        gt=0,
        description="weight of the distance from the reconstructed weights in a refit, as a share of the "
        "mean diagonal of a Gram matrix",
    )
    weights: Literal["gradients", "equal"] | None = Field(
        None,
        description="weights of tokens and of errors of outputs: gradients, which need PyTorch, or equal, for an ONNX "
        "file only; default: equal where ONNX Runtime runs an ONNX file, else gradients",
    )


def network_of(inputs: PruningInputs, weights: str | None = None) -> Network:
    """The network that forwards run on: sessions of ONNX Runtime for a file on the CPU, else modules of PyTorch.

    Args:
        weights: see `ReconstructOptions`; modules always weigh by gradients, and sessions if they are requested.
    """
    if (sessions := sessions_of(inputs, weights)) is not None:
        return sessions
    from compressor.selection.pruners.layerwise.torch_network import TorchNetwork  # which needs PyTorch

    if weights == "equal":
        raise UsageError(
            "weights=equal: PyTorch runs this model, and weighs by gradients; omit the option",
            code=ErrorCode.CONTRADICTION,
            field="options",
            value="weights=equal",
        )
    return TorchNetwork(inputs)


class ReconstructPruner(Pruner[ReconstructOptions]):
    """Removes units by second order, and refits the linears that read and compute them.

    Call `rank()`, then `losses()` (name of a group -> number of units -> loss), `kept(group, count)` (ids of the units)
    and `finish(counts)`, which gives the model its new weights.

    Units are chosen by Optimal Brain Surgeon on whole units (Hassibi and Stork 1993; ZipLM, Kurtic et al. 2023), with
    errors of the outputs weighted by the Fisher information of the model's answer, as a product of a weight for each
    token and a metric of the outputs. After the allocation, the linears that groups end in and their feeders are
    refitted in order (`refit_in_order`). No labels are used.

    Args:
        inputs: the model and its rows.
        options: the options; None: the defaults.
        network: what runs the rows; None: ONNX Runtime for a graph on the CPU, else PyTorch.

    Raises:
        InputError: the rows have fewer tokens than a linear has inputs, or a loss is NaN or infinite.
    """

    options_class = ReconstructOptions

    def __init__(
        self, inputs: PruningInputs, options: ReconstructOptions | None = None, network: Network | None = None
    ) -> None:
        super().__init__(inputs, options)
        self._network = network or network_of(inputs, self.options.weights)
        if self.options.weights is None:  # a plan records which ones it was chosen by
            weights = "gradients" if self._network.has_gradients else "equal"
            self.options = self.options.model_copy(update={"weights": weights})
        require_tokens(self._network, inputs.groups)
        self._choices: dict[str, GroupChoice] = {}
        self._used: Mapping[str, Damping] = {}

    def rank(self, on_progress: ProgressCallback = ignore_progress) -> None:
        inputs = self.inputs
        linears = [str(group.linear) for group in inputs.groups]

        @versioned(2, "compressor.selection.pruners.layerwise", "compressor.graph.layers")
        def gather(_: Path) -> Mapping[str, Gram]:
            return self._network.grams(list(dict.fromkeys(linears)), progress_of(1))

        passes = 1 if self.store.holds(_GRAMS, {}, gather) else 2

        def progress_of(number: int) -> ProgressCallback:
            """The progress of the first or the second pass over the batches."""
            return lambda done, batches: on_progress(number * batches + done, passes * batches)

        metrics = self._network.weigh(linears, progress_of(0))
        self.store.memo(_GRAMS, {}, gather, _GRAMS_FILE)
        grams = self.store.load(_GRAMS, _GRAMS_FILE)  # which need not stay in memory
        assert grams is not None
        self._choices = choices_of(self._network, inputs.groups, grams, metrics, self.options.damp)

    def losses(self, on_progress: ProgressCallback = ignore_progress) -> dict[str, Curve]:
        inputs, curves = self.inputs, dict[str, Curve]()
        divergence: Divergence | None = None

        @versioned(
            2,
            *("compressor.selection.pruners.layerwise", "compressor.selection.pruners.reconstruct"),
            "compressor.graph.layers",
        )
        def measure(group: PrunableGroup, _: Path) -> Curve:
            nonlocal divergence
            divergence = divergence or self._network.divergence()
            curve = loss_curve(self._choices[group.name], divergence)
            require_finite_losses(group.name, curve)
            return curve

        for group in tracked(inputs.groups, on_progress):
            name = f"loss-{digest(group.name)[:16]}"
            curves[group.name] = self.store.memo(name, {"group": group.name}, partial(measure, group), _CURVE)
        return curves

    def kept(self, group: PrunableGroup, count: int) -> tuple[int, ...]:
        group.require_count(count)
        return self._choices[group.name].kept(count)

    def finish(self, counts: Mapping[str, int], on_progress: ProgressCallback = ignore_progress) -> None:
        self.require_counts(counts)
        choices = [self._choices[group.name] for group in self.inputs.groups]
        self._used = refit_in_order(self._network, choices, counts, on_progress, ridge=self.options.ridge)

    @property
    def notes(self) -> tuple[Note, ...]:
        return (*self._weights_note(), *self._damping_note())

    def _weights_note(self) -> list[Note]:
        reason = getattr(self._network, "obstacle", None)
        text = f"tokens and errors of outputs had equal weights when units were chosen, without gradients: {reason}"
        return [] if reason is None else [Note(code=NoteCode.EQUAL_WEIGHTS, text=text)]

    def _damping_note(self) -> list[Note]:
        raised = []
        for option, requested in (("damp", self.options.damp), ("ridge", self.options.ridge)):
            shares = {name: getattr(used, option) for name, used in self._used.items()}
            groups = [name for name, share in shares.items() if share > requested]
            if groups:
                largest = max(shares[name] for name in groups)
                raised.append(f"{option} from {requested:g} to {largest:g} for {', '.join(groups)}")
        if not raised:
            return []
        text = (
            f"raised {' and '.join(raised)}: their Gram matrices are singular; the weights are less close to the"
            " model's outputs than requested; use more or more varied rows (--data, --prune-rows)"
        )
        return [Note(code=NoteCode.DAMPING_RAISED, text=text)]
