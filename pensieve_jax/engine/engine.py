"""The engine: the step loop, and everything a caller can ask for."""

import logging
import threading
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from host_cache.manager import CacheCounters, CacheManager
from pensieve_jax.config import EngineConfig
from pensieve_jax.core.errors import (
    ContextTooLongError,
    ConversationBusyError,
    EngineError,
    InvalidArgumentError,
    PensieveError,
    RequestTooLargeError,
    UnknownConversationError,
)
from pensieve_jax.core.plans import StepPlan, StepResult
from pensieve_jax.core.types import FinishReason, SamplingParams, TurnReceipt
from pensieve_jax.engine.answer import Answer, receipt_of
from pensieve_jax.engine.build import EngineParts, build_parts, open_checkpoint
from pensieve_jax.engine.conversation import Conversation
from pensieve_jax.engine.inputs import TurnInput
from pensieve_jax.engine.loop import EngineLoop, Turnstile
from pensieve_jax.engine.state import ActiveTurn, ConversationState, copy_of, new_state, state_of
from pensieve_jax.engine.turn import Turn, TurnDelta, TurnResult
from pensieve_jax.models.interface import ModelSpec, ServableModel
from pensieve_jax.scheduler.request import Request, RequestOutput
from pensieve_jax.scheduler.scheduler import Scheduler
from pensieve_jax.store.log import ConversationLog, TurnRecord

