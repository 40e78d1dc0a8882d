"""A linear layer after the pooling of a sentence encoder, which maps embeddings to another space."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

ACTIVATIONS: Mapping[str, type[nn.Module]] = {
    layer.__name__: layer for layer in (nn.Identity, nn.Tanh, nn.ReLU, nn.GELU, nn.SiLU, nn.Sigmoid)
}
"""The activations of a `DenseLayer` by the names of their classes."""


class DenseLayer(nn.Module):
    """The module `Dense` of sentence-transformers: an affine map and an activation.

    The weights are buffers: the layer follows the last one that is pruned, and is neither pruned nor trained.

    Args:
        weight: `[output width, input width]`.
        bias: `[output width]`; None: there is none.
        activation: a name in `ACTIVATIONS`.
    """

    weight: Tensor
    bias: Tensor | None

    def __init__(self, weight: Tensor, bias: Tensor | None, activation: str) -> None:
        super().__init__()
        self.register_buffer("weight", weight)
        self.register_buffer("bias", bias)
        self.activation = activation
        self._activate = ACTIVATIONS[activation]()

    def forward(self, embeddings: Tensor) -> Tensor:
        """Map embeddings `[texts, input width]` to `[texts, output width]`."""
        mapped: Tensor = self._activate(nn.functional.linear(embeddings, self.weight, self.bias))
        return mapped
