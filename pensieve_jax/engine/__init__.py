"""The engine: conversations in, answers out, one step after the other."""

from pensieve_jax.engine.conversation import Conversation
from pensieve_jax.engine.engine import Engine
from pensieve_jax.engine.turn import Turn, TurnDelta, TurnResult

__all__ = ["Conversation", "Engine", "Turn", "TurnDelta", "TurnResult"]
