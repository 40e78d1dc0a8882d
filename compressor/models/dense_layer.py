"""The layers after the pooling of a sentence encoder or reranker, which map embeddings to other ones or to scores."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

ACTIVATIONS: Mapping[str, type[nn.Module]] = {
    layer.__name__: layer for layer in (nn.Identity, nn.Tanh, nn.ReLU, nn.GELU, nn.SiLU, nn.Sigmoid)
}
"""The activations of a `DenseLayer` by the names of their classes."""


class DenseLayer(nn.Module):
    """The module `Dense` of sentence-transformers: an affine map and an activation, and possibly a residual connection.

    The weights are buffers: the layer follows the last one that is pruned, and is neither pruned nor trained.

    Args:
        weight: `[output width, input width]`.
        bias: `[output width]`; None: there is none.
        activation: a name in `ACTIVATIONS`.
        is_residual: whether the input is added to the output.
        residual: `[output width, input width]`, which maps that input; None: it is added as it is.
    """

    weight: Tensor
    bias: Tensor | None
    residual: Tensor | None

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None,
        activation: str,
        *,
        is_residual: bool = False,
        residual: Tensor | None = None,
    ) -> None:
        super().__init__()
        self.register_buffer("weight", weight)
        self.register_buffer("bias", bias)
        self.register_buffer("residual", residual)
        self.activation, self.is_residual = activation, is_residual
        self._activate = ACTIVATIONS[activation]()

    @property
    def setting(self) -> str:
        """What the layer computes besides its weights."""
        return f"{self.activation} residual" if self.is_residual else self.activation

    def forward(self, embeddings: Tensor) -> Tensor:
        """Map embeddings `[texts, input width]` to `[texts, output width]`."""
        mapped: Tensor = self._activate(nn.functional.linear(embeddings, self.weight, self.bias))
        if not self.is_residual:
            return mapped
        return mapped + (embeddings if self.residual is None else nn.functional.linear(embeddings, self.residual))


class NormLayer(nn.Module):
    """The module `LayerNorm` of sentence-transformers, whose weights are buffers like those of `DenseLayer`.

    Args:
        weight: `[width]`.
        bias: `[width]`.
    """

    weight: Tensor
    bias: Tensor

    def __init__(self, weight: Tensor, bias: Tensor) -> None:
        super().__init__()
        self.register_buffer("weight", weight)
        self.register_buffer("bias", bias)

    @property
    def setting(self) -> str:
        """What the layer computes besides its weights."""
        return "LayerNorm"

    def forward(self, embeddings: Tensor) -> Tensor:
        """Normalise embeddings `[texts, width]`."""
        return nn.functional.layer_norm(embeddings, self.weight.shape, self.weight, self.bias)
