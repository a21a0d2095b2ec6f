"""The step loop: turns in, one step after the other, results out. For one thread at a time."""

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from host_cache.counters import CacheCounters
from host_cache.manager import CacheManager
from pensieve_jax.config import EngineConfig
from pensieve_jax.core.errors import (
    ContextTooLongError,
    EngineError,
    InvalidArgumentError,
    PensieveError,
    RequestTooLargeError,
)
from pensieve_jax.core.plans import SampleRequest, StepPlan
from pensieve_jax.core.types import FinishReason, SamplingParams, TurnReceipt
from pensieve_jax.engine.answer import Answer, receipt_of
from pensieve_jax.engine.audit import Auditor, CheckCounters, unattended_turn
from pensieve_jax.engine.build import EngineParts
from pensieve_jax.engine.hints import HintBook
from pensieve_jax.engine.inputs import TurnInput
from pensieve_jax.engine.registry import ConversationRegistry
from pensieve_jax.engine.state import ActiveTurn, ConversationState, new_state
from pensieve_jax.engine.turn import Turn, TurnDelta, TurnResult
from pensieve_jax.models.interface import ModelSpec
from pensieve_jax.scheduler.request import Request, RequestOutput
from pensieve_jax.scheduler.scheduler import Scheduler
from pensieve_jax.store.log import TurnRecord
from pensieve_jax.worker.compilations import CompilationCounter
from pensieve_jax.worker.worker import PendingStep

logger = logging.getLogger(__name__)