logger = logging.getLogger(__name__)
MAX_IDLE_STATES = 10_000
"""Conversations without an unfinished turn that stay in memory beside the log."""


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

        Raises:
            InvalidArgumentError: the configuration doesn't fit the model or the machine.
            LogError: the log can't be opened.
        """
        self.config = config or EngineConfig()
        self.spec: ModelSpec = model.spec
        self.tokenizer = tokenizer
        self._clock = clock
        self._parts: EngineParts = build_parts(model, tokenizer, self.config, num_shards)
        limit = self.config.max_context_tokens or self.spec.max_context_tokens
        self.max_context_tokens = min(limit, self.spec.max_context_tokens)
        if end_token_ids is None:
            eos = getattr(tokenizer, "eos_token_id", None)
            end_token_ids = () if eos is None else (eos,)
        self._end_token_ids = frozenset(end_token_ids)
        try:
            self._log = ConversationLog.open(
                self.config.log_path,
                vocab_size=self.spec.vocab_size,
                model=self.spec.name,
                fingerprint=fingerprint,
            )
        except BaseException:
            self._parts.worker.close()
            raise
        self._states: OrderedDict[str, ConversationState] = OrderedDict()
        self._active: dict[int, ActiveTurn] = {}
        """Request id -> the unfinished turn that waits or runs."""
        self._random = np.random.default_rng(self.config.seed)
        self._next_request_id = 0
        self._poisoned: frozenset[int] = frozenset()
        self._turnstile = Turnstile()
        self._work = threading.Condition()
        self._closed = False
        self._failure: EngineError | None = None
        self._start_cache()
        self._loop = EngineLoop(self) if self.config.background else None

    @classmethod
    def from_checkpoint(
        cls,
        path: str | Path,
        config: EngineConfig | None = None,
        *,
        dtype: str | None = None,
        num_shards: int = 1,
        progress: Callable[[int, int], None] | None = None,
    ) -> "Engine":
        """Load a checkpoint and serve it.

        Args:
            path: a Hugging Face folder, a GGUF file, or an Orbax folder of `pensieve convert`.
            config: sizes and choices.
            dtype: of weights and KV; None: the checkpoint's own.
            num_shards: devices to spread the model over.
            progress: called with (bytes loaded, bytes in all).

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
        )

    # -- conversations ---------------------------------------------------------------------------

    def conversation(self, conversation_id: str | None = None) -> Conversation:
        """Open a conversation of the log, or begin one.

        Args:
            conversation_id: of the one to open or begin; None begins one with a fresh id.
        """
        with self._turnstile:
            if conversation_id is None:
                conversation_id = uuid.uuid4().hex
            _check_id("conversation_id", conversation_id)
            try:
                self._state(conversation_id)
            except UnknownConversationError:
                self._log.create(conversation_id)
                self._states[conversation_id] = new_state(conversation_id, logged=True)
            return Conversation(self, conversation_id)

    def conversation_ids(self) -> Iterator[str]:
        """Ids of all conversations of the log."""
        return self._log.ids()

    def num_turns(self, conversation_id: str) -> int:
        """Finished turns of a conversation.

        Raises:
            UnknownConversationError: there is none of that id.
        """
        with self._turnstile:
            return self._state(conversation_id).num_turns

    def token_ids(self, conversation_id: str) -> np.ndarray:
        """i32[n]: all tokens of a conversation's finished turns.

        Raises:
            UnknownConversationError: there is none of that id.
        """
        with self._turnstile:
            return self._state(conversation_id).tokens.copy()

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
        with self._turnstile:
            source = self._state(conversation_id)
            num_turns = self._checked_turns(source, num_turns)
            new_id = uuid.uuid4().hex if new_id is None else new_id
            _check_id("new_id", new_id)
            self._log.fork(conversation_id, new_id, num_turns)
            self._states[new_id] = copy_of(source, new_id, num_turns)
            self._cache.open(conversation_id, self._clock())
            self._cache.fork(conversation_id, new_id, source.tokens_of(num_turns), self._clock())
            return Conversation(self, new_id)

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
        with self._turnstile:
            self._check_idle(conversation_id)
            if not isinstance(num_turns, int):
                raise InvalidArgumentError(f"num_turns: got {num_turns!r}, expected an integer")
            self._log.rewind(conversation_id, num_turns)  # before it is read: this may cut damaged turns off
            state = self._state(conversation_id)
            state.cut(num_turns)
            self._cache.open(conversation_id, self._clock())
            self._cache.truncate(conversation_id, len(state.tokens))

    def delete(self, conversation_id: str) -> None:
        """Forget a conversation, its log and its KV.

        Raises:
            UnknownConversationError: there is no such conversation.
            ConversationBusyError: it has an unfinished turn.
        """
        with self._turnstile:
            self._check_idle(conversation_id)
            self._log.delete(conversation_id)
            self._forget(conversation_id)

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
        with self._turnstile:
            self._check_open()
            state = self._state(conversation_id)
            turn = Turn(self, conversation_id)
            if state.busy:
                if self.config.on_busy == "refuse":
                    raise ConversationBusyError(f"conversation {conversation_id!r} has an unfinished turn")
                state.queued.append((turn, given, params))
            else:
                self._start(state, turn, given, params)
        self._wake()
        return turn

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
                with self._turnstile:
                    self._check_open()
                    state = new_state(f"generate-{uuid.uuid4().hex}", logged=False)
                    turn = Turn(self, state.id)
                    self._start(state, turn, given, param)
                    self._states[state.id] = state
                    turns.append(turn)
            self._wake()
            return [turn.result() for turn in turns]
        finally:
            for turn in turns:
                turn.cancel()
            with self._turnstile:
                for turn in turns:
                    self._forget(turn.conversation_id)

    def cancel(self, turn: Turn) -> None:
        """See `Turn.cancel`."""
        with self._turnstile:
            if turn.done:
                return
            state = self._states[turn.conversation_id]
            if state.active is not None and state.active.turn is turn:
                self._end_cancelled(state.active)
            else:
                state.queued = type(state.queued)(entry for entry in state.queued if entry[0] is not turn)
                turn.end(_empty_result(turn, FinishReason.CANCELLED, None))
        self._wake()  # a turn that was queued behind this one runs now

    def advance(self, turn: Turn, seen: int) -> None:
        """See `TurnDriver.advance`."""
        if self._loop is None:
            self.step()
        else:
            turn.wait_for_news(seen, timeout_s=1.0)
            if not turn.done and not self._loop.alive:
                raise EngineError("the engine is closed")

    # -- steps -----------------------------------------------------------------------------------

    def step(self) -> bool:
        """Run one step, if there is work. If the step fails, its turns end with an `EngineError`.

        Returns:
            whether there was.

        Raises:
            IntegrityError: the cache's books don't add up (only a `paranoid` engine looks).
        """
        with self._turnstile:
            if self._closed or not self._scheduler.has_work:
                return False
            plan = self._scheduler.schedule(self._clock())
            result = self._execute(plan)
            if result is not None:
                self._deliver(self._scheduler.apply(plan, result, self._clock()))
            return True

    def settle(self) -> None:
        """Wait until all copies to the host have ended."""
        with self._turnstile:
            plan = StepPlan(rows=(), swap_ins=(), swap_outs=self._cache.take_swap_outs())
            result = self._execute(plan)
            if result is not None:
                self._scheduler.apply(plan, result, self._clock())

    # -- the whole -------------------------------------------------------------------------------

    def set_weights(self, model: ServableModel) -> None:
        """Serve other weights of the same structure from now on. All KV is dropped: it was of the old ones.

        Raises:
            ConversationBusyError: turns are unfinished.
            InvalidArgumentError: the model has other dimensions.
        """
        with self._turnstile:
            if self._scheduler.has_work:
                raise ConversationBusyError("set_weights: turns are unfinished")
            self._parts.worker.set_weights(model)
            self.settle()
            self._cache.clear()

    @property
    def has_thread(self) -> bool:
        """Whether steps run in a thread of the engine."""
        return self._loop is not None

    @property
    def counters(self) -> CacheCounters:
        """What the cache has done since the start."""
        with self._turnstile:
            return self._cache.counters

    @property
    def num_suspensions(self) -> int:
        """How often a turn was suspended for want of device pages, since the start."""
        return self._scheduler.num_suspensions

    @property
    def cache_config(self) -> Any:
        """Sizes of the tiers as they are."""
        return self._parts.cache_config

    def check_integrity(self) -> None:
        """Check the cache's books.

        Raises:
            IntegrityError: they don't add up.
        """
        with self._turnstile:
            self._cache.check_integrity()

    def close(self) -> None:
        """Cancel all unfinished turns and close the log. Further calls raise `EngineError` or `LogError`."""
        if self._closed:
            return
        with self._turnstile:
            while self._active:
                self._end_cancelled(next(iter(self._active.values())))
            self._closed = True
        self._wake()
        if self._loop is not None:
            self._loop.join()
        self._parts.worker.close()
        self._log.close()

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- for the loop ----------------------------------------------------------------------------

    def wait_for_work(self) -> bool:
        """Sleep until there is work.

        Returns:
            False once the engine is closed.
        """
        with self._work:
            self._work.wait_for(lambda: self._closed or self._scheduler.has_work)
        return not self._closed

    def give_up(self, error: Exception) -> None:
        """End all unfinished turns, and refuse new ones: after a failure that leaves nothing to trust."""
        with self._turnstile:
            self._failure = EngineError(f"the engine failed: {type(error).__name__}: {error}")
            self._start_cache()
            while self._active:
                self._end(next(iter(self._active.values())), self._failure)

    def _wake(self) -> None:
        with self._work:
            self._work.notify_all()

    # -- inside ----------------------------------------------------------------------------------

    def _start_cache(self) -> None:
        parts = self._parts
        self._cache = CacheManager(parts.cache_config, parts.policy)
        self._scheduler = Scheduler(self._cache, self.config.scheduler)

    def _check_open(self) -> None:
        if self._closed:
            raise EngineError("the engine is closed")
        if self._failure is not None:
            raise self._failure

    def _state(self, conversation_id: str) -> ConversationState:
        """The conversation's state, from memory or from the log."""
        _check_known(conversation_id)
        state = self._states.get(conversation_id)
        if state is None:
            state = self._states[conversation_id] = state_of(self._log.load(conversation_id))
        self._states.move_to_end(conversation_id)
        if len(self._states) > MAX_IDLE_STATES:
            oldest = next((s for s in self._states.values() if s.logged and not s.busy), state)
            if oldest is not state:
                del self._states[oldest.id]
        return state

    def _check_idle(self, conversation_id: str) -> None:
        _check_known(conversation_id)
        state = self._states.get(conversation_id)
        if state is not None and state.busy:
            raise ConversationBusyError(f"conversation {conversation_id!r} has an unfinished turn")

    @staticmethod
    def _checked_turns(state: ConversationState, num_turns: int | None) -> int:
        if num_turns is None:
            return state.num_turns
        if not isinstance(num_turns, int) or not 0 <= num_turns <= state.num_turns:
            raise InvalidArgumentError(f"num_turns: got {num_turns}, expected 0 to {state.num_turns}")
        return num_turns

    def _forget(self, conversation_id: str) -> None:
        self._cache.forget(conversation_id)
        self._states.pop(conversation_id, None)

    def _start(
        self, state: ConversationState, turn: Turn, given: TurnInput, params: SamplingParams | None
    ) -> None:
        """Queue a turn of a conversation that is not busy, or raise with nothing changed."""
        encoded = self._parts.encoder.encode(state, given)
        history = len(state.tokens)
        num_prompt = history + len(encoded.token_ids)
        params = self._completed(params or SamplingParams(), num_prompt)
        stops = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self._end_token_ids)
        now = self._clock()
        request = Request(
            id=self._next_request_id,
            conversation_id=state.id,
            params=params,
            stop_token_ids=stops,
            tokens=np.concatenate([state.tokens, encoded.token_ids]),
            num_tokens=num_prompt,
            num_prompt_tokens=num_prompt,
            num_history_tokens=max(0, history - 1),  # the last one was produced, but never computed
            arrived_s=now,
        )
        self._next_request_id += 1
        state.active = self._active[request.id] = ActiveTurn(
            state=state,
            turn=turn,
            request=request,
            answer=Answer(self.tokenizer, params.stop),
            messages=encoded.messages,
            note=encoded.note,
        )
        self._scheduler.submit(request, now)

    def _completed(self, params: SamplingParams, num_prompt: int) -> SamplingParams:
        """Parameters with seed and `max_tokens` set, after everything is known to fit."""
        outside = [i for i in params.logit_bias if not 0 <= i < self.spec.vocab_size]
        if outside:
            raise InvalidArgumentError(
                f"logit_bias: got token id {outside[0]}, expected ids from 0 to {self.spec.vocab_size - 1}"
            )
        wanted = params.max_tokens or 1
        if num_prompt + wanted > self.max_context_tokens:
            raise ContextTooLongError(
                f"input: got {num_prompt} tokens with the history and {wanted} to produce, "
                f"expected at most {self.max_context_tokens} in all"
            )
        # The last token produced is never computed, so it needs no place.
        pool = self._parts.cache_config.device_pages * self._parts.cache_config.page_tokens
        if num_prompt + wanted - 1 > pool:
            raise RequestTooLargeError(
                f"input: got {num_prompt} tokens with the history and {wanted} to produce, "
                f"expected at most {pool + 1}, what the device pool holds"
            )
        room = min(self.max_context_tokens, pool + 1) - num_prompt
        seed = params.seed if params.seed is not None else int(self._random.integers(2**63))
        return replace(params, seed=seed, max_tokens=params.max_tokens or room)

    def _execute(self, plan: StepPlan) -> StepResult | None:
        """Run a plan. After a failure of the device the running turns have failed and the cache is empty."""
        try:
            result = self._parts.worker.execute(plan)
        except Exception as error:
            logger.exception("a step failed; its turns are given up and the cache starts anew")
            self._recover(error)
            return None
        return result

    def _recover(self, error: Exception) -> None:
        turns = sorted(self._active.values(), key=lambda active: active.request.id)
        self._parts.worker.reset()
        self._poisoned = frozenset()
        self._start_cache()
        for active in turns:
            if active.request.running:
                reason = EngineError(f"a step failed, the turn was given up: {type(error).__name__}: {error}")
                self._end(active, reason)
            else:
                self._scheduler.submit(active.request, self._clock())

    def _deliver(self, outputs: Sequence[RequestOutput]) -> None:
        if self.config.paranoid:
            self._check_and_poison()
        for output in outputs:
            active = self._active[output.request_id]
            text = active.answer.push(output.token, finished=output.finished)
            active.turn.push(TurnDelta(text=text, tokens=(output.token,)))
            if output.finished or active.answer.stopped:
                if not output.finished:
                    self._scheduler.end(active.request, self._clock())
                stopped = output.stopped or active.answer.stopped
                self._commit(active, FinishReason.STOP if stopped else FinishReason.LENGTH)

    def _check_and_poison(self) -> None:
        self._cache.check_integrity()
        free = frozenset(self._cache.free_device_pages())
        self._parts.worker.poison(sorted(free - self._poisoned))
        self._poisoned = free

    def _commit(self, active: ActiveTurn, reason: FinishReason) -> None:
        """A turn has ended well: log it, then tell its caller."""
        state, request, answer = active.state, active.request, active.answer
        record = TurnRecord(
            input_ids=request.tokens[len(state.tokens) : request.num_prompt_tokens].copy(),
            output_ids=request.tokens[request.num_prompt_tokens : request.num_tokens].copy(),
            finish_reason=reason,
            messages=active.messages,
            output_text=answer.text,
        )
        try:
            if state.logged:
                self._log.append_turn(state.id, record)
        except PensieveError as error:
            self._end(active, error)
            return
        state.append(record)
        result = TurnResult(
            conversation_id=state.id,
            text=answer.text,
            tokens=tuple(answer.tokens),
            finish_reason=reason,
            receipt=receipt_of(request),
            note=active.note,
        )
        self._end(active, result)

    def _end_cancelled(self, active: ActiveTurn) -> None:
        self._scheduler.end(active.request, self._clock())
        receipt = receipt_of(active.request)
        self._end(active, _empty_result(active.turn, FinishReason.CANCELLED, receipt))

    def _end(self, active: ActiveTurn, outcome: TurnResult | PensieveError) -> None:
        """Close a turn that the scheduler has let go: cut KV past the finished turns, start the next one."""
        state = active.state
        del self._active[active.request.id]
        state.active = None
        self._cache.open(state.id, self._clock())
        self._cache.truncate(state.id, len(state.tokens))
        active.turn.end(outcome)
        while state.queued and not state.busy:
            turn, given, params = state.queued.popleft()
            try:
                self._start(state, turn, given, params)
            except PensieveError as error:
                turn.end(error)
            except Exception as error:  # as it would reach a caller whose turn needn't wait
                logger.exception("a queued turn can't be started")
                turn.end(EngineError(f"the turn can't be started: {type(error).__name__}: {error}"))


def _is_id(value: object) -> bool:
    """Whether it is a text that the log can hold: half a surrogate pair has no encoding."""
    return isinstance(value, str) and value != "" and not any("\ud800" <= char <= "\udfff" for char in value)


def _check_id(name: str, conversation_id: object) -> None:
    if not _is_id(conversation_id):
        raise InvalidArgumentError(f"{name}: got {conversation_id!r}, expected a text that is not empty")


def _check_known(conversation_id: object) -> None:
    """What can't be an id is the id of no conversation."""
    if not _is_id(conversation_id):
        raise UnknownConversationError(f"conversation {conversation_id!r}: there is none of this id")


def _empty_result(turn: Turn, reason: FinishReason, receipt: TurnReceipt | None) -> TurnResult:
    return TurnResult(
        conversation_id=turn.conversation_id,
        text="",
        tokens=(),
        finish_reason=reason,
        receipt=receipt,
        note=None,
    )
