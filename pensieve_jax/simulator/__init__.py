"""Replays conversations against the real scheduler and cache manager on a virtual clock. No jax, no GPU.

A model of the step time takes the worker's place; everything that decides is the code that serves.
"""

from pensieve_jax.core.model_shape import ModelShape
from pensieve_jax.core.profile import StepProfile, read_profile
from pensieve_jax.simulator.arrivals import sample_conversations, with_poisson_arrivals, with_time_scale
from pensieve_jax.simulator.driver import Simulation, SimulationResult
from pensieve_jax.simulator.hardware import DEVICES, MODELS, DeviceSpec
from pensieve_jax.simulator.metrics import RequestRecord, summarize
from pensieve_jax.simulator.readers import read_workload
from pensieve_jax.simulator.settings import SimulationConfig, make_config
from pensieve_jax.simulator.step_time import StepTimeModel, StepWork
from pensieve_jax.simulator.workload import (
    PrefixSegment,
    SimConversation,
    SimTurn,
    cut_to_context,
    read_jsonl,
    write_jsonl,
)

__all__ = [
    "DEVICES",
    "MODELS",
    "DeviceSpec",
    "ModelShape",
    "PrefixSegment",
    "RequestRecord",
    "SimConversation",
    "SimTurn",
    "Simulation",
    "SimulationConfig",
    "SimulationResult",
    "StepProfile",
    "StepTimeModel",
    "StepWork",
    "cut_to_context",
    "make_config",
    "read_jsonl",
    "read_profile",
    "read_workload",
    "sample_conversations",
    "summarize",
    "with_poisson_arrivals",
    "with_time_scale",
    "write_jsonl",
]