class TurnLoop:
    """Carries turns from their input to their end: encodes, schedules, executes, delivers, logs.

    Cache and scheduler are replaced as a whole when a step has failed.
    """

    def __init__(
        self,
        parts: EngineParts,
        config: EngineConfig,
        conversations: ConversationRegistry,
        *,
        spec: ModelSpec,
        tokenizer: Any | None,
        end_token_ids: frozenset[int],
        clock: Callable[[], float],
    ) -> None:
        """Args:
        parts: worker, encoder, policy and sizes.
        config: sizes and choices.
        conversations: where finished turns go.
        spec: of the model.
        tokenizer: of `transformers`; None: token ids alone.
        end_token_ids: ids that end a turn.
        clock: seconds.
        """
        self.parts = parts
        self.max_context_tokens = spec.context_limit(config.max_context_tokens)
        self._config = config
        self._conversations = conversations
        self._spec = spec
        self._tokenizer = tokenizer
        self._end_token_ids = end_token_ids
        self._clock = clock
        self._active: dict[int, ActiveTurn] = {}
        """Request id -> the unfinished turn that waits or runs."""
        self.hints = HintBook()
        self.auditor = Auditor(config.recompute_share, config.seed, spec.dtype, config.tiers.kv_dtype)
        self._books_checked = 0
        self._random = np.random.default_rng(config.seed)
        self._next_request_id = 0
        self._poisoned: frozenset[int] = frozenset()
        self._counters_before = CacheCounters()
        self._suspensions_before = 0
        self._under_way: deque[PendingStep] = deque()
        """Steps that the device has and whose results were not applied, the oldest first."""
        self.compilations = CompilationCounter()
        self._start_cache()

    def close(self) -> None:
        """Cancel all unfinished turns and give the memory back."""
        self.cancel_all()
        self._under_way.clear()
        self.parts.worker.close()
        self.compilations.close()

    @property
    def has_work(self) -> bool:
        """Whether a turn waits or runs, or a hint asks for copies to the device."""
        return self.scheduler.has_work

    @property
    def has_turns(self) -> bool:
        """Whether a turn waits or runs."""
        return bool(self._active)

    def step(self) -> bool:
        """Plan a step and hand it to the device, if there is work; then take in what the step before has
        brought or, if none may run ahead, this one.

        Returns:
            whether there was.

        Raises:
            IntegrityError: the cache's books don't add up (only a `paranoid` engine looks).
        """
        if not self.has_work:
            self._finish_steps()
            return False
        plan = self.scheduler.schedule(self._clock())
        if plan is not None:
            self._dispatch(plan)
        self._finish_steps(keep=int(self.parts.run_ahead and plan is not None))
        return True

    def settle(self) -> None:
        """Wait until all steps and all copies to the host have ended."""
        self._finish_steps()
        self._dispatch(StepPlan(rows=(), swap_ins=(), swap_outs=self.cache.take_swap_outs()))
        self._finish_steps()

    def compile(
        self,
        params: Sequence[SamplingParams],
        *,
        max_turns: int | None,
        progress: Callable[[int, int], None] | None,
    ) -> None:
        """Compile ahead; see `Worker.compile`."""
        self._finish_steps()
        none = np.zeros(0, np.int32)
        choices = [SampleRequest(replace(each, seed=each.seed or 0), 0, none) for each in params]
        self.parts.worker.compile(choices, max_turns=max_turns, progress=progress)
        self.compilations.count = 0

    def open_in_cache(self, state: ConversationState) -> None:
        """Let the cache know a conversation and what its caller has said of it, if it doesn't."""
        hints = self.hints.get(state.id)
        self.cache.open(
            state.id,
            self._clock(),
            tenant=state.tenant,
            priority=hints.priority,
            time_to_live_s=hints.time_to_live_s,
        )

    def set_hints(self, state: ConversationState, **changes: Any) -> None:
        """Change some of a conversation's hints, the fields of `Hints`.

        Raises:
            InvalidArgumentError: a value is out of range; nothing changed.
        """
        hints = self.hints.change(state.id, **changes)
        self.open_in_cache(state)
        self.cache.set_priority(state.id, hints.priority)
        self.cache.set_time_to_live(state.id, hints.time_to_live_s)

    def fork_in_cache(self, source: ConversationState, new: ConversationState) -> None:
        """Let a fork of a conversation share what the cache has of it, and copy what can't be shared."""
        self.hints.copy(source.id, new.id)
        self.open_in_cache(source)
        page_copy = self.cache.fork(source.id, new.id, len(new.tokens), self._clock())
        if page_copy is not None:
            try:
                self.parts.worker.copy_page(*page_copy)
            except Exception as error:
                logger.exception("a page can't be copied")
                self._recover(error)

    def warm(self, state: ConversationState) -> int:
        """An idle conversation's next turn is near: the next step loads what the host has of it.

        Returns:
            chunks that could be loaded.
        """
        now = self._clock()
        self.open_in_cache(state)
        self.cache.touch(state.id, now)  # else what is loaded would be the first to leave
        return self.cache.warm(state.id)

    def cancel(self, turn: Turn, state: ConversationState) -> None:
        """End a turn that has not ended, and roll its conversation back."""
        if state.active is not None and state.active.turn is turn:
            self._cancel_active(state.active)
        else:
            state.queued = type(state.queued)(entry for entry in state.queued if entry[0] is not turn)
            turn.end(_empty_result(turn, FinishReason.CANCELLED, None))

    def cancel_all(self) -> None:
        """End all unfinished turns."""
        while self._active:
            self._cancel_active(next(iter(self._active.values())))

    def fail_all(self, error: EngineError) -> None:
        """End all unfinished turns with an error, and forget what is cached."""
        self._restart_cache()
        while self._active:
            self._end(next(iter(self._active.values())), error)

    def start(
        self, state: ConversationState, turn: Turn, given: TurnInput, params: SamplingParams | None
    ) -> None:
        """Queue a turn of a conversation that is not busy, or raise with nothing changed."""
        encoded = self.parts.encoder.encode(state, given)
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
            answer=Answer(self._tokenizer, params.stop),
            messages=encoded.messages,
            note=encoded.note,
        )
        self._submit(state.active)

    def _submit(self, active: ActiveTurn) -> None:
        self.open_in_cache(active.state)
        self.scheduler.submit(active.request, self._clock())

    def _completed(self, params: SamplingParams, num_prompt: int) -> SamplingParams:
        """Parameters with seed and `max_tokens` set, after everything is known to fit."""
        outside = [i for i in params.logit_bias if not 0 <= i < self._spec.vocab_size]
        if outside:
            raise InvalidArgumentError(
                f"logit_bias: got token id {outside[0]}, expected ids from 0 to {self._spec.vocab_size - 1}"
            )
        wanted = params.max_tokens or 1
        if num_prompt + wanted > self.max_context_tokens:
            raise ContextTooLongError(
                f"input: got {num_prompt} tokens with the history and {wanted} to produce, "
                f"expected at most {self.max_context_tokens} in all"
            )
        # The last token produced is never computed, so it needs no place.
        pool = self.parts.cache_config.device_pages * self.parts.cache_config.page_tokens
        if num_prompt + wanted - 1 > pool:
            raise RequestTooLargeError(
                f"input: got {num_prompt} tokens with the history and {wanted} to produce, "
                f"expected at most {pool + 1}, what the device pool holds"
            )
        room = min(self.max_context_tokens, pool + 1) - num_prompt
        seed = params.seed if params.seed is not None else int(self._random.integers(2**63))
        return replace(params, seed=seed, max_tokens=params.max_tokens or room)

    @property
    def counters(self) -> CacheCounters:
        """What the cache has done since the start, failed steps included."""
        return self._counters_before + self.cache.counters

    @property
    def num_suspensions(self) -> int:
        """How often a turn was suspended, since the start."""
        return self._suspensions_before + self.scheduler.num_suspensions

    @property
    def checks(self) -> CheckCounters:
        """What checks have found since the start."""
        worker, auditor = self.parts.worker, self.auditor
        sums = worker.checksum_counters
        return CheckCounters(
            books_checked=self._books_checked,
            pages_summed=sums.pages_summed,
            pages_verified=sums.pages_verified,
            pages_damaged=sums.pages_damaged,
            turns_recomputed=auditor.turns_recomputed,
            turns_different=auditor.turns_different,
            turns_unreadable=auditor.turns_unreadable,
            faults_injected=worker.fault_counters.total,
        )

    def _restart_cache(self) -> None:
        """Begin with an empty cache. Counters go on."""
        self._counters_before = self.counters
        self._suspensions_before = self.num_suspensions
        self._start_cache()

    def _start_cache(self) -> None:
        parts = self.parts
        self._under_way.clear()
        self.cache = CacheManager(parts.cache_config, parts.policy, parts.cost)
        self.scheduler = Scheduler(self.cache, self._config.scheduler)

    def _dispatch(self, plan: StepPlan) -> None:
        """Hand a plan to the device. After a failure the running turns have failed and the cache is empty."""
        try:
            step = self.parts.worker.dispatch(plan)
        except Exception as error:
            logger.exception("a step can't be run")
            self._recover(error)
            return
        self.scheduler.advance(plan, step.start, self._clock())
        self._under_way.append(step)

    def _finish_steps(self, keep: int = 0) -> None:
        """Take in what steps have brought until `keep` are under way. Failures are as in `_dispatch`."""
        while len(self._under_way) > keep:
            step = self._under_way.popleft()
            try:
                result = step.result()
            except Exception as error:
                logger.exception("a step broke off")
                self._recover(error)
                return
            self._deliver(self.scheduler.apply(result, self._clock()), result.unsound)

    def _recover(self, error: Exception) -> None:
        logger.error("the running turns are given up and the cache starts anew")
        turns = sorted(self._active.values(), key=lambda active: active.request.id)
        try:
            self.parts.worker.reset()
        except Exception as lost:
            logger.exception("nor can it start over")
            reason = f"the device can't be used any more: {type(lost).__name__}: {lost}"
            raise EngineError(reason) from error
        self._poisoned = frozenset()
        self._restart_cache()
        for active in turns:
            if active.request.running:
                reason = EngineError(f"a step failed, the turn was given up: {type(error).__name__}: {error}")
                self._end(active, reason)
            else:
                self._submit(active)

    def _deliver(self, outputs: Sequence[RequestOutput], unsound: frozenset[int]) -> None:
        if self._config.paranoid:
            self._check_and_poison()
        for output in outputs:
            active = self._active[output.request_id]
            if output.request_id in unsound:
                self._give_up(active, output, "the model's logits are NaN")
                self.cache.release(active.state.id)  # it may come from the cache
                continue
            try:
                text = active.answer.push(output.token, finished=output.finished)
            except Exception as error:
                logger.exception("the text of a token can't be made")
                what = f"the text of token {output.token.token_id} can't be made"
                self._give_up(active, output, f"{what}: {type(error).__name__}: {error}")
                continue
            active.turn.push(TurnDelta(text=text, tokens=(output.token,)))
            if output.finished or active.answer.stopped:
                if not output.finished:
                    self.scheduler.end(active.request, self._clock())
                stopped = output.stopped or active.answer.stopped
                self._commit(active, FinishReason.STOP if stopped else FinishReason.LENGTH)

    def _give_up(self, active: ActiveTurn, output: RequestOutput, why: str) -> None:
        logger.error("a turn of conversation %r is given up: %s", active.state.id, why)
        if not output.finished:
            self.scheduler.end(active.request, self._clock())
        self._end(active, EngineError(why))

    def _check_and_poison(self) -> None:
        self.cache.check_integrity()
        self._books_checked += 1
        free = frozenset(self.cache.free_device_pages())
        self.parts.worker.poison(sorted(free - self._poisoned))
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
            self._conversations.append(state, record)
        except PensieveError as error:
            self._end(active, error)
            return
        result = TurnResult(
            conversation_id=state.id,
            text=answer.text,
            tokens=tuple(answer.tokens),
            finish_reason=reason,
            receipt=receipt_of(request),
            note=active.note,
        )
        self._end(active, result)
        if state.logged and self.auditor.draws(request.params):
            self._compute_again(state.id, state.tokens, len(record.output_ids))

    def _compute_again(self, conversation_id: str, tokens: np.ndarray, num_output: int) -> None:
        """Compute a conversation's last turn again, from its tokens in the log and without what is cached."""
        try:
            logged = self._conversations.logged_tokens(conversation_id)
        except PensieveError as error:
            self.auditor.unreadable(conversation_id, error)
            return
        if not np.array_equal(logged, tokens):
            self.auditor.unreadable(conversation_id, "its tokens differ")
            return
        served = logged[-num_output:].tolist()

        def judge(again: Turn) -> None:
            self.auditor.judge(conversation_id, served, again)
            self.cache.forget(again.conversation_id)

        name = f"recompute-{self._next_request_id}"
        cold = new_state(name, logged=False, tenant=name)
        self.start(cold, unattended_turn(name, judge), logged[:-num_output], self.auditor.params(num_output))

    def _cancel_active(self, active: ActiveTurn) -> None:
        self.scheduler.end(active.request, self._clock())
        receipt = receipt_of(active.request)
        self._end(active, _empty_result(active.turn, FinishReason.CANCELLED, receipt))

    def _end(self, active: ActiveTurn, outcome: TurnResult | PensieveError) -> None:
        """Close a turn that the scheduler has let go: cut KV past the finished turns, start the next one."""
        state = active.state
        del self._active[active.request.id]
        state.active = None
        self.open_in_cache(state)
        self.cache.truncate(state.id, len(state.tokens))
        active.turn.end(outcome)
        while state.queued and not state.busy:
            turn, given, params = state.queued.popleft()
            try:
                self.start(state, turn, given, params)
            except PensieveError as error:
                turn.end(error)
            except Exception as error:  # as it would reach a caller whose turn needn't wait
                logger.exception("a queued turn can't be started")
                turn.end(EngineError(f"the turn can't be started: {type(error).__name__}: {error}"))


def _empty_result(turn: Turn, reason: FinishReason, receipt: TurnReceipt | None) -> TurnResult:
    return TurnResult(
        conversation_id=turn.conversation_id,
        text="",
        tokens=(),
        finish_reason=reason,
        receipt=receipt,
        note=None,
    )
