"""What happens to one family of transformers: built tiny, exported, cut by a random plan, and compared."""

from __future__ import annotations

import copy
import dataclasses
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel
from transformers.exporters.utils import get_leaf_tensors

from benchmarks.families_tiny import HEAD_DIM, HEADS, VOCABULARY, Form, switch_lengths, task_of, tiny_model
from compressor.engines.prove import Case, case_name, make_cases, prove_engine, prove_shrunk, require
from compressor.engines.prove_export import prove_export
from compressor.errors import CompressorError, ErrorCode, MismatchError, SiteRefusedError
from compressor.export import export_reference
from compressor.generation.engine_model import EngineModel
from compressor.generation.export import export_generation
from compressor.generation.export_module import prove_export as prove_cached
from compressor.generation.prove import generation_cases, prove_steps
from compressor.generation.steps import TARGET, run_in_steps
from compressor.model_folder import ModelFolder, example_inputs
from compressor.model_folder.input_rules import VIDEOS
from compressor.model_folder.processor import IMAGES
from compressor.model_folder.text_limits import token_limit
from compressor.models.block_sparse import attend_by_masks
from compressor.results import ProofStage
from compressor.silence_libraries import one_line
from compressor.targets import target
from compressor.targets.base import TOLERANCE
from compressor.targets.caches import Sessions
from compressor.targets.onnxruntime.sessions import OrtSessions
from compressor.targets.relative_error import ReferenceOutputs
from compressor.units import PrunableGroup, find_groups, gated, keep_all
from compressor.units.dependencies import kept_outputs
from graph_passes import GraphPassError, Plan, load, save, shrink
from graph_passes.plan import GroupPlan
from graph_passes.shrink import shrink_parts

SIZES = ((2, 8), (3, 13), (HEADS, HEADS), (HEAD_DIM, HEAD_DIM), (2, 90))
"""Batch sizes and lengths at which the outputs are compared: as many rows and positions as there are heads, and as each
of them is wide; a length is larger than a chunk of linear attention."""

COMPARED = (
    "rows of 4 to 90 tokens and of up to twice the length at which a family computes attention in another way, padding"
    " on both sides, each on a fresh copy of the model"
)
"""Inputs on which the outputs are compared."""

COMPARED_IN_STEPS = (
    "the inputs on which a run proves its graphs, in steps and with padding on the left of a decoder alone; then tokens"
    " of a greedy search and of two beams"
)
"""Inputs on which graphs with caches are compared."""

_NEW_TOKENS = 6
"""Number of tokens that are generated for each text."""

_TOKENS = ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids")
"""Inputs with a number for each token, which padding on the left moves."""


class Outcome(StrEnum):
    """What became of a family."""

    HOLDS = "holds"
    """Every group was cut, and the shrunk graph computes what the gated model computes."""
    IN_PART = "holds in part"
    """The same, but some groups were refused by name."""
    REFUSED = "refused"
    """An error of the project says why nothing can be cut."""
    NOT_EXPORTABLE = "not exportable"
    """The exporter of transformers fails, or its graph of the dense model runs nowhere or computes something else."""
    NO_ATTENTION = "no attention"
    OFF_INTERFACE = "off the interface"
    """The model has attention, neither the interface nor a projection shows its heads, and it has no neurons."""
    NOT_BUILT = "not built"
    """The tiny model or its inputs could not be made by the general rules."""
    FAILED = "FAILED"
    """A traceback, an abort, a wrong number that a run misses, or a shrunk graph that does not run."""


@dataclasses.dataclass
class Row:
    """The row of a family.

    Attributes:
        family: model type.
        outcome: what became of it.
        reason: why, on one line; empty where everything holds.
        model: name of the model class.
        heads: number of attention sites.
        neurons: number of groups of neurons.
        cut: number of groups that lost units.
        parameters: parameters of the graph before and after.
        error: largest relative error on ONNX Runtime.
        openvino: the same on OpenVINO, or why there is none.
        where: the last lines of a traceback.
        seconds: wall-clock time.
        form: which class of the family was taken.
        swept: day of the sweep, `2026-11-29`.
        compared: inputs on which the outputs were compared.
    """

    family: str
    outcome: Outcome = Outcome.FAILED
    reason: str = ""
    model: str = ""
    heads: int = 0
    neurons: int = 0
    cut: int = 0
    parameters: tuple[int, int] = (0, 0)
    error: float | None = None
    openvino: float | str | None = None
    where: str = ""
    seconds: float = 0.0
    form: Form = Form.USUAL
    swept: str = ""
    compared: str = ""


