"""From what a request has to compute to rows of a batch (the paper's sub-requests, 4.3.4)."""

import numpy as np

from host_cache.manager import CacheManager
from pensieve_jax.core.plans import Row, SampleRequest
from pensieve_jax.scheduler.request import Request

NO_CONTEXT = np.zeros(0, np.int32)


def rows_of(request: Request, cache: CacheManager, *, max_tokens: int, max_rows: int) -> list[Row]:
    """One row per gap and one for the new tokens, as far as the budget goes.

    All rows of a request stand over the same pages: a gap attends to itself and what precedes it, the
    new tokens to everything. Ranges come in ascending order, so what a row attends to is computed
    before it or in the same step.

    Args:
        request: a running request.
        cache: holds its pages.
        max_tokens: query tokens to use at most.
        max_rows: rows to use at most.

    Returns:
        rows in ascending order; the last one samples if nothing is left to compute after it.
    """
    rows = []
    for start, end in request.pieces(max_tokens):
        if len(rows) == max_rows:
            break
        rows.append(_row_of(request, cache, start, end))
    return rows


def decode_row(request: Request) -> Row:
    """The row of a decoding request's last token, over all of its pages. A step makes hundreds."""
    end, sample = request.num_tokens, _sample_request(request)
    last = request.tokens[end - 1 : end]
    return Row(request.id, last, end - 1, request.page_ids, sample, request.num_awaited > 0)


def _row_of(request: Request, cache: CacheManager, start: int, end: int) -> Row:
    """The row of one range of a request's tokens; it samples if no token comes after it."""
    return Row(
        request.id,
        request.tokens[start:end],
        start,
        cache.page_ids(request.conversation_id, end),
        _sample_request(request) if end == request.num_tokens else None,
        end > request.num_known,
    )


def _sample_request(request: Request) -> SampleRequest:
    context = request.tokens[: request.num_tokens] if request.params.needs_history else NO_CONTEXT
    return SampleRequest(request.params, request.num_tokens - request.num_prompt_tokens, context)
