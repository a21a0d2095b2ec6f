"""Multi-token paged attention in Triton: for decode batches, for GPUs before Hopper, and for what the
Hopper kernel refuses.

Two kinds of work, a launch each. *Wide* tiles are tokens of a row of more than one under heads that share a
KV head: prefill, bound by arithmetic. *Narrow* ones are the heads of a group of a row of one token, over a
stretch of its keys: decode, bound by memory. Where rows and heads don't fill the GPU, narrow rows are cut and
a third launch joins the parts.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from pallas_kernels import fp8_pages
from pallas_kernels.errors import UnsupportedInputError
from pallas_kernels.multi_token_attention.plan import TILE_LINES, AttentionPlan
from pallas_kernels.triton_support import compute_capability_here, power_of_two, triton_call

try:
    from pallas_kernels.multi_token_attention.triton_kernel import merge_kernel, narrow_kernel, wide_kernel
except ImportError:
    merge_kernel = narrow_kernel = wide_kernel = None

HOPPER = 90
MOST_GROUP = 16
MOST_HEAD_DIM = 256
MOST_HEAD_DIM_FLOAT32 = 128
"""Beyond it a tile's registers don't hold the operands of a product without matrix units."""
LEAST_LINES = 16
"""Rows of the smallest product on the matrix units."""
MULTIPROCESSORS = 132
"""Of the GPU whose last wave of programs decides how rows are cut; others fill in a similar way."""
WHOLE_PROGRAMS, CUT_PROGRAMS = 4, 5
"""Programs of a multiprocessor at a time, of whole rows (112 registers a thread) and of cut ones (96)."""
LEAST_OF_WAVE = 0.4
"""Time of a wave of few programs, beside a full one: few don't use the memory's whole rate (H200)."""
PROGRAM_KEYS = 32
"""Keys that a program reads in the time of its start and end."""
MERGE_KEYS = 80_000
"""Keys, of one KV head each, that are read in the time in which parts are written and joined (H200)."""
LEAST_KEYS = 128
"""Keys of a stretch, at least: shorter ones cost more to join than they save."""
MOST_SPLITS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """How a kernel is compiled."""

    block_kv: int
    """Keys of a step."""
    num_warps: int
    num_stages: int
    """Steps whose keys and values are in shared memory or on the way there."""


def wide_tuning(head_dim: int, itemsize: int, compute_capability: int) -> Tuning:
    """For tiles of many queries; chosen so that registers and shared memory suffice."""
    row_bytes = power_of_two(head_dim) * itemsize
    if itemsize == 4:  # no matrix units: all of a product's operands are in registers
        return Tuning(block_kv=16, num_warps=16, num_stages=1)
    if row_bytes > 256:
        return Tuning(block_kv=32, num_warps=8, num_stages=2 if compute_capability >= HOPPER else 1)
    if compute_capability >= HOPPER:
        return Tuning(block_kv=128, num_warps=8, num_stages=3)
    return Tuning(block_kv=64, num_warps=8, num_stages=2)


def narrow_tuning(head_dim: int, itemsize: int) -> Tuning:
    """For the heads of a group over one query."""
    if itemsize == 4:
        return Tuning(block_kv=16, num_warps=4, num_stages=2)
    return Tuning(block_kv=64 if head_dim <= 128 else 32, num_warps=4, num_stages=2)


def num_splits(*, rows: int, num_kv_heads: int, most_keys: int) -> int:
    """Stretches into which each narrow row is cut, so that the last wave of programs fills the GPU, too."""

    def cost(splits: int) -> float:
        """Keys, of one KV head each, that could be read in the time of all."""
        at_once = MULTIPROCESSORS * (WHOLE_PROGRAMS if splits == 1 else CUT_PROGRAMS)
        waves, rest = divmod(rows * num_kv_heads * splits, at_once)
        last = LEAST_OF_WAVE + (1 - LEAST_OF_WAVE) * rest / at_once if rest else 0.0
        each = most_keys / splits + PROGRAM_KEYS
        return (waves + last) * at_once * each + (MERGE_KEYS if splits > 1 else 0)

    return min(range(1, max(1, min(most_keys // LEAST_KEYS, MOST_SPLITS)) + 1), key=cost)


def attention_triton(
    q: jax.Array,
    kv_pages: jax.Array,
    plan: AttentionPlan,
    *,
    scale: float,
    sliding_window: int | None,
    logit_soft_cap: float | None,
    compute_capability: int | None = None,
    wide: Tuning | None = None,
    narrow: Tuning | None = None,
) -> jax.Array:
    """As `multi_token_attention`.

    Args:
        q: see there, as are `kv_pages`, `plan`, `scale`, `sliding_window` and `logit_soft_cap`.
        compute_capability: compile for this GPU, 90 for one; None: for the one that is here.
        wide: None: `wide_tuning`.
        narrow: None: `narrow_tuning`.

    Raises:
        UnsupportedInputError: no Triton, or an input that it doesn't compute.
    """
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads, page_size = kv_pages.shape[2], fp8_pages.page_size(kv_pages)
    group = num_heads // num_kv_heads
    _check(
        q.dtype in (jnp.bfloat16, jnp.float16, jnp.float32),
        f"q: got {q.dtype}, expected bfloat16, float16 or float32",
    )
    most = MOST_HEAD_DIM_FLOAT32 if q.dtype == jnp.float32 else MOST_HEAD_DIM
    _check(head_dim <= most, f"q: got head_dim {head_dim}, expected at most {most} for {q.dtype}")
    _check(group <= MOST_GROUP, f"q: got {group} heads for each kv head, expected at most {MOST_GROUP}")
    capability = compute_capability or compute_capability_here()
    fp8_pages.check_capability(kv_pages, capability)
    max_rows, max_pages = plan.page_table.shape
    decode_only = plan.block_q == 1
    options = {
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "page_size": page_size,
        "page_rows": kv_pages.shape[3],
        "block_dim": power_of_two(max(LEAST_LINES, head_dim)),
        "scale": scale,
        "window": sliding_window or 0,
        "soft_cap": logit_soft_cap or 0.0,
        "precision": "ieee" if q.dtype == jnp.float32 else "tf32",  # the latter says nothing of 16-bit types
    }
    rows = (plan.cu_q_lens, plan.kv_lens, plan.page_table)
    out = jax.ShapeDtypeStruct(q.shape, q.dtype)
    written = q  # of the same shape and dtype, where nothing is written yet
    if not decode_only:
        tuning = wide or wide_tuning(head_dim, q.dtype.itemsize, capability)
        chunks = -(-plan.block_q * group // TILE_LINES)
        tile_heads = -(-group // chunks)
        (written,) = triton_call(
            q,
            kv_pages,
            *rows,
            plan.tile_rows,
            plan.tile_starts,
            max_rows,
            max_pages,
            num_tokens,
            kernel=wide_kernel,
            outputs=[out],
            grid=(plan.tile_rows.shape[0], num_kv_heads * chunks),
            name="attention_wide",
            num_warps=tuning.num_warps,
            num_stages=tuning.num_stages,
            compute_capability=compute_capability,
            constants={
                "block_q": plan.block_q,
                "tile_heads": tile_heads,
                "head_chunks": chunks,
                "lines": power_of_two(max(LEAST_LINES, plan.block_q * tile_heads)),
                "block_kv": tuning.block_kv,
                **options,
            },
        )
    tuning = narrow or narrow_tuning(head_dim, q.dtype.itemsize)
    splits = num_splits(rows=max_rows, num_kv_heads=num_kv_heads, most_keys=max_pages * page_size)
    parts = (max_rows, num_heads, splits) if splits > 1 else (1, 1, 1)
    written, part_out, part_lse = triton_call(
        q,
        kv_pages,
        *rows,
        written,
        max_pages,
        num_tokens,
        kernel=narrow_kernel,
        outputs=(
            out,
            jax.ShapeDtypeStruct((*parts, head_dim), jnp.float32),
            jax.ShapeDtypeStruct(parts, jnp.float32),
        ),
        aliases={} if decode_only else {5: 0},
        grid=(splits, num_kv_heads, max_rows),
        name="attention_narrow",
        num_warps=tuning.num_warps,
        num_stages=tuning.num_stages,
        compute_capability=compute_capability,
        constants={
            "decode_only": decode_only,
            "splits": splits,
            "lines": power_of_two(max(LEAST_LINES, group)),
            "block_kv": tuning.block_kv,
            "least_blocks": max(1, LEAST_KEYS // tuning.block_kv),
            **options,
        },
    )
    if splits == 1:
        return written
    return triton_call(
        part_out,
        part_lse,
        plan.cu_q_lens,
        written,
        num_tokens,
        kernel=merge_kernel,
        outputs=[out],
        aliases={3: 0},
        grid=(num_heads, max_rows),
        name="attention_merge",
        num_warps=4,
        compute_capability=compute_capability,
        constants={
            "num_heads": num_heads,
            "head_dim": head_dim,
            "decode_only": decode_only,
            "splits": splits,
            "block_splits": power_of_two(splits),
            "block_dim": options["block_dim"],
        },
    )[0]


def _check(ok: bool, problem: str) -> None:
    if not ok:
        raise UnsupportedInputError(problem)
