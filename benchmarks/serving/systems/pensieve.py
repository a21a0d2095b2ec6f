"""The engine of this repository as a system, in all of its variants."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from importlib.metadata import version
from typing import Any

import jax
import numpy as np

from benchmarks.serving.clock import RunClock
from benchmarks.serving.systems.base import (
    ContextCounts,
    Ended,
    Event,
    FirstToken,
    RefusedError,
    ServingError,
    SystemFacts,
    TurnRequest,
)
from pensieve_jax.config import EngineConfig
from pensieve_jax.core.errors import ContextTooLongError, PensieveError, RequestTooLargeError
from pensieve_jax.core.types import SamplingParams
from pensieve_jax.engine import Engine
from pensieve_jax.engine.turn import Turn
from pensieve_jax.engine.warmup import warm_up
from pensieve_jax.models import ServableModel

VARIANTS: Mapping[str, Callable[[EngineConfig], EngineConfig]] = {
    "pensieve": lambda config: config,
    "gpu-only": lambda config: replace(config, tiers=replace(config.tiers, host_pages=0)),
    "stateless": lambda config: replace(config, tiers=replace(config.tiers, keep_state=False, host_pages=0)),
    "lru": lambda config: replace(config, tiers=replace(config.tiers, policy="lru")),
    "separate": lambda config: replace(config, scheduler=replace(config.scheduler, separate_phases=True)),
}
"""Name -> what differs from the whole system: no host tier, no state between turns, another policy, prompts
and decoding in steps of their own."""


class PensieveSystem:
    """An engine whose steps the driver runs."""

    def __init__(
        self, name: str, model: ServableModel, config: EngineConfig, clock: RunClock, *, num_shards: int = 1
    ) -> None:
        """Args:
        name: one of `VARIANTS`.
        model: with its weights.
        config: of the whole system; the variant changes it.
        clock: the driver's.
        num_shards: devices to spread the model over.
        """
        changed = VARIANTS[name](config)
        self._clock = clock
        self.engine = Engine(
            model, None, replace(changed, background=False), clock=clock, num_shards=num_shards
        )
        tiers = self.engine.cache_config
        self.facts = SystemFacts(
            name=name,
            versions={package: version(package) for package in ("jax", "jaxlib", "flax")},
            settings={
                "device_pages": tiers.device_pages,
                "host_pages": tiers.host_pages,
                "page_tokens": tiers.page_tokens,
                "policy": changed.tiers.policy,
                "keep_state": changed.tiers.keep_state,
                **asdict(changed.scheduler),
                "num_shards": num_shards,
            },
            tells_tiers=True,
        )
        self._turns: dict[str, Turn] = {}
        self._silent: set[str] = set()
        """Conversations whose turn has given no token yet."""
        self._known: set[str] = set()

    def warm_up(self) -> None:
        """Compile all steps and copies that greedy turns can need."""
        warm_up(self.engine, SamplingParams(ignore_eos=True))

    def submit(self, request: TurnRequest) -> None:
        """See `System.submit`."""
        name = request.conversation_id
        if name not in self._known:
            self.engine.conversation(name)
            self._known.add(name)
        try:
            turn = self.engine.submit(name, request.new, _params(request.output_tokens))
        except (ContextTooLongError, RequestTooLargeError) as error:
            raise RefusedError(str(error)) from error
        self._turns[name] = turn
        self._silent.add(name)

    def poll(self, timeout_s: float) -> Sequence[Event]:
        """One step, and what it brought."""
        self.engine.step()
        now_s = self._clock()
        events: list[Event] = []
        for name in [name for name in self._silent if self._turns[name].news]:
            self._silent.remove(name)
            events.append(FirstToken(conversation_id=name, time_s=now_s))
        done = [name for name, turn in self._turns.items() if turn.done]
        return [*events, *(_ended(name, self._turns.pop(name), now_s) for name in done)]

    def settle(self) -> None:
        """See `System.settle`."""
        self.engine.settle()

    def reset(self) -> None:
        """See `System.reset`."""
        for turn in self._turns.values():
            turn.cancel()
        self._turns.clear()
        self._silent.clear()
        self.engine.drop_state()
        for name in self._known:
            self.engine.delete(name)
        self._known.clear()

    def counters(self) -> Mapping[str, float]:
        """The cache's counters, and programs that were compiled while turns were served: none, if warm."""
        return asdict(self.engine.counters) | {
            "suspensions": self.engine.num_suspensions,
            "compiled": self.engine.num_compilations,
        }

    def memory_bytes(self) -> int | None:
        """See `System.memory_bytes`."""
        stats: dict[str, Any] = jax.devices()[0].memory_stats() or {}
        return stats.get("peak_bytes_in_use")

    def close(self) -> None:
        """See `System.close`."""
        self.engine.close()


def _params(output_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=output_tokens, ignore_eos=True, seed=0)


def _ended(name: str, turn: Turn, now_s: float) -> Ended:
    try:
        result = turn.result()
    except PensieveError as error:
        raise ServingError(f"a turn of {name!r} failed: {error}") from error
    receipt = result.receipt
    if receipt is None:
        raise ServingError(f"a turn of {name!r} never ran")
    return Ended(
        conversation_id=name,
        time_s=now_s,
        output=np.asarray(result.token_ids, np.int32),
        queue_s=receipt.queue_s,
        counts=ContextCounts(
            new=receipt.tokens_new,
            from_device=receipt.tokens_from_device,
            from_host=receipt.tokens_from_host,
            recomputed=receipt.tokens_recomputed,
            restored=receipt.tokens_restored,
            suspensions=receipt.suspensions,
            swap_in_wait_s=receipt.swap_in_wait_s,
        ),
    )
