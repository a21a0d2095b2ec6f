"""Run the Triton kernels in Triton's interpreter: python -m tests.pallas_kernels.interpret_triton PARTS

PARTS is the folder that `make compiler` makes. Prints a line of JSON for each case: the relative error
against the reference. A process of its own, since the setting must be there before the kernels are defined.
"""

import dataclasses
import functools
import json
import os
import sys

os.environ |= {"JAX_PLATFORMS": "cpu", "TRITON_INTERPRET": "1"}
sys.path.append(sys.argv[1])

import ml_dtypes
import numpy as np
import triton.language as tl
import triton.runtime.interpreter as interpreter

from pallas_kernels import triton_support


@dataclasses.dataclass
class Tensor:
    """As much of a PyTorch tensor as the interpreter asks for, over a NumPy array."""

    array: np.ndarray

    @property
    def dtype(self):
        return self.array.dtype.name

    def data_ptr(self):
        return self.array.ctypes.data

    def untyped_storage(self):
        return self

    def cpu(self):
        return self

    def new_empty(self, *_, **__):
        return Tensor(self.array)

    def set_(self, *_):
        pass

    def copy_(self, _):
        pass

    def storage_offset(self):
        return 0

    def size(self):
        return self.array.shape

    def stride(self):
        return self.array.strides


def triton_call(*arguments, kernel, outputs, grid, aliases=None, constants, **_):
    """In place of `triton_support.triton_call`. Outputs begin as NaN, aliased ones as their input."""
    arguments = [x if isinstance(x, int) else np.array(x) for x in arguments]
    arrays = [x for x in arguments if not isinstance(x, int)]
    aliased = {output: argument for argument, output in (aliases or {}).items()}
    results = [
        arrays[aliased[i]] if i in aliased else np.full(output.shape, np.nan, output.dtype)
        for i, output in enumerate(outputs)
    ]
    kernel[grid](*[x if isinstance(x, int) else Tensor(x) for x in (*arguments, *results)], **constants)
    return results


def numbers_of_one_element(patch):
    """Triton 3.6.0 makes Python numbers of arrays of one element in a way that NumPy 2.5 refuses."""

    def patched(tensor, scope):
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    return patched


def to_the_nearest(convert):
    """Triton 3.6.0's interpreter cuts numbers off that GPUs round, and knows no NaN of 8 bits."""

    def patched(values, of, to, mode):
        if to == tl.float8e4nv:
            return values.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
        return convert(values, of, to, mode)

    return patched


interpreter._convert_float = to_the_nearest(interpreter._convert_float)
interpreter._patch_lang_tensor = numbers_of_one_element(interpreter._patch_lang_tensor)
triton_support.triton_call = triton_call

from pallas_kernels.kv_write.triton import rotate_and_write_triton  # noqa: E402
from pallas_kernels.multi_token_attention import reference_attention, tile_tokens  # noqa: E402
from pallas_kernels.multi_token_attention.triton import attention_triton  # noqa: E402
from pallas_kernels.page_move import address_halves  # noqa: E402
from pallas_kernels.page_move.triton import copy_pages_triton, read_pages_triton  # noqa: E402
from tests.pallas_kernels.fp8 import plain_of  # noqa: E402
from tests.pallas_kernels.ragged import ragged_batch  # noqa: E402
from tests.pallas_kernels.rotated import case, expected  # noqa: E402

rng = np.random.default_rng()


def relative_error(got, want):
    got, want = (np.asarray(x, np.float32) for x in (got, want))
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


def attention(
    lens, heads, kv_heads, *, head_dim=32, page_size=32, dtype=np.float16, window=None, cap=None, fp8=False
):
    sizes = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "page_size": page_size, "fp8": fp8}
    q, pool, plan = ragged_batch(rng, lens, dtype=dtype, block_q=tile_tokens(heads // kv_heads), **sizes)
    options = {"scale": 0.2, "sliding_window": window, "logit_soft_cap": cap}
    got = attention_triton(q, pool, plan, **options, compute_capability=90)
    return relative_error(got, reference_attention(q, pool, plan, **options))


def kv_write(**sizes):
    arguments = case(rng, **sizes)
    got, want = rotate_and_write_triton(*arguments, compute_capability=90), expected(*arguments)
    if sizes.get("fp8"):
        changed = (want[1] != arguments[0]).any(-1)  # the other bytes may be no numbers
        np.testing.assert_array_equal((got[1] != arguments[0]).any(-1), changed)
        got, want = ((q, np.where(changed[..., :-1, None], plain_of(pool), 0)) for q, pool in (got, want))
    return max(relative_error(x, y) for x, y in zip(got, want, strict=True))


def copy_pages():
    target, source = (rng.standard_normal((n, 2, 3, 8, 20), np.float32) for n in (6, 9))
    to, start = np.array([3, 6, 0, 5], np.int32), np.array([8, 2, 9, 0], np.int32)
    want = target.copy()
    want[[3, 5]] = source[[8, 0]]
    return relative_error(copy_pages_triton(target, source, to, start, program_bytes=512), want)


def read_pages():
    target = rng.standard_normal((6, 2, 3, 8, 20), np.float32)
    layers = [rng.standard_normal((9, 2, 3, 8, 20), np.float32) for _ in range(3)]
    addresses = address_halves([layer.ctypes.data for layer in layers])
    to, start = np.array([3, 6, 0, 5], np.int32), np.array([8, 2, 9, 0], np.int32)
    want = target.copy()
    want[[3, 5]] = layers[2][[8, 0]]
    got = read_pages_triton(target, addresses, 2, to, start, num_source=9, program_bytes=512)
    return relative_error(got, want)


CASES = {
    "decode_cut_and_merged": lambda: attention([(1, 900), (1, 40), (1, 129)], 4, 1),
    "mixed": lambda: attention([(70, 200), (1, 300), (130, 130)], 6, 2),
    "odd_group_d80_float32": lambda: attention(
        [(40, 200), (1, 300)], 5, 1, head_dim=80, page_size=16, dtype=np.float32
    ),
    "window": lambda: attention([(70, 300), (1, 400)], 4, 2, page_size=64, window=90),
    "soft_cap": lambda: attention([(70, 200), (1, 300)], 16, 1, page_size=128, cap=5.0),
    "kv_write": functools.partial(kv_write, num_tokens=9, num_heads=8, num_kv_heads=2, head_dim=64),
    "kv_write_partial_norm": functools.partial(
        kv_write,
        num_tokens=7,
        num_heads=3,
        num_kv_heads=3,
        head_dim=24,
        rotary_dim=20,
        norm=True,
        fused=False,
        dtype=np.float16,
    ),
    "fp8_decode": lambda: attention([(1, 900), (1, 40), (1, 129)], 4, 1, fp8=True),
    "fp8_mixed_d80": lambda: attention(
        [(70, 200), (1, 300), (130, 130)], 6, 2, head_dim=80, page_size=16, window=150, fp8=True
    ),
    "fp8_write": functools.partial(
        kv_write, num_tokens=70, num_heads=8, num_kv_heads=2, head_dim=64, fp8=True
    ),
    "fp8_write_partial_norm": functools.partial(
        kv_write,
        num_tokens=70,
        num_heads=3,
        num_kv_heads=3,
        head_dim=24,
        rotary_dim=20,
        norm=True,
        fused=False,
        fp8=True,
    ),
    "copy_pages": copy_pages,
    "read_pages": read_pages,
}
for name, error in CASES.items():
    print(json.dumps({"case": name, "error": error()}), flush=True)
