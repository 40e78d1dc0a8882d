"""Language models that read a text in segments and attend to a memory of earlier segments.

`AllAttentionForCausalLM` is the variant of Shim et al. (Layer-wise Pruning of Transformer Attention Heads for Efficient
Language Modeling, 2021) of Sukhbaatar et al.'s All-attention Transformer: pre-norm, no adaptive span.
`TransformerXLForCausalLM` is the model of Dai et al. (2019), also pre-norm, so that the two differ only in the
feed-forward layer.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import torch
from huggingface_hub.dataclasses import strict
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers import initialization as init
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import ModelOutput

from compressor.errors import ErrorCode, InputError
from compressor.segment_memory import MemoryLimits, new_memory_names, ordered_memories
from compressor.units import Site, check_plan
from graph_passes import Plan, SitePlan

_COUNTS = (
    *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "head_dim", "intermediate_size"),
    "max_position_embeddings",
)
Memories = tuple[Tensor, ...]
"""A tensor for each layer: its input hidden states, before the norm, `[batch, memory, hidden]`."""


@strict
class SegmentConfig(PreTrainedConfig):
    """The fields of both families' configurations.

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
        """Original ids of the heads that a layer has."""
        return list(range(self.num_attention_heads)) if self.layer_heads is None else self.layer_heads[layer]

    @property
    def limits(self) -> MemoryLimits:
        """Number and sizes of the memories."""
        return MemoryLimits(self.num_hidden_layers, self.hidden_size, self.memory_length, self.max_position_embeddings)

    def validate_architecture(self) -> None:
        """Check sizes and heads; `strict` calls this when it validates the configuration."""
        for name, least in (*((name, 1) for name in _COUNTS), ("memory_length", 0), ("num_persistent", 0)):
            if (size := getattr(self, name, None)) is not None and size < least:
                raise _out_of_range(name, size, f"give {least} or more")
        for name in ("attention_dropout", "embedding_dropout", "hidden_dropout"):
            if not 0 <= (share := getattr(self, name)) < 1:
                raise _out_of_range(name, share, "give 0 or more, and less than 1")
        if self.hidden_size % 2:
            raise _out_of_range("hidden_size", self.hidden_size, "give an even number, for sines and cosines")
        if self.head_dim is None:
            size, heads = self.hidden_size, self.num_attention_heads
            text = f"hidden_size {size} cannot be divided among {heads} heads; give a multiple of them, or head_dim"
            raise InputError(text, code=ErrorCode.CONTRADICTION, field="hidden_size", value=size, heads=heads)
        memory, positions = self.memory_length, self.max_position_embeddings
        if memory >= positions:
            text = (
                f"memory_length {memory} leaves no position of max_position_embeddings {positions} for a segment; give"
                " a shorter memory or more positions"
            )
            raise InputError(
                text, code=ErrorCode.CONTRADICTION, field="memory_length", value=memory, positions=positions
            )
        if self.layer_heads is not None:
            self._check_heads(self.layer_heads)

    def _check_heads(self, layer_heads: list[list[int]]) -> None:
        """Raise InputError unless ascending ids of original heads are listed for every layer."""
        if (layers := len(layer_heads)) != self.num_hidden_layers:
            text = f"layer_heads has {layers} layers, the model {self.num_hidden_layers}; give heads for each layer"
            raise InputError(text, code=ErrorCode.CONTRADICTION, field="layer_heads", layers=layers)
        for layer, heads in enumerate(layer_heads):
            if heads != sorted(set(heads)) or not set(heads) <= set(range(self.num_attention_heads)):
                text = f"layer_heads: layer {layer} has {heads}; give ascending ids of original heads"
                raise InputError(text, code=ErrorCode.INVALID_VALUE, field="layer_heads", layer=layer, value=heads)


def _out_of_range(field: str, value: Any, remedy: str) -> InputError:
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


def _eager_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """Attention of query `[batch, head, query, head_dim]` in basic operators, by the interface of transformers.

    Returns:
        Output `[batch, query, head, head_dim]` and map `[batch, head, query, key]`.
    """
    scores = query @ key.transpose(2, 3) * scaling
    if attention_mask is not None:
        scores = scores + attention_mask
    weights = nn.functional.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    weights = nn.functional.dropout(weights, p=dropout, training=module.training)
    return (weights @ value).transpose(1, 2).contiguous(), weights


