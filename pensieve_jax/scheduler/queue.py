"""Turns that wait, in the order in which they arrived."""

import bisect

from pensieve_jax.scheduler.request import Request


class WaitingQueue:
    """First come, first served. A suspended request returns to the place its arrival gives it."""

    def __init__(self) -> None:
        self._requests: list[Request] = []

    def __len__(self) -> int:
        return len(self._requests)

    def push(self, request: Request) -> None:
        """Put a request into its place."""
        bisect.insort(self._requests, request, key=_arrival)

    def first(self) -> Request | None:
        """The request that came first, or None. It stays."""
        return self._requests[0] if self._requests else None

    def remove(self, request: Request) -> None:
        """Take a request out, wherever it stands."""
        self._requests.remove(request)


def _arrival(request: Request) -> int:
    return request.id
