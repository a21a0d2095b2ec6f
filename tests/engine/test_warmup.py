"""Nothing is compiled while turns are served, once the engine has compiled ahead."""

import gc
import random
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx

from pensieve_jax.core.types import SamplingParams
from pensieve_jax.engine import Engine
from pensieve_jax.engine.build import keep_programs
from pensieve_jax.engine.warmup import warm_up
from pensieve_jax.models import make_model
from tests.engine.serving import Chat, config, ids, small_engine
from tests.tiny import VOCAB


def small_llama():
    sizes = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 64, "max_position_embeddings": 2048}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    return make_model({"model_type": "llama", **sizes, **heads}, dtype=np.dtype(np.float32), rngs=nnx.Rngs(0))


@pytest.mark.parametrize(
    ("execution", "run_ahead", "num_shards"),
    [
        ("layered", False, 1),
        ("resident", True, 1),
        pytest.param("resident", True, 2, marks=pytest.mark.slow),
    ],
)
def test_nothing_compiles_while_serving(execution, run_ahead, num_shards):
    settings = config(execution=execution, run_ahead=run_ahead, paranoid=False, host_pages=7, step_tokens=32)
    engine = Engine(small_llama(), config=settings, num_shards=num_shards)
    shown = []
    warm_up(engine, progress=lambda done, total: shown.append((done, total)))
    assert shown == [(n, shown[-1][1]) for n in range(shown[-1][1] + 1)]
    turns = []
    rng = random.Random(1)
    for n in range(60):
        params = SamplingParams(max_tokens=rng.randint(1, 20), temperature=n % 3, top_p=[1.0, 0.8][n % 2])
        conversation = f"c{rng.randrange(7)}"
        turns.append(engine.submit(engine.conversation(conversation).id, ids(rng.randint(1, 40), n), params))
        for _ in range(rng.randint(0, 6)):
            engine.step()
        if n % 10 == 9:
            engine.fork(conversation)
    assert [turn.result() for turn in turns]
    engine.settle()
    counters = engine.counters
    assert min(counters.chunks_swapped_in, counters.chunks_swapped_out, counters.chunks_copied) > 0
    assert engine.num_compilations == 0
    engine.close()


def test_the_collector_leaves_programs_alone_until_the_engine_is_closed():
    with small_engine(paranoid=False) as engine:
        warm_up(engine, SamplingParams())
        assert gc.get_freeze_count() > 0
    assert gc.get_freeze_count() == 0


def test_what_was_not_asked_for_is_counted():
    with small_engine(paranoid=False) as engine:
        warm_up(engine, SamplingParams())
        engine.generate([ids(40)], SamplingParams(max_tokens=4))
        assert engine.num_compilations == 0
        engine.generate([ids(20)], SamplingParams(max_tokens=2, frequency_penalty=1.0))
        assert engine.num_compilations > 0


def test_steps_of_more_tokens_than_their_rows_can_hold():
    with small_engine(paranoid=False, step_tokens=2048, max_rows=2, max_context_tokens=64) as engine:
        warm_up(engine, SamplingParams())
        engine.generate([ids(50), ids(60, 1), ids(40, 2)], SamplingParams(max_tokens=3))
        assert engine.num_compilations == 0


@pytest.mark.parametrize("step_tokens", [4, 48])
def test_one_shape_for_all_batches(step_tokens):
    with small_engine(paranoid=False, batch_invariant=True, step_tokens=step_tokens) as engine:
        warm_up(engine, SamplingParams())
        engine.generate([ids(30), ids(7), ids(1)], SamplingParams(max_tokens=6))
        assert engine.num_compilations == 0


def test_conversations_outlast_it():
    with small_engine() as engine:
        chat = Chat(engine)
        chat.turn(ids(70))
        turn = chat.submit(ids(30, seed=1), max_tokens=20)
        for _ in range(5):
            engine.step()
        warm_up(engine, SamplingParams())
        chat.check(turn, ids(30, seed=1))
        assert chat.turn([3]).receipt.tokens_from_device == len(chat.tokens) - 6
        engine.check_integrity()


def test_programs_are_kept_where_the_user_wants_them(tmp_path):
    before = jax.config.jax_compilation_cache_dir
    assert before, "the tests keep theirs"
    assert keep_programs(tmp_path) == Path(before) / "programs"
    assert jax.config.jax_compilation_cache_dir == before
    try:
        jax.config.update("jax_compilation_cache_dir", None)
        assert keep_programs(None) is None
        assert jax.config.jax_compilation_cache_dir is None
        assert keep_programs(tmp_path) == tmp_path / "programs"
        assert jax.config.jax_compilation_cache_dir == str(tmp_path)
        jax.config.update("jax_compilation_cache_dir", "gs://bucket/programs")
        assert keep_programs(tmp_path) == tmp_path / "programs"
    finally:
        jax.config.update("jax_compilation_cache_dir", before)
