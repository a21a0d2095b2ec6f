"""Spread over several devices, an engine gives the same tokens as on one."""

import jax
import numpy as np
import pytest
from flax import nnx

from pensieve_jax.core.errors import InvalidArgumentError
from pensieve_jax.core.types import SamplingParams
from pensieve_jax.engine import Engine
from pensieve_jax.models import make_model
from tests.engine.serving import Chat, config, evict, ids
from tests.tiny import assert_greedy

_SIZES = {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
MODELS = {
    "llama": {
        **_SIZES,
        "model_type": "llama",
        "intermediate_size": 64,
        "num_key_value_heads": 4,
        "max_position_embeddings": 1024,
    },
    "opt": {**_SIZES, "model_type": "opt", "ffn_dim": 64, "max_position_embeddings": 1024},
}


def random_model(settings):
    model = make_model(settings, dtype=np.dtype(np.float32), rngs=nnx.Rngs(0))
    state = nnx.state(model, nnx.Param)
    rng = np.random.default_rng(0)
    # Larger than at the start of a training, so that answers depend on what they attend to.
    larger = jax.tree.map(lambda x: x + 0.3 * rng.standard_normal(x.shape, np.float32), state)
    nnx.update(model, larger)
    return model


@pytest.fixture(scope="module", params=sorted(MODELS))
def family(request):
    return request.param


@pytest.fixture(scope="module")
def model(family):
    return random_model(MODELS[family])


def conversation(model, num_shards, execution, kv_dtype=None):
    """Three turns of two conversations, the second turns after a stay in the host tier."""
    settings = config(device_pages=8, execution=execution, kv_dtype=kv_dtype)
    with Engine(model, config=settings, num_shards=num_shards) as engine:
        chats = [Chat(engine) for _ in range(2)]
        outputs, hosts = [], []
        for turn in range(3):
            given = [ids(40 + 7 * n, seed=10 * turn + n) for n in range(2)]
            turns = [
                engine.submit(c.id, g, SamplingParams(max_tokens=8))
                for c, g in zip(chats, given, strict=True)
            ]
            results = [turn.result() for turn in turns]
            outputs += [result.token_ids for result in results]
            hosts.append(sum(result.receipt.tokens_from_host for result in results))
            if turn == 0:
                for chat, tokens, result in zip(chats, given, results, strict=True):
                    chat.tokens = [*tokens, *result.token_ids]
                    assert len(chat.tokens) == len(engine.token_ids(chat.id))
                evict(engine, 8 * 32)
        engine.settle()
        engine.check_integrity()
        kv = engine._turns.parts.worker._runner._pools[0]
        assert {shard.data.shape[2] for shard in kv.addressable_shards} == {4 // num_shards}
        tokens = [engine.token_ids(chat.id).tolist() for chat in chats]
    assert hosts[1] > 0, "pages came back from the host"
    return outputs, tokens


@pytest.fixture(scope="module")
def one_device(model):
    outputs, tokens = conversation(model, 1, "auto")
    for whole, output in zip(tokens, outputs[-2:], strict=True):
        assert_greedy(model, whole[: -len(output)], output)
    return outputs


@pytest.mark.parametrize(("num_shards", "execution"), [(2, "auto"), (4, "auto"), (4, "resident")])
def test_same_tokens_as_on_one_device(model, one_device, num_shards, execution):
    assert len({tuple(output) for output in one_device}) > 1
    assert conversation(model, num_shards, execution)[0] == one_device


def test_8_bit_pages_carry_the_scales_of_their_shards_heads(model):
    one, two = (conversation(model, shards, "auto", "fp8_e4m3")[0] for shards in (1, 2))
    assert len(set(map(tuple, one))) > 1
    assert one == two


def test_warm_up_and_checksums_of_shards():
    model = random_model(MODELS["llama"])
    with Engine(model, config=config(device_pages=8, host_pages=40), num_shards=2) as engine:
        outputs = []
        for warm in (False, True):
            conversation = engine.conversation()
            conversation.send(ids(70), SamplingParams(max_tokens=4))
            evict(engine, 8 * 32)
            if warm:
                assert conversation.warm() == 3
                assert engine.step()
            result = conversation.send([7, 8], SamplingParams(max_tokens=8))
            receipt = result.receipt
            expected = (73, 0) if warm else (0, 73)
            assert (receipt.tokens_from_device, receipt.tokens_from_host) == expected
            outputs.append(result.token_ids)
        assert outputs[0] == outputs[1]
        assert engine.checks.pages_verified == 6
        damaged = engine.conversation()
        damaged.send(ids(70), SamplingParams(max_tokens=4))
        evict(engine, 8 * 32)
        for shards in engine._turns.parts.worker._mover.pool.layers:
            shards[1].view(np.uint8)[...] ^= 1  # the second shard alone
        receipt = damaged.send([7, 8], SamplingParams(max_tokens=8)).receipt
        assert receipt.tokens_recomputed == 73
        assert engine.checks.pages_damaged == 3


@pytest.mark.parametrize(("heads", "kv_heads", "text"), [(4, 2, "num_kv_heads=2"), (6, 6, "num_heads=6")])
def test_heads_that_do_not_divide(heads, kv_heads, text):
    settings = {
        **MODELS["llama"],
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": 8,
    }
    model = random_model(settings)
    with pytest.raises(
        InvalidArgumentError, match=f"{text} can't be split over 4 shards: expected a multiple"
    ):
        Engine(model, config=config(), num_shards=4)
