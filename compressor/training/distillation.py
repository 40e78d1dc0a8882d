"""The loss of distillation: a student learns the answers and the hidden states of a teacher, without labels."""

from __future__ import annotations

import copy
import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
from datasets import Dataset
from torch import Tensor, nn
from torch.nn.functional import normalize
from transformers import PreTrainedModel

from compressor.answers import EMBEDDING, AnswerKind, several_answers
from compressor.config.values import MixedPrecision
from compressor.errors import ErrorCode, InputError, UsageError
from compressor.model_folder import ModelFolder, fingerprint
from compressor.models.forwards import decoder_mask, forward_arguments, scored_logits_only, tensors_of
from compressor.models.pooled_encoder import SentenceEncoder
from compressor.store import Store, digest, versioned
from compressor.tasks import Data, Task, batches
from compressor.tasks.scoring import BATCH_SIZE, draw_rows
from compressor.tasks.sentence_similarity import pair_embeddings
from compressor.training.divergence import are_numbers, divergence, variances
from compressor.training.precision import autocast, training_autocast
from compressor.training.teacher_outputs import KeptOutputs, Outputs, row_key
from compressor.units.find import evaluation_mode

_DECODER_STATES = "decoder_hidden_states"
_HIDDEN_STATES = ("hidden_states", "encoder_hidden_states", _DECODER_STATES)
"""Outputs with one tensor for each layer, the embeddings first."""
_DOCUMENTS = 1024
"""Maximum number of documents that texts are ranked against."""


