"""Serving the demo's conversations in both ways, and timing that without the compiler."""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields
from functools import partial

import jax.monitoring

from host_cache.manager import CacheCounters
from pensieve_jax.config import EngineConfig, TierConfig
from pensieve_jax.core.errors import EngineError
from pensieve_jax.core.types import FinishReason, SamplingParams, TurnReceipt
from pensieve_jax.demo.workload import Workload
from pensieve_jax.engine import Engine
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
            warm_up(engine, params, max_turns=1, progress=partial(progress, f"compiling, {way}"))
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


def _difference(after: CacheCounters, before: CacheCounters) -> CacheCounters:
    names = [field.name for field in fields(CacheCounters)]
    return CacheCounters(**{name: getattr(after, name) - getattr(before, name) for name in names})
