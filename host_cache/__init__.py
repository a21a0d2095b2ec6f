"""A two-tier cache of KV pages: who stays on the device, who moves to the host, who is computed again.

Pure Python and NumPy, except `host_cache.transfer`, which moves the bytes and is the only part with jax.
"""
