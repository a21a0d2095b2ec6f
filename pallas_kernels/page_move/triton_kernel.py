"""The Triton kernels that copy pages: in a file of their own, since Triton compiles its source text."""

import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]


@triton.jit
def _copy_page(
    source,
    source_pages,
    target_pages,
    num_source,
    num_target,
    target,
    page_numbers: tl.constexpr,
    block: tl.constexpr,
):
    """A part of page source_pages[i] to page target_pages[i]; out of range on either side: nothing."""
    i = tl.program_id(1)
    source_page = tl.load(source_pages + i)
    target_page = tl.load(target_pages + i)
    if (source_page >= 0) & (source_page < num_source) & (target_page >= 0) & (target_page < num_target):
        read = source + source_page.to(tl.int64) * page_numbers
        written = target + target_page.to(tl.int64) * page_numbers
        place = tl.program_id(0) * block + tl.arange(0, block)
        inside = place < page_numbers
        tl.store(written + place, tl.load(read + place, mask=inside), mask=inside)


@triton.jit
def copy_pages_kernel(
    source,
    source_pages,
    target_pages,
    target_in,  # the same memory as `target`
    num_source,
    num_target,
    target,
    page_numbers: tl.constexpr,
    block: tl.constexpr,  # numbers that one program copies, all of them under way together
):
    """Pages of one array to another."""
    _copy_page(source, source_pages, target_pages, num_source, num_target, target, page_numbers, block)


@triton.jit
def read_pages_kernel(
    addresses,  # of memory that the GPU reads: for each layer the lower and the upper half
    source_pages,
    target_pages,
    target_in,  # the same memory as `target`
    layer,
    num_source,
    num_target,
    target,
    page_numbers: tl.constexpr,
    block: tl.constexpr,
):
    """Pages of a layer from memory at an address to an array of the same dtype."""
    lower = tl.load(addresses + 2 * layer).to(tl.int64) & 0xFFFFFFFF
    upper = tl.load(addresses + 2 * layer + 1).to(tl.int64)
    address = tl.multiple_of((upper << 32) | lower, 16)
    source = tl.multiple_of(address.to(tl.pointer_type(target.dtype.element_ty)), 16)
    _copy_page(source, source_pages, target_pages, num_source, num_target, target, page_numbers, block)
