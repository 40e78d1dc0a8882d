"""A language model with segment memory from scratch: from a text to a complete model folder."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from accelerate import PartialState
from transformers import PreTrainedModel

from compressor.config.train import Training
from compressor.model_folder import ModelFolder, fingerprint
from compressor.models import AllAttentionConfig, AllAttentionForCausalLM, TransformerXLConfig, TransformerXLForCausalLM
from compressor.progress import Listener, NullListener, ProgressCallback
from compressor.silence_libraries import quiet_transformers
from compressor.tasks import Data, open_data, training_texts
from compressor.tasks.segment_streams import Streams, read, reader
from compressor.training import tokenizers
from compressor.training.fit import fit
from compressor.training.schedule import Schedule
from compressor.workdir import WorkDir, open_workdir

FILE_NAME = "training.json"
"""What a training leaves beside the model: what was asked for, the metric, the curves."""

_CHECKPOINTS = "checkpoints"
_SLOWER = (
    "lower the learning rate (--learning-rate) or warm it up for longer (--warmup), and start anew with --force or in"
    " another folder"
)


@dataclass(frozen=True)
class Trained:
    """What came out.

    Attributes:
        metric: `perplexity` or `bits-per-character`.
        eval: of the text that the best checkpoint was chosen on.
        test: of the text that is reported on.
        tokens: in the text that was learnt from.
        vocabulary: tokens that the model knows.
        parameters: of the model; `stack` are those of its layers, embeddings left out.
    """

    metric: str
    eval: float
    test: float
    tokens: int
    vocabulary: int
    parameters: int
    stack: int


def train(recipe: Training, listener: Listener | None = None) -> Trained:
    """Train a model from scratch and write its folder, which appears whole or not at all.

    An interrupted training goes on where its last checkpoint was. Under `accelerate launch` every process trains on
    streams of its own; the helper processes end after that.

    Raises:
        InputError: the text cannot be used.
        UsageError: the folder is there, or holds checkpoints of another training.
        DivergedError: the loss or the metric is no finite number any more; the last checkpoint stays.
    """
    state = PartialState(cpu=not torch.cuda.is_available())
    if not state.is_main_process:
        store = WorkDir(recipe.out.absolute()).learning
        _fit(recipe, *_start(recipe), store, NullListener(), lambda done, total: None)
        sys.exit(0)
    listen = listener or NullListener()
    with open_workdir(recipe.out, force=recipe.force) as work:
        with listen.stage("reading the text"):
            folder, data = _start(recipe)
        for note in data.notes:
            listen.note(note)
        with listen.stage(f"training {recipe.architecture}") as tell:
            log = _fit(recipe, folder, data, work.learning, listen, tell)
        with listen.stage("reading the test text"):
            found = _found(folder, data, log, recipe.batch_size)
        with quiet_transformers():
            folder.model.save_pretrained(work.result)
            folder.processor.save_pretrained(work.result)
        told = {"asked": recipe.model_dump(mode="json"), "found": asdict(found), "log": log}
        (work.result / FILE_NAME).write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
        work.finish()
    return found


def new_model(recipe: Training, tokens: int, end: int | None = None) -> PreTrainedModel:
    """A model of the recipe's sizes with the seed's random weights, for `tokens` tokens."""
    sizes: dict[str, Any] = {
        "vocab_size": tokens,
        "hidden_size": recipe.hidden,
        "num_hidden_layers": recipe.layers,
        "num_attention_heads": recipe.heads,
        "memory_length": recipe.memory,
        "max_position_embeddings": max(4096, recipe.memory + 4 * recipe.segment),
        "attention_dropout": recipe.attention_dropout,
        "embedding_dropout": recipe.embedding_dropout,
        "hidden_dropout": recipe.hidden_dropout,
        "eos_token_id": end,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        if recipe.architecture == "all-attention":
            return AllAttentionForCausalLM(AllAttentionConfig(num_persistent=recipe.persistent, **sizes))
        return TransformerXLForCausalLM(TransformerXLConfig(intermediate_size=recipe.persistent, **sizes))


def _start(recipe: Training) -> tuple[ModelFolder, Data]:
    """The untrained model with its tokenizer, and the texts."""
    notes: tuple[str, ...] = ()
    if recipe.eval_data is not None and recipe.test_data is None:
        recipe = recipe.model_copy(update={"test_data": recipe.eval_data})
        notes = ("no test data was given: the test text is that of --eval-data, which the checkpoint is chosen on",)
    if recipe.level == "character":
        tokenizer = tokenizers.characters()
    else:
        tokenizer = tokenizers.words(training_texts(recipe.rows), recipe.vocabulary)
    with quiet_transformers():
        model = new_model(recipe, len(tokenizer), tokenizer.eos_token_id)
    family = model.config.model_type
    folder = ModelFolder(recipe.out, model, tokenizer, model.config, fingerprint(model), "causal-lm", family)
    data = open_data(recipe.rows, folder, recipe.seed)
    return folder, replace(data, notes=(*notes, *data.notes))


def _fit(
    recipe: Training, folder: ModelFolder, data: Data, store: Path, listen: Listener, tell: ProgressCallback
) -> list[dict[str, object]]:
    precision: Literal["no", "bf16"] = "no" if recipe.mixed_precision == "no" else "bf16"
    native = torch.cuda.is_available() and torch.cuda.is_bf16_supported(including_emulation=False)
    if recipe.mixed_precision == "auto" and not native:
        precision = "no"
    schedule = Schedule(
        steps=recipe.steps,
        batch_size=recipe.batch_size,
        learning_rate=recipe.learning_rate,
        seed=recipe.seed,
        warmup=recipe.warmup,
        weight_decay=recipe.weight_decay,
        max_grad_norm=recipe.max_grad_norm,
        evaluations=recipe.evaluations,
        points=max(recipe.evaluations, 60),
        mixed_precision=precision,
        optimizer=recipe.optimizer,
        scheduler="cosine",
        final_learning_rate=recipe.final_learning_rate,
    )
    asked = recipe.model_dump(mode="json", exclude={"out", "force"})
    metric = data.task.metric

    def measured(step: int, value: float) -> None:
        listen.note(f"step {step} of {recipe.steps}: {metric} {value:.4g}")

    folder.model.train()
    return fit(
        folder.model,
        data,
        schedule,
        asked,
        store / _CHECKPOINTS,
        tell,
        measured=measured,
        refuse_others=not recipe.force,
        mend=_SLOWER,
    )


def _found(folder: ModelFolder, data: Data, log: list[dict[str, object]], streams: int) -> Trained:
    task, model = data.task, folder.model.eval()
    assert isinstance(task, Streams)
    best = [float(str(entry[f"eval_{task.metric}"])) for entry in log if f"eval_{task.metric}" in entry]
    stack = sum(weight.numel() for weight in model.model.layers.parameters())
    return Trained(
        metric=task.metric,
        eval=min(best, default=math.nan),
        test=task.score(read(task, data.test, reader(model), streams)),
        tokens=sum(data.train["length"]) - len(data.train) + 1,
        vocabulary=model.config.vocab_size,
        parameters=model.num_parameters(),
        stack=stack,
    )