class _EndError(Exception):
    """The end of a family before the law could be checked."""

    def __init__(self, outcome: Outcome, reason: str) -> None:
        super().__init__(reason)
        self.outcome, self.reason = outcome, reason


@contextmanager
def _ends_as(outcome: Outcome, prefix: str = "") -> Iterator[None]:
    """Any error inside is the end of the family, with this outcome."""
    try:
        yield
    except Exception as error:
        raise _EndError(outcome, f"{prefix}{type(error).__name__}: {one_line(error)}") from error


def sweep_family(family: str, on_stage: Callable[[Row], None], seed: int = 0, form: Form = Form.USUAL) -> Row:
    """Check the law for a family; every exception is an outcome.

    Args:
        family: the model type.
        on_stage: called when a stage begins, with the row that counts if the process ends within the stage.
        seed: seed of the weights and of the plan.
        form: which class of the family is taken.
    """
    row, start = Row(family, form=form), time.monotonic()
    files = ""
    try:
        with tempfile.TemporaryDirectory() as files:
            check = _check_caches if form is Form.GENERATES else _check
            check(row, Path(files), seed, on_stage)
    except _EndError as end:
        row.outcome, row.reason = end.outcome, end.reason
        if end.__cause__ is not None:
            row.where = _where(end.__cause__)
    except (CompressorError, GraphPassError) as error:
        row.outcome = Outcome.NOT_EXPORTABLE if error.code is ErrorCode.EXPORT_FAILED else Outcome.REFUSED
        row.reason = one_line(error)
    except Exception as error:
        row.outcome, row.reason, row.where = Outcome.FAILED, f"{type(error).__name__}: {one_line(error)}", _where(error)
    row.reason = row.reason.replace(f"{files}/", "")
    row.seconds = round(time.monotonic() - start, 1)
    return row


def _where(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)[-3:]
    return " < ".join(f"{Path(frame.filename).name}:{frame.lineno} {frame.name}" for frame in reversed(frames))


def _check(row: Row, files: Path, seed: int, on_stage: Callable[[Row], None]) -> None:
    """Fill in the row of a family, stage by stage."""

    def begin(outcome: Outcome, stage: str) -> None:
        on_stage(dataclasses.replace(row, outcome=outcome, reason=stage))

    row.compared = COMPARED
    begin(Outcome.NOT_BUILT, "building the model")
    fresh, folder, inputs = _build(row)
    model = fresh()
    attend_by_masks(model)  # a run exports this form; proofs compare with the model as it is
    begin(Outcome.FAILED, "finding units")
    groups = _find_groups(model, inputs[0])
    row.heads = sum(group.type == "heads" for group in groups)
    row.neurons = len(groups) - row.heads
    plan = random_plan(groups, np.random.default_rng(seed))
    cases = [_case(batch) for batch in inputs]
    begin(Outcome.FAILED, "gating")
    require_gates(fresh, keep_all(groups), cases)
    begin(Outcome.NOT_EXPORTABLE, "exporting")
    reference = files / "reference.onnx"
    _export(model, plan, inputs[0], reference)
    with _ends_as(Outcome.NOT_EXPORTABLE, "the exported graph: "):
        _prove(fresh(), plan, reference, _cases_of_a_run(folder))
    with _ends_as(Outcome.FAILED, "the proofs of a run hold, but the exported graph: "):
        _prove(fresh(), plan, reference, cases)
    begin(Outcome.FAILED, "shrinking")
    _shrink(row, reference, plan, cases, files / "shrunk.onnx")
    row.openvino = _on_openvino(files / "shrunk.onnx", cases)


