"""Measuring the model's steps on this machine: `pensieve bench step`."""

from pensieve_jax.bench.presets import PRESETS, Preset, find_preset
from pensieve_jax.bench.step import StepBench

__all__ = ["PRESETS", "Preset", "StepBench", "find_preset"]
