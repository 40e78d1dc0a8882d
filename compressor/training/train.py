"""`compress train`: a language model with segment memory, trained from scratch to a complete model folder."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from compressor.config.request import Training
from compressor.model_folder import ModelFolder, fingerprint
from compressor.models import AllAttentionConfig, AllAttentionForCausalLM, TransformerXLConfig, TransformerXLForCausalLM
from compressor.models.forwards import reader
from compressor.processes import process_state
from compressor.progress import Listener, NullListener, ProgressCallback, ignore_progress
from compressor.results import Note, NoteCode
from compressor.silence_libraries import quiet_transformers
from compressor.tasks import Data, open_data, training_texts
from compressor.tasks.causal_lm import read
from compressor.training import tokenizers
from compressor.training.checkpoints import Checkpoints
from compressor.training.fit import fit
from compressor.training.precision import native_precision
from compressor.training.schedule import Schedule
from compressor.workdir import WorkDir, open_workdir

FILE_NAME = "training.json"
"""The file in the model folder with the configuration of its training, the metric and the curves."""

_CHECKPOINTS = "checkpoints"
_POINTS = 60
"""Number of points of the curves, unless there are more evaluations."""
_REMEDY = (
    "lower the learning rate (--learning-rate) or lengthen its warm-up (--warmup), and start from the beginning with"
    " --force or in another folder"
)

Log = list[dict[str, Any]]
"""Entries of a training log, each with its `step`."""


@dataclass(frozen=True)
class TrainingResult:
    """The outcome of a training.

    Attributes:
        metric: `perplexity` or `bits-per-character`.
        eval: the metric on the evaluation text, at the selected checkpoint.
        test: the metric on the test text.
        tokens: tokens of the training text.
        vocabulary: number of tokens of the tokenizer.
        parameters: parameters of the model.
        stack: parameters of its layers, without embeddings.
    """

    metric: str
    eval: float
    test: float
    tokens: int
    vocabulary: int
    parameters: int
    stack: int


def train(training: Training, listener: Listener | None = None) -> TrainingResult:
    """Train a model from scratch and write its folder, which appears only when it is complete.

    An interrupted training resumes from its last checkpoint. Under `accelerate launch`, each process trains on streams
    of its own; all processes but the main one exit afterwards.

    Args:
        training: the configuration.
        listener: receives stages and notes; None: nothing is reported.

    Raises:
        InputError: the text cannot be used.
        UsageError: the folder exists, or has checkpoints of another training.
        DivergedError: the loss or the metric is not finite; the last checkpoint remains.
    """
    listener = listener or NullListener()
    if not process_state().is_main_process:
        _train_in_worker(training)
    with open_workdir(training.out, force=training.force) as work:
        with listener.stage("reading the text"):
            folder, data = _prepare(training)
        for note in data.notes:
            listener.note(note)
        with listener.stage(f"training {training.architecture}") as on_progress:
            log = _fit(training, folder, data, work.learning, listener, on_progress)
        with listener.stage("reading the test text"):
            result = _evaluate(folder, data, log, training.batch_size)
        with quiet_transformers():
            folder.model.save_pretrained(work.result)
            folder.processor.save_pretrained(work.result)
        record = {"training": training.model_dump(mode="json"), "result": asdict(result), "log": log}
        (work.result / FILE_NAME).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        work.finish()
    return result


def new_model(training: Training, vocabulary: int, end_token: int | None = None) -> PreTrainedModel:
    """A model of the configured sizes, with random weights drawn from the seed.

    Args:
        training: architecture, sizes, dropout and seed.
        vocabulary: number of tokens.
        end_token: id of the token that ends a line; None: there is none.
    """
    sizes: dict[str, Any] = {
        "vocab_size": vocabulary,
        "hidden_size": training.hidden,
        "num_hidden_layers": training.layers,
        "num_attention_heads": training.heads,
        "memory_length": training.memory,
        "max_position_embeddings": max(4096, training.memory + 4 * training.segment),
        "attention_dropout": training.attention_dropout,
        "embedding_dropout": training.embedding_dropout,
        "hidden_dropout": training.hidden_dropout,
        "eos_token_id": end_token,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(training.seed)
        if training.architecture == "all-attention":
            return AllAttentionForCausalLM(AllAttentionConfig(num_persistent=training.persistent, **sizes))
        return TransformerXLForCausalLM(TransformerXLConfig(intermediate_size=training.persistent, **sizes))


def schedule_of(training: Training) -> Schedule:
    """The schedule of a training; the precision `auto` is bfloat16 on a GPU that computes it natively."""
    precision = training.mixed_precision
    if precision == "auto":
        precision = native_precision() if torch.cuda.is_available() else "no"
    return Schedule(
        steps=training.steps,
        batch_size=training.batch_size,
        learning_rate=training.learning_rate,
        seed=training.seed,
        warmup=training.warmup,
        weight_decay=training.weight_decay,
        max_grad_norm=training.max_grad_norm,
        evaluations=training.evaluations,
        points=max(training.evaluations, _POINTS),
        mixed_precision=precision,
        optimizer=training.optimizer,
        scheduler="cosine",
        final_learning_rate=training.final_learning_rate,
    )


def _prepare(training: Training) -> tuple[ModelFolder, Data]:
    """The untrained model with its tokenizer, and the encoded texts."""
    rows, notes = training.rows, tuple[Note, ...]()
    if rows.eval_data is not None and rows.test_data is None:
        rows = rows.model_copy(update={"test_data": rows.eval_data})
        text = "no test data was given, so the test text is the text of --eval-data, which selects the checkpoint"
        notes = (Note(text=text, code=NoteCode.TEST_IS_EVAL),)
    if training.level == "character":
        tokenizer = tokenizers.characters()
    else:
        tokenizer = tokenizers.words(training_texts(rows), training.vocabulary)
    with quiet_transformers():
        model = new_model(training, len(tokenizer), tokenizer.eos_token_id)
    family = model.config.model_type
    folder = ModelFolder(training.out, model, tokenizer, model.config, fingerprint(model), "causal-lm", family)
    data = open_data(rows, folder, training.seed)
    return folder, replace(data, notes=(*notes, *data.notes))


def _train_in_worker(training: Training) -> None:
    """Take part in a training as one of several processes, not the main one, then exit."""
    checkpoints = WorkDir(training.out.absolute()).learning
    _fit(training, *_prepare(training), checkpoints, NullListener(), ignore_progress)
    sys.exit(0)


def _fit(
    training: Training,
    folder: ModelFolder,
    data: Data,
    learning: Path,
    listener: Listener,
    on_progress: ProgressCallback,
) -> Log:
    """Train the model of `folder` in place, with checkpoints in the folder `learning`."""
    metric = data.task.metric

    def on_evaluation(step: int, value: float) -> None:
        text = f"step {step} of {training.steps}: {metric} {value:.4g}"
        listener.note(Note(text=text, code=NoteCode.EVALUATED))

    settings = training.model_dump(mode="json", exclude={"out", "force"})
    folder.model.train()
    return fit(
        folder.model,
        data,
        schedule_of(training),
        Checkpoints(learning / _CHECKPOINTS, settings, refuse_others=not training.force),
        on_progress=on_progress,
        on_evaluation=on_evaluation,
        remedy=_REMEDY,
    )


def _evaluate(folder: ModelFolder, data: Data, log: Log, streams: int) -> TrainingResult:
    """The result of a training, from its log and from the test text, which the model reads in parallel streams."""
    task, model = data.task, folder.model.eval()
    key = f"eval_{task.metric}"
    return TrainingResult(
        metric=task.metric,
        eval=min((float(entry[key]) for entry in log if key in entry), default=math.nan),
        test=task.score(read(task, data.test, reader(model), streams)),
        tokens=sum(data.train["length"][:]) - len(data.train) + 1,
        vocabulary=model.config.vocab_size,
        parameters=model.num_parameters(),
        stack=sum(weight.numel() for weight in model.model.layers.parameters()),
    )
