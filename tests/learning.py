"""A tiny model, its sites and a made-up task that learn in a second: what the tests of learning share."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import PartialState
from datasets import Dataset
from torch import Tensor
from transformers import BertConfig, BertForSequenceClassification, GPT2Config, GPT2LMHeadModel, PreTrainedModel

from compressor.progress import ProgressCallback
from compressor.results import MetricUnit
from compressor.selection.learn import Learned, learn
from compressor.tasks.base import Data, Task
from compressor.tasks.metrics import Metric, accuracy, mean_loss
from compressor.training.checkpoints import digest
from compressor.units import Site, find_sites, gated
from graph_passes import Plan


@dataclass(frozen=True)
class Recipe:
    """What `learn` reads of a recipe."""

    method: str = "dsp"
    keep: int | str | None = 3
    max_drop: float | None = None
    guarantee: float | None = None
    ray: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    steps: int | None = 12
    epochs: float | None = 1.0
    batch_size: int = 4
    learning_rate: float = 1e-3
    seed: int = 0


class Sign(Task):
    """Tells whether a row holds more tokens above 10 than below."""

    name = "text-classification"
    metrics = (Metric("accuracy", accuracy, MetricUnit.POINTS, maximum=1.0),)

    def __init__(self) -> None:
        super().__init__(self.metrics[0])

    def encode(self, rows: Dataset, source: str) -> Dataset:
        return rows

    def collate(self, examples: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        longest = max(len(example["input_ids"]) for example in examples)
        ids = torch.zeros(len(examples), longest, dtype=torch.int64)
        for row, example in enumerate(examples):
            ids[row, : len(example["input_ids"])] = torch.tensor(example["input_ids"])
        labels = torch.tensor([example["labels"] for example in examples])
        return {"input_ids": ids, "attention_mask": (ids > 0).long(), "labels": labels}

    def per_example(self, logits: np.ndarray, labels: np.ndarray) -> np.ndarray:
        return np.stack([logits.argmax(-1), labels], axis=-1).astype(np.float64)


class NextToken(Sign):
    """Scored by the loss: smaller is better, and a label a token."""

    name = "causal-lm"
    metrics = (Metric("loss", mean_loss, higher_is_better=False),)

    def collate(self, examples: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        batch = super().collate(examples)
        return {**batch, "labels": batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)}

    def per_example(self, logits: np.ndarray, labels: np.ndarray) -> np.ndarray:
        scores, targets = torch.from_numpy(logits[:, :-1]), torch.from_numpy(labels[:, 1:])
        losses = torch.nn.functional.cross_entropy(scores.transpose(1, 2), targets, reduction="none")
        return np.stack([losses.sum(1).numpy(), (targets != -100).sum(1).numpy()], axis=-1).astype(np.float64)


def rows(count: int, seed: int) -> Dataset:
    """`count` rows of 2 to 9 tokens."""
    draw = np.random.default_rng(seed)
    ids = [draw.integers(1, 20, draw.integers(2, 10)).tolist() for _ in range(count)]
    labels = [int(sum(token > 10 for token in row) * 2 > len(row)) for row in ids]
    return Dataset.from_dict({"input_ids": ids, "labels": labels, "length": [len(row) for row in ids]})


def data(task: Sign | None = None) -> Data:
    """60 rows to learn from, 12 to choose on, 12 to report on."""
    return Data(rows(60, 0), rows(12, 1), rows(12, 2), task or Sign(), (), "sha256:rows", "sha256:eval")


def model(seed: int = 0) -> PreTrainedModel:
    """Two layers of four heads, dropout on."""
    torch.manual_seed(seed)
    config = BertConfig(
        vocab_size=20,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=16,
        max_position_embeddings=16,
    )
    return BertForSequenceClassification(config)


def language_model() -> PreTrainedModel:
    """Two layers of four heads whose output layer shares the embedding's weights."""
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=20, n_embd=16, n_layer=2, n_head=4, n_positions=16, bos_token_id=0, eos_token_id=0)
    return GPT2LMHeadModel(config)


def sites(of: PreTrainedModel) -> list[Site]:
    """Its two sites."""
    return find_sites(of, {"input_ids": torch.ones(2, 4, dtype=torch.int64)})


def run(
    folder: Path,
    recipe: Recipe | None = None,
    of: PreTrainedModel | None = None,
    task: Sign | None = None,
    progress: ProgressCallback | None = None,
) -> Learned:
    """Learn on a fresh model unless one is given."""
    learner = of or model()
    return learn(learner, sites(learner), data(task), recipe or Recipe(), folder, progress)


def accuracy(of: PreTrainedModel, plan: Plan) -> float:
    """Share of the evaluation rows that the gated model gets right."""
    rows_ = data().eval
    of.eval()
    with gated(of, plan) as held, torch.no_grad():
        logits = [held(**Sign().collate([example])).logits.argmax(-1).item() for example in rows_]
    return float(np.mean(np.array(logits) == np.array(rows_["labels"])))


def main(folder: Path) -> None:
    """One of several processes: learn by a gate that draws heads and by a penalised one, then say what came out."""
    found: dict[str, Any] = {}
    for method in ("dsp", "hard-concrete"):
        learner = model()
        learned = run(folder / method, Recipe(method=method), of=learner)
        found[method] = {
            "kept": [site.kept for site in learned.plan.sites],
            "weights": digest(learner),
            "curves": [point.model_dump() for point in learned.curves],
        }
    state = PartialState()
    found["processes"] = state.num_processes
    (folder / f"rank{state.process_index}.json").write_text(json.dumps(found))
    state.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