@dataclass(frozen=True)
class Distillation:
    """The loss of a student, from the outputs of its teacher on the same rows.

    The loss of a batch is T^2 KL(teacher / T || student / T), the mean over rows (Hinton et al. 2015, "Distilling the
    knowledge in a neural network", section 2), plus the error of the hidden states: for each layer the squared
    difference over the squared norm of the teacher's, over all tokens that are not padding, averaged over layers. For a
    regression the first part is the squared difference over the variance of the teacher's outputs, for embeddings one
    minus their cosine, and for a model that assigns several classes to a row the divergence of each decision.

    Student and teacher have the same layers and widths, so layers correspond one to one. Dropout is off.

    Attributes:
        teacher: the whole model, in evaluation mode; it is not changed.
        outputs: names of the model's outputs that the task scores.
        temperature: T.
        hidden_weight: weight of the error of the hidden states; models without hidden states have none.
        precision: precision of the matmuls of teacher and student in training steps; evaluations are in float32.
        kept: file of the teacher's outputs; None: the teacher runs in every step.
        variance: variance of the teacher's outputs in a regression, `[numbers]`, by which squared differences are
            divided; None: the variance in each batch.

    Raises:
        InputError: an attribute is out of its range; on a call, student and teacher differ in outputs or layers.
    """

    teacher: PreTrainedModel
    outputs: tuple[str, ...]
    temperature: float = 2.0
    hidden_weight: float = 1.0
    precision: MixedPrecision = "no"
    kept: KeptOutputs | None = None
    variance: Tensor | None = None
    _evaluated: dict[bytes, Outputs] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        is_valid = {
            "outputs": not isinstance(self.outputs, str) and len(self.outputs) > 0,
            "temperature": 0 < self.temperature < math.inf,
            "hidden_weight": 0 <= self.hidden_weight < math.inf,
            "precision": self.precision in get_args(MixedPrecision),
        }
        for name in (name for name, valid in is_valid.items() if not valid):
            raise InputError(
                f"{name} {getattr(self, name)!r}: out of range; give names of outputs, a temperature above 0, a weight"
                " of at least 0, the precision no or bf16",
                code=ErrorCode.INVALID_VALUE,
                field=name,
                value=getattr(self, name),
            )

    @classmethod
    def of(cls, model: PreTrainedModel, outputs: tuple[str, ...], **options: Any) -> Distillation:
        """Distillation from a copy of a model, so that the model itself may change afterwards.

        Args:
            model: the whole model.
            outputs: names of its outputs that the task scores.
            options: further attributes, e.g. `temperature`.
        """
        return cls(copy.deepcopy(model).eval().requires_grad_(False), outputs, **options)

    @property
    def settings(self) -> list[Any]:
        """The settings that the loss depends on; checkpoints of another teacher or loss are not resumed."""
        loss = [list(self.outputs), self.temperature, self.hidden_weight, self.precision]
        return [self._teacher_key, *loss]

    @property
    def _kind(self) -> AnswerKind | None:
        """What the logits of the teacher are, where a row has several answers."""
        return several_answers(self.teacher.config)

    @property
    def _teacher_key(self) -> str:
        """Hash of everything that the teacher's outputs depend on."""
        teacher, key = self.teacher, hashlib.sha256(fingerprint(self.teacher).encode())
        key.update((self._kind or "").encode())
        key.update(" ".join(getattr(teacher, "settings", ())).encode())
        if isinstance(teacher, SentenceEncoder) and teacher.documents is not None:
            key.update(teacher.documents.detach().float().cpu().contiguous().numpy().tobytes())
        return key.hexdigest()

    def keep_outputs(self, folder: Path, rows: int, tokens: int) -> Distillation:
        """A copy of this distillation that computes the teacher's outputs once for each row and keeps them in a file.

        Args:
            folder: folder of the file; runs with the same teacher may share it.
            tokens: number of tokens in the training rows.
        """
        inputs = [self._teacher_key, list(self.outputs), self.hidden_weight > 0, self.precision]
        store = Store(folder / digest(inputs)[:16], {"teacher": inputs})
        return replace(self, kept=KeptOutputs(self.teach, store, rows, tokens))

    def loss(self, student: nn.Module, batch: Mapping[str, Tensor], target: Outputs | None = None) -> Tensor:
        """The loss of a batch `[batch, ...]`, a scalar.

        Args:
            student: the model that is trained, possibly in a distributed wrapper.
            batch: its inputs, with or without labels, which are not used.
            target: the outputs of the teacher; None: they are read from the file that keeps them, else computed.
        """
        if target is None:
            target = self.teach(batch) if self.kept is None else self.kept(batch)
        # Dropout would hide the small errors that are left.
        with evaluation_mode(student), training_autocast(self.teacher.device, self.precision, batch):
            output = self._outputs(student, batch)
        return self._loss(target, output, batch)

    def require_defined_teacher(self, batch: Mapping[str, Tensor]) -> None:
        """Check that the loss of a batch is a number for a student that equals its teacher.

        Args:
            batch: its inputs `[batch, ...]`.

        Raises:
            InputError: outputs of the teacher that are compared are NaN or infinite.
        """
        target = self.teach(batch)
        if not torch.isfinite(self._loss(target, target, batch)):
            name = " ".join(filter(None, ("the teacher", self.teacher.name_or_path)))
            raise InputError(
                f"{name}: its outputs on some rows are NaN or infinite, so no model can learn them; check its"
                " weights, or use a checkpoint from before its training diverged",
                code=ErrorCode.NOT_FINITE,
                field="teacher",
                path=self.teacher.name_or_path,
            )

    def divergences(self, outputs: Mapping[str, Tensor], batch: Mapping[str, Tensor]) -> Tensor:
        """KL(teacher || student) of each row, or the relative squared error of a regression, `[rows]`, float64.

        Args:
            outputs: the scored outputs of the student, by name.
            batch: its inputs `[batch, ...]`.

        Raises:
            InputError: outputs of the teacher are NaN or infinite.
        """
        with torch.no_grad():
            target = self._evaluation_target(batch)
            divergences = divergence(target, outputs, self.outputs, batch, self.variance, kind=self._kind)
        if not torch.isfinite(divergences).all():
            self.require_defined_teacher(batch)
        return divergences

    def with_variance_of(self, task: Task, rows: Dataset) -> Distillation:
        """A copy whose divergences of a regression are divided by the variance of the teacher's outputs on all rows.

        Args:
            rows: encoded rows with labels.
        """
        if len(self.outputs) > 1:
            return self
        outputs: list[Tensor] = []
        with torch.no_grad():
            for _, batch in batches(task, rows):
                target = self._evaluation_target(tensors_of(task.model_inputs(batch)))[self.outputs[0]]
                if not are_numbers(target, self.outputs[0], self._kind):
                    return self
                outputs.append(target)
        return replace(self, variance=variances(torch.cat(outputs)))

    def mean_divergence(
        self,
        model: PreTrainedModel,
        task: Task,
        rows: Dataset,
        batch_size: int = BATCH_SIZE,
    ) -> float:
        """The mean of `divergences` of a model over the examples of encoded rows.

        Args:
            model: the student or the teacher; it is in evaluation mode afterwards.
            rows: encoded rows with labels.
        """
        examples = []
        model.eval()
        for _, batch in batches(task, rows, batch_size):
            inputs = tensors_of(task.model_inputs(batch))
            with torch.no_grad():
                outputs = model(**forward_arguments(model, inputs))
            if model is self.teacher:
                self._keep_evaluated(_input_keys(forward_arguments(model, inputs)), outputs)
            examples.append(task.example_means(self.divergences(outputs, inputs).cpu().numpy(), batch))
        return float(torch.from_numpy(np.concatenate(examples)).mean())

    def _evaluation_target(self, batch: Mapping[str, Tensor]) -> Outputs:
        """The scored outputs of the teacher; small ones are kept, since every evaluation reads the same rows."""
        arguments = forward_arguments(self.teacher, batch)
        keys = _input_keys(arguments)
        if not self._evaluated.keys() >= set(keys):
            with scored_logits_only(self.teacher, batch):
                return self._keep_evaluated(keys, self.teacher(**arguments))
        return {name: torch.stack([self._evaluated[key][name] for key in keys]) for name in self.outputs}

    def _keep_evaluated(self, keys: list[bytes], output: Mapping[str, Any]) -> Outputs:
        """The scored outputs of the teacher for rows with these keys; they are kept if they are small."""
        target = {name: output[name] for name in self.outputs}
        if all(value.dim() <= 2 for value in target.values()):
            for row, key in enumerate(keys):
                self._evaluated.setdefault(key, {name: value[row] for name, value in target.items()})
        return target

    @versioned(1)
    def teach(self, batch: Mapping[str, Tensor]) -> Outputs:
        with torch.no_grad(), autocast(self.teacher.device, self.precision):
            return self._outputs(self.teacher, batch)

    def _outputs(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Outputs:
        """The scored outputs of a model, and its hidden states as `hidden_states.0` and so on."""
        compares_hidden = self.hidden_weight > 0
        with scored_logits_only(model, batch):
            output = model(**forward_arguments(self.teacher, batch), output_hidden_states=compares_hidden)
        if missing := [name for name in self.outputs if name not in output]:
            text = f"outputs: the model has no output {missing[0]}; name some of {', '.join(output)}"
            raise InputError(text, code=ErrorCode.UNKNOWN_NAME, field="outputs", value=missing[0])
        outputs = {name: output[name] for name in self.outputs}
        if compares_hidden:
            for kind in _HIDDEN_STATES:
                layers = (output.get(kind) or ())[1:]
                outputs |= {f"{kind}.{number}": hidden for number, hidden in enumerate(layers)}
        return outputs

    def _loss(self, target: Outputs, output: Outputs, batch: Mapping[str, Tensor]) -> Tensor:
        # The variance of a batch of few rows would weigh batches by chance.
        options: dict[str, Any] = {"temperature": self.temperature, "dtype": torch.float32, "kind": self._kind}
        divergences = divergence(target, output, self.outputs, batch, self.variance, **options)
        return divergences.mean() + self.hidden_weight * _hidden_error(target, output, batch)


def _input_keys(arguments: Mapping[str, Any]) -> list[bytes]:
    """One key for each row of the inputs of a model."""
    inputs = {name: value for name, value in arguments.items() if isinstance(value, Tensor)}
    return [row_key(inputs, row) for row in range(len(next(iter(inputs.values()))))]


def _hidden_error(target: Outputs, output: Outputs, batch: Mapping[str, Tensor]) -> Tensor:
    """The relative squared error of the hidden states, averaged over layers; zero where there are none."""
    layers, taught = (sorted(name for name in part if "." in name) for part in (output, target))
    if layers != taught:
        raise InputError(
            f"the student has {len(layers)} layers of hidden states and the teacher {len(taught)}; give equally deep"
            " models, or hidden_weight=0",
            code=ErrorCode.INVALID_VALUE,
            field="hidden_weight",
        )
    errors = []
    for name, dense in target.items():
        kind, _, layer = name.partition(".")
        if layer:
            mask = decoder_mask(batch) if kind == _DECODER_STATES else batch.get("attention_mask")
            weight = _position_weights(dense, mask)
            error = (dense - output[name]).float().square() * weight
            errors.append(error.sum() / (dense.float().square() * weight).sum().clamp(min=1e-12))
    if not errors:
        return torch.zeros((), device=next(iter(output.values())).device)
    return torch.stack(errors).mean()


def _position_weights(hidden: Tensor, mask: Tensor | None) -> Tensor:
    """One for each position that is not padding, else zero, to be multiplied with `[batch, position, width]`."""
    if mask is None or mask.shape != hidden.shape[: mask.dim()]:
        return torch.ones((), device=hidden.device)
    return mask.to(hidden.device, torch.float32).reshape(*mask.shape, *(1,) * (hidden.dim() - mask.dim()))


def rank_documents(folder: ModelFolder, data: Data, seed: int) -> None:
    """Give an encoder, as it is now, documents of the training rows against whose embeddings it ranks texts.

    Raises:
        UsageError: the model is not a sentence encoder, or there are no training rows.
    """
    model = folder.network
    if not isinstance(model, SentenceEncoder) or not len(data.train):
        problem = "no training rows (--data)" if isinstance(model, SentenceEncoder) else "the model embeds no texts"
        raise UsageError(
            f"--match-dense: {folder.path}: {problem}; omit --match-dense",
            code=ErrorCode.CONTRADICTION,
            field="match_dense",
            task=folder.task,
        )
    embeddings = []
    for _, batch in batches(data.task, draw_rows(data.train, _DOCUMENTS, seed)):
        with torch.no_grad():
            output = model(**forward_arguments(model, tensors_of(data.task.model_inputs(batch))))[EMBEDDING]
        embeddings.append(pair_embeddings(output.cpu().numpy(), batch[data.task.label_name])[1])
    model.documents = normalize(torch.from_numpy(np.unique(np.concatenate(embeddings), axis=0)), dim=-1)
