"""Compiled programs are found by what they were made from; what isn't there, or is damaged, is compiled."""

import logging
import os
from fractions import Fraction
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from pensieve_jax.models import make_model
from pensieve_jax.parallel import make_mesh
from pensieve_jax.worker import program_store
from pensieve_jax.worker.batch import BatchShapes
from pensieve_jax.worker.compilations import compile_together
from pensieve_jax.worker.program_store import ProgramStore, open_store
from pensieve_jax.worker.programs import Call, Program
from pensieve_jax.worker.step_functions import StepFunctions, split_model
from pensieve_jax.worker.worker import workspace_bytes
from tests.tiny import TinyModel

LLAMA = {
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
}
TRACED = "/jax/core/compile/jaxpr_to_mlir_module_duration"


@pytest.fixture
def traced():
    """Names of what is lowered meanwhile."""
    events = []

    def listen(event, duration_secs, **details):
        if event == TRACED:
            events.append(details.get("fun_name"))

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield events
    jax.monitoring.unregister_event_duration_listener(listen)


def add(pool, rows):
    return pool.at[0].add(rows.sum()), {"sum": rows.sum(), "none": None}


def store_in(folder, made_from="this", num_shards=1, **settings):
    return ProgramStore(folder, make_mesh(num_shards), made_from, **settings)


def arguments(rows=3):
    place = jax.sharding.NamedSharding(make_mesh(1), jax.sharding.PartitionSpec())
    return jax.device_put(jnp.zeros((4, 8)), place), np.arange(rows, dtype=np.float32)


def fill(store, args):
    program = Program("add", add, store, fixed=1, donate=(0,))
    with store.fill():
        assert list(compile_together([[Call(program, args)]])) == [None]
    return program


def test_a_second_start_traces_nothing_and_computes_the_same(tmp_path, traced):
    expected = fill(store_in(tmp_path), arguments())(*arguments())
    assert traced, "the first start traces"
    pool, rows = arguments()
    where = pool.unsafe_buffer_pointer()
    traced.clear()
    program = fill(store_in(tmp_path), (pool, rows))
    got = program(pool, rows)
    assert traced == []
    assert pool.is_deleted()
    assert got[0].unsafe_buffer_pointer() == where
    np.testing.assert_array_equal(got[0], expected[0])
    assert got[1]["sum"] == expected[1]["sum"] == 3
    assert got[1]["none"] is None
    program(arguments()[0], np.zeros(5, np.float32))
    assert traced, "other shapes are traced when they come"


def test_a_program_is_found_by_everything_that_it_depends_on(tmp_path):
    fill(store_in(tmp_path), arguments())
    load = store_in(tmp_path).load
    pool, rows = arguments()
    assert load("add", (pool, rows)) is not None
    assert load("sub", (pool, rows)) is None
    assert load("add", (pool, rows.astype(np.float16))) is None
    assert load("add", (pool, rows[:2])) is None
    assert load("add", (pool, [rows])) is None
    assert load("add", (jnp.zeros((4, 8)), rows)) is None, "placed otherwise"
    assert store_in(tmp_path, "that").load("add", (pool, rows)) is None


@pytest.mark.parametrize("damage", [lambda content: content[:-9], lambda content: b"", lambda content: b"x"])
def test_a_damaged_file_is_written_anew(tmp_path, caplog, damage):
    fill(store_in(tmp_path), arguments())
    (path,) = tmp_path.iterdir()
    content = path.read_bytes()
    path.write_bytes(damage(content))
    with caplog.at_level(logging.WARNING):
        program = fill(store_in(tmp_path), arguments())
    assert "damaged" in caplog.text
    assert str(path) in caplog.text
    assert program(*arguments())[1]["sum"] == 3
    assert [file.name for file in tmp_path.iterdir()] == [path.name]
    assert store_in(tmp_path).load("add", arguments()) is not None


def test_what_was_found_out_is_recalled(tmp_path, caplog):
    args = arguments()
    assert store_in(tmp_path).recall("size", args, lambda: 5) == 5
    assert store_in(tmp_path).recall("size", args, lambda: 6) == 5
    assert store_in(tmp_path).recall("size", arguments(4), lambda: 6) == 6
    for path in tmp_path.iterdir():
        path.write_bytes(b"")
    assert store_in(tmp_path).recall("size", args, lambda: 7) == 7
    assert "damaged" in caplog.text
    assert store_in(tmp_path).recall("size", args, lambda: 8) == 7