def _sinusoids(length: int, width: int, like: Tensor) -> Tensor:
    """Encodings `[length, width]` of the distances length-1, ..., 0, sines before cosines (R in Transformer-XL)."""
    steps = torch.arange(width // 2, device=like.device)  # integers, here and below: TensorRT 8.6 has no float Range
    distance = length - 1 - torch.arange(length, device=like.device)
    angles = distance.float()[:, None] * torch.exp(steps.float() * (-2 * math.log(10000.0) / width))
    return torch.cat([angles.sin(), angles.cos()], dim=-1).to(like.dtype)


def _rel_shift(scores: Tensor) -> Tensor:
    """Convert scores `[batch, head, query, key]` by distance into scores by key (Transformer-XL, appendix B).

    Column p of the scores is that of distance key - 1 - p. Entry [i, j] of the result is that of distance
    i + memory - j; entries of negative distance (the future) are arbitrary.
    """
    batch, heads, queries, keys = scores.shape
    padded = nn.functional.pad(scores, (1, 0)).reshape(batch, heads, keys + 1, queries)
    return padded[:, :, 1:].reshape(batch, heads, queries, keys)


class RelativeAttention(nn.Module):
    """Attention over memory, segment and persistent vectors, with relative positions.

    The score of query i and key j is `((q_i + b_w) k_j + (q_i + b_r) W_r R_{i+S-j}) / sqrt(head_dim)` (Transformer-XL,
    section 3.3). Persistent vectors (All-attention, eq. 1) are attended by every query, never masked, and have no
    position.

    Args:
        heads: heads of this site, at least one.
        persistent: number N of persistent key and value vectors per head.
    """

    is_causal = True
    reads_segments = True
    """Queries start at position 0 of the segment, regardless of the length of the memory."""

    def __init__(self, config: SegmentConfig, heads: int, persistent: int = 0) -> None:
        super().__init__()
        assert config.head_dim is not None
        self.config, self.heads, self.head_dim, self.persistent = config, heads, config.head_dim, persistent
        self.scaling = self.head_dim**-0.5
        self.attention_dropout = config.attention_dropout
        width = heads * self.head_dim
        self.q_proj, self.k_proj, self.v_proj, self.r_proj = (
            nn.Linear(config.hidden_size, width, bias=False) for _ in range(4)
        )
        self.o_proj = nn.Linear(width, config.hidden_size)
        self.content_bias = nn.Parameter(torch.zeros(heads, self.head_dim))  # b_w
        self.position_bias = nn.Parameter(torch.zeros(heads, self.head_dim))  # b_r
        if persistent:
            self.persistent_key = nn.Parameter(torch.zeros(heads, persistent, self.head_dim))
            self.persistent_value = nn.Parameter(torch.zeros(heads, persistent, self.head_dim))

    def forward(self, context: Tensor, length: int, positions: Tensor, masked: Tensor) -> Tensor:
        """Attend from a segment to memory, segment and persistent vectors.

        Args:
            context: normalized memory and segment, `[batch, key, hidden]`; the last `length` positions are the segment.
            positions: encodings of distances `[key, hidden]`, farthest first.
            masked: True where a query must not attend to a key; can be broadcast to `[batch, 1, query, key]`.

        Returns:
            `[batch, query, hidden]`.
        """
        batch, keys = context.shape[:2]
        query = self._heads(self.q_proj(context[:, keys - length :]))
        key, value = self._heads(self.k_proj(context)), self._heads(self.v_proj(context))
        distance = self._heads(self.r_proj(positions)[None])
        biased = (query + self.position_bias.to(query.dtype)).transpose(1, 2)
        mask = _rel_shift(biased @ distance.permute(0, 2, 3, 1)) * self.scaling
        mask = mask.masked_fill(masked, torch.finfo(mask.dtype).min)
        if self.persistent:
            # The factors keep both in the range of the projected keys and values (Sukhbaatar et al., 2019).
            key = self._append_persistent(key, self.persistent_key * math.sqrt(self.head_dim))
            value = self._append_persistent(value, self.persistent_value * math.sqrt(self.persistent))
            mask = nn.functional.pad(mask, (0, self.persistent))
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, _eager_attention_forward)
        out, _ = attend(
            self,
            (query + self.content_bias.to(query.dtype)).transpose(1, 2),
            key.transpose(1, 2),
            value.transpose(1, 2),
            mask,
            scaling=self.scaling,
            dropout=self.attention_dropout if self.training else 0.0,
        )
        return self.o_proj(out.reshape(batch, length, -1))

    def _heads(self, states: Tensor) -> Tensor:
        """`[batch, position, head * head_dim]` -> `[batch, position, head, head_dim]`."""
        return states.view(*states.shape[:2], -1, self.head_dim)

    def _append_persistent(self, states: Tensor, vectors: Tensor) -> Tensor:
        """Append persistent vectors `[head, N, head_dim]` to the positions of every example."""
        vectors = vectors.transpose(0, 1).to(states.dtype).expand(states.shape[0], -1, -1, -1)
        return torch.cat([states, vectors], dim=1)


