"""Sizes of the two language models that read a text segment by segment with a memory of the segments before."""

from __future__ import annotations

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig

from compressor.errors import InputError
from compressor.segment_memory import MemoryLimits

_COUNTS = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "head_dim",
    "intermediate_size",
    "max_position_embeddings",
)


@strict
class SegmentConfig(PreTrainedConfig):
    """What both have.

    Attributes:
        vocab_size: tokens.
        hidden_size: width d of the model.
        num_hidden_layers: layers.
        num_attention_heads: heads of a layer.
        head_dim: width of a head; None: hidden_size / num_attention_heads.
        memory_length: positions that each layer remembers of the segments before.
        max_position_embeddings: most positions, memory and segment together.
        attention_dropout: of attention maps.
        embedding_dropout: of token embeddings.
        hidden_dropout: of what a sublayer adds to the residual.
        layer_heads: original ids of the heads that each layer still has; None: all of them.

    Raises:
        InputError: sizes that no model can have; one line says which, and what is allowed.
    """

    vocab_size: int = 32000
    hidden_size: int = 512
    num_hidden_layers: int = 16
    num_attention_heads: int = 8
    head_dim: int | None = None
    memory_length: int = 192
    max_position_embeddings: int = 4096
    attention_dropout: float | int = 0.2
    embedding_dropout: float | int = 0.1
    hidden_dropout: float | int = 0.1
    initializer_range: float = 0.02
    layer_norm_eps: float = 1e-5
    tie_word_embeddings: bool = True
    layer_heads: list[list[int]] | None = None
    bos_token_id: int | None = None
    eos_token_id: int | None = None
    pad_token_id: int | None = None

    def __post_init__(self, **kwargs: object) -> None:
        if self.head_dim is None and self.num_attention_heads > 0 and not self.hidden_size % self.num_attention_heads:
            self.head_dim = self.hidden_size // self.num_attention_heads
        super().__post_init__(**kwargs)

    def kept(self, layer: int) -> list[int]:
        """Original ids of the heads that a layer has."""
        return list(range(self.num_attention_heads)) if self.layer_heads is None else self.layer_heads[layer]

    @property
    def limits(self) -> MemoryLimits:
        """What may be given as memory."""
        return MemoryLimits(self.num_hidden_layers, self.hidden_size, self.memory_length, self.max_position_embeddings)

    def validate_architecture(self) -> None:
        """Part of the validation that `strict` runs."""
        for name in _COUNTS:
            if (size := getattr(self, name, None)) is not None and size < 1:
                raise InputError(f"{name} is {size}; give 1 or more")
        for name in ("memory_length", "num_persistent"):
            if (size := getattr(self, name, 0)) < 0:
                raise InputError(f"{name} is {size}; give 0 or more")
        for name in ("attention_dropout", "embedding_dropout", "hidden_dropout"):
            if not 0 <= (share := getattr(self, name)) < 1:
                raise InputError(f"{name} is {share}; give 0 or more, and less than 1")
        if self.hidden_size % 2:
            raise InputError(
                f"hidden_size {self.hidden_size} is odd, its positions are sines beside cosines; give an even one"
            )
        if self.head_dim is None:
            raise InputError(
                f"hidden_size {self.hidden_size} cannot be divided among {self.num_attention_heads} heads; give a"
                " multiple of the heads, or head_dim"
            )
        if self.memory_length >= self.max_position_embeddings:
            raise InputError(
                f"memory_length {self.memory_length} leaves a segment none of the {self.max_position_embeddings}"
                " positions (max_position_embeddings); give a shorter memory or more positions"
            )
        if self.layer_heads is None:
            return
        if len(self.layer_heads) != self.num_hidden_layers:
            raise InputError(
                f"layer_heads has {len(self.layer_heads)} layers, the model {self.num_hidden_layers}; give one each"
            )
        for layer, heads in enumerate(self.layer_heads):
            if heads != sorted(set(heads)) or not set(heads) <= set(range(self.num_attention_heads)):
                raise InputError(f"layer_heads: layer {layer} lists {heads}; give ascending ids of the original heads")


@strict
class AllAttentionConfig(SegmentConfig):
    """All-attention Transformer: `num_persistent` key and value vectors a head in place of a feed-forward layer."""

    model_type = "all-attention"

    num_persistent: int = 2048


@strict
class TransformerXLConfig(SegmentConfig):
    """Transformer-XL in pre-norm form; `intermediate_size` of its feed-forward layer, None: 4 * hidden_size."""

    model_type = "transformer-xl"

    intermediate_size: int | None = None

    def __post_init__(self, **kwargs: object) -> None:
        if self.intermediate_size is None:
            self.intermediate_size = 4 * self.hidden_size
        super().__post_init__(**kwargs)
