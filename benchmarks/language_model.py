"""Train a small Llama on a text, as a dense model to compress.

    python -m benchmarks.language_model      # writes build/language_model/model

The tokens are a byte-level BPE of the text, and the model has 5.4 million parameters: 6 layers of width 256 with 8
query and 4 key/value heads. It reads 1,000 batches of 16 x 128 tokens, two thirds of WikiText-2: 15 minutes on one
core.
"""

from __future__ import annotations

import argparse
import lzma
import time
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from benchmarks.machine import machine
from compressor.silence_libraries import quiet_transformers
from compressor.training.precision import native_precision

DATA = Path(__file__).parents[2] / "shared" / "data"
_VOCABULARY, _LENGTH, _BATCH, _RATE = 4096, 128, 16, 3e-3


def read_text(path: Path) -> str:
    """The text of a file, which may end in .xz."""
    data = path.read_bytes()
    return (lzma.decompress(data) if path.suffix == ".xz" else data).decode()


def start(text: str, folder: Path) -> LlamaForCausalLM:
    """Write the tokenizer of a text; returns the untrained model."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCABULARY, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(text.splitlines(keepends=True), trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="</s>")
    fast.save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=256,
        intermediate_size=688,
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=512,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=1,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    return LlamaForCausalLM(config)


def train(text: str, folder: Path, steps: int) -> None:
    """Write a folder with a tokenizer and a model that is trained on a text.

    Args:
        text: the text.
        folder: folder of the model.
        steps: training steps, of 16 stretches of 128 tokens each.
    """
    model = start(text, folder).train()
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    with quiet_transformers():
        ids = torch.tensor(tokenizer(text, verbose=False)["input_ids"])
    print(f"{model.num_parameters():,} parameters, {len(ids):,} tokens", flush=True)
    segments = ids[: len(ids) // _LENGTH * _LENGTH].view(-1, _LENGTH)
    optimizer = torch.optim.AdamW(model.parameters(), lr=_RATE, weight_decay=0.1, betas=(0.9, 0.98), fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, _RATE, total_steps=steps, pct_start=0.1)
    order = torch.cat([torch.randperm(len(segments)) for _ in range(-(-steps * _BATCH // len(segments)))])
    began, losses = time.perf_counter(), []
    for step in range(steps):
        batch = segments[order[step * _BATCH : (step + 1) * _BATCH]]
        with torch.autocast("cpu", torch.bfloat16, enabled=native_precision() == "bf16"):
            loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if (step + 1) % max(1, steps // 10) == 0:
            recent = losses[-max(1, steps // 10) :]
            print(f"step {step + 1}: loss {sum(recent) / len(recent):.3f}", flush=True)
    print(f"{time.perf_counter() - began:.0f} s", flush=True)
    model.eval().save_pretrained(folder)


def main() -> None:
    """Train the model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=DATA / "wikitext2_train.txt.xz")
    parser.add_argument("--out", type=Path, default=Path("build/language_model"))
    parser.add_argument("--steps", type=int, default=1000)
    options = parser.parse_args()
    print(machine("torch", "transformers", "tokenizers"), flush=True)
    train(read_text(options.data), options.out / "model", options.steps)


if __name__ == "__main__":
    main()
