"""Perplexity of a decoder before and after its weights are rounded to 8 and 4 bits.

    python -m benchmarks.rounded_weights wikitext2_train.txt wikitext2_valid.txt --steps 400

Trains a Llama of 4 layers and width 128 on the first text, and rounds it (`compress --precision int8w`, `int4w`). The
perplexity is that of the second text, by the engine with caches; it is written for the engine in fp32 too.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import compressor
from compressor.config.run import Recipe
from compressor.targets import WEIGHT_BITS

_VOCABULARY, _LENGTH, _BATCH = 2048, 64, 16


def train(text: Path, folder: Path, steps: int) -> None:
    """Write a folder with a tokenizer and a model that was trained on a text.

    Args:
        text: the text.
        folder: folder of the model.
        steps: training steps, of 16 stretches of 64 tokens each.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=_VOCABULARY, special_tokens=["<s>", "</s>"])
    tokenizer.train([str(text)], trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="</s>")
    fast.save_pretrained(folder)
    ids = torch.tensor(tokenizer.encode(text.read_text(encoding="utf-8")).ids)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=128,
        intermediate_size=344,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=1,
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps)
    for step in range(steps):
        starts = torch.randint(len(ids) - _LENGTH, (_BATCH, 1))
        batch = ids[starts + torch.arange(_LENGTH)]
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 50 == 0:
            print(f"step {step}: loss {loss.item():.3f}", flush=True)
    model.eval().save_pretrained(folder)


def main() -> None:
    """Print the perplexity of each precision."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("train", type=Path)
    parser.add_argument("valid", type=Path)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--model", type=Path, help="folder of the model, which is trained where it is missing")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as scratch:
        model = options.model or Path(scratch) / "model"
        if not (model / "config.json").is_file():
            train(options.train, model, options.steps)
        for precision in WEIGHT_BITS:
            recipe = Recipe(
                model=model,
                data=str(options.train),
                eval_data=str(options.valid),
                keep="100%",
                precision=precision,
                threads=options.threads,
                batch=(1,),
                seconds=0.1,
                out=Path(scratch) / precision,
            )
            report = compressor.compress(recipe)
            assert report.generation is not None
            for row in report.generation.candidates:
                assert row.metric is not None
                assert row.difference is not None
                before = row.metric - row.difference
                print(f"{row.label}: perplexity {before:.3f} in fp32, {row.metric:.3f}", flush=True)


if __name__ == "__main__":
    main()
