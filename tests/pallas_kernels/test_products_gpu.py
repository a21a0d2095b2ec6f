"""The products of a decode step and the norms on a GPU, against float32: every tiling, epilogue and chain."""

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.norm.mosaic import norm_mosaic
from pallas_kernels.norm.xla import layer_norm_xla, rms_norm_xla
from pallas_kernels.skinny_matmul import products
from pallas_kernels.skinny_matmul.epilogue import Epilogue
from pallas_kernels.skinny_matmul.mosaic import skinny_matmul_mosaic
from pallas_kernels.skinny_matmul.tiling import candidates
from pallas_kernels.skinny_matmul.xla import skinny_matmul_xla

pytestmark = pytest.mark.gpu_kernel

TOLERANCE = 6e-3


def normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16)


def relative_error(got, want):
    got, want = got.astype(jnp.float32), want.astype(jnp.float32)
    return float(jnp.linalg.norm(got - want) / jnp.linalg.norm(want))


def wide(array):
    return array.astype(jnp.float32)


@pytest.mark.parametrize("tokens", [1, 8, 24, 64, 96, 100])
@pytest.mark.parametrize(
    ("sizes", "adds", "options"),
    [
        ([1024, 512, 512], False, {}),
        ([2048, 2048], False, {"activation": jax.nn.silu, "gated": True}),
        ([2048], True, {"activation": jax.nn.relu}),
    ],
)
def test_products_match_float32(sizes, adds, options, tokens):
    x, weights = normal(0, tokens, 2048), [normal(i + 1, n, 2048) / 45 for i, n in enumerate(sizes)]
    biases = [normal(10 + i, n) for i, n in enumerate(sizes)]
    add = normal(20, tokens, sizes[0]) if adds else None
    got = products(x, weights, biases=biases, add=add, **options)
    want = products(
        wide(x),
        [wide(w) for w in weights],
        biases=[wide(b) for b in biases],
        add=None if add is None else wide(add),
        implementation="xla",
        **options,
    )
    for y, expected in zip(got, want, strict=True):
        assert relative_error(y, expected) < TOLERANCE


@pytest.mark.parametrize("tokens", [8, 64, 128])
@pytest.mark.parametrize(
    "epilogue", [Epilogue(adds=True), Epilogue(activation=jax.nn.silu, gated=True)], ids=["add", "gated"]
)
def test_every_tiling_gives_the_product(epilogue, tokens):
    x, add = normal(0, tokens, 2048), normal(2, tokens, 1024) if epilogue.adds else None
    weights = [normal(3 + i, 1024, 2048) / 45 for i in range(epilogue.together)]
    (want,) = skinny_matmul_xla(
        wide(x),
        [wide(w) for w in weights],
        [],
        None if add is None else wide(add),
        epilogue=epilogue,
        out_dtype=jnp.float32,
    )
    tilings = list(
        candidates(
            tokens=tokens,
            sizes=[len(w) for w in weights],
            contracted=2048,
            together=epilogue.together,
            out_bytes=2,
            adds=epilogue.adds,
        )
    )
    assert {tiling.splits for tiling in tilings} == {1, 2}
    assert {tiling.shares for tiling in tilings} == ({1} if tokens == 8 else {1, 2})
    for tiling in tilings:
        options = {"epilogue": epilogue, "out_dtype": jnp.bfloat16, "overlap": True}
        run = jax.jit(
            lambda x, weights, add, t=tiling, o=options: skinny_matmul_mosaic(
                x, weights, [], add, tiling=t, **o
            )
        )
        (got,), (again,) = run(x, weights, add), run(x, weights, add)
        assert relative_error(got, want) < TOLERANCE, tiling
        assert jnp.array_equal(got, again), tiling


def test_a_long_chain_of_early_starts_is_right():
    """Every product starts while the norm before it runs: each must wait for its input all the same."""
    tokens, width, depth = 16, 2048, 24
    scale = jnp.ones((width,), jnp.bfloat16)
    weights = [normal(i, width, width) / 45 for i in range(depth)]

    @jax.jit
    def chain(x, weights):
        for w in weights:
            h = norm_mosaic(x, scale, None, epsilon=1e-5)
            (x,) = products(h, [w], add=x, overlap=True, implementation="mosaic")
        return x

    @jax.jit
    def plain(x, weights):
        for w in weights:
            h = rms_norm_xla(x, scale, epsilon=1e-5)
            (x,) = products(h, [w], add=x, implementation="xla")
        return x

    x = normal(99, tokens, width)
    first = chain(x, weights)
    assert relative_error(first, plain(x, weights)) < 3e-2
    assert all(bool(jnp.array_equal(first, chain(x, weights))) for _ in range(20))


@pytest.mark.parametrize("tokens", [1, 8, 128])
def test_norms_match_float32(tokens):
    x, scale, bias = normal(0, tokens, 5120), 1 + normal(1, 5120) / 8, normal(2, 5120)
    got = norm_mosaic(x, scale, None, epsilon=1e-5)
    assert relative_error(got, rms_norm_xla(wide(x), wide(scale), epsilon=1e-5)) < TOLERANCE
    got = norm_mosaic(x, scale, bias, epsilon=1e-5)
    assert relative_error(got, layer_norm_xla(wide(x), wide(scale), wide(bias), epsilon=1e-5)) < TOLERANCE
