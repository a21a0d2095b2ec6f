"""Pages copied between pools, against NumPy."""

import jax
import numpy as np
import pytest

from pallas_kernels.errors import UnsupportedInputError
from pallas_kernels.page_move import copy_pages
from pallas_kernels.page_move import triton as page_move_triton


def pools(rng):
    return (rng.standard_normal((n, 2, 3, 4), np.float32) for n in (9, 12))


def test_pages_go_where_they_should():
    target, source = pools(np.random.default_rng(1))
    to, start = np.array([3, 9, 0, 8, 5]), np.array([11, 2, 12, 0, 4])
    got = jax.jit(copy_pages, donate_argnums=0)(jax.numpy.asarray(target), source, to, start)
    want = target.copy()
    want[[3, 8, 5]] = source[[11, 0, 4]]
    np.testing.assert_array_equal(got, want)


def test_what_does_not_fit_together_is_refused(monkeypatch):
    target, source = map(jax.numpy.asarray, pools(np.random.default_rng(2)))
    ids = np.arange(3)
    for match, call in [
        ("source: got pages", lambda: copy_pages(target, source[..., :2], ids, ids)),
        ("source: got pages", lambda: copy_pages(target, source.astype(np.float16), ids, ids)),
        ("target_pages, source_pages", lambda: copy_pages(target, source, ids, ids[:2])),
        ("implementation", lambda: copy_pages(target, source, ids, ids, implementation="abacus")),
    ]:
        with pytest.raises(ValueError, match=match):
            call()
    monkeypatch.setattr(page_move_triton, "copy_pages_kernel", None)
    with pytest.raises(UnsupportedInputError, match="jax-triton"):
        copy_pages(target, source, ids, ids, implementation="triton")