@dataclass
class SegmentOutput(ModelOutput):
    """Output of the models.

    Attributes:
        loss: mean loss per token, if labels are given.
        logits: of a language model, `[batch, segment, vocabulary]`.
        last_hidden_state: normalized, of a model without language model head, `[batch, segment, hidden]`.
        memories: memories for the next segment.
    """

    loss: Tensor | None = None
    logits: Tensor | None = None
    last_hidden_state: Tensor | None = None
    memories: Memories | None = None

    def by_name(self) -> dict[str, Tensor]:
        """The outputs by their names in an exported graph with memory."""
        memories = self.memories or ()
        return {name: value for name, value in self.items() if torch.is_tensor(value)} | dict(
            zip(new_memory_names(len(memories)), memories, strict=True)
        )


class SegmentLayer(nn.Module):
    """Pre-norm attention, followed by a feed-forward in Transformer-XL.

    Instead of attention, a layer without heads adds its output bias to the residual.
    """

    def __init__(self, config: SegmentConfig, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = nn.Dropout(config.hidden_dropout)
        if heads:
            self.norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
            self.attention = RelativeAttention(config, heads, getattr(config, "num_persistent", 0))
        else:
            self.bias = nn.Parameter(torch.zeros(config.hidden_size))
        self.feed_forward: nn.Module | None = None
        if isinstance(config, TransformerXLConfig):
            assert config.intermediate_size is not None
            self.feed_forward = nn.Sequential(
                nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps),
                nn.Linear(config.hidden_size, config.intermediate_size),
                nn.ReLU(),
                nn.Dropout(config.hidden_dropout),
                nn.Linear(config.intermediate_size, config.hidden_size),
            )

    def forward(self, states: Tensor, memory: Tensor | None, positions: Tensor, masked: Tensor) -> Tensor:
        """Next hidden states `[batch, segment, hidden]`.

        Args:
            states: hidden states of the segment, `[batch, segment, hidden]`.
            memory: hidden states of earlier segments, `[batch, memory, hidden]`, or None.
            positions, masked: see `RelativeAttention.forward`.
        """
        if self.heads:
            context = states if memory is None else torch.cat([memory, states], dim=1)
            states = states + self.dropout(self.attention(self.norm(context), states.shape[1], positions, masked))
        else:
            states = states + self.dropout(self.bias)
        return states if self.feed_forward is None else states + self.dropout(self.feed_forward(states))


