"""Language models that read a text in segments and attend to a memory of earlier segments.

`AllAttentionForCausalLM` is the variant of Shim et al. (Layer-wise Pruning of Transformer Attention Heads for Efficient
Language Modeling, 2021) of Sukhbaatar et al.'s All-attention Transformer: pre-norm, no adaptive span.
`TransformerXLForCausalLM` is the model of Dai et al. (2019), also pre-norm, so that the two differ only in the
feed-forward layer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers import initialization as init

from compressor.models.configuration import AllAttentionConfig, SegmentConfig, TransformerXLConfig
from compressor.models.relative_attention import RelativeAttention, sinusoids
from compressor.models.segment_outputs import SegmentOutput, SegmentStates, by_name
from compressor.segment_memory import ordered_memories


class SegmentLayer(nn.Module):
    """Pre-norm attention; a layer without heads only adds its output bias to the residual.

    Args:
        config: sizes of the model.
        heads: heads of this layer, or 0.
        persistent: persistent vectors per head.
    """

    def __init__(self, config: SegmentConfig, heads: int, persistent: int = 0) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = nn.Dropout(config.hidden_dropout)
        if heads:
            self.norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
            self.attention = RelativeAttention(config, heads, persistent)
        else:
            self.bias = nn.Parameter(torch.zeros(config.hidden_size))

    def forward(self, states: Tensor, memory: Tensor | None, positions: Tensor, masked: Tensor) -> Tensor:
        """Next hidden states `[batch, segment, hidden]`.

        Args:
            states: hidden states of the segment, `[batch, segment, hidden]`.
            memory: hidden states of earlier segments, `[batch, memory, hidden]`, or None.
            positions: see `RelativeAttention.forward`.
            masked: see `RelativeAttention.forward`.
        """
        if not self.heads:
            return states + self.dropout(self.bias)
        context = states if memory is None else torch.cat([memory, states], dim=1)
        return states + self.dropout(self.attention(self.norm(context), states.shape[1], positions, masked))


class AllAttentionLayer(SegmentLayer):
    """Attention with persistent vectors, without feed-forward layer."""

    def __init__(self, config: AllAttentionConfig, heads: int) -> None:
        super().__init__(config, heads, config.num_persistent)


class TransformerXLLayer(SegmentLayer):
    """Attention, followed by a feed-forward layer."""

    def __init__(self, config: TransformerXLConfig, heads: int) -> None:
        super().__init__(config, heads)
        assert config.intermediate_size is not None
        self.feed_forward = nn.Sequential(
            nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps),
            nn.Linear(config.hidden_size, config.intermediate_size),
            nn.ReLU(),
            nn.Dropout(config.hidden_dropout),
            nn.Linear(config.intermediate_size, config.hidden_size),
        )

    def forward(self, states: Tensor, memory: Tensor | None, positions: Tensor, masked: Tensor) -> Tensor:
        """Next hidden states `[batch, segment, hidden]`, after the feed-forward.

        Args:
            states, memory: hidden states of the segment and of earlier ones, `[batch, positions, hidden]`.
            positions, masked: those of `RelativeAttention.forward`.
        """
        states = super().forward(states, memory, positions, masked)
        return states + self.dropout(self.feed_forward(states))


class SegmentPreTrainedModel(PreTrainedModel):
    """Base of both families: loading, saving and initial values."""

    config: SegmentConfig
    base_model_prefix = "model"
    main_input_name = "input_ids"
    _supports_sdpa = True

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, RelativeAttention):
            init.zeros_(module.content_bias)
            init.zeros_(module.position_bias)
            if module.persistent:
                init.normal_(module.persistent_key, std=module.head_dim**-0.5)
                init.normal_(module.persistent_value, std=module.persistent**-0.5)
        elif isinstance(module, SegmentLayer) and not module.heads:
            init.zeros_(module.bias)


class SegmentModel(SegmentPreTrainedModel):
    """The model without language model head: embedding, layers and final norm."""

    layer_class: ClassVar[Callable[..., SegmentLayer]]

    def __init__(self, config: SegmentConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.dropout = nn.Dropout(config.embedding_dropout)
        self.layers = nn.ModuleList(
            self.layer_class(config, len(config.kept(layer))) for layer in range(config.num_hidden_layers)
        )
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        memories: Sequence[Tensor] | None = None,
        inputs_embeds: Tensor | None = None,
        **named: Any,
    ) -> SegmentStates | dict[str, Tensor]:
        """Compute hidden states and new memories.

        Memories may also be passed by name, as to an exported graph: `memory_0`, `memory_1`, ... The result is then a
        dictionary of the first output and `new_memory_0`, `new_memory_1`, ...

        Args:
            input_ids: `[batch, segment]`.
            attention_mask: `[batch, segment]`, 0 where a position is padding; positions in memory are never masked.
            memories: one tensor per layer, `[batch, memory, hidden]`, as returned for the previous segment; None for
                the first segment.
            inputs_embeds: `[batch, segment, hidden]` instead of `input_ids`, already scaled by sqrt(hidden).
            named: memories by name.

        Raises:
            InputError: the memories have a wrong number or shape, or there are more positions than the model has.
        """
        if inputs_embeds is None:
            assert input_ids is not None
            inputs_embeds = self.embed_tokens(input_ids) * math.sqrt(self.config.hidden_size)
        named_memories = ordered_memories(named)
        memories = named_memories if memories is None or not len(memories) else list(memories)
        states = self.dropout(inputs_embeds)
        if not torch.compiler.is_compiling():
            self.config.limits.check(states.shape[0], states.shape[1], [memory.shape for memory in memories or ()])
        length = states.shape[1]
        keys = length if not memories else memories[0].shape[1] + length
        positions = sinusoids(keys, self.config.hidden_size, states)
        masked = _masked_keys(length, keys, attention_mask, states.device)
        new_memories = []
        for index, layer in enumerate(self.layers):
            memory = memories[index] if memories else None
            new_memories.append(self._new_memory(memory, states))
            states = layer(states, memory, positions, masked)
        outputs = SegmentStates(last_hidden_state=self.norm(states), memories=tuple(new_memories))
        return by_name(outputs) if named_memories else outputs

    def _new_memory(self, memory: Tensor | None, states: Tensor) -> Tensor:
        """The last `memory_length` positions of memory and segment, without gradient."""
        context = (states if memory is None else torch.cat([memory, states], dim=1)).detach()
        return context[:, torch.sym_max(context.shape[1] - self.config.memory_length, 0) :]


class SegmentForCausalLM(SegmentPreTrainedModel):
    """A language model whose output matrix is the embedding."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012
    model_class: ClassVar[type[SegmentModel]]

    def __init__(self, config: SegmentConfig) -> None:
        super().__init__(config)
        self.model = self.model_class(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        memories: Sequence[Tensor] | None = None,
        labels: Tensor | None = None,
        shift_labels: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        **kwargs: Any,
    ) -> SegmentOutput | dict[str, Tensor]:
        """Compute logits of the next token at every position, the loss if labels are given, and new memories.

        Args:
            input_ids: see `SegmentModel.forward`.
            attention_mask: see `SegmentModel.forward`.
            memories: see `SegmentModel.forward`.
            labels: `[batch, segment]`, the token at each position, shifted by one here; -100 is ignored.
            shift_labels: `[batch, segment]`, the token after each position, instead of `labels`.
            inputs_embeds: see `SegmentModel.forward`.
            kwargs: memories by name, and arguments of the loss function.

        Raises:
            InputError: see `SegmentModel.forward`.
        """
        named_memories = ordered_memories(kwargs)
        memories = named_memories if memories is None else memories
        outputs = self.model(input_ids, attention_mask, memories, inputs_embeds)
        logits = self.lm_head(outputs.last_hidden_state)
        loss = None
        if labels is not None or shift_labels is not None:
            loss = self.loss_function(
                logits=logits, labels=labels, vocab_size=self.config.vocab_size, shift_labels=shift_labels, **kwargs
            )
        result = SegmentOutput(loss=loss, logits=logits, memories=outputs.memories)
        return by_name(result) if named_memories else result


def _masked_keys(length: int, keys: int, attention_mask: Tensor | None, device: torch.device) -> Tensor:
    """True where a query must not attend to a key, `[1 or batch, 1, segment, memory + segment]`."""
    past = keys - length
    query = torch.arange(length, device=device)[:, None] + past
    future = (torch.arange(keys, device=device) > query)[None, None]
    if attention_mask is None:
        return future
    return future | (nn.functional.pad(attention_mask, (past, 0), value=1) == 0)[:, None, None]


class AllAttentionModel(SegmentModel):
    """The All-attention Transformer without language model head."""

    config_class = AllAttentionConfig
    layer_class = AllAttentionLayer


class TransformerXLModel(SegmentModel):
    """Transformer-XL without language model head."""

    config_class = TransformerXLConfig
    layer_class = TransformerXLLayer


class AllAttentionForCausalLM(SegmentForCausalLM):
    """The All-attention Transformer as a language model."""

    config_class = AllAttentionConfig
    model_class = AllAttentionModel


class TransformerXLForCausalLM(SegmentForCausalLM):
    """Transformer-XL as a language model."""

    config_class = TransformerXLConfig
    model_class = TransformerXLModel
