"""The chat in a real terminal: answers stream, Ctrl-C stops them, conversations outlive the process."""

import re
import time

import pytest
from terminal import CTRL_C, CTRL_D, Terminal

PROMPT = r"\n?> $"
LONG = 1200
"""Tokens of an answer that takes longer than a test needs to type Ctrl-C."""


@pytest.fixture
def options(checkpoint, tmp_path):
    sizes = ["--device-pages", "128", "--host-pages", "40", "--max-context", "4096"]
    return [checkpoint, "--log", tmp_path / "log.sqlite", *sizes]


def stopped_in_the_middle(chat, question):
    chat.type(question + "\n")
    chat.expect(re.escape(question) + r"\n[A-Za-z0-9]{3,}")  # it streams
    chat.type(CTRL_C)
    return chat.expect(r"stopped; [^\n]*\n")


def test_stopped_twice_then_answered_then_resumed(options):
    with Terminal("chat", *options, "--conversation", "mine", "--max-tokens", LONG) as chat:
        greeting = chat.expect(PROMPT)
        assert "conversation mine (new)" in greeting
        assert "without --log" not in greeting
        for question in ("first question", "second question"):
            assert "the conversation is empty again" in stopped_in_the_middle(chat, question)
            chat.expect(PROMPT)
        chat.type("third question\n")
        answer = chat.expect(rf"cut off after {LONG} tokens\n")
        assert re.search(rf"\n[A-Za-z0-9]{{{LONG}}}\n", answer), answer
        chat.expect(PROMPT)
        assert "back at the end of turn 1" in stopped_in_the_middle(chat, "fourth question")
        chat.expect(PROMPT)
        chat.type(CTRL_D)
        assert "--conversation mine" in chat.expect(r"to go on: [^\n]*\n")
        assert chat.wait() == 0

    with Terminal("chat", *options, "--conversation", "mine", "--max-tokens", 3) as chat:
        assert re.search(r"conversation mine \(1 turn, \d+ tokens\)", chat.expect(PROMPT))
        chat.type("/history\n")
        history = chat.expect(PROMPT)
        assert "third question" in history
        assert "first question" not in history
        assert "second question" not in history
        chat.type("and now?\n")
        chat.expect(r"cut off after 3 tokens\n")
        chat.expect(PROMPT)
        chat.type("/receipt\n")
        receipt = chat.expect(PROMPT)
        assert re.search(r"tokens recomputed +\d{4}\n", receipt)  # the process is new, so nothing was cached
        assert re.search(r"time to first token +[\d.]+ ms", receipt)
        time.sleep(0.5)  # a signal between the prompt and the system call that reads is seen only afterwards
        chat.type(CTRL_C)
        chat.expect("to go on")
        assert chat.wait() == 0


def test_commands(options):
    with Terminal("chat", *options, "--max-tokens", "4", "--system", "be brief") as chat:
        chat.expect(PROMPT)

        def reply(line):
            chat.type(line + "\n")
            return chat.expect(PROMPT)

        assert "no answer yet" in reply("/receipt")
        assert "expected a conversation that has turns" in reply("/rewind")
        reply("one")
        reply("two")
        history = reply("/history")
        assert "system\nbe brief" in history
        assert history.count("be brief") == 1
        assert "now in other, a copy of" in reply("/fork other")
        assert "back at the end of turn 1" in reply("/rewind 1")
        assert "two" not in reply("/history").removeprefix("/history")
        assert "got 2, expected a number from 1 to 1" in reply("/rewind 2")
        assert "(new)" in reply("/new third")
        assert "1 turn," in reply("/new other")
        assert "/fork [ID]" in reply("/help")
        assert "/nonsense: unknown command" in reply("/nonsense")
        assert "too many" in reply("/fork a b")
        assert "error: /new 'x: No closing quotation" in reply("/new 'x")
        assert "error" not in reply(" /said to the model")
        assert "error: input: got" in reply("x" * 4090)  # longer than the context
        assert "error" not in reply("still there?")
        chat.type("/quit\n")
        assert chat.wait() == 0
