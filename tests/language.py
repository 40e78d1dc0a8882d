"""A generated text, and tiny language models with segment memory for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerFast

from compressor.config.request import Training
from compressor.model_folder import ModelFolder, fingerprint
from compressor.tasks import Data, open_data
from compressor.training.schedule import Schedule
from compressor.training.tokenizers import words
from compressor.training.train import new_model
from tests import folders

WORDS = "one two three four five six seven eight nine ten".split()


def text(lines: int, seed: int = 0) -> str:
    """Lines of words, each likely to be followed by the next number."""
    rng = np.random.default_rng(seed)
    sentences = []
    for _ in range(lines):
        number = int(rng.integers(10))
        line = []
        for _ in range(int(rng.integers(3, 9))):
            line.append(WORDS[number])
            number = (number + 1) % 10 if rng.random() < 0.8 else int(rng.integers(10))
        sentences.append(" ".join(line))
    return "\n".join(sentences) + "\n"


def training_request(out: Path = Path("out"), **fields: Any) -> Training:
    """The training of a model of two layers and four heads."""
    tiny: dict[str, Any] = {
        "data": str(out.parent / "train.txt"),
        "layers": 2,
        "hidden": 16,
        "heads": 4,
        "persistent": 8,
        "memory": 8,
        "segment": 6,
        "batch_size": 3,
        "steps": 12,
        "evaluations": 4,
        "warmup": 0.25,
    }
    return Training(out=out, **{**tiny, **fields})


def folder(tokenizer: PreTrainedTokenizerFast | None = None, **fields: Any) -> ModelFolder:
    """An untrained model in evaluation mode, by default with the tokenizer of the generated text."""
    tokenizer = tokenizer or words([text(200)])
    model = new_model(training_request(**fields), len(tokenizer)).eval()
    return ModelFolder(Path("model"), model, tokenizer, model.config, fingerprint(model), "causal-lm", "all-attention")


def data(path: Path, folder: ModelFolder, *, segment: int = 6, lines: int = 60) -> Data:
    """The generated text as rows for a model, written to the folder `path`."""
    for name, seed in (("train", 0), ("eval", 1), ("test", 2)):
        (path / f"{name}.txt").write_text(text(lines, seed))
    files = (str(path / f"{name}.txt") for name in ("train", "eval", "test"))
    return open_data(folders.rows_config(*files, max_length=segment), folder)


def schedule(**fields: Any) -> Schedule:
    """A schedule of twelve steps of LAMB over three streams."""
    tiny: dict[str, Any] = {
        "steps": 12,
        "batch_size": 3,
        "learning_rate": 1e-2,
        "seed": 0,
        "warmup": 0.25,
        "weight_decay": 0.01,
        "max_grad_norm": 0.5,
        "evaluations": 4,
        "points": 12,
        "mixed_precision": "no",
        "optimizer": "lamb",
        "scheduler": "cosine",
        "final_learning_rate": 1e-4,
    }
    return Schedule(**{**tiny, **fields})


UNDROPPED: dict[str, Any] = {"attention_dropout": 0.0, "embedding_dropout": 0.0, "hidden_dropout": 0.0}


class EndOfPowerError(Exception):
    """Ends a run early."""
