"""Compiling what turns will need before they come, so that no turn waits for the compiler."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from pensieve_jax.core.types import SamplingParams
from pensieve_jax.engine.engine import Engine
from pensieve_jax.worker.batch import SMALLEST_PREFILL


def warm_up(
    engine: Engine,
    params: SamplingParams | None = None,
    *,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Compile the steps of a single conversation: a prompt of every padded length, and one decoding row.

    Batches of several turns have shapes of their own. Leaves nothing in the cache or in the log.

    Args:
        engine: one without unfinished turns.
        params: how tokens will be chosen; what it asks for selects the compiled variant. None: greedy.
        progress: called with (shapes compiled, shapes in all).
    """
    params = params or SamplingParams()
    lengths = prompt_lengths(engine)
    for done, length in enumerate(lengths):
        if progress is not None:
            progress(done, len(lengths))
        once = replace(params, max_tokens=2 if done == 0 else 1, ignore_eos=True, stop=(), stop_token_ids=())
        prompt = np.random.default_rng(length).integers(engine.spec.vocab_size, size=length)
        engine.generate([prompt], once)
    if progress is not None:
        progress(len(lengths), len(lengths))


def prompt_lengths(engine: Engine) -> list[int]:
    """A length for every padded shape that the new tokens of one turn can have: powers of two as far as a
    step goes, and the step's own limit."""
    pages = engine.cache_config
    room = min(engine.max_context_tokens - 2, pages.device_pages * pages.page_tokens - 1)
    most = min(engine.config.scheduler.step_tokens, room)
    lengths = []
    length = SMALLEST_PREFILL
    while length < most:
        lengths.append(length)
        length *= 2
    return [*lengths, most]
