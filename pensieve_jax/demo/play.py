"""Serving the demo's conversations in both ways, and timing that without the compiler."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields
from functools import partial

import jax.monitoring
import numpy as np

from host_cache.manager import CacheCounters
from pensieve_jax.config import EngineConfig, TierConfig
from pensieve_jax.core.errors import EngineError
from pensieve_jax.core.types import FinishReason, SamplingParams, TurnReceipt
from pensieve_jax.demo.workload import Workload
from pensieve_jax.engine import Conversation, Engine
from pensieve_jax.engine.warmup import warm_up
from pensieve_jax.interrupts import closing_on_interrupt
from pensieve_jax.scheduler.scheduler import SchedulerConfig

COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"
MAX_ROWS = 8
"""Rows of a step: one turn runs at a time, so few are needed, and padding rows cost time."""

type Progress = Callable[[str, int, int], None]
"""Called with (what is done now, done, in all)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoSizes:
    """Sizes of the demo's engines."""

    max_output_tokens: int
    device_pages: int
    host_pages: int

    def engine_config(self, *, keep_state: bool) -> EngineConfig:
        """The same for both ways of serving, but for the state."""
        return EngineConfig(
            tiers=TierConfig(
                device_pages=self.device_pages, host_pages=self.host_pages, keep_state=keep_state
            ),
            scheduler=SchedulerConfig(max_rows=MAX_ROWS),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PlayedTurn:
    """One turn as it was served."""

    conversation: int
    turn: int
    """Counted from 0."""
    text: str
    token_ids: tuple[int, ...]
    receipt: TurnReceipt


@dataclass(frozen=True, slots=True, kw_only=True)
class ModeRun:
    """All turns served in one way."""

    keep_state: bool
    turns: tuple[PlayedTurn, ...]
    """In the order in which they came."""
    counters: CacheCounters
    """Of the cache, for these turns alone."""
    total_s: float
    """Of all turns, each from its submission to its end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    """A program that was compiled while turns were timed."""

    name: str
    seconds: float


class _Player:
    """Serves turns with one engine and notes what came of them."""

    def __init__(self, engine: Engine, workload: Workload, params: SamplingParams) -> None:
        self._engine = engine
        self._workload = workload
        self._params = params
        self._before = engine.counters
        self._turns: list[PlayedTurn] = []
        self._total_s = 0.0

    def play(self, conversation: int, turn: int) -> None:
        """Serve one turn."""
        handle = self._engine.conversation(f"demo-{conversation}")
        start_s = time.perf_counter()
        result = handle.send(self._workload.inputs[conversation][turn], self._params)
        self._total_s += time.perf_counter() - start_s
        if result.finish_reason is FinishReason.CANCELLED or result.receipt is None:
            raise EngineError("the engine was closed while it served")
        self._turns.append(
            PlayedTurn(
                conversation=conversation,
                turn=turn,
                text=result.text,
                token_ids=result.token_ids,
                receipt=result.receipt,
            )
        )

    def run(self) -> ModeRun:
        """What was served so far."""
        return ModeRun(
            keep_state=self._engine.config.tiers.keep_state,
            turns=tuple(self._turns),
            counters=_difference(self._engine.counters, self._before),
            total_s=self._total_s,
        )


def serve(
    workload: Workload, sizes: DemoSizes, progress: Progress
) -> tuple[ModeRun, ModeRun, tuple[Compiled, ...]]:
    """Serve all conversations with the state kept and without, by two engines that differ in nothing else.

    One turn at a time, so that a time to first token is the time that this turn took and not a wait for
    others; and each turn in both ways, one right after the other, so that a machine that becomes busier slows
    both. Every shape is compiled before the first turn. Ctrl-C ends the turn that runs.

    Returns:
        (with state, without, what was compiled all the same while turns were timed).

    Raises:
        PensieveError: a turn doesn't fit the sizes, or an engine fails.
        KeyboardInterrupt: Ctrl-C, after the engines are closed.
    """
    params = SamplingParams(max_tokens=sizes.max_output_tokens)
    with ExitStack() as stack:
        kept, lost = (
            stack.enter_context(_engine(workload, sizes.engine_config(keep_state=keep)))
            for keep in (True, False)
        )

        def close() -> None:
            kept.close()
            lost.close()

        stack.enter_context(closing_on_interrupt(close))
        for engine, way in ((kept, "with state"), (lost, "without")):
            warm_up(engine, params, progress=partial(progress, f"compiling, {way}"))
        warm_up_copies(kept, progress=partial(progress, "compiling, copies"))
        players = [_Player(engine, workload, params) for engine in (kept, lost)]
        with _compilations() as compiled:
            for done, (conversation, turn) in enumerate(workload.order):
                progress("serving", done, workload.num_turns)
                for player in players:
                    player.play(conversation, turn)
            progress("serving", workload.num_turns, workload.num_turns)
        with_state, without_state = (player.run() for player in players)
        return with_state, without_state, tuple(compiled)


def _engine(workload: Workload, config: EngineConfig) -> Engine:
    return Engine(workload.model, workload.tokenizer, config, end_token_ids=workload.end_token_ids)


@contextmanager
def _compilations() -> Iterator[list[Compiled]]:
    """Yields a list of all programs that are compiled in the context."""
    compiled: list[Compiled] = []

    def listen(event: str, duration_secs: float, **about: str | int) -> None:
        if event == COMPILE_EVENT:
            compiled.append(Compiled(name=str(about.get("fun_name", "?")), seconds=duration_secs))

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield compiled
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def warm_up_copies(engine: Engine, *, progress: Callable[[int, int], None]) -> None:
    """Compile the copies between the tiers, in every padded number of pages that a conversation reaches: fill
    conversations of 1, 2, 3, 5, 9, ... pages, which are padded to 1, 2, 4, 8, 16, ...; push them out to the
    host with others; and continue them.

    Leaves nothing in the cache or in the log.
    """
    pages, page_tokens = engine.cache_config, engine.cache_config.page_tokens
    once = SamplingParams(max_tokens=1, ignore_eos=True)
    most = min(pages.host_pages, pages.device_pages * 3 // 4, engine.max_context_tokens // page_tokens - 2)
    sizes = [size for size in (1, *(1 + (1 << i) for i in range(most.bit_length()))) if size <= most]
    # The fillers' own pages go to the host too, until a quarter of the device is free.
    groups = _groups(sizes, pages.host_pages - pages.device_pages // 4)
    half = max(1, pages.device_pages // 2)
    rng = np.random.default_rng(0)
    conversations: list[Conversation] = []

    def compute(conversation: Conversation, num_pages: int) -> int:
        """Pages that had to come from the host."""
        prompt = rng.integers(engine.spec.vocab_size, size=max(1, num_pages * page_tokens))
        receipt = conversation.send(prompt, once).receipt
        return -(-receipt.tokens_from_host // page_tokens) if receipt else 0

    def begin(num_pages: int) -> Conversation:
        conversations.append(engine.conversation())
        compute(conversations[-1], num_pages)
        return conversations[-1]

    def swap(group: list[int]) -> set[int]:
        """Numbers of pages that were swapped in."""
        filled = [begin(size) for size in group]
        begin(half)
        begin(half)
        swapped_in = {compute(conversation, 0) for conversation in filled}
        for size in group:  # as many are copied out ahead of time, now that the pool is full
            begin(size)
        return swapped_in

    met: set[int] = set()
    for done, group in enumerate(groups):
        progress(done, len(groups))
        met |= swap(group)
    for size in sizes:  # what others of its group have pushed out of the host
        if size not in met:
            swap([size])
    progress(len(groups), len(groups))
    engine.settle()
    for conversation in conversations:
        conversation.delete()


def _groups(sizes: Sequence[int], most: int) -> list[list[int]]:
    """The sizes in ascending order, in groups whose sums are at most `most`."""
    groups: list[list[int]] = []
    for size in sizes:
        if groups and sum(groups[-1]) + size <= most:
            groups[-1].append(size)
        else:
            groups.append([size])
    return groups


def _difference(after: CacheCounters, before: CacheCounters) -> CacheCounters:
    names = [field.name for field in fields(CacheCounters)]
    return CacheCounters(**{name: getattr(after, name) - getattr(before, name) for name in names})
