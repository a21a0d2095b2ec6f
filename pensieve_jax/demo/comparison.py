"""What two ways of serving the same conversations did, side by side."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from pensieve_jax.demo.play import Compiled, ModeRun, PlayedTurn
from pensieve_jax.demo.workload import Workload

LATE_TURN = 5
"""From this turn on, counted from 1, histories are long enough to judge by."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenCounts:
    """Where context tokens came from, and how many tokens were produced."""

    new: int
    from_device: int
    from_host: int
    recomputed: int
    output: int

    @property
    def context(self) -> int:
        """Tokens before the first output token."""
        return self.new + self.from_device + self.from_host + self.recomputed

    @property
    def computed(self) -> int:
        """Context tokens that had to be computed."""
        return self.new + self.recomputed


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnRow:
    """All turns of one number, over the conversations."""

    number: int
    """Counted from 1."""
    num_turns: int
    with_state_s: float
    """Mean time to first token."""
    without_state_s: float
    counts: TokenCounts
    """With state, summed."""

    def mean(self, tokens: int) -> float:
        """A sum over the turns as their mean."""
        return tokens / self.num_turns

    @property
    def ratio(self) -> float:
        """Time to first token with state as a part of that without."""
        return self.with_state_s / self.without_state_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """An answer that isn't the same in both runs."""

    conversation: int
    turn: int
    """Counted from 1."""
    with_state: str
    without_state: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Both runs of a workload."""

    title: str
    is_fallback: bool
    with_state: ModeRun
    without_state: ModeRun
    rows: tuple[TurnRow, ...]
    differences: tuple[Difference, ...]
    compiled: tuple[Compiled, ...]
    """What was compiled while turns were timed; empty if the warm-up met every shape."""
    unused: tuple[str, ...]
    """What the sizes were meant to bring about and didn't; empty if everything was really used."""

    @property
    def equal(self) -> bool:
        """Whether all answers are the same in both runs."""
        return not self.differences

    @property
    def late_ratio(self) -> float | None:
        """As `TurnRow.ratio`, over all turns from `LATE_TURN` on; None without such turns."""
        late = [row for row in self.rows if row.number >= LATE_TURN]
        if not late:
            return None
        return sum(row.with_state_s for row in late) / sum(row.without_state_s for row in late)


def compare(
    workload: Workload, with_state: ModeRun, without_state: ModeRun, compiled: tuple[Compiled, ...]
) -> Comparison:
    """Put two runs of a workload side by side."""
    numbers = range(1, max(turn for _, turn in workload.order) + 2)
    return Comparison(
        title=workload.title,
        is_fallback=workload.is_fallback,
        with_state=with_state,
        without_state=without_state,
        rows=tuple(_row(number, with_state, without_state) for number in numbers),
        compiled=compiled,
        differences=_differences(with_state, without_state),
        unused=_unused(with_state),
    )


def counts_of(turns: Sequence[PlayedTurn]) -> TokenCounts:
    """The sums of the turns' receipts."""
    receipts = [turn.receipt for turn in turns]
    return TokenCounts(
        new=sum(r.tokens_new for r in receipts),
        from_device=sum(r.tokens_from_device for r in receipts),
        from_host=sum(r.tokens_from_host for r in receipts),
        recomputed=sum(r.tokens_recomputed for r in receipts),
        output=sum(r.tokens_output for r in receipts),
    )


def _row(number: int, with_state: ModeRun, without_state: ModeRun) -> TurnRow:
    kept, lost = (
        [turn for turn in run.turns if turn.turn == number - 1] for run in (with_state, without_state)
    )
    return TurnRow(
        number=number,
        num_turns=len(kept),
        with_state_s=fmean(turn.receipt.time_to_first_token_s for turn in kept),
        without_state_s=fmean(turn.receipt.time_to_first_token_s for turn in lost),
        counts=counts_of(kept),
    )


def _differences(with_state: ModeRun, without_state: ModeRun) -> tuple[Difference, ...]:
    return tuple(
        Difference(
            conversation=a.conversation + 1,
            turn=a.turn + 1,
            with_state=a.text or str(a.token_ids),
            without_state=b.text or str(b.token_ids),
        )
        for a, b in zip(with_state.turns, without_state.turns, strict=True)
        if a.text != b.text or a.token_ids != b.token_ids
    )


def _unused(run: ModeRun) -> tuple[str, ...]:
    used = {
        "no history was found on the device": run.counters.tokens_from_device,
        "no history was swapped in from the host": run.counters.tokens_from_host,
        "nothing was swapped out to the host": run.counters.chunks_swapped_out,
        "no history had to be recomputed": run.counters.tokens_recomputed,
    }
    return tuple(what for what, count in used.items() if count == 0)
