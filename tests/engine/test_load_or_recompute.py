"""With a profile, chunks are recomputed where that is faster than loading them; else they are loaded."""

from dataclasses import replace

import pytest

from pensieve_jax.config import EngineConfig
from pensieve_jax.core.errors import InvalidArgumentError
from pensieve_jax.core.profile import write_profile
from pensieve_jax.engine import Engine
from pensieve_jax.models.shape import shape_of
from tests.core.test_profile_file import PROFILE
from tests.engine.serving import DEVICE_TOKENS, Chat, config, evict, ids, places, tiny_model

PAGE_BYTES = 32 * 2 * 2 * 2 * 16 * 4
"""Of the tiny model: keys and values of two layers and two heads."""


def serve(tmp_path, load_bytes_per_s, load_or_recompute):
    """The receipt of a turn whose history was evicted, and the cache's counters."""
    profile = replace(PROFILE, model=shape_of(tiny_model()), device="cpu", load_bytes_per_s=load_bytes_per_s)
    write_profile(tmp_path / "p.json", profile)
    settings = config(profile_path=tmp_path / "p.json", load_or_recompute=load_or_recompute)
    with Engine(tiny_model(), config=settings) as engine:
        chat = Chat(engine)
        chat.turn(ids(90), 5)
        evict(engine, DEVICE_TOKENS)
        receipt = chat.turn([7, 8]).receipt
        engine.check_integrity()
        return receipt, engine.counters


@pytest.mark.parametrize(
    ("seconds", "load_or_recompute", "loads"), [(0.1, True, False), (1e-6, True, True), (0.1, False, True)]
)
def test_whichever_is_faster(tmp_path, seconds, load_or_recompute, loads):
    """Recomputing a chunk takes between 2.5 and 3 ms by this profile."""
    receipt, counters = serve(tmp_path, PAGE_BYTES / seconds, load_or_recompute)
    assert places(receipt) == ((0, 94, 0) if loads else (0, 0, 94))
    assert (counters.chunks_swapped_out > 0) == loads


def test_it_needs_a_profile():
    with pytest.raises(
        InvalidArgumentError, match="load_or_recompute: got True, expected False without a prof"
    ):
        EngineConfig(load_or_recompute=True)
