"""A tiny model, its sites, and tasks on generated rows that it learns in a second."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from transformers import BertConfig, BertForSequenceClassification, GPT2Config, GPT2LMHeadModel, PreTrainedModel

from compressor.config.methods import METHODS
from compressor.config.steps import Heads, Units
from compressor.models.forwards import tensors_of
from compressor.progress import ProgressCallback, ignore_progress
from compressor.results import MetricUnit
from compressor.selection.learn import learn
from compressor.selection.plan_and_curves import SelectedPlan
from compressor.tasks.base import Batch, Task
from compressor.tasks.data import Data
from compressor.tasks.encoding import pad
from compressor.tasks.metrics import Metric, accuracy, mean_loss, summed_losses
from compressor.units import Site, find_sites, gated
from graph_passes import Plan

GATE_METHODS = tuple(name for name, method in METHODS.items() if method.kind == "gate")
HEAD_METHODS = tuple(name for name, method in METHODS.items() if method.kind != "budget")
HEADS = 8
"""Heads of the models."""


class Sign(Task):
    """A task that classifies whether a row has more tokens above 10 than others."""

    name = "text-classification"
    metrics = (Metric("accuracy", accuracy, MetricUnit.POINTS, maximum=1.0),)

    def __init__(self) -> None:
        super().__init__(self.metrics[0])

    def encode(self, rows: Dataset, source: str) -> Dataset:
        return rows

    def collate(self, examples: Sequence[Mapping[str, Any]]) -> Batch:
        ids = pad([example["input_ids"] for example in examples], 0)
        labels = np.array([example["labels"] for example in examples])
        return {"input_ids": ids, "attention_mask": (ids > 0).astype(np.int64), "labels": labels}

    def per_example(self, logits: np.ndarray, labels: np.ndarray) -> np.ndarray:
        return np.stack([logits.argmax(-1), labels], axis=-1).astype(np.float64)


class NextToken(Sign):
    """A task that is scored by the loss: smaller is better, and there is one label per token."""

    name = "causal-lm"
    metrics = (Metric("loss", mean_loss, higher_is_better=False),)

    def collate(self, examples: Sequence[Mapping[str, Any]]) -> Batch:
        batch = super().collate(examples)
        return {**batch, "labels": np.where(batch["attention_mask"] == 0, -100, batch["input_ids"])}

    def per_example(self, logits: np.ndarray, labels: np.ndarray) -> np.ndarray:
        return summed_losses(logits[:, :-1], labels[:, 1:])


def rows(count: int, seed: int) -> Dataset:
    """`count` rows of 2 to 9 tokens."""
    draw = np.random.default_rng(seed)
    ids = [draw.integers(1, 20, draw.integers(2, 10)).tolist() for _ in range(count)]
    labels = [int(sum(token > 10 for token in row) * 2 > len(row)) for row in ids]
    return Dataset.from_dict({"input_ids": ids, "labels": labels, "length": [len(row) for row in ids]})


def new_rows(count: int, seed: int) -> Dataset:
    """`count` rows that are no training rows of `data`."""
    known = {tuple(ids) for ids in data().train["input_ids"]}
    drawn = rows(2 * count, seed)
    return drawn.select([index for index, ids in enumerate(drawn["input_ids"]) if tuple(ids) not in known][:count])


def data(task: Task | None = None) -> Data:
    """60 training rows, 12 evaluation rows, 12 test rows."""
    return Data(rows(60, 0), rows(12, 1), rows(12, 2), task or Sign(), (), "sha256:rows", "sha256:eval")


def classifier(seed: int = 0, neurons: int = 16) -> PreTrainedModel:
    """Two layers of four heads and some neurons, with dropout."""
    torch.manual_seed(seed)
    config = BertConfig(
        vocab_size=20,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=neurons,
        max_position_embeddings=16,
    )
    return BertForSequenceClassification(config)


def language_model() -> PreTrainedModel:
    """Two layers of four heads; the output layer shares the weights of the embedding."""
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=20, n_embd=16, n_layer=2, n_head=4, n_positions=16, bos_token_id=0, eos_token_id=0)
    return GPT2LMHeadModel(config)


def sites_of(model: PreTrainedModel) -> list[Site]:
    """The two sites of a model."""
    return find_sites(model, {"input_ids": torch.ones(2, 4, dtype=torch.int64)})


def selection(**fields: Any) -> Heads:
    """Keep three heads by `dsp` in twelve steps, with some fields replaced. Three evaluations write checkpoints."""
    defaults = {"method": "dsp", "keep": 3, "training_steps": 12, "epochs": 1.0, "batch_size": 4, "learning_rate": 1e-3}
    options = {"options": {"evaluations": 3}} if fields.get("method", "dsp") in GATE_METHODS else {}
    return Heads(**{**defaults, **options, **fields})


def units(**fields: Any) -> Units:
    """Learn units in twelve steps within a budget that the pool has, with some fields replaced."""
    return Units(
        **{
            **selection().model_dump(include={"method", "training_steps", "epochs", "batch_size", "learning_rate"}),
            "macs": 0.5,  # the pool has the budget
            **fields,
        }
    )


def learn_plan(
    folder: Path,
    config: Heads | None = None,
    model: PreTrainedModel | None = None,
    task: Task | None = None,
    on_progress: ProgressCallback = ignore_progress,
) -> SelectedPlan:
    """Learn on a classifier, or on `model`; checkpoints go into `folder`."""
    learner = classifier() if model is None else model
    return learn(learner, sites_of(learner), data(task), config or selection(), folder, on_progress)


def gated_accuracy(model: PreTrainedModel, plan: Plan) -> float:
    """Share of the evaluation rows that a model gets right with the heads of a plan."""
    evaluated = data().eval
    model.eval()
    with gated(model, plan) as gated_model, torch.no_grad():
        logits = [
            gated_model(**tensors_of(Sign().collate([example]))).logits.argmax(-1).item() for example in evaluated
        ]
    return float(np.mean(np.array(logits) == np.array(evaluated["labels"])))


def have_same_weights(first: torch.nn.Module, second: torch.nn.Module) -> bool:
    """Whether two models of one class have equal weights."""
    pairs = zip(first.state_dict().values(), second.state_dict().values(), strict=True)
    return all(torch.equal(weights, second_weights) for weights, second_weights in pairs)
