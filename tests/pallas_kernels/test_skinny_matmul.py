"""Products of few rows: the XLA path, and the Hopper kernel in the interpreter, which looks for races."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from benchmarks.kernels.layer import LAYERS, name_of
from benchmarks.kernels.products import PRODUCTS, limits_of
from pallas_kernels.errors import UnsupportedInputError
from pallas_kernels.mosaic_support import NUM_SMS
from pallas_kernels.skinny_matmul import products
from pallas_kernels.skinny_matmul.epilogue import Epilogue
from pallas_kernels.skinny_matmul.mosaic import skinny_matmul_mosaic
from pallas_kernels.skinny_matmul.tiling import BLOCK_K, Tiling, plan_tiling

INTERPRETER = plgpu.InterpretGPUParams(detect_races=True)
RACE = "RACE DETECTED"
"""What the interpreter prints: what it keeps is of the last kernel alone."""


def inputs(tokens, contracted, sizes, dtype=np.float16):
    rng = np.random.default_rng(tokens)
    x = rng.standard_normal((tokens, contracted)).astype(dtype)
    return x, [rng.standard_normal((n, contracted)).astype(dtype) for n in sizes]


def wide(array):
    return np.asarray(array, np.float64)


def relative_error(got, want):
    return np.linalg.norm(wide(got) - want) / np.linalg.norm(want)


def tiling(tokens, sizes, epilogue, *, features):
    return Tiling(
        features=features,
        splits=1,
        num_slots=3,
        num_tiles=sum(sizes) // features // epilogue.together,
        consumers=-(-tokens // 64),
        chunk=features if epilogue.adds else features // 2,
    )


def run(x, weights, epilogue, *, features, biases=(), add=None):
    return skinny_matmul_mosaic(
        jnp.asarray(x),
        [jnp.asarray(w) for w in weights],
        [jnp.asarray(b) for b in biases],
        None if add is None else jnp.asarray(add),
        tiling=tiling(len(x), [len(w) for w in weights], epilogue, features=features),
        epilogue=epilogue,
        out_dtype=jnp.float32,
        overlap=True,
        interpret=INTERPRETER,
    )


@pytest.mark.parametrize(
    ("tokens", "sizes", "features"), [(8, [64, 32, 32], 32), (64, [80], 80), (96, [64], 32)]
)
def test_the_kernel_matches_float64_without_races(tokens, sizes, features, capsys):
    x, weights = inputs(tokens, 320, sizes)
    got = run(x, weights, Epilogue(), features=features)
    for out, w in zip(got, weights, strict=True):
        assert relative_error(out, wide(x) @ wide(w).T) < 1e-5
    assert RACE not in capsys.readouterr().out


def test_a_gated_pair_with_biases(capsys):
    x, (gate, up) = inputs(16, 256, [64, 64])
    biases = inputs(2, 64, [])[0]
    epilogue = Epilogue(biased=True, activation=jax.nn.relu, gated=True)
    (got,) = run(x, [gate, up], epilogue, features=32, biases=list(biases))
    x, gate, up, biases = (wide(a) for a in (x, gate, up, biases))
    assert relative_error(got, np.maximum(x @ gate.T + biases[0], 0) * (x @ up.T + biases[1])) < 1e-5
    assert RACE not in capsys.readouterr().out


def test_a_bias_and_a_sum(capsys):
    x, (w,) = inputs(128, 256, [64])
    add, ((bias,),) = inputs(128, 64, [1], np.float32)
    (got,) = run(x, [w], Epilogue(biased=True, adds=True), features=32, biases=[bias], add=add)
    assert relative_error(got, wide(x) @ wide(w).T + bias + add) < 1e-5
    assert RACE not in capsys.readouterr().out


CASES = {
    "products": ({}, 3),
    "bias and activation": ({"biased": True, "activation": jax.nn.relu}, 2),
    "gated": ({"activation": jax.nn.silu, "gated": True}, 2),
    "sum": ({"biased": True, "adds": True}, 1),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
def test_the_xla_path_matches_float64(name, dtype):
    options, count = CASES[name]
    options = dict(options)
    x, weights = inputs(5, 48, [24] * count, dtype)
    biases = list(inputs(count, 24, [], dtype)[0]) if options.pop("biased", False) else []
    add = inputs(5, 24, [], dtype)[0] if options.pop("adds", False) else None
    got = products(jnp.asarray(x), weights, biases=biases, add=add, **options)
    want = [wide(x) @ wide(w).T for w in weights]
    want = [y + wide(b) for y, b in zip(want, biases, strict=True)] if biases else want
    activation = options.get("activation")
    if options.get("gated"):
        want = [np.asarray(activation(want[0]), np.float64) * want[1]]
    elif activation is not None:
        want = [np.maximum(y, 0) for y in want]
    want = [y + wide(add) for y in want] if add is not None else want
    assert len(got) == len(want)
    for y, expected in zip(got, want, strict=True):
        assert y.dtype == dtype
        assert relative_error(y, expected) < (1e-6 if dtype == np.float32 else 6e-3)


@pytest.mark.parametrize("tokens", [8, 64, 128])
@pytest.mark.parametrize(
    ("sizes", "contracted", "together", "adds"),
    [
        ([5120, 1280, 1280], 5120, 1, False),
        ([5120], 13824, 1, True),
        ([13824, 13824], 5120, 2, False),
        ([32000], 5120, 1, False),
    ],
)
def test_tilings_divide_evenly_and_run_at_once(sizes, contracted, together, adds, tokens):
    plan = plan_tiling(
        tokens=tokens, sizes=sizes, contracted=contracted, together=together, out_bytes=2, adds=adds
    )
    assert plan is not None
    assert all(size % plan.features == 0 for size in sizes)
    assert plan.num_tiles == sum(sizes) // together // plan.features
    assert 80 <= plan.num_tiles * plan.splits <= NUM_SMS
    assert contracted % (plan.splits * BLOCK_K) == 0
    assert plan.chunk == plan.features // plan.splits if adds else plan.chunk <= 64


CHOSEN = {
    ("llama", 8): ["64", "40", "128", "80-split2"],
    ("llama", 64): ["80", "80-split2", "128-share2", "80-split2"],
    ("llama", 128): ["80", "80-split2", "128-share2", "80-split2"],
    ("opt", 8): ["128", "40", "160", "80-split2"],
    ("opt", 64): ["128", "80-split2", "160-share2", "80-split2"],
    ("opt", 128): ["160", "80-split2", "160-share2", "80-split2"],
}
"""Of q k v, projection, up, down: what was fast on an H200 (docs/design/decode-products.md)."""


@pytest.mark.parametrize(("layer", "tokens"), CHOSEN)
def test_the_tilings_that_an_h200_showed_to_be_fast_are_chosen(layer, tokens):
    plans = [plan_tiling(**limits_of(PRODUCTS[name], tokens)) for name in LAYERS[layer]]
    assert [name_of(plan) for plan in plans] == CHOSEN[layer, tokens]


def test_no_tiling_where_features_do_not_divide():
    options = {"tokens": 8, "contracted": 5120, "together": 1, "out_bytes": 2, "adds": False}
    assert plan_tiling(sizes=[50272], **options) is None
    assert plan_tiling(sizes=[5124], **options) is None


def test_what_does_not_fit_is_refused():
    x, (w,) = inputs(8, 64, [32])
    bad = [
        ("implementation", lambda: products(x, [w], implementation="cuda")),
        ("x:", lambda: products(x[0], [w])),
        ("weights:", lambda: products(x, [])),
        (r"weights\[0\]", lambda: products(x, [w[:, :32]])),
        ("expected equal", lambda: products(x, [w, w[:16]], gated=True)),
        ("biases:", lambda: products(x, [w, w], biases=[w[:, 0]])),
        (r"biases\[0\]", lambda: products(x, [w], biases=[w[0]])),
        ("add:", lambda: products(x, [w], add=x)),
    ]
    for match, call in bad:
        with pytest.raises(ValueError, match=match):
            call()
    for match, inputs_, weight in [
        ("dtype", x.astype(np.float32), w.astype(np.float32)),
        ("tokens", np.concatenate([x] * 17), w),
        ("tiling", x, w[:31]),
    ]:
        with pytest.raises(UnsupportedInputError, match=match):
            products(inputs_, [weight], implementation="mosaic")
    with pytest.raises(UnsupportedInputError, match="activation"):
        products(x, [w], activation=jnp.tanh, implementation="mosaic")
