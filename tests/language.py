"""A made-up text, and tiny language models with memory in memory: what the tests of streams and training share."""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import PartialState
from transformers import PreTrainedTokenizerFast

from compressor.config.train import Training
from compressor.model_folder import ModelFolder, fingerprint
from compressor.selection.learn import learn
from compressor.tasks import Data, open_data
from compressor.training.checkpoints import digest
from compressor.training.fit import fit
from compressor.training.schedule import Schedule
from compressor.training.tokenizers import characters, words
from compressor.training.train import new_model
from compressor.units import find_sites
from tests import folders
from tests.learning import Recipe

WORDS = "one two three four five six seven eight nine ten".split()


def text(lines: int, seed: int = 0) -> str:
    """Lines of words, each likely to be followed by the one that comes after it in counting."""
    draw = np.random.default_rng(seed)
    told = []
    for _ in range(lines):
        at = int(draw.integers(10))
        line = []
        for _ in range(int(draw.integers(3, 9))):
            line.append(WORDS[at])
            at = (at + 1) % 10 if draw.random() < 0.8 else int(draw.integers(10))
        told.append(" ".join(line))
    return "\n".join(told) + "\n"


def asked(out: Path = Path("out"), **more: Any) -> Training:
    """A training of a model of two layers and four heads."""
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
    return Training(out=out, **{**tiny, **more})


def folder(tokenizer: PreTrainedTokenizerFast | None = None, **more: Any) -> ModelFolder:
    """An untrained model in evaluation mode with the tokenizer of the made-up text, or the one given."""
    known = tokenizer or words([text(200)])
    model = new_model(asked(**more), len(known)).eval()
    return ModelFolder(Path("model"), model, known, model.config, fingerprint(model), "causal-lm", "all-attention")


def data(at: Path, held: ModelFolder, *, segment: int = 6, lines: int = 60) -> Data:
    """The made-up text as rows for `held`, written to the folder `at`."""
    for name, seed in (("train", 0), ("eval", 1), ("test", 2)):
        (at / f"{name}.txt").write_text(text(lines, seed))
    train, choose, report = (str(at / f"{name}.txt") for name in ("train", "eval", "test"))
    return open_data(folders.Request(data=train, eval_data=choose, test_data=report, max_length=segment), held)


def schedule(**more: Any) -> Schedule:
    """Twelve steps of LAMB over three streams."""
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
    return Schedule(**{**tiny, **more})


UNDROPPED: dict[str, Any] = {"attention_dropout": 0.0, "embedding_dropout": 0.0, "hidden_dropout": 0.0}


class EndOfPowerError(Exception):
    """Stands for whatever ends a run half-way."""


def pruned(at: Path, rows: Data, stop: int | None = None) -> dict[str, Any]:
    """What gates learn together with a model, dropout on, in a run that ends after a step, if asked to."""

    def tell(done: int, total: int) -> None:
        if done == stop:
            raise EndOfPowerError

    held = folder()
    sites = find_sites(held.model, {"input_ids": torch.ones(2, 4, dtype=torch.int64)})
    recipe = Recipe(options={"optimizer": "lamb", "evaluations": 4}, batch_size=2)
    learned = learn(held.model, sites, rows, recipe, at, tell)
    return {
        "kept": [site.kept for site in learned.plan.sites],
        "weights": digest(held.model),
        "curves": [point.model_dump() for point in learned.curves],
    }


def main(at: Path) -> None:
    """One of several processes that train together: each on streams of its own."""
    held = folder(**UNDROPPED)
    state = PartialState(cpu=True)
    with state.main_process_first():
        rows = data(at, held)
    log = fit(held.model, rows, schedule(batch_size=2), {}, at / "run", lambda done, total: None)
    whole = pruned(at / "whole", rows)
    with contextlib.suppress(EndOfPowerError):
        pruned(at / "halved", rows, stop=7)
    found = {
        "weights": digest(held.model),
        "norm": float(sum(weight.double().norm() for weight in held.model.parameters())),
        "perplexity": [entry["eval_perplexity"] for entry in log if "eval_perplexity" in entry],
        "memories": sorted(file.name for file in (at / "halved" / "checkpoint-6").glob("memory_*")),
        "whole": whole,
        "resumed": pruned(at / "halved", rows),
    }
    (at / f"rank{state.process_index}.json").write_text(json.dumps(found))
    state.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))


__all__ = ["UNDROPPED", "EndOfPowerError", "asked", "characters", "data", "folder", "schedule", "text"]
