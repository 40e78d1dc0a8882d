"""Train a small Marian for German to English on Multi30k, as a dense model to compress, and print its BLEU.

    python -m benchmarks.translation --size small      # writes build/translation/small/model
    python -m benchmarks.translation --size tiny       # one minute; learns nothing useful
    python -m benchmarks.translation --size small --pools model bidirectional causal cross --keeps 50% 25%
    compress build/translation/small/model --task translation --data multi30k_deen.tsv.xz --keep 50%

With `--pools`, methods select among the heads of the whole model or of one kind of attention, and keep the others
(table 3b and figure 6b of Li et al. 2021, figure 4 of Michel et al. 2019): a grid study in a folder for each pool;
finished cells are not run again. Joint methods start from the model, searches and pipelined ones from the dense run.

Both languages share a BPE vocabulary. The checkpoint with the least loss on the validation rows is kept; BLEU is that
of `compressor.tasks.translation`. An interrupted run resumes from its last checkpoint.
"""

from __future__ import annotations

import argparse
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import (
    MarianConfig,
    MarianMTModel,
    PreTrainedTokenizerFast,
    PrinterCallback,
    Trainer,
    TrainingArguments,
    set_seed,
)
from transformers.trainer_utils import get_last_checkpoint

from benchmarks.machine import machine
from benchmarks.stored import require_settings
from benchmarks.studies.cell_store import read_results
from benchmarks.studies.request import StudyRequest
from benchmarks.studies.request import StudySize as Grid
from benchmarks.studies.run import study
from compressor.cli.console import Console
from compressor.config.run import Recipe
from compressor.config.sections import RowsConfig
from compressor.model_folder import ModelFolder, load
from compressor.models.forwards import tensors_of
from compressor.silence_libraries import quiet_transformers
from compressor.tasks import Data, open_data, statistics
from compressor.tasks.scoring import forward_of
from compressor.tasks.splits import named_splits, pick

DATA = Path(__file__).parents[2] / "shared" / "data" / "multi30k_deen.tsv.xz"


@dataclass(frozen=True)
class Size:
    """Model and schedule of one `--size`.

    Attributes:
        vocabulary: number of tokens in the vocabulary.
        width: width of the model.
        layers: layers of the encoder, and of the decoder.
        heads: heads per attention.
        inner: width of the feed-forward layers.
        dropout: dropout rate of every kind.
        steps: optimizer steps.
        evaluations: evaluations during training.
        batch: rows per step.
        learning_rate: peak learning rate.
        rows: maximum number of rows of each split to score; None: all.
    """

    vocabulary: int
    width: int
    layers: int
    heads: int
    inner: int
    dropout: float
    steps: int
    evaluations: int
    batch: int
    learning_rate: float
    rows: int | None


SIZES = {
    "tiny": Size(1000, 64, 2, 4, 128, 0.1, 60, 2, 32, 3e-3, 32),
    "small": Size(4000, 192, 2, 8, 768, 0.1, 3000, 6, 64, 2e-3, 200),
    "paper": Size(8000, 256, 3, 8, 1024, 0.3, 9000, 30, 128, 1e-3, None),
}


