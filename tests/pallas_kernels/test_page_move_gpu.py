"""Pages copied between the device and pinned host memory by a kernel."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

from pallas_kernels.page_move import copy_pages

pytestmark = pytest.mark.gpu_kernel

PAGE = (2, 3, 16, 80)


@pytest.mark.parametrize("source_kind", ["device", "pinned_host"])
@pytest.mark.parametrize("target_kind", ["device", "pinned_host"])
def test_pages_go_where_they_should(source_kind, target_kind):
    rng = np.random.default_rng()
    places = [SingleDeviceSharding(jax.devices()[0], memory_kind=k) for k in (target_kind, source_kind)]
    before, source = (rng.standard_normal((n, *PAGE)).astype(np.float16) for n in (50, 70))
    target_pages, source_pages = (rng.permutation(n)[:20].astype(np.int32) for n in (50, 70))
    target_pages[3], source_pages[5] = 50, 99
    target = jax.device_put(before, places[0])
    address = target.unsafe_buffer_pointer()
    run = jax.jit(copy_pages, donate_argnums=0, out_shardings=places[0], static_argnames="implementation")
    got = run(
        target,
        jax.device_put(source, places[1]),
        jnp.asarray(target_pages),
        jnp.asarray(source_pages),
        implementation="triton",
    )
    kept = np.array([i not in (3, 5) for i in range(20)])
    want = before.copy()
    want[target_pages[kept]] = source[source_pages[kept]]
    np.testing.assert_array_equal(np.asarray(got), want)
    assert got.sharding.memory_kind == target_kind
    assert got.unsafe_buffer_pointer() == address
