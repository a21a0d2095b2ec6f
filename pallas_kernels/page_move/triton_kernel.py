"""The Triton kernel that copies pages. Triton compiles its source text, so it stands in a file of its own."""

import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]


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