def test_the_workspace_is_compiled_for_once(tmp_path, traced):
    shapes = BatchShapes(num_pages=8, page_tokens=32, max_rows=2, max_tokens=16, max_pages=4)
    sizes = partial(workspace_bytes, llama(), shapes=shapes, mesh=make_mesh(1))
    first = sizes(programs=tmp_path)
    assert "jit(whole)" in traced
    traced.clear()
    assert sizes(programs=tmp_path) == first > 0
    assert "jit(whole)" not in traced
    assert sizes() == first


def test_a_folder_that_takes_nothing_is_no_hindrance(tmp_path, caplog):
    (tmp_path / "file").write_bytes(b"")
    program = fill(store_in(tmp_path / "file"), arguments())
    assert "isn't kept" in caplog.text
    assert program(*arguments())[1]["sum"] == 3


def test_what_was_not_used_for_longest_goes(tmp_path):
    fill(store_in(tmp_path), arguments())
    (first,) = tmp_path.iterdir()
    room = 5 * first.stat().st_size // 2
    fill(store_in(tmp_path, most_bytes=room), arguments(4))
    for at, path in enumerate(sorted(tmp_path.iterdir(), key=lambda path: path != first)):
        os.utime(path, (at, at))
    assert store_in(tmp_path).load("add", arguments()) is not None  # used again
    fill(store_in(tmp_path, most_bytes=room), arguments(5))
    kept = {rows for rows in (3, 4, 5) if store_in(tmp_path).load("add", arguments(rows)) is not None}
    assert kept == {3, 5}


def test_jax_keeps_nothing_meanwhile_and_goes_on_afterwards(tmp_path):
    store = store_in(tmp_path)
    before = jax.config.jax_enable_compilation_cache
    with store.fill():
        assert not jax.config.jax_enable_compilation_cache
        assert store.filling
    assert jax.config.jax_enable_compilation_cache == before
    assert not store.filling


def functions_of(model, num_shards=1):
    parts, _ = split_model(model, num_shards=num_shards)
    return model.spec, StepFunctions(model.spec, parts, make_mesh(num_shards))


def made_from(folder, *args):
    store = open_store(folder, *functions_of(*args))
    assert store is not None
    return store._made_from


def llama(**changes):
    return make_model(LLAMA | changes, dtype=np.dtype(np.float32), rngs=nnx.Rngs(0))


def test_models_settings_code_and_devices_are_told_apart(tmp_path, monkeypatch):
    here = made_from(tmp_path, llama())
    assert here == made_from(tmp_path, llama())
    others = [
        made_from(tmp_path, llama(rms_norm_eps=0.5)),
        made_from(tmp_path, llama(rope_theta=3.0)),
        made_from(tmp_path, llama(num_hidden_layers=3)),
        made_from(tmp_path, llama(), 2),
    ]
    with jax.default_matmul_precision("bfloat16"):
        others.append(made_from(tmp_path, llama()))
    logistic = jax.config.jax_use_hlo_logistic_lowering
    jax.config.update("jax_use_hlo_logistic_lowering", not logistic)
    others.append(made_from(tmp_path, llama()))
    jax.config.update("jax_use_hlo_logistic_lowering", logistic)
    with monkeypatch.context() as patch:
        patch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=true")
        others.append(made_from(tmp_path, llama()))
    with monkeypatch.context() as patch:
        patch.setattr(program_store, "package_versions", lambda names: {"jax": "0.0"})
        others.append(made_from(tmp_path, llama()))
    with monkeypatch.context() as patch:
        patch.setattr(program_store, "source_digest", lambda: "other")
        others.append(made_from(tmp_path, llama()))
    assert len({here, *others}) == len(others) + 1
    assert made_from(tmp_path, llama()) == here


def test_any_file_changes_the_digest(tmp_path, monkeypatch):
    package = tmp_path / "some_package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "table.json").write_text("1")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(program_store, "SOURCES", ("some_package",))
    digest = program_store.source_digest.__wrapped__
    before = digest()
    assert digest() == before
    (package / "table.json").write_text("2")
    assert digest() != before


def test_own_models_are_not_kept(tmp_path):
    class Mine(type(llama().layers[0].mlp)):
        pass

    assert open_store(tmp_path, *functions_of(llama())) is not None
    assert open_store(None, *functions_of(llama())) is None
    assert open_store(tmp_path, *functions_of(TinyModel())) is None
    model = llama()
    model.layers[1].mlp.__class__ = Mine
    assert open_store(tmp_path, *functions_of(model)) is None
    model = llama()
    for other in (jnp.tanh, make_model, Fraction(1)):
        model.layers[1].mlp.activation = other
        assert open_store(tmp_path, *functions_of(model)) is None
