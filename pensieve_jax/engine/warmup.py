"""Compiling what turns will need before they come, so that no turn waits for the compiler."""

from collections.abc import Callable, Sequence

from pensieve_jax.core.types import SamplingParams
from pensieve_jax.engine.engine import Engine

USUAL_PARAMS = (SamplingParams(), SamplingParams(temperature=1.0), SamplingParams(temperature=1.0, top_p=0.9))
"""Greedy, drawn from all tokens, drawn from the likeliest. Penalties, biases and log probabilities choose by
small programs of their own, which are compiled when they are first asked for."""


def warm_up(
    engine: Engine,
    params: SamplingParams | Sequence[SamplingParams] = USUAL_PARAMS,
    *,
    max_turns: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Compile the steps of all padded shapes, and the copies between the tiers.

    Leaves nothing in the cache or in the log. What is alive in the process then, Python's collector of cycles
    doesn't look at until the engine is closed. With `EngineConfig.compilation_cache` a second
    start reads the programs instead, and traces none unless the model's code is outside `pensieve_jax`.

    Args:
        engine: turns may be under way; they wait.
        params: how tokens will be chosen; what they ask for selects the compiled variants.
        max_turns: turns that will run at once at most; None: as many as the engine takes.
        progress: called with (shapes compiled, shapes in all).
    """
    each = [params] if isinstance(params, SamplingParams) else list(params)
    engine.compile(each, max_turns=max_turns, progress=progress)