def _check_caches(row: Row, files: Path, seed: int, on_stage: Callable[[Row], None]) -> None:
    """Fill in the row of a family that generates: graphs with caches, in steps, and the tokens that they generate."""

    def begin(outcome: Outcome, stage: str) -> None:
        on_stage(dataclasses.replace(row, outcome=outcome, reason=stage))

    row.compared = COMPARED_IN_STEPS
    begin(Outcome.NOT_BUILT, "building the model")
    fresh, folder, inputs = _build(row)
    model = fresh()
    attend_by_masks(model)
    if not model.can_generate():
        raise _EndError(Outcome.REFUSED, f"{row.model} generates no text")
    begin(Outcome.FAILED, "finding units")
    groups = _find_groups(model, inputs[0])
    row.heads = sum(group.type == "heads" for group in groups)
    row.neurons = len(groups) - row.heads
    plan = random_plan(groups, np.random.default_rng(seed))
    cases = generation_cases(_cases_of_a_run(folder))
    begin(Outcome.NOT_EXPORTABLE, "exporting with caches")
    exported, cut = files / "exported", files / "cut"
    exported.mkdir()
    cut.mkdir()
    names = export_generation(model, plan, exported)
    try:
        prove_cached(folder, plan, cases, exported, "eager", "dense")
    except MismatchError as error:  # a refusal stays one
        raise _EndError(Outcome.NOT_EXPORTABLE, f"the exported graphs: {one_line(error)}") from error
    sessions = OrtSessions(exported, optimized=False)
    begin(Outcome.FAILED, "shrinking")
    parts = shrink_parts({name: load(exported / name) for name in names}, plan)
    for name, part in parts.items():
        if part.model.graph.outputs:
            save(part.model, cut / name)
    row.cut = len({removed.group for part in parts.values() for removed in part.removed})
    row.parameters = tuple(sum(part.parameters[side] for part in parts.values()) for side in (0, 1))  # type: ignore[assignment]
    obstacles = [part.obstacle for part in parts.values() if part.obstacle]
    if not row.cut:
        raise _EndError(Outcome.REFUSED, "; ".join(obstacles))
    expected = [run_in_steps(sessions, case.feeds) for case in cases]
    sessions = OrtSessions(cut, optimized=False)
    with _ends_as(Outcome.FAILED, "the shrunk graphs: "):
        row.error = prove_steps(ProofStage.CACHED_SHRINK, "compressed", cases, expected, sessions).error
    begin(Outcome.FAILED, "generating")
    note = _compare_tokens(fresh(), plan, sessions, cases[1])
    row.outcome = Outcome.IN_PART if obstacles else Outcome.HOLDS
    row.reason = "; ".join(filter(None, [*obstacles, note]))


def _compare_tokens(model: PreTrainedModel, plan: Plan, sessions: Sessions, case: Case) -> str:
    """The end of a family whose graphs generate other tokens than the gated model.

    Returns:
        What is to be known of a model that generates other tokens with its own cache than by whole texts; empty: it
        generates the same.

    Raises:
        _EndError: the graphs generate other tokens than the model by whole texts, or the model generates none.
    """
    engine: Any = EngineModel.of(type(model), model.config, sessions)
    inputs = {name: torch.from_numpy(array) for name, array in case.feeds.items() if name != TARGET}
    start = 0 if model.config.is_encoder_decoder else None
    note = ""
    for beams in (1, 2):
        settings = GenerationConfig(
            num_beams=beams, do_sample=False, max_new_tokens=_NEW_TOKENS, pad_token_id=0, decoder_start_token_id=start
        )
        tokens = engine.generate(**inputs, generation_config=settings)
        for use_cache in (True, False):
            settings.use_cache = use_cache
            with _ends_as(Outcome.NOT_BUILT, "generate: "), gated(model, plan, attention="eager") as generator:
                expected = generator.generate(**inputs, generation_config=settings)  # type: ignore[operator]
            if torch.equal(tokens, expected):
                break
            note = "the model generates other tokens with its own cache than by whole texts, as the graphs do"
        else:
            raise _EndError(Outcome.FAILED, f"other tokens with {beams} beams than those of the gated model")
    return note


def _cases_of_a_run(folder: ModelFolder) -> tuple[Case, ...]:
    """The inputs on which a run without options proves its graphs."""
    return make_cases(
        lambda *size: example_inputs(folder, *size), maximum_length=token_limit(folder.model), shapes=[(1, 128)]
    )


