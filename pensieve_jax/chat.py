"""A chat in the terminal."""

import contextlib
import shlex
from collections.abc import Callable, Sequence
from dataclasses import fields

from rich.console import Console

from pensieve_jax.core.errors import InvalidArgumentError, PensieveError
from pensieve_jax.core.messages import Message
from pensieve_jax.core.types import FinishReason, SamplingParams, TurnReceipt
from pensieve_jax.engine import Conversation, Engine, Turn, TurnResult
from pensieve_jax.interrupts import on_interrupt

with contextlib.suppress(ImportError):  # not every Python has it
    import readline  # noqa: F401 (gives `input` line editing and a history)

PROMPT = "> "
HELP = """\
/receipt        what the last answer cost, and where its context came from
/history        the conversation so far
/rewind [N]     take the last N turns back (1 unless given)
/fork [ID]      go on in a copy of this conversation
/new [ID]       begin another conversation, or go back to one
/help           this list
/quit           leave; so do Ctrl-C and Ctrl-D at the prompt
Anything else is said to the model; a line that is to begin with / needs a space before it.
Ctrl-C stops an answer: the conversation is then as it was before the question."""


class Chat:
    """Reads lines, shows answers as they come, obeys commands."""

    def __init__(
        self,
        engine: Engine,
        console: Console,
        *,
        conversation_id: str | None,
        params: SamplingParams,
        system: str | None,
    ) -> None:
        """Args:
        engine: with a tokenizer.
        console: where answers go.
        conversation_id: of the conversation to open or begin; None begins one.
        params: of every turn.
        system: system message of every conversation that begins here.
        """
        self._engine = engine
        self._console = console
        self._params = params
        self._system = system
        self._receipt: TurnReceipt | None = None
        self._conversation = engine.conversation(conversation_id)
        self._commands: dict[str, Callable[[Sequence[str]], None]] = {
            "/receipt": self._show_receipt,
            "/history": self._show_history,
            "/rewind": self._rewind,
            "/fork": self._fork,
            "/new": self._new,
            "/help": lambda _: self._note(HELP),
        }

    def run(self) -> None:
        """Chat until the user leaves."""
        self._greet()
        while True:
            try:
                line = input(PROMPT)
            except (EOFError, KeyboardInterrupt):
                self._console.print()
                break
            if line.split() == ["/quit"]:
                break
            try:
                self._obey(line)
            except PensieveError as error:
                self._note(f"error: {error}")
        self._farewell()

    def _obey(self, line: str) -> None:
        if not line.strip():
            return
        if not line.startswith("/"):
            self._answer(line)
            return
        try:
            name, *arguments = shlex.split(line)
        except ValueError as error:
            raise InvalidArgumentError(f"{line}: {error}") from error
        command = self._commands.get(name)
        if command is None:
            raise InvalidArgumentError(f"{name}: unknown command, /help lists them")
        if len(arguments) > (name in ("/rewind", "/fork", "/new")):
            raise InvalidArgumentError(f"{name}: got {len(arguments)} arguments, too many")
        command(arguments)

    # -- a turn ----------------------------------------------------------------------------------

    def _answer(self, text: str) -> None:
        messages = [Message(role="user", content=text)]
        if self._system is not None and self._conversation.num_turns == 0:
            messages.insert(0, Message(role="system", content=self._system))
        started: list[Turn] = []

        def stop() -> None:
            for turn in started:
                turn.cancel()

        with on_interrupt(stop) as interrupted:
            turn = self._conversation.send(messages, self._params, stream=True)
            started.append(turn)
            if interrupted.is_set():  # before there was a turn to cancel
                turn.cancel()
            result = self._streamed(turn)
        if result.receipt is not None:
            self._receipt = result.receipt
        if result.finish_reason is FinishReason.CANCELLED:
            turns = self._conversation.num_turns
            self._note(
                f"stopped; the conversation is back at the end of turn {turns}"
                if turns
                else "stopped; the conversation is empty again"
            )
        elif result.finish_reason is FinishReason.LENGTH:
            self._note(f"cut off after {len(result.tokens)} tokens")
        if result.note is not None:
            self._note(result.note)

    def _streamed(self, turn: Turn) -> TurnResult:
        try:
            for delta in turn:
                self._console.out(_printable(delta.text), end="", highlight=False)
        finally:
            self._console.print()
        return turn.result()

    # -- commands --------------------------------------------------------------------------------

    def _show_receipt(self, _: Sequence[str]) -> None:
        if self._receipt is None:
            self._note("no answer yet")
            return
        for field in fields(TurnReceipt):
            value = getattr(self._receipt, field.name)
            name = field.name.removesuffix("_s").replace("_", " ")
            self._note(f"{name:24}{f'{value * 1e3:.1f} ms' if field.name.endswith('_s') else value}")

    def _show_history(self, _: Sequence[str]) -> None:
        tokenizer = self._engine.tokenizer
        assert tokenizer is not None, "a chat needs a tokenizer"
        self._console.out(_printable(tokenizer.decode(self._conversation.token_ids)), highlight=False)

    def _rewind(self, arguments: Sequence[str]) -> None:
        count = arguments[0] if arguments else "1"
        turns = self._conversation.num_turns
        if not count.isdecimal() or not 1 <= int(count) <= turns:
            expected = f"a number from 1 to {turns}" if turns else "a conversation that has turns"
            raise InvalidArgumentError(f"/rewind: got {count}, expected {expected}")
        self._conversation.rewind(num_turns=turns - int(count))
        self._note(f"back at the end of turn {turns - int(count)}")

    def _fork(self, arguments: Sequence[str]) -> None:
        before = self._conversation.id
        self._conversation = self._conversation.fork(*arguments)
        self._note(f"now in {self._conversation.id}, a copy of {before}")

    def _new(self, arguments: Sequence[str]) -> None:
        self._conversation = self._engine.conversation(*arguments)
        self._note(_where(self._conversation))

    # -- texts -----------------------------------------------------------------------------------

    def _greet(self) -> None:
        self._note(f"{_where(self._conversation)}; /help lists commands")
        if self._system is not None and self._conversation.num_turns:
            self._note("--system is for new conversations and changes nothing here")
        if self._engine.config.log_path is None:
            self._note("without --log FILE, conversations end with this chat")

    def _farewell(self) -> None:
        log = self._engine.config.log_path
        if log is not None and self._conversation.num_turns:
            self._note(f"to go on: --log {shlex.quote(str(log))} --conversation {self._conversation.id}")

    def _note(self, text: str) -> None:
        """Something that the model didn't say."""
        self._console.print(text, style="dim", markup=False, highlight=False, soft_wrap=True)


def _where(conversation: Conversation) -> str:
    turns, tokens = conversation.num_turns, len(conversation.token_ids)
    state = f"{turns} turn{'s' * (turns > 1)}, {tokens} tokens" if turns else "new"
    return f"conversation {conversation.id} ({state})"


def _printable(text: str) -> str:
    """The text without control characters, which could do things to the terminal."""
    return "".join(character for character in text if character.isprintable() or character in "\n\t")
