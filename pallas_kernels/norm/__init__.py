"""Norms over the hidden axis."""

from pallas_kernels.norm.api import layer_norm, rms_norm

__all__ = ["layer_norm", "rms_norm"]