def _prove(model: PreTrainedModel, plan: Plan, graph: Path, cases: Sequence[Case]) -> None:
    require(prove_export(model, plan, graph, cases, "compressed", attention="eager"))


def _build(row: Row) -> tuple[Callable[[], PreTrainedModel], ModelFolder, list[dict[str, Tensor]]]:
    """A function that returns the tiny model, on which nothing has run, a folder of one, and its inputs of all sizes.

    A model may change itself on its first input, so that each comparison begins with another copy.
    """
    with _ends_as(Outcome.NOT_BUILT):
        pristine = tiny_model(row.family, form=row.form)
    row.model = type(pristine).__name__

    def fresh() -> PreTrainedModel:
        return copy.deepcopy(pristine)

    task = task_of(row.family, row.form)
    folder = ModelFolder(Path(row.family), fresh(), None, pristine.config, "", task, row.family)
    limit = token_limit(pristine)
    sizes = dict.fromkeys(
        (batch, length if limit is None else min(length, limit))
        for batch, length in (*SIZES, *_around_switches(pristine))
    )
    inputs = [example_inputs(folder, batch, length) for batch, length in sizes]
    inputs += [moved for batch in inputs if (moved := padded_left(batch)) is not None]
    with _ends_as(Outcome.NOT_BUILT, "forward: "), torch.no_grad():
        for batch in inputs:
            fresh()(**batch)
    return fresh, folder, inputs


def _around_switches(model: PreTrainedModel) -> Iterator[tuple[int, int]]:
    """Batch sizes and lengths on both sides of each length at which the model computes something else."""
    for length in switch_lengths(model.config):
        if _SHORTEST <= length <= _LONGEST:
            yield from ((2, length), (3, length + 1), (2, 2 * length))


_SHORTEST, _LONGEST = 5, 256
"""Rows of fewer tokens are among `SIZES`; longer ones take too much time."""


def padded_left(inputs: Mapping[str, Tensor]) -> dict[str, Tensor] | None:
    """The same rows with their padding on the left; None where no row is padded on the right."""
    mask = inputs.get("attention_mask")
    if mask is None or mask.dim() != 2 or bool(mask[:, -1].all()):
        return None
    lengths = mask.shape[1] - mask.flip(1).argmax(1)
    moved = dict(inputs)
    for name in _TOKENS:
        if name in inputs and inputs[name].shape == mask.shape:
            rows = zip(inputs[name], lengths.tolist(), strict=True)
            moved[name] = torch.stack([row.roll(len(row) - length) for row, length in rows])
    return moved


def require_gates(fresh: Callable[[], PreTrainedModel], plan: Plan, cases: Sequence[Case]) -> None:
    """The end of a family whose model with gates of one computes something else than the model.

    A query that sees no key has no defined output, and SDPA and eager attention differ there: with padding on the left,
    the first token of a row in a model of windows. An output that depends on the tokens of the padding is compared with
    the model with eager attention instead, which the gates have as well.

    Args:
        fresh: returns the model, on which nothing has run.
        plan: a plan with gates of one.
        cases: the inputs.
    """
    for case in cases:
        inputs = {name: torch.from_numpy(array) for name, array in case.feeds.items()}
        expected = _outputs(fresh(), inputs)
        with gated(fresh(), plan, attention="eager") as model:
            outputs = _outputs(model, inputs)
        for name in kept_outputs(fresh(), expected):  # caches have padding that nothing reads
            error = _error(expected, outputs, name, case)
            if not error <= TOLERANCE["fp32"] and _reads_padding(fresh, case, expected, name):
                eager = fresh()
                eager.set_attn_implementation("eager")
                error = _error(_outputs(eager, inputs), outputs, name, case)
            if not error <= TOLERANCE["fp32"]:
                raise _EndError(Outcome.FAILED, f"gates of one change {name} of {case.name} by {error:.1e}")


def _error(expected: Mapping[str, np.ndarray], outputs: Mapping[str, np.ndarray], name: str, case: Case) -> float:
    return ReferenceOutputs([expected], [case.feeds]).error(0, name, outputs[name])


