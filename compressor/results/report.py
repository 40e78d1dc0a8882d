"""Everything that a run selected, measured and refused, as one object: `report.json`."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, Field, model_validator

from compressor.results.answers import AnsweredRow
from compressor.results.budgets import BudgetRow, CostShare
from compressor.results.certificates import CertifiedLoss
from compressor.results.embeddings import EmbeddingAgreement
from compressor.results.engines import Candidate, EngineFacts
from compressor.results.metrics import CurvePoint, Score
from compressor.results.notes import AnyNote, NoteCode
from compressor.results.proofs import Proof
from compressor.results.rows import STRICT, Row, renamed_keys
from compressor.results.times import Speed, Throughput
from graph_passes import Kind, Plan
from graph_passes.plan import current_kind


class Refusal(Row):
    """Sites whose heads cannot be removed (`what`), and the operator that prevents it (`why`)."""

    what: str
    why: str


class SiteBlocks(Row):
    """The blocks of one attention site.

    `share` is the share of the blocks of its kept heads that the mask keeps over the longest row; for causal attention
    future blocks are not counted. Blocks that the model's own window hides are not kept. `form` is the form in which
    the engine computes the attention, `why` the reason.
    `unprojected` is the number of key blocks that no query attends to, whose keys and values are not projected.
    `milliseconds` holds the time of each form of the attention alone at the first batch size, by length and form, where
    it was measured.
    """

    site: str
    kind: Annotated[Kind, BeforeValidator(current_kind)]
    block: int
    share: float
    form: Literal["whole", "masked", "block-sparse"]
    why: str
    unprojected: int = 0
    milliseconds: dict[int, dict[str, float]] = Field(default_factory=dict)


class TaskCode(Row):
    """The code of a custom task: `path` is `module:class`, `source` the hash `sha256:...` of its files."""

    path: str
    source: str


class DropStatus(StrEnum):
    """Whether the metric fell by more than `--max-drop` allows."""

    PASSED = "passed"
    FAILED = "failed"
    NOT_CHECKED = "not checked"


class MissingTarget(Row):
    """The requested target, which this machine lacks: ONNX Runtime on the CPU was measured instead.

    `reason` is what the machine lacks; `command` builds the engine on a machine that has it.
    """

    target: str
    reason: str
    command: str = ""


class Report(BaseModel):
    """Everything that a run selected, measured and refused."""

    model_config = STRICT

    version: Literal[1] = 1
    verdict: str
    """One sentence: the gain in speed and the change of the metric, or that nothing was gained."""
    model: str
    """Name of the model folder."""
    family: str
    """transformers' model type, e.g. `bert`."""
    task: str | None
    task_code: TaskCode | None = None
    """Where the code of the task is; None for a task of this package."""
    plan: Plan
    notes: tuple[AnyNote, ...] = ()
    """Facts for the reader, e.g. that test rows were set aside from the evaluation rows."""
    curves: tuple[CurvePoint, ...] = ()
    scores: tuple[Score, ...] = ()
    proofs: tuple[Proof, ...] = ()
    speeds: tuple[Speed, ...] = ()
    speeds_over_rewritten: tuple[Speed, ...] = ()
    """Times with the rewritten dense engine in place of the dense one: what was gained beyond the rewrites.
    Empty where nothing was rewritten, or nothing else was done."""
    throughputs: tuple[Throughput, ...] = ()
    """Rows per second with one caller and with several; empty for engines on a GPU, and where there is one core."""
    dense: EngineFacts
    compressed: EngineFacts
    refused: tuple[Refusal, ...] = ()
    blocks: tuple[SiteBlocks, ...] = ()
    """Sites from which blocks were to be dropped; empty where none were."""
    candidates: tuple[Candidate, ...] = ()
    """The engines that were tried; empty where the recipe names one."""
    budget: tuple[BudgetRow, ...] = ()
    """The budgets that units were removed to meet; empty without one."""
    costs: tuple[CostShare, ...] = ()
    """Where the cost goes, before and after; empty without a budget."""
    embeddings: EmbeddingAgreement | None = None
    """How far the embeddings are those of the dense engine; None for other tasks than sentence similarity."""
    answers: tuple[AnsweredRow, ...] = ()
    """The test rows whose score changed most, with the answers of both engines, changed answers first; for embeddings
    the rows with the lowest cosine. Empty without rows, and where answers have no text."""
    certificate: CertifiedLoss | None = None
    """The loss that is certified; None where no certificate was requested."""
    drop_status: DropStatus = DropStatus.NOT_CHECKED
    target: str
    """The target that was measured."""
    missing: MissingTarget | None = None
    """The requested target, if `target` was measured instead of it."""
    graphs: dict[str, str] = Field(default_factory=dict)
    """Hashes of the proven graphs in the folder, with their external data, by file name."""
    precision: str
    delivered: str = ""
    """The engine that the run itself delivered, with its form: `ort int8 portable`; builds leave it."""
    session: dict[str, Any] = Field(default_factory=dict)
    """Runtime, provider, session options."""
    machine: dict[str, str] = Field(default_factory=dict)
    """Processor, cores, memory, versions of the libraries."""
    recipe: dict[str, Any] = Field(default_factory=dict)
    """Every field of the recipe by name, without sections."""
    command: str = ""
    """The command line that reproduces the run."""
    seconds: dict[str, float] = Field(default_factory=dict)
    """Wall time of each stage."""

    @model_validator(mode="before")
    @classmethod
    def _current_keys(cls, fields: Any) -> Any:
        """Rename the key `gate` of version 0.1 to `drop_status`, and divide its text `missing` into fields."""
        if not isinstance(fields, dict):
            return fields
        fields = renamed_keys(fields, {"gate": "drop_status"})
        if fields.get("drop_status") == "not asked":
            fields["drop_status"] = DropStatus.NOT_CHECKED
        if isinstance(missing := fields.get("missing"), str):
            target, _, text = missing.partition(": ")
            reason, _, command = text.partition("; on the machine to deploy on, say ")
            fields["missing"] = {"target": target, "reason": reason, "command": command}
            fields["notes"] = [
                {"text": note, "code": NoteCode.TARGET_MISSING}
                if isinstance(note, str) and note.startswith(f"{target}: ")
                else note
                for note in fields.get("notes", ())
            ]
        return fields
