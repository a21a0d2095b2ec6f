"""Measures a model on a device: what a step and what recomputing a chunk cost, and how fast pages move."""

from pensieve_jax.profiler.measure import ProfileConfig, measure_profile

__all__ = ["ProfileConfig", "measure_profile"]
