"""Folders with graphs that count: the token after a number is the next number, and after the last one the text ends."""

from __future__ import annotations

from pathlib import Path

import onnx_ir as ir
import transformers as hf
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from compressor.targets.caches import DECODER, ENCODER
from graph_passes import save
from graph_passes.flow.caches import record_caches

WORDS = "zero one two three four five six seven eight nine ten".split()
END, PADDING, SIZE = len(WORDS), len(WORDS) + 1, len(WORDS) + 2
"""Ids of the end and of padding, and the size of the vocabulary."""
POSITIONS = 16
TEMPLATE = "{% for message in messages %}three {{ message['content'] }}{% endfor %}"

_DECODER = f"""
<ir_version: 10, opset_import: ["": 18]>
decoder (
    int64[batch, sequence] input_ids, int64[batch, mask] MASK,
    float[batch, 2, past, 3] keys, float[batch, 1, past, 3] values INPUTS
) => (
    float[batch, sequence, {SIZE}] logits, float[batch, 2, total, 3] new_keys, float[batch, 1, total, 3] new_values
)
<
    int64[{SIZE}] tokens = {{{", ".join(map(str, range(SIZE)))}}}, int64[1] last = {{2}}, int64[2] outer = {{1, 3}},
    int64[1] one = {{1}}, int64[1] three = {{3}}, int64[1] end = {{{END}}},
    int64[4] of_keys = {{1, 2, 1, 3}}, int64[4] of_values = {{1, 1, 1, 3}}
>
{{
    added = Add(input_ids, one)
    next = Min(added, end)
    column = Unsqueeze(next, last)
    away = Sub(tokens, column)
    thrice = Mul(away, three)
    distance = Add(thrice, one)
    squared = Mul(distance, distance)
    loss = Neg(squared)
    logits = Cast<to = 1>(loss)
    wide = Unsqueeze(input_ids, outer)
    number = Cast<to = 1>(wide)
    key = Tile(number, of_keys)
    value = Tile(number, of_values)
    new_keys = Concat<axis = 2>(keys, key)
    new_values = Concat<axis = 2>(values, value)
}}
"""
_ENCODER = """
<ir_version: 10, opset_import: ["": 18]>
encoder (int64[batch, source] input_ids, int64[batch, source] attention_mask)
    => (float[batch, 1, source, 1] states)
<int64[2] outer = {1, 3}>
{
    wide = Unsqueeze(input_ids, outer)
    states = Cast<to = 1>(wide)
}
"""
_CACHES = [("keys", "new_keys"), ("values", "new_values")]


def tokenizer(template: str | None = None) -> PreTrainedTokenizerFast:
    """A tokenizer of the numbers."""
    vocabulary = {word: index for index, word in enumerate((*WORDS, "[END]", "[PAD]"))}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="zero"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    numbers = PreTrainedTokenizerFast(
        tokenizer_object=words, eos_token="[END]", pad_token="[PAD]", unk_token="zero", chat_template=template
    )
    numbers.model_input_names = ["input_ids", "attention_mask"]
    return numbers


def write_decoder_only(folder: Path, *, template: str | None = None) -> Path:
    """Write a folder with a decoder-only model, whose graph takes positions and uses none."""
    graph = ir.from_onnx_text(
        _DECODER.replace("MASK", "attention_mask").replace("INPUTS", ", int64[batch, sequence] position_ids")
    )
    record_caches(graph, _CACHES)
    config = hf.GPT2Config(vocab_size=SIZE, n_embd=4, n_layer=1, n_head=2, n_positions=POSITIONS)
    return _write(folder, {DECODER: graph}, config, "GPT2LMHeadModel", template)


def write_encoder_decoder(folder: Path) -> Path:
    """Write a folder with an encoder-decoder, which begins to count at zero whatever it reads."""
    graph = ir.from_onnx_text(
        _DECODER.replace("MASK", "encoder_attention_mask").replace("INPUTS", ", float[batch, 1, mask, 1] source")
    )
    record_caches(graph, [*_CACHES, ("source", "states")])
    config = hf.BartConfig(
        vocab_size=SIZE, d_model=4, encoder_layers=1, decoder_layers=1, encoder_ffn_dim=4, decoder_ffn_dim=4,
        encoder_attention_heads=2, decoder_attention_heads=2, max_position_embeddings=POSITIONS,
        decoder_start_token_id=0, forced_eos_token_id=None,
    )  # fmt: skip
    graphs = {ENCODER: ir.from_onnx_text(_ENCODER), DECODER: graph}
    return _write(folder, graphs, config, "BartForConditionalGeneration", None)


def _write(
    folder: Path, graphs: dict[str, ir.Model], config: hf.PretrainedConfig, name: str, template: str | None
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    config.architectures = [name]
    config.bos_token_id, config.eos_token_id, config.pad_token_id = 0, END, PADDING
    config.save_pretrained(folder)
    tokenizer(template).save_pretrained(folder)
    for file, graph in graphs.items():
        save(graph, folder / file)
    return folder