class SegmentPreTrainedModel(PreTrainedModel):
    """Base class of both families: loading, saving and initial values."""

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

    def __init__(self, config: SegmentConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.dropout = nn.Dropout(config.embedding_dropout)
        self.layers = nn.ModuleList(
            SegmentLayer(config, len(config.kept(layer))) for layer in range(config.num_hidden_layers)
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
    ) -> SegmentOutput | dict[str, Tensor]:
        """Compute hidden states and new memories.

        Memories may also be passed by name, as to an exported graph: `memory_0`, `memory_1`, ... The result is then a
        dictionary of the first output and `new_memory_0`, `new_memory_1`, ...

        Args:
            input_ids: `[batch, segment]`.
            attention_mask: `[batch, segment]`, 0 where a position is padding; positions in memory are never masked.
            memories: a tensor for each layer, `[batch, memory, hidden]`, as returned for the previous segment; None for
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
        positions = _sinusoids(keys, self.config.hidden_size, states)
        masked = _masked_keys(length, keys, attention_mask, states.device)
        new_memories = []
        for index, layer in enumerate(self.layers):
            memory = memories[index] if memories else None
            context = (states if memory is None else torch.cat([memory, states], dim=1)).detach()
            new_memories.append(context[:, torch.sym_max(context.shape[1] - self.config.memory_length, 0) :])
            states = layer(states, memory, positions, masked)
        outputs = SegmentOutput(last_hidden_state=self.norm(states), memories=tuple(new_memories))
        return outputs.by_name() if named_memories else outputs


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
            input_ids, attention_mask, memories, inputs_embeds: see `SegmentModel.forward`.
            labels: `[batch, segment]`, the token at each position, shifted by one here; -100 is ignored.
            shift_labels: `[batch, segment]`, the token after each position, instead of `labels`.
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
        return result.by_name() if named_memories else result


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


class TransformerXLModel(SegmentModel):
    """Transformer-XL without language model head."""

    config_class = TransformerXLConfig


class AllAttentionForCausalLM(SegmentForCausalLM):
    """The All-attention Transformer as a language model.

    A call reads the next segment `[batch, segment]` of each text and `memories`, a tensor `[batch, memory, hidden]` for
    each layer. It returns `logits` `[batch, segment, vocabulary]` and the `memories` for the next segment.
    """

    config_class = AllAttentionConfig
    model_class = AllAttentionModel


class TransformerXLForCausalLM(SegmentForCausalLM):
    """Transformer-XL as a language model, called as `AllAttentionForCausalLM`."""

    config_class = TransformerXLConfig
    model_class = TransformerXLModel


Model = TypeVar("Model", bound=SegmentPreTrainedModel)


def pruned(model: Model, plan: Plan) -> Model:
    """A model without the dropped heads that computes the same function as `model` gated by `plan`.

    Dropping a head removes its query, key, value, position and output projections, its two biases and its persistent
    vectors. A layer without heads adds its output bias to the residual. Scales are folded into the output projections.

    Args:
        model: the model, which is not changed and shares no tensor with the result.
        plan: one entry for each attention site of the model.

    Raises:
        InputError: the plan belongs to another model, masks blocks of attention maps, or drops or scales neurons.
    """
    neurons = tuple(group.name for group in plan.feed_forwards if group.gate != (1.0,) * group.units)
    if neurons:
        text = f"plan: it drops or scales neurons of {neurons[0]}, which only graphs are shrunk by; use a plan of heads"
        raise InputError(text, code=ErrorCode.INVALID_VALUE, field="plan", sites=neurons)
    if masked := tuple(sorted(plan.masks)):
        text = f"plan: it masks blocks of {', '.join(masked)}, which removing heads cannot express; use a plan of heads"
        raise InputError(text, code=ErrorCode.INVALID_VALUE, field="plan", sites=masked)
    layers = {name: module for name, module in model.named_modules() if isinstance(module, SegmentLayer)}
    sites = {f"{name}.attention": layer.attention for name, layer in layers.items() if layer.heads}
    check_plan(plan, [Site(name, "causal", at.heads, at.heads, at.head_dim) for name, at in sites.items()])
    planned = {site.name: site for site in plan.sites}
    config = copy.deepcopy(model.config)
    config.layer_heads = [config.kept(layer) for layer in range(config.num_hidden_layers)]
    state = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    for index, name in enumerate(layers):
        site = planned.get(f"{name}.attention")
        if site is None:
            continue
        config.layer_heads[index] = [config.layer_heads[index][head] for head in site.kept]
        for key, tensor in _slice_heads(sites[site.name], site).items():
            state[f"{site.name}.{key}"] = tensor
        if not site.kept:
            bias, removed = state[f"{site.name}.o_proj.bias"], (f"{name}.attention.", f"{name}.norm.")
            state = {key: value for key, value in state.items() if not key.startswith(removed)}
            state[f"{name}.bias"] = bias
    with torch.device("meta"):
        smaller = type(model)(config)
    smaller.load_state_dict(state, assign=True)
    smaller.tie_weights()
    trained = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    for name, parameter in smaller.named_parameters():
        parameter.requires_grad_(trained.get(name, True))
    return smaller.train(model.training)


def _slice_heads(attention: RelativeAttention, site: SitePlan) -> dict[str, Tensor]:
    """The tensors of an attention module, without dropped heads."""
    kept = torch.tensor(site.kept, dtype=torch.long, device=attention.o_proj.weight.device)
    tensors = {}
    for name, tensor in attention.state_dict().items():
        if name == "o_proj.bias":
            tensors[name] = tensor.clone()
        elif name == "o_proj.weight":
            scale = torch.tensor(site.scale, dtype=tensor.dtype, device=tensor.device)
            tensors[name] = (tensor.unflatten(1, (site.heads, -1))[:, kept] * scale[:, None]).flatten(1)
        elif name.endswith("proj.weight"):
            tensors[name] = tensor.unflatten(0, (site.heads, -1))[kept].flatten(0, 1)
        else:
            tensors[name] = tensor[kept]
    return tensors
