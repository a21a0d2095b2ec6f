"""The example of a policy of one's own: short, and followed by the simulator and by the engine's cache."""

import runpy
from dataclasses import replace
from pathlib import Path

import pytest

from host_cache.policies import RetentionValue, make_policy
from pensieve_jax.core.errors import InvalidArgumentError
from pensieve_jax.engine import Engine
from pensieve_jax.simulator import Simulation, SimulationConfig, make_config, summarize
from tests.engine.serving import Chat, config, ids, tiny_model
from tests.host_cache.test_manager import COST, Cache

EXAMPLE = Path(__file__).parents[2] / "examples" / "own_policy.py"


@pytest.fixture(scope="module")
def returning():
    return runpy.run_path(str(EXAMPLE))["Returning"]


def test_it_runs_and_is_short(capsys):
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    plain, own = (float(line.split()[-6]) for line in capsys.readouterr().out.splitlines())
    assert 0 < own < plain < 1
    assert sum(1 for line in EXAMPLE.read_text().splitlines() if line.strip()) < 30


@pytest.mark.parametrize("own", [False, True])
def test_the_cache_keeps_who_has_come_back(returning, own):
    books = Cache(8, policy=returning(COST) if own else RetentionValue(COST))
    books.turn("regular", 12)
    books.manager.touch("regular", books.now + 1)
    books.turn("regular", 13)
    books.turn("once", 12)
    books.now = 11.0  # the regular one has been idle for half as long again
    books.turn("new", 8)
    lost_its_beginning = books.admit("regular", 14).missing[0][0] == 0
    assert lost_its_beginning == (not own)


def test_the_engine_follows_it_and_answers_stay_right(returning):
    settings = config(device_pages=8, host_pages=2)
    settings = replace(settings, tiers=replace(settings.tiers, policy=returning))
    with Engine(tiny_model(), config=settings) as engine:
        assert engine._turns.parts.policy.name == "returning"
        chats = [Chat(engine) for _ in range(4)]
        for number in range(12):
            chats[number % 4].turn(ids(25, seed=number))
        assert engine._turns.cache.counters.chunks_dropped > 0
        engine.check_integrity()


def test_it_is_found_by_its_place(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLE.parent))
    assert make_policy("own_policy:Returning", lambda context: 1.0).name == "returning"
    assert isinstance(make_config(policy="own_policy:Returning"), SimulationConfig)
    with pytest.raises(InvalidArgumentError, match="policy: got 'own_policy:Nobody'"):
        make_config(policy="own_policy:Nobody")


def test_the_simulator_takes_a_factory(returning):
    result = Simulation([], make_config(policy=returning)).run()
    assert summarize(result)["requests"] == 0