def _reads_padding(
    fresh: Callable[[], PreTrainedModel], case: Case, expected: Mapping[str, np.ndarray], name: str
) -> bool:
    """Whether other tokens in place of the padding change an output."""
    ids, mask = case.feeds.get("input_ids"), case.feeds.get("attention_mask")
    if ids is None or mask is None or ids.shape != mask.shape or mask.all():
        return False
    feeds = {**case.feeds, "input_ids": np.where(mask == 0, (ids + 1) % VOCABULARY, ids)}
    outputs = _outputs(fresh(), {name: torch.from_numpy(array) for name, array in feeds.items()})
    return not _error(expected, outputs, name, case) <= TOLERANCE["fp32"]


def _outputs(model: PreTrainedModel, inputs: Mapping[str, Tensor]) -> dict[str, np.ndarray]:
    with torch.no_grad():
        return {name: value.numpy() for name, value in get_leaf_tensors(model(**inputs)).items()}


def _export(model: PreTrainedModel, plan: Plan, inputs: Mapping[str, Tensor], graph: Path) -> None:
    """Export the gated model; the end of the family if the exporter fails."""
    fixed = [name for name in (IMAGES, VIDEOS) if name in inputs]  # processors make images of one size
    try:
        export_reference(model, plan, inputs, graph, fixed=fixed)
    except SiteRefusedError:
        raise
    except CompressorError as error:
        raise _EndError(Outcome.NOT_EXPORTABLE, one_line(error)) from error


def _shrink(row: Row, reference: Path, plan: Plan, cases: Sequence[Case], path: Path) -> None:
    """Shrink the exported graph, and compare both."""
    shrunk = shrink(load(reference), plan)
    save(shrunk.model, path)
    row.cut, row.parameters = len(shrunk.removed), shrunk.parameters
    if not shrunk.removed:
        raise _EndError(Outcome.REFUSED, shrunk.obstacle or "")
    with _ends_as(Outcome.FAILED, "the shrunk graph: "):
        row.error = require(prove_shrunk(reference, path, cases, "compressed")).error
    if shrunk.parameters[1] >= shrunk.parameters[0]:
        raise _EndError(Outcome.FAILED, f"{row.cut} groups were cut and no parameter is gone")
    row.outcome = Outcome.IN_PART if shrunk.refused else Outcome.HOLDS
    shared = [f"{min(norm.sites)}: {norm.op} reads all units" for norm in shrunk.shared]
    row.reason = "; ".join([*filter(None, [shrunk.obstacle]), *shared[:1]])


def _find_groups(model: PreTrainedModel, inputs: Mapping[str, Tensor]) -> list[PrunableGroup]:
    """The groups of a model; the end of the family if it has none."""
    try:
        return find_groups(model, inputs, attention="eager")
    except SiteRefusedError as error:
        if "site" in error.details:
            raise
        has_attention = any("attention" in type(module).__name__.lower() for module in model.modules())
        raise _EndError(Outcome.OFF_INTERFACE if has_attention else Outcome.NO_ATTENTION, "") from None


def _case(inputs: Mapping[str, Tensor]) -> Case:
    feeds = {name: tensor.numpy() for name, tensor in inputs.items()}
    return Case(feeds, case_name(feeds))


def random_plan(groups: Sequence[PrunableGroup], rng: np.random.Generator) -> Plan:
    """A plan that keeps a random half of the units of every group, at random scales."""
    plans: list[GroupPlan] = []
    for group in groups:
        kept = sorted(int(unit) for unit in rng.choice(group.units, group.units // 2, replace=False))
        scale = tuple(float(value) for value in rng.uniform(0.5, 1.5, len(kept)).astype(np.float32))
        plans.append(dataclasses.replace(group.plan(range(group.units)), kept=tuple(kept), scale=scale))
    return Plan(groups=tuple(plans))


def _on_openvino(graph: Path, cases: Sequence[Case]) -> float | str:
    """The relative error of OpenVINO, or why it does not run the shrunk graph."""
    try:
        engine = target("openvino").build(graph, graph.with_suffix(".xml"), threads=1)
        proof = prove_engine(graph, engine, cases, "compressed")
    except Exception as error:
        return one_line(str(error).replace(f"{graph.parent}/", ""), 120)
    return proof.error if proof.error <= TOLERANCE["fp32"] else f"error {proof.error:.1e}"
