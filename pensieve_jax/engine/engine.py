"""The engine: everything a caller can ask for, from any thread."""

import asyncio
import gc
import logging
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from host_cache.manager import CacheCounters
from pensieve_jax.config import EngineConfig
from pensieve_jax.core.errors import (
    ConversationBusyError,
    EngineError,
    InvalidArgumentError,
)
from pensieve_jax.core.types import SamplingParams
from pensieve_jax.engine.audit import CheckCounters
from pensieve_jax.engine.build import build_parts, open_checkpoint
from pensieve_jax.engine.conversation import Conversation
from pensieve_jax.engine.hints import Hints
from pensieve_jax.engine.inputs import TurnInput
from pensieve_jax.engine.loop import EngineThread, between_steps
from pensieve_jax.engine.registry import ConversationRegistry
from pensieve_jax.engine.state import new_state
from pensieve_jax.engine.turn import Turn, TurnResult
from pensieve_jax.engine.turn_loop import TurnLoop
from pensieve_jax.models.interface import ModelSpec, ServableModel
from pensieve_jax.store.log import ConversationLog

logger = logging.getLogger(__name__)
IDS_PER_CALL = 1000
"""Conversation ids that are read from the log at a time."""


class Engine:
    """Serves conversations with their state kept between turns. All methods may be called from any thread.

    Use it as a context manager, or call `close`.
    """

    def __init__(
        self,
        model: ServableModel,
        tokenizer: Any | None = None,
        config: EngineConfig | None = None,
        *,
        end_token_ids: Sequence[int] | None = None,
        fingerprint: str = "unknown",
        num_shards: int = 1,
        clock: Callable[[], float] = time.monotonic,
        host_progress: Callable[[int, int], None] | None = None,
    ) -> None:
        """Serve a model that is in memory: one of `pensieve_jax.models` or your own.

        Args:
            model: a Flax NNX model that follows `pensieve_jax.models.interface.ServableModel`.
            tokenizer: of `transformers`; None: the engine takes and gives token ids alone.
            config: sizes and choices.
            end_token_ids: ids that end a turn; None: the tokenizer's end token.
            fingerprint: identifies the weights in the log.
            num_shards: devices to spread the model over (tensor parallelism).
            clock: seconds; for tests.
            host_progress: called with (bytes of the host tier's memory that are ready, bytes in all): tens of
                GB take a GPU machine some seconds.

        Raises:
            InvalidArgumentError: the configuration doesn't fit the model or the machine.
            LogError: the log can't be opened.
        """
        self.config = config or EngineConfig()
        self.spec: ModelSpec = model.spec
        self.tokenizer = tokenizer
        self._clock = clock
        parts = build_parts(model, tokenizer, self.config, num_shards, host_progress)
        if end_token_ids is None:
            eos = getattr(tokenizer, "eos_token_id", None)
            end_token_ids = () if eos is None else (eos,)
        try:
            log = ConversationLog.open(
                self.config.log_path,
                vocab_size=self.spec.vocab_size,
                model=self.spec.name,
                fingerprint=fingerprint,
            )
        except BaseException:
            parts.worker.close()
            raise
        self._conversations = ConversationRegistry(log)
        self._turns = TurnLoop(
            parts,
            self.config,
            self._conversations,
            spec=self.spec,
            tokenizer=tokenizer,
            end_token_ids=frozenset(end_token_ids),
            clock=clock,
        )
        self._closed = False
        self._failure: EngineError | None = None
        self._thread = EngineThread(self, steps_alone=self.config.background)

    @classmethod
    def from_checkpoint(
        cls,
        path: str | Path,
        config: EngineConfig | None = None,
        *,
        dtype: str | None = None,
        num_shards: int = 1,
        progress: Callable[[int, int], None] | None = None,
        host_progress: Callable[[int, int], None] | None = None,
    ) -> "Engine":
        """Load a checkpoint and serve it.

        Args:
            path: a Hugging Face folder, a GGUF file, or an Orbax folder of `pensieve convert`.
            config: sizes and choices.
            dtype: of weights and KV; None: the checkpoint's own.
            num_shards: devices to spread the model over.
            progress: called with (bytes loaded, bytes in all).
            host_progress: as where a model is in memory.

        Raises:
            CheckpointError: it is missing, damaged or inconsistent.
            UnsupportedModelError: no model here computes it.
        """
        loaded = open_checkpoint(path, dtype=dtype, num_shards=num_shards, progress=progress)
        return cls(
            loaded.model,
            loaded.tokenizer,
            config,
            end_token_ids=loaded.end_token_ids,
            fingerprint=loaded.fingerprint,
            num_shards=num_shards,
            host_progress=host_progress,
        )

    # -- conversations ---------------------------------------------------------------------------

    @between_steps
    def conversation(
        self,
        conversation_id: str | None = None,
        *,
        tenant: str | None = None,
        priority: float | None = None,
        time_to_live_s: float | None = None,
    ) -> Conversation:
        """Open a conversation of the log, or begin one.

        Args:
            conversation_id: of the one to open or begin; None begins one with a fresh id.
            tenant: whose it is, from its first day on; its KV is shared with no other tenant's conversations,
                whatever they have in common. None: nobody's, or as it is. Forks have their source's.
            priority: see `Conversation.priority`; None: as it is, at first 1.
            time_to_live_s: see `Conversation.time_to_live_s`; None: as it is, at first no limit.

        Raises:
            InvalidArgumentError: an argument is not acceptable; no conversation has begun.
        """
        given = {"priority": priority, "time_to_live_s": time_to_live_s}
        changes = {name: value for name, value in given.items() if value is not None}
        Hints(**changes)  # before the log has the conversation
        state = self._conversations.open(conversation_id, tenant)
        if changes:
            self.set_hints(state.id, **changes)
        return Conversation(self, state.id)

    def conversation_ids(self) -> Iterator[str]:
        """Ids of all conversations of the log."""
        ids = self._conversations.ids()
        while page := self._thread.call(lambda: list(islice(ids, IDS_PER_CALL))):
            yield from page

    @between_steps
    def num_turns(self, conversation_id: str) -> int:
        """Finished turns of a conversation.

        Raises:
            UnknownConversationError: there is none of that id.
        """
        return self._conversations.get(conversation_id).num_turns

    @between_steps
    def token_ids(self, conversation_id: str) -> np.ndarray:
        """i32[n]: all tokens of a conversation's finished turns.

        Raises:
            UnknownConversationError: there is none of that id.
        """
        return self._conversations.get(conversation_id).tokens.copy()

    @between_steps
    def fork(
        self, conversation_id: str, new_id: str | None = None, *, num_turns: int | None = None
    ) -> Conversation:
        """Begin a conversation with the first turns of another. Their KV is shared, not copied.

        Args:
            conversation_id: the source; it may be busy.
            new_id: of the new one; None: a fresh id.
            num_turns: finished turns to take; None: all.

        Raises:
            UnknownConversationError: there is no such source.
            InvalidArgumentError: it has fewer turns, or the new id is taken.
        """
        source, new = self._conversations.fork(conversation_id, new_id, num_turns)
        self._turns.fork_in_cache(source, new)
        return Conversation(self, new.id)

    @between_steps
    def rewind(self, conversation_id: str, *, num_turns: int) -> None:
        """Put a conversation back to the end of one of its turns. The KV up to there stays.

        Args:
            conversation_id: it must not be busy.
            num_turns: finished turns to keep.

        Raises:
            UnknownConversationError: there is no such conversation.
            ConversationBusyError: it has an unfinished turn.
            InvalidArgumentError: it has fewer turns.
        """
        state = self._conversations.rewind(conversation_id, num_turns)
        self._turns.open_in_cache(state)
        self._turns.cache.truncate(state.id, len(state.tokens))

    @between_steps
    def delete(self, conversation_id: str) -> None:
        """Forget a conversation, its log and its KV.

        Raises:
            UnknownConversationError: there is no such conversation.
            ConversationBusyError: it has an unfinished turn.
        """
        self._conversations.delete(conversation_id)
        self._turns.cache.forget(conversation_id)
        self._turns.hints.forget(conversation_id)

    # -- hints -----------------------------------------------------------------------------------

    @between_steps
    def warm(self, conversation_id: str) -> int:
        """Say that a conversation's next turn is near; see `Conversation.warm`."""
        self._check_open()
        state = self._conversations.get(conversation_id)
        return 0 if state.busy else self._turns.warm(state)

    @between_steps
    def release(self, conversation_id: str) -> None:
        """Let a conversation's KV go; see `Conversation.release`."""
        self._check_open()
        self._conversations.get(conversation_id)
        self._conversations.check_idle(conversation_id)
        self._turns.cache.release(conversation_id)

    @between_steps
    def hints(self, conversation_id: str) -> Hints:
        """What was said about a conversation.

        Raises:
            UnknownConversationError: there is none of that id.
        """
        return self._turns.hints.get(self._conversations.get(conversation_id).id)

    @between_steps
    def set_hints(self, conversation_id: str, **changes: Any) -> None:
        """Change some of a conversation's hints, the fields of `Hints`.

        Raises:
            UnknownConversationError: there is none of that id.
            InvalidArgumentError: a value is out of range; nothing changed.
        """
        self._check_open()
        state = self._conversations.get(conversation_id)
        self._turns.set_hints(state, **changes)

    async def arun[T](self, function: Callable[[], T]) -> T:
        """For asyncio: run one of the engine's methods without letting the event loop wait for a step.

        Args:
            function: calls methods of this engine or of its conversations that return at once, none that
                waits for a turn.
        """
        return await self._thread.acall(function)

    # -- turns -----------------------------------------------------------------------------------

    def submit(self, conversation_id: str, given: TurnInput, params: SamplingParams | None = None) -> Turn:
        """Add a turn to a conversation. Returns at once.

        Args:
            conversation_id: of an open conversation.
            given: the user's text, messages, or token ids.
            params: how to choose tokens and when to stop; None: greedy until an end token.

        Raises:
            UnknownConversationError: there is no such conversation.
            ConversationBusyError: it has an unfinished turn and the engine refuses a second one.
            ContextTooLongError: the turn can't fit the model's context.
            RequestTooLargeError: the turn can't fit the device pool.
            InvalidArgumentError: the input or a parameter is not acceptable.
        """
        turn = Turn(self, conversation_id)
        try:
            self.begin(turn, given, params)
        except Exception:
            raise
        except BaseException:  # the caller is interrupted and never gets the turn
            self.cancel_soon(turn)
            raise
        return turn

    async def asubmit(
        self, conversation_id: str, given: TurnInput, params: SamplingParams | None = None
    ) -> Turn:
        """As `submit`, for asyncio: the event loop doesn't wait for the step that is under way."""
        turn = Turn(self, conversation_id)
        try:
            await self._thread.acall(partial(self.begin, turn, given, params))
        except asyncio.CancelledError:
            self.cancel_soon(turn)
            raise
        return turn

    @between_steps
    def begin(self, turn: Turn, given: TurnInput, params: SamplingParams | None) -> None:
        """As `submit`, for a caller who has the turn already and can cancel it, however far this comes."""
        self._check_open()
        state = self._conversations.get(turn.conversation_id)
        if not state.busy:
            self._turns.start(state, turn, given, params)
        elif self.config.on_busy == "refuse":
            self._conversations.check_idle(state.id)
        else:
            state.queued.append((turn, given, params))

    def generate(
        self, inputs: Sequence[TurnInput], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[TurnResult]:
        """Answer many inputs, each in a conversation of its own that is forgotten afterwards.

        Args:
            inputs: one per answer.
            params: for all, or one per input.

        Returns:
            results in the order of the inputs.

        Raises:
            InvalidArgumentError: an input is not acceptable; none is answered then.
        """
        if isinstance(inputs, str | bytes) or not isinstance(inputs, Sequence | np.ndarray):
            raise InvalidArgumentError(f"inputs: got {type(inputs).__name__}, expected a list of inputs")
        each = list(params) if isinstance(params, Sequence) else [params] * len(inputs)
        if len(each) != len(inputs):
            raise InvalidArgumentError(f"params: got {len(each)}, expected one per input, {len(inputs)}")
        turns: list[Turn] = []
        try:
            for given, param in zip(inputs, each, strict=True):
                turn = Turn(self, f"generate-{uuid.uuid4().hex}")
                turns.append(turn)
                self._thread.call(partial(self._begin_unlogged, turn, given, param))
            return [turn.result() for turn in turns]
        finally:
            self._thread.call(partial(self._forget_unlogged, turns))

    def _begin_unlogged(self, turn: Turn, given: TurnInput, params: SamplingParams | None) -> None:
        self._check_open()
        state = new_state(turn.conversation_id, logged=False)
        self._turns.start(state, turn, given, params)
        self._conversations.add_unlogged(state)

    def _forget_unlogged(self, turns: Sequence[Turn]) -> None:
        for turn in turns:
            self._cancel(turn)
            self._turns.cache.forget(turn.conversation_id)
            self._conversations.forget(turn.conversation_id)

    def cancel(self, turn: Turn) -> None:
        """See `TurnDriver.cancel`."""
        if self._thread.is_current:  # an abandoned iteration may be collected in the middle of a step
            self.cancel_soon(turn)
        else:
            self._thread.call(partial(self._cancel, turn))

    def cancel_soon(self, turn: Turn) -> None:
        """See `TurnDriver.cancel_soon`."""
        self._thread.post(partial(self._cancel, turn))

    def _cancel(self, turn: Turn) -> None:
        state = None if turn.done else self._conversations.busy(turn.conversation_id)
        if state is not None:  # else the turn never began
            self._turns.cancel(turn, state)

    def advance(self, turn: Turn, seen: int) -> None:
        """See `TurnDriver.advance`."""
        if self.has_thread:
            turn.wait_for_news(seen)
        else:
            self.step()

    # -- steps -----------------------------------------------------------------------------------

    @between_steps
    def step(self) -> bool:
        """Run one step, if there is work. If the step fails, its turns end with an `EngineError`.

        Returns:
            whether there was.

        Raises:
            IntegrityError: the cache's books don't add up (only a `paranoid` engine looks).
            EngineError: the device is lost. All turns have ended with it; the log has what had finished.
        """
        try:
            return not self._closed and self._turns.step()
        except EngineError as error:
            self.give_up(error)
            raise

    @between_steps
    def settle(self) -> None:
        """Wait until all copies to the host have ended."""
        self._turns.settle()

    @between_steps
    def compile(
        self,
        params: Sequence[SamplingParams],
        *,
        max_turns: int | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        """Compile ahead; see `pensieve_jax.engine.warmup.warm_up`."""
        self._turns.compile(params, max_turns=max_turns, progress=progress)
        gc.collect()
        gc.freeze()  # traced programs are so many objects that a look at all takes tens of steps' time

    @property
    def num_compilations(self) -> int:
        """Programs compiled in this process, or read from the persistent cache, since `warm_up` or the start:
        0 while everything that is served was compiled ahead."""
        return self._turns.compilations.count

    # -- the whole -------------------------------------------------------------------------------

    @between_steps
    def set_weights(self, model: ServableModel) -> None:
        """Serve other weights of the same structure from now on. All KV is dropped: it was of the old ones.

        Raises:
            ConversationBusyError: turns are unfinished.
            InvalidArgumentError: the model has other dimensions.
        """
        if self._turns.has_turns:
            raise ConversationBusyError("set_weights: turns are unfinished")
        self._turns.parts.worker.set_weights(model)
        self.drop_state()

    @between_steps
    def drop_state(self) -> None:
        """Drop all KV from both tiers. Conversations stay; a next turn computes its history again.

        Raises:
            ConversationBusyError: turns are unfinished.
        """
        if self._turns.has_turns:
            raise ConversationBusyError("drop_state: turns are unfinished")
        self._turns.settle()
        self._turns.cache.clear()

    @property
    def max_context_tokens(self) -> int:
        """Longest conversation in tokens."""
        return self._turns.max_context_tokens

    @property
    def has_thread(self) -> bool:
        """Whether steps run in a thread of the engine."""
        return self.config.background

    @property
    @between_steps
    def counters(self) -> CacheCounters:
        """What the cache has done since the start."""
        return self._turns.counters

    @property
    @between_steps
    def checks(self) -> CheckCounters:
        """What checks of the engine by itself have found since the start (`paranoid`, `recompute_share`)."""
        return self._turns.checks

    @property
    def num_suspensions(self) -> int:
        """How often a turn was suspended for want of device pages, since the start."""
        return self._turns.num_suspensions

    @property
    def cache_config(self) -> Any:
        """Sizes of the tiers as they are."""
        return self._turns.parts.cache_config

    @between_steps
    def check_integrity(self) -> None:
        """Check the cache's books.

        Raises:
            IntegrityError: they don't add up.
        """
        self._turns.cache.check_integrity()

    @between_steps
    def close(self) -> None:
        """Cancel all unfinished turns and close the log. Further calls raise `EngineError` or `LogError`."""
        if self._closed:
            return
        self._turns.close()
        self._closed = True
        self._conversations.close()
        gc.unfreeze()  # what `compile` froze may go

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- inside ----------------------------------------------------------------------------------

    @between_steps
    def give_up(self, error: Exception) -> None:
        """End all unfinished turns, and refuse new ones: after a failure that leaves nothing to trust."""
        self._failure = EngineError(f"the engine failed: {type(error).__name__}: {error}")
        self._turns.fail_all(self._failure)

    def _check_open(self) -> None:
        if self._closed:
            raise EngineError("the engine is closed")
        if self._failure is not None:
            raise self._failure