def tokenizer(texts: list[str], size: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer, which can encode any text, with an end token after every text."""
    tokens = Tokenizer(models.BPE())
    tokens.normalizer = normalizers.NFC()
    tokens.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokens.decoder = decoders.ByteLevel()
    special = ["<pad>", "</s>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokens.train_from_iterator(texts, trainer)
    tokens.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    names = ["input_ids", "attention_mask"]
    return PreTrainedTokenizerFast(
        tokenizer_object=tokens, pad_token="<pad>", eos_token="</s>", model_input_names=names
    )


def start(size: Size, data: Path, folder: Path) -> None:
    """Write the untrained model folder: the tokenizer of the training rows, and random weights."""
    splits = named_splits(str(data))
    rows = splits[pick(splits, "train") or next(iter(splits))]
    words = tokenizer([*rows["de"], *rows["en"]], size.vocabulary)
    config = MarianConfig(
        vocab_size=len(words),
        d_model=size.width,
        encoder_layers=size.layers,
        decoder_layers=size.layers,
        encoder_attention_heads=size.heads,
        decoder_attention_heads=size.heads,
        encoder_ffn_dim=size.inner,
        decoder_ffn_dim=size.inner,
        dropout=size.dropout,
        activation_function="relu",
        max_position_embeddings=128,
        scale_embedding=True,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
        decoder_start_token_id=0,
        forced_eos_token_id=1,
    )
    MarianMTModel(config).save_pretrained(folder)
    words.save_pretrained(folder)


def open_model(path: Path, data: Path) -> tuple[ModelFolder, Data]:
    """The model folder, and the rows encoded by its tokenizer."""
    folder = load(path, task="translation")
    return folder, open_data(RowsConfig(data=str(data), text_columns=("de", "en"), max_length=96), folder)


def learn(folder: ModelFolder, data: Data, size: Size, checkpoints: Path) -> None:
    """Train in place from the last checkpoint, if there is one; the best checkpoint remains."""
    every = size.steps // size.evaluations
    trainer = Trainer(
        model=folder.model,
        args=TrainingArguments(
            output_dir=str(checkpoints),
            max_steps=size.steps,
            per_device_train_batch_size=size.batch,
            per_device_eval_batch_size=size.batch,
            learning_rate=size.learning_rate,
            lr_scheduler_type="inverse_sqrt",
            warmup_steps=0.1,
            adam_beta2=0.98,
            label_smoothing_factor=0.1,
            train_sampling_strategy="group_by_length",
            eval_strategy="steps",
            eval_steps=every,
            save_steps=every,
            save_total_limit=1,
            load_best_model_at_end=True,
            prediction_loss_only=True,
            remove_unused_columns=False,
            label_names=["labels"],
            dataloader_pin_memory=False,
            logging_steps=every,
            disable_tqdm=True,
            report_to="none",
        ),
        data_collator=lambda examples: tensors_of(data.task.collate(examples)),
        train_dataset=data.train,
        eval_dataset=data.eval if size.rows is None else data.eval.select(range(size.rows)),
    )
    trainer.remove_callback(PrinterCallback)
    with quiet_transformers():
        trainer.train(resume_from_checkpoint=get_last_checkpoint(str(checkpoints)) if checkpoints.exists() else None)
    for entry in trainer.state.log_history:
        if "eval_loss" in entry:
            print(f"step {entry['step']}: loss on the validation rows {entry['eval_loss']:.3f}")


def score(folder: ModelFolder, data: Data, size: Size) -> None:
    """Print BLEU of beam search on the validation and the test rows."""
    for name, rows in (("validation", data.eval), ("test", data.test)):
        start_time = time.perf_counter()
        part = rows if size.rows is None else rows.select(range(size.rows))
        with torch.inference_mode():
            bleu = data.task.score(statistics(data.task, part, forward_of(data.task, folder.model)))
        print(f"BLEU on {len(part)} {name} rows: {bleu:.2f} ({time.perf_counter() - start_time:.0f} s)", flush=True)


GRID = {
    "tiny": Grid("tiny", 320, 32, 32, 1.0, 5, (1,), ("50%",), 1, 32, 5, 2, 0.1),
    "small": Grid("small", 10_000, 64, 128, 1.0, 100, (1,), ("50%", "25%"), 2, 500, 20, 10, 3.0),
    "paper": Grid("paper", None, None, None, 3.0, 1500, (1, 2, 3), ("75%", "50%", "25%"), 4, 10_000, 100, 10, 10.0),
}
"""Sizes of the studies of pools."""


def study_pools(args: argparse.Namespace, model: Path, out: Path) -> None:
    """Run a grid study for each pool, and print one table of all of them."""
    size = GRID[args.size]
    axes = {"methods": tuple(args.methods), "keeps": tuple(args.keeps or size.keeps)}
    print(f"\n{size}; seeds {size.seeds}\n\n| pool | method | heads kept | BLEU | minus dense |\n|---|---|---|---|---|")
    for pool in args.pools:
        recipe = Recipe(
            model=model,
            task="translation",
            data=str(args.data),
            text_columns=("de", "en"),
            keep="100%",
            options={"pool": pool, "mixed_precision": "bf16"},
            learning_rate=3e-4,
            max_length=96,
            out=out / f"grid-{pool}",
        )
        study("grid", StudyRequest(recipe, size, axes=axes), Console())
        cells = read_results(recipe.output.out)
        dense = np.mean([cell["test"] for cell in cells if cell["settings"]["method"] == "dense"])
        groups: dict[tuple[str, int], list[float]] = {}
        for cell in cells:
            groups.setdefault((cell["settings"]["method"], cell["heads"]), []).append(cell["test"])
        for (method, heads), scores in sorted(groups.items(), key=lambda group: (group[0][0] != "dense", group[0])):
            difference = "" if method == "dense" else f"{np.mean(scores) - dense:+.2f}"
            print(f"| {pool} | {method} | {heads} | {np.mean(scores):.2f} | {difference} |", flush=True)


def train(data_file: Path, size: Size, out: Path) -> None:
    """Write the dense model to `out`, from its `partial` folder if a run was interrupted."""
    partial = out / "partial"
    if not (partial / "started").exists():
        with quiet_transformers():
            start(size, data_file, partial / "model")
        (partial / "started").touch()
    start_time = time.perf_counter()
    folder, data = open_model(partial / "model", data_file)
    learn(folder, data, size, partial / "checkpoints")
    print(f"{folder.model.num_parameters():,} parameters, {time.perf_counter() - start_time:.0f} s", flush=True)
    with quiet_transformers():
        folder.model.save_pretrained(partial / "model")
    (partial / "model").rename(out / "model")
    shutil.rmtree(partial)


def main() -> None:
    """Train the model unless it exists, and print BLEU, or compare methods on it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="tiny")
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument("--out", type=Path, default=Path("build/translation"), help="parent of a folder per size")
    parser.add_argument("--pools", nargs="+", default=(), choices=("model", "kind", "bidirectional", "causal", "cross"))
    parser.add_argument("--methods", nargs="+", default=("dsp", "ste", "hard-concrete", "dsp-pipelined", "taylor"))
    parser.add_argument("--keeps", nargs="+", help="default: those of the size")
    args = parser.parse_args()
    if not args.data.exists():
        print(f"skipped: {args.data} is not on this machine; give --data")
        return
    size, out = SIZES[args.size], args.out / args.size
    print(f"size {args.size}: {size}\n{machine('torch', 'transformers', 'sacrebleu')}", flush=True)
    set_seed(0)
    require_settings(out, data=str(args.data.resolve()))
    model = out / "model"
    if not model.exists():
        train(args.data, size, out)
    if args.pools:
        study_pools(args, model, out)
        return
    folder, data = open_model(model, args.data)
    if torch.cuda.is_available():
        folder.model.to("cuda")
    for note in data.notes:
        print(note)
    score(folder, data, size)


if __name__ == "__main__":
    main()
