"""The groups of a model whose units a budget may remove."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from compressor.config.steps import Units
from compressor.errors import ErrorCode, SiteRefusedError
from compressor.results import Note, NoteCode
from compressor.run.run_context import LoadedModel
from compressor.units import PrunableGroup, expert_weights
from graph_passes import Refusal


def prunable_groups(
    step: Units, model: LoadedModel, refused: Sequence[Refusal]
) -> tuple[list[PrunableGroup], tuple[Note, ...]]:
    """The groups whose units a budget may remove, and notes on those that are kept whole and on experts.

    Args:
        step: the types of units that may be removed, and whether groups may be skipped.
        model: the model.
        refused: groups that cannot be removed from the graph.

    Raises:
        SiteRefusedError: one cannot be removed from the graph, and the step does not allow to skip it; or the tensors
            of the model have positions before rows.
    """
    if any(site.batch_axis for site in model.sites):
        raise SiteRefusedError(
            f"{model.folder.family}: its tensors have positions before rows, so what its linears read cannot be"
            " assigned to rows, which a budget needs; choose a number of heads (--keep)",
            code=ErrorCode.SITE_REFUSED,
            family=model.folder.family,
        )
    units = step.prune_units
    groups = [group for group in model.groups if units in ("all", group.type)]
    reasons = {name: str(refusal) for refusal in refused for name in refusal.sites}
    if not step.learns:  # a gate multiplies the heads themselves
        reasons |= {group.name: "its output projection was not recognized" for group in groups if group.linear is None}
    skipped = [group for group in groups if group.name in reasons]
    if skipped and not step.skip_refused:
        first = skipped[0]
        raise SiteRefusedError(
            f"{first.name}: {reasons[first.name]}; keep such groups whole with --skip-refused, or try --attention sdpa"
            " or --opset 23",
            code=ErrorCode.SITE_REFUSED,
            refused=tuple(group.name for group in skipped),
        )
    remaining = [group for group in groups if group not in skipped]
    if not remaining:
        raise SiteRefusedError(
            f"{model.folder.family}: it has no {'units' if units == 'all' else units} that can be removed; choose"
            " others (--prune-units)",
            code=ErrorCode.SITE_REFUSED,
        )
    experts = [] if units == "heads" else expert_notes(model)
    return remaining, (*_skipped_notes(skipped, reasons), *experts)


def expert_notes(model: LoadedModel) -> list[Note]:
    """A note on the experts of a model whose neurons are no units; empty if it has none."""
    experts = expert_weights(model.folder.model, model.groups)
    text = f"{', '.join(experts)}: neurons of experts whose weights are one tensor of three axes cannot be removed"
    return [Note(code=NoteCode.EXPERTS_KEPT, text=text)] if experts else []


def _skipped_notes(skipped: Sequence[PrunableGroup], reasons: Mapping[str, str]) -> Iterator[Note]:
    """One note for each reason why groups are kept whole."""
    for reason in dict.fromkeys(reasons[group.name] for group in skipped):
        names = ", ".join(group.name for group in skipped if reasons[group.name] == reason)
        yield Note(code=NoteCode.GROUPS_SKIPPED, text=f"{names}: kept whole, because {reason}")
