"""The Hopper kernel in the interpreter, which looks for races."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.errors import UnsupportedInputError
from pallas_kernels.multi_token_attention import (
    mosaic,
    multi_token_attention,
    plan,
    plan_attention,
    reference_attention,
)

INTERPRETER = plgpu.InterpretGPUParams(detect_races=True)
RACE = "RACE DETECTED"
"""What the interpreter prints: what it keeps is of the last kernel alone."""


def batch(lens, *, heads, kv_heads, head_dim=64, page_size=32, spare=3):
    """A pool full of NaN except the slots in use, and a plan for a grid of four CTAs."""
    rng = np.random.default_rng(len(lens))
    counts = [-(-kv_len // page_size) for _, kv_len in lens]
    num_pages = sum(counts) + 2
    pages = np.split(rng.permutation(num_pages)[: sum(counts)].astype(np.int32), np.cumsum(counts)[:-1])
    pool = np.full((num_pages, 2, kv_heads, page_size, head_dim), np.nan, np.float16)
    for (_, kv_len), row_pages in zip(lens, pages, strict=True):
        for i, page in enumerate(row_pages):
            used = min(page_size, kv_len - i * page_size)
            pool[page, :, :, :used] = rng.standard_normal((2, kv_heads, used, head_dim))
    tokens = sum(q for q, _ in lens) + spare
    attention_plan = plan_attention(
        q_lens=[q for q, _ in lens],
        kv_lens=[kv for _, kv in lens],
        pages=pages,
        max_rows=len(lens) + 1,
        max_pages=max(counts) + 1,
        max_tokens=tokens,
        num_heads=heads,
        num_kv_heads=kv_heads,
    )
    return rng.standard_normal((tokens, heads, head_dim)).astype(np.float16), pool, attention_plan


@pytest.fixture(autouse=True)
def small_grid(monkeypatch):
    monkeypatch.setattr(plan, "plan_schedule", functools.partial(plan.plan_schedule, num_ctas=4))


def run(q, pool, attention_plan, soft_cap=None, window=None):
    return mosaic.attention_mosaic(
        jnp.asarray(q),
        jnp.asarray(pool),
        attention_plan,
        scale=q.shape[2] ** -0.5,
        sliding_window=window,
        logit_soft_cap=soft_cap,
        interpret=INTERPRETER,
    )


@pytest.mark.parametrize(
    ("lens", "heads", "soft_cap", "window", "sizes"),
    [
        ([(1, 900), (1, 40), (3, 129)], (4, 1), None, None, {}),  # decode, cut and merged
        ([(70, 200), (1, 500), (130, 130)], (4, 2), None, None, {}),  # mixed, rows off the alignment
        ([(70, 200), (90, 128)], (3, 3), 5.0, None, {}),  # an odd group
        ([(70, 500), (1, 900), (3, 700)], (4, 2), None, 150, {}),  # parts before the window
        ([(100, 300), (1, 40)], (3, 3), None, 7, {}),
        ([(70, 200), (1, 500), (3, 300)], (4, 2), None, None, {"head_dim": 80}),
        ([(70, 200), (1, 500), (3, 300)], (3, 3), None, None, {"head_dim": 96, "page_size": 16}),
        ([(70, 200), (1, 500), (3, 300)], (4, 2), None, None, {"head_dim": 256}),
        ([(70, 200), (1, 450), (3, 300)], (3, 3), None, 100, {"head_dim": 256, "page_size": 128}),
    ],
)
def test_matches_reference_without_races(lens, heads, soft_cap, window, sizes, capsys):
    q, pool, attention_plan = batch(lens, heads=heads[0], kv_heads=heads[1], **sizes)
    got = np.asarray(run(q, pool, attention_plan, soft_cap, window), np.float32)
    want = reference_attention(
        q.astype(np.float32),
        pool.astype(np.float32),
        attention_plan,
        logit_soft_cap=soft_cap,
        sliding_window=window,
    )
    assert np.linalg.norm(got - want) < 2e-3 * np.linalg.norm(want)
    assert RACE not in capsys.readouterr().out


def test_a_planted_race_is_found(monkeypatch, capsys):
    """A slot is given back before its keys were read: the producer's next copy races with the product."""
    scores, release = mosaic._Consumer.scores, mosaic._Consumer.release

    def careless(self, queries, slot):
        release(self, slot)
        monkeypatch.setattr(mosaic._Consumer, "release", forget)
        return scores(self, queries, slot)

    def forget(self, slot):
        monkeypatch.setattr(mosaic._Consumer, "release", release)

    monkeypatch.setattr(mosaic._Consumer, "scores", careless)
    run(*batch([(1, 3000)], heads=4, kv_heads=1))
    assert RACE in capsys.readouterr().out


def test_what_it_does_not_compute_is_refused():
    q, pool, attention_plan = batch([(1, 40)], heads=4, kv_heads=1)
    refuse = functools.partial(multi_token_attention, implementation="mosaic")
    for match, call in [
        ("dtype", lambda: refuse(q.astype(np.float32), pool.astype(np.float32), attention_plan)),
        ("head_dim", lambda: refuse(q[..., :32], pool[..., :32], attention_plan)),
        ("page_size", lambda: refuse(q, pool[:, :, :, :8], attention_plan)),
        ("heads, tokens", lambda: refuse(q[:, :2], pool, attention_plan)),
    ]:
        with pytest.raises(UnsupportedInputError, match=match):
            call()


def test_the_cpu_goes_on_with_xla():
    q, pool, attention_plan = batch([(5, 40), (1, 33)], heads=4, kv_heads=1)
    got = multi_token_attention(jnp.asarray(q), jnp.asarray(pool), attention_plan)
    want = reference_attention(q.astype(np.float32), pool.astype(np.float32), attention_plan)
    np.testing.assert_allclose(got, want, atol=1e-2)
