"""Finds the conversations in a trace of single requests with chained block hashes.

Every request brings its whole prompt, cut into blocks of 512 tokens; a block's id stands for everything up
to its end, so equal ids mean equal prefixes. A request continues an earlier one if it begins with all full
blocks of that one's prompt, no other conversation has the last of them, and there is room for the answer.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from pensieve_jax.simulator.workload import PrefixSegment, SimConversation, SimTurn

BLOCK_TOKENS = 512
"""Tokens of a block (Mooncake's trace format)."""


@dataclass(slots=True)
class _Chain:
    """A conversation while it is put together."""

    first: dict[str, Any]
    last: dict[str, Any]
    turns: list[SimTurn] = field(default_factory=list)


def link_requests(rows: Sequence[dict[str, Any]]) -> list[SimConversation]:
    """Join requests to conversations.

    Args:
        rows: objects with `timestamp` in milliseconds, `input_length`, `output_length` and `hash_ids`, in the
            order of time.

    Returns:
        conversations in the order in which they begin. The prefix of each is as many leading blocks as other
        conversations have too.
    """
    chains: list[_Chain] = []
    owner: dict[int, int | None] = {}
    """Block -> the only conversation that has it, or None for several."""
    for row in rows:
        number = _continued(row, chains, owner)
        if number is None:
            number = len(chains)
            chains.append(_Chain(first=row, last=row))
        chain = chains[number]
        chain.turns.append(_turn(row, chain))
        chain.last = row
        for block in row["hash_ids"]:
            if owner.setdefault(block, number) != number:
                owner[block] = None
    return [
        SimConversation(id=f"mooncake {number}", turns=tuple(chain.turns), prefix=_prefix(chain.first, owner))
        for number, chain in enumerate(chains)
    ]


def _full_blocks(row: dict[str, Any]) -> list[int]:
    return row["hash_ids"][: row["input_length"] // BLOCK_TOKENS]


def _continued(row: dict[str, Any], chains: list[_Chain], owner: dict[int, int | None]) -> int | None:
    """The conversation that a request continues."""
    known = next((block for block in reversed(row["hash_ids"]) if block in owner), None)
    number = None if known is None else owner[known]
    if number is None:
        return None
    last = chains[number].last
    blocks = _full_blocks(last)
    has_room = last["input_length"] + last["output_length"] < row["input_length"]
    return number if blocks and blocks[-1] == known and has_room else None


def _turn(row: dict[str, Any], chain: _Chain) -> SimTurn:
    first = not chain.turns
    before = 0 if first else chain.last["input_length"] + chain.last["output_length"]
    return SimTurn(
        input_tokens=max(1, row["input_length"] - before),
        output_tokens=max(1, row["output_length"]),
        arrival_s=row["timestamp"] / 1000,
    )


def _prefix(row: dict[str, Any], owner: dict[int, int | None]) -> tuple[PrefixSegment, ...]:
    shared = []
    for block in _full_blocks(row):
        if owner[block] is not None:
            break
        shared.append(PrefixSegment(id=f"block {block}", tokens=BLOCK_TOKENS))
    return tuple(shared)
