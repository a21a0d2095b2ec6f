"""What follows a product before it is stored."""

from collections.abc import Callable
from dataclasses import dataclass

import jax


@dataclass(frozen=True, slots=True, kw_only=True)
class Epilogue:
    """In float32, in this order; hashable, since a kernel is compiled for it.

    Attributes:
        biased: whether each matrix has a bias to add.
        activation: of the sum; None: none.
        gated: whether the matrices come in pairs, and the second one's product is multiplied with the
            activation of the first one's.
        adds: whether an array of the output's shape is added; only with one output.
    """

    biased: bool = False
    activation: Callable[[jax.Array], jax.Array] | None = None
    gated: bool = False
    adds: bool = False

    @property
    def together(self) -> int:
        """Matrices of which a CTA has the same tile at once."""
        return 2 if self.gated else 1
