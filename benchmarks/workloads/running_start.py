"""Begins in the middle: a server that has run for a while, with conversations at every stage.

From an empty start, a server sees only first turns for about as long as a conversation lasts, which a short
run never gets past. Here conversations begin before the start, as the same Poisson process; turns that would
have been answered by then stand, with their recorded answers, at the beginning of the first turn that comes
after it. So every such conversation computes its history once, within the warm-up, and goes on as usual.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from benchmarks.workloads.workload import TokenConversation


def with_running_start(
    conversations: Sequence[TokenConversation], *, head_start_s: float, answer_s_per_token: float
) -> list[TokenConversation]:
    """Move the start `head_start_s` seconds into the process.

    Args:
        conversations: with times.
        head_start_s: how long conversations have been coming; 0 changes nothing.
        answer_s_per_token: about how long an answer took then, for each of its tokens.

    Returns:
        conversations that have turns left, ordered by their first one.
    """
    if head_start_s == 0:
        return list(conversations)
    moved = [_moved(c, head_start_s, answer_s_per_token) for c in conversations]
    left = [conversation for conversation in moved if conversation is not None]
    return sorted(left, key=lambda conversation: conversation.shape.turns[0].arrival_s or 0.0)


def _moved(
    conversation: TokenConversation, head_start_s: float, answer_s_per_token: float
) -> TokenConversation | None:
    time_s = (conversation.shape.turns[0].arrival_s or 0.0) - head_start_s
    for index, turn in enumerate(conversation.shape.turns):
        if index:
            time_s += turn.gap_s or 0.0
        if time_s >= 0:
            return _from_turn(conversation, index, time_s)
        time_s += turn.output_tokens * answer_s_per_token
    return None


def _from_turn(conversation: TokenConversation, index: int, arrival_s: float) -> TokenConversation:
    pieces = [
        tokens
        for given, answer in zip(conversation.inputs[:index], conversation.answers[:index], strict=True)
        for tokens in (given, answer)
    ]
    given = np.concatenate([*pieces, conversation.inputs[index]])
    first, *later = conversation.shape.turns[index:]
    first = replace(first, input_tokens=len(given), arrival_s=arrival_s, gap_s=None)
    return TokenConversation(
        shape=replace(conversation.shape, turns=(first, *later)),
        inputs=(given, *conversation.inputs[index + 1 :]),
        answers=conversation.answers[index:],
    )
