"""Configurations of the two language models that read a text in segments with a memory of earlier ones."""

from __future__ import annotations

from typing import Any

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig

from compressor.errors import ErrorCode, InputError
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
    """Fields that both families share.

    Attributes:
        vocab_size: number of tokens.
        hidden_size: width d of the model.
        num_hidden_layers: number of layers.
        num_attention_heads: heads per layer.
        head_dim: width of a head; None: hidden_size / num_attention_heads.
        memory_length: positions of earlier segments that each layer keeps.
        max_position_embeddings: maximum number of positions, memory and segment together.
        attention_dropout: dropout of attention maps.
        embedding_dropout: dropout of token embeddings.
        hidden_dropout: dropout of the output of each sublayer, before it is added to the residual.
        initializer_range: standard deviation of initial weights.
        layer_norm_eps: epsilon of the layer norms.
        tie_word_embeddings: whether the output matrix is the embedding.
        layer_heads: original ids of the heads of each layer; None: every layer has all heads.

    Raises:
        InputError: a size is out of range, sizes contradict each other, or `layer_heads` is invalid.
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
        """Original ids of the heads of a layer."""
        return list(range(self.num_attention_heads)) if self.layer_heads is None else self.layer_heads[layer]

    @property
    def limits(self) -> MemoryLimits:
        """Number and sizes of the memories."""
        return MemoryLimits(self.num_hidden_layers, self.hidden_size, self.memory_length, self.max_position_embeddings)

    def validate_architecture(self) -> None:
        """Check sizes and heads; `strict` calls this when it validates the configuration."""
        self._check_sizes()
        self._check_heads()

    def _check_sizes(self) -> None:
        """Raise InputError unless all sizes are in range and consistent."""
        for name in _COUNTS:
            if (size := getattr(self, name, None)) is not None and size < 1:
                raise _out_of_range(name, size, "give 1 or more")
        for name in ("memory_length", "num_persistent"):
            if (size := getattr(self, name, 0)) < 0:
                raise _out_of_range(name, size, "give 0 or more")
        for name in ("attention_dropout", "embedding_dropout", "hidden_dropout"):
            if not 0 <= (share := getattr(self, name)) < 1:
                raise _out_of_range(name, share, "give 0 or more, and less than 1")
        if self.hidden_size % 2:
            raise _out_of_range("hidden_size", self.hidden_size, "give an even number, for sines and cosines")
        if self.head_dim is None:
            raise InputError(
                f"hidden_size {self.hidden_size} cannot be divided among {self.num_attention_heads} heads; give a"
                " multiple of the heads, or head_dim",
                code=ErrorCode.CONTRADICTION,
                field="hidden_size",
                value=self.hidden_size,
                heads=self.num_attention_heads,
            )
        if self.memory_length >= self.max_position_embeddings:
            raise InputError(
                f"memory_length {self.memory_length} leaves no position of max_position_embeddings"
                f" {self.max_position_embeddings} for a segment; give a shorter memory or more positions",
                code=ErrorCode.CONTRADICTION,
                field="memory_length",
                value=self.memory_length,
                positions=self.max_position_embeddings,
            )

    def _check_heads(self) -> None:
        """Raise InputError unless `layer_heads` lists ascending ids of original heads for every layer."""
        if self.layer_heads is None:
            return
        if len(self.layer_heads) != self.num_hidden_layers:
            raise InputError(
                f"layer_heads has {len(self.layer_heads)} layers, the model {self.num_hidden_layers}; give a list of"
                " heads for each layer",
                code=ErrorCode.CONTRADICTION,
                field="layer_heads",
                layers=len(self.layer_heads),
            )
        for layer, heads in enumerate(self.layer_heads):
            if heads != sorted(set(heads)) or not set(heads) <= set(range(self.num_attention_heads)):
                raise InputError(
                    f"layer_heads: layer {layer} has {heads}; give ascending ids of original heads",
                    code=ErrorCode.INVALID_VALUE,
                    field="layer_heads",
                    layer=layer,
                    value=heads,
                )


def _out_of_range(field: str, value: Any, remedy: str) -> InputError:
    """The error for a field with a value out of range."""
    return InputError(f"{field} is {value}; {remedy}", code=ErrorCode.OUT_OF_RANGE, field=field, value=value)


@strict
class AllAttentionConfig(SegmentConfig):
    """All-attention Transformer: persistent key and value vectors replace the feed-forward layer.

    Source: Sukhbaatar et al. 2019, Augmenting Self-attention with Persistent Memory, in the form of Shim et al. 2021.

    Attributes:
        num_persistent: persistent vectors per head.
    """

    model_type = "all-attention"

    num_persistent: int = 2048


@strict
class TransformerXLConfig(SegmentConfig):
    """Transformer-XL in pre-norm form.

    Source: Dai et al. 2019, Transformer-XL: Attentive Language Models Beyond a Fixed-Length Context.

    Attributes:
        intermediate_size: width of the feed-forward layer; None: 4 * hidden_size.
    """

    model_type = "transformer-xl"

    intermediate_size: int | None = None

    def __post_init__(self, **kwargs: object) -> None:
        if self.intermediate_size is None:
            self.intermediate_size = 4 * self.hidden_size
        super().__post_init__(**kwargs)
