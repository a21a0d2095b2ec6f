"""Logits equal those of transformers, on one device and on several."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dense_context import GOLDEN_FOLDER, SMALL_MODELS, logits, relative_error, sharded_logits
from flax import nnx

from pensieve_jax.core.errors import InvalidArgumentError
from pensieve_jax.models import load_model, make_model
from pensieve_jax.parallel import make_mesh, partition_specs
from tests.assets import smollm2_path


@pytest.mark.parametrize("name", SMALL_MODELS)
def test_small_model_equals_transformers(name):
    folder = GOLDEN_FOLDER / name
    golden = np.load(folder / "golden.npz")
    actual = logits(load_model(folder), golden["token_ids"])
    assert actual.dtype == np.float32
    assert relative_error(actual, golden["logits"]) < 1e-4


@pytest.mark.parametrize(
    ("name", "num_shards"),
    [
        ("opt", 2),
        ("opt", 4),
        ("opt-350m", 4),
        ("llama-biases", 2),
        ("llama-biases", 4),
        ("llama3-tied", 2),
        ("mistral", 2),
        ("qwen2", 2),
        ("qwen3-biases", 2),
    ],
)
def test_sharded_model_equals_one_device(name, num_shards):
    folder = GOLDEN_FOLDER / name
    golden = np.load(folder / "golden.npz")
    mesh = make_mesh(num_shards)
    model = load_model(folder, mesh=mesh)
    table = model.embedding.embed_tokens.table[...]
    assert table.sharding.shard_shape(table.shape)[0] == table.shape[0] // num_shards
    assert relative_error(sharded_logits(model, golden["token_ids"], mesh), golden["logits"]) < 1e-4


def test_vocabulary_that_does_not_divide_is_replicated():
    config = small_config("llama") | {"vocab_size": 97}
    model = make_model(config, dtype=np.dtype(np.float32), rngs=nnx.Rngs(0))
    token_ids = np.array([0, 5, 96])
    mesh = make_mesh(2)
    assert relative_error(sharded_logits(model, token_ids, mesh), logits(model, token_ids)) < 1e-5


def test_layers_of_one_structure_share_one_definition():
    model = load_model(GOLDEN_FOLDER / "llama3-tied")
    first, second = (nnx.split(layer)[0] for layer in model.layers)
    assert first == second and hash(first) == hash(second)


def test_tied_head_shares_the_embedding():
    model = load_model(GOLDEN_FOLDER / "llama3-tied")
    assert model.head.lm_head.table is model.embedding.embed_tokens.table


@pytest.mark.parametrize("name", ["llama", "opt"])
def test_bfloat16_is_close(name):
    golden = np.load(GOLDEN_FOLDER / name / "golden.npz")
    model = load_model(GOLDEN_FOLDER / name, dtype="bfloat16")
    assert all(leaf.dtype == jnp.bfloat16 for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)))
    assert relative_error(logits(model, golden["token_ids"]), golden["logits"]) < 0.1


def test_heads_that_do_not_divide_are_refused():
    with pytest.raises(InvalidArgumentError, match="num_kv_heads=2 can't be split over 4 shards"):
        load_model(GOLDEN_FOLDER / "qwen3", mesh=make_mesh(4))


def test_feed_forward_that_does_not_divide_is_refused():
    config = small_config("llama") | {"intermediate_size": 49}
    model = make_model(config, dtype=np.dtype(np.float32), rngs=nnx.Rngs(0))
    with pytest.raises(InvalidArgumentError, match=r"layers.0.mlp.down_proj.weight of shape \(32, 49\)"):
        partition_specs(nnx.state(model), num_shards=2)


def test_parameter_without_a_rule_is_refused():
    class Odd(nnx.Module):
        def __init__(self):
            self.mystery = nnx.Param(jnp.ones((2, 2)))

    with pytest.raises(InvalidArgumentError, match="mystery: no partition rule"):
        partition_specs(nnx.state(Odd()), num_shards=2)


@pytest.mark.parametrize("num_shards", [0, 5])
def test_mesh_larger_than_the_machine_is_refused(num_shards):
    with pytest.raises(InvalidArgumentError, match=f"num_shards={num_shards}"):
        make_mesh(num_shards)


@pytest.mark.skipif(smollm2_path() is None, reason="SmolLM2 was not fetched")
def test_smollm2_equals_transformers():
    golden = np.load(GOLDEN_FOLDER / "smollm2-logits.npz")
    actual = logits(load_model(smollm2_path()), golden["token_ids"])
    assert relative_error(actual[-1], golden["last_logits"]) < 1e-4
    top = np.take_along_axis(actual, golden["top_ids"], axis=1)
    assert relative_error(top, golden["top_logits"]) < 1e-4
    assert np.array_equal(actual.argmax(axis=1), golden["top_ids"][:, 0])


@pytest.mark.parametrize("name", SMALL_MODELS)
def test_live_transformers_agree(name):
    """Where PyTorch is installed: the golden files are what this version of transformers computes."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    golden = np.load(GOLDEN_FOLDER / name / "golden.npz")
    reference = transformers.AutoModelForCausalLM.from_pretrained(GOLDEN_FOLDER / name, dtype=torch.float32)
    with torch.no_grad():
        expected = reference(torch.tensor(golden["token_ids"])[None]).logits[0].numpy()
    assert relative_error(logits(load_model(GOLDEN_FOLDER / name), golden["token_ids"]), expected) < 1e-4


def small_config(name):
    return json.loads((GOLDEN_FOLDER / name / "config.json").read_text())
