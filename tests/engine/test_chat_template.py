"""Turn by turn gives the tokens of the whole chat, or says why it doesn't. The templates are real ones."""

import copy
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from pensieve_jax.core.errors import InvalidArgumentError
from pensieve_jax.core.messages import Message
from pensieve_jax.engine.chat_template import ChatTemplate
from tests.engine.small_tokenizers import byte_level, sentence_piece, smollm2

SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
    "<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA2 = (
    "{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}"
    "{% set system_message = messages[0]['content'] %}{% else %}{% set loop_messages = messages %}"
    "{% set system_message = false %}{% endif %}{% for message in loop_messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if loop.index0 == 0 and system_message != false %}"
    "{% set content = '<<SYS>>\n' + system_message + '\n<</SYS>>\n\n' + message['content'] %}"
    "{% else %}{% set content = message['content'] %}{% endif %}"
    "{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}"
    "{% elif message['role'] == 'assistant' %}{{ ' '  + content.strip() + ' ' + eos_token }}{% endif %}"
    "{% endfor %}"
)
LLAMA3 = (
    "{% set loop_messages = messages %}{% for message in loop_messages %}"
    "{% set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'"
    "+ message['content'] | trim + '<|eot_id|>' %}"
    "{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
QWEN3 = (
    "{%- set ns = namespace(last_query_index=-1) %}{%- for message in messages %}"
    "{%- if message.role == 'user' %}{%- set ns.last_query_index = loop.index0 %}{%- endif %}{%- endfor %}"
    "{%- for message in messages %}{%- set content = message.content %}"
    "{%- if message.role == 'assistant' %}{%- set reasoning_content = '' %}"
    "{%- if '</think>' in content %}"
    "{%- set reasoning_content = "
    "content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}"
    "{%- set content = content.split('</think>')[-1].lstrip('\\n') %}{%- endif %}"
    "{%- if loop.index0 > ns.last_query_index and (loop.last or reasoning_content) %}"
    "{{- '<|im_start|>assistant\\n<think>\\n' + reasoning_content.strip('\\n') + '\\n</think>\\n\\n' "
    "+ content.lstrip('\\n') }}"
    "{%- else %}{{- '<|im_start|>assistant\\n' + content }}{%- endif %}{{- '<|im_end|>\\n' }}"
    "{%- else %}{{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}{%- endif %}"
    "{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
MISTRAL = (
    "{%- if messages[0]['role'] == 'system' %}{%- set system_message = messages[0]['content'] %}"
    "{%- set loop_messages = messages[1:] %}{%- else %}{%- set loop_messages = messages %}{%- endif %}"
    "{{- bos_token }}{%- for message in loop_messages %}{%- if message['role'] == 'user' %}"
    "{%- if loop.last and system_message is defined %}"
    "{{- '[INST] ' + system_message + '\\n\\n' + message['content'] + '[/INST]' }}"
    "{%- else %}{{- '[INST] ' + message['content'] + '[/INST]' }}{%- endif %}"
    "{%- elif message['role'] == 'assistant' %}{{- ' ' + message['content'] + eos_token }}{%- endif %}"
    "{%- endfor %}"
)


@dataclass(frozen=True)
class Family:
    """A tokenizer with its template, and how the answers of its models end."""

    tokenizer: PreTrainedTokenizerFast
    end: str

    @property
    def end_id(self) -> int:
        return self.tokenizer.convert_tokens_to_ids(self.end)


def family(tokenizer: PreTrainedTokenizerFast, template: str | None, end: str) -> Family:
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = template
    return Family(tokenizer, end)


FAMILIES = {
    "smollm2": family(byte_level(), SMOLLM2, "<|im_end|>"),
    "llama2_legacy": family(sentence_piece(legacy=True), LLAMA2, "</s>"),
    "llama2": family(sentence_piece(legacy=False), LLAMA2, "</s>"),
    "llama3": family(byte_level("<|begin_of_text|>", "<|eot_id|>"), LLAMA3, "<|eot_id|>"),
    "qwen3": family(byte_level(eos="<|im_end|>"), QWEN3, "<|im_end|>"),
    "mistral": family(sentence_piece(legacy=False), MISTRAL, "</s>"),
}


def say(role: str, content: str) -> Message:
    return Message(role=role, content=content)


class Chat:
    """A conversation whose answers are given, as the engine would keep it."""

    def __init__(self, of: Family) -> None:
        self.family = of
        self.template = ChatTemplate(of.tokenizer)
        self.log = np.zeros(0, np.int32)
        self.messages: list[Message] = []

    def ask(self, *new: Message) -> str | None:
        """Encodes a turn and appends it to the log; returns the note."""
        turn = self.template.encode_turn(self.messages, new, logged_tail=self.log)
        self.log = np.concatenate([self.log, turn.token_ids])
        self.messages += new
        return turn.note

    def answer(self, text: str, tokens: list[int] | None = None, *, ended: bool = True) -> None:
        """A finished answer: by default with the tokens that encoding the chat gives."""
        if tokens is None:
            tokens = self.canonical(text)
        self.log = np.concatenate([self.log, np.asarray(tokens + [self.family.end_id] * ended, np.int32)])
        self.messages.append(say("assistant", text))

    def canonical(self, text: str) -> list[int]:
        """The tokens that stand for the answer in the whole chat, without the end token."""
        whole = self.template.encode_whole(
            [*self.messages, say("assistant", text), say("user", "x")]
        ).tolist()
        assert whole[: len(self.log)] == self.log.tolist()
        rest = whole[len(self.log) :]
        return rest[: rest.index(self.family.end_id)]

    def assert_equals_whole(self) -> None:
        assert self.log.tolist() == self.template.encode_whole(self.messages).tolist()


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("ended", [True, False], ids=["ended", "cut"])
def test_turns_add_up_to_the_whole_chat(name: str, ended: bool) -> None:
    chat = Chat(FAMILIES[name])
    for question, answer in (
        ("Hello there", "I am fine, thank you."),
        ("What  is\n\nthe weather like?", "grüße, 漢字 🙂\n\n  print('hi')"),
        ("", "x"),
        ("Hello", "Why not?"),
    ):
        assert chat.ask(say("user", question)) is None
        chat.assert_equals_whole()
        chat.answer(answer, ended=ended)
    assert chat.ask(say("user", "Hello to you too")) is None
    chat.assert_equals_whole()


@pytest.mark.parametrize("name", ["smollm2", "llama3", "qwen3"])
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_any_texts(name: str, data: st.DataObject) -> None:
    text = st.text(alphabet="ab \n?é漢🙂", max_size=12)
    chat = Chat(FAMILIES[name])
    for _ in range(data.draw(st.integers(1, 3))):
        roles = data.draw(st.sampled_from([("user",), ("system", "user"), ("user", "tool", "user")]))
        assert chat.ask(*(say(role, data.draw(text)) for role in roles)) is None
        chat.assert_equals_whole()
        answer = data.draw(text).strip() or "a"
        chat.answer(answer, ended=data.draw(st.booleans()))


@pytest.mark.parametrize("name", FAMILIES)
def test_the_first_turn_begins_once(name: str) -> None:
    tokenizer = FAMILIES[name].tokenizer
    chat = Chat(FAMILIES[name])
    chat.ask(say("system", "You are a helpful AI"), say("user", "Hello"))
    expected = tokenizer.apply_chat_template(
        [{"role": m.role, "content": m.content} for m in chat.messages],
        add_generation_prompt=True,
        return_dict=False,
    )
    assert chat.log.tolist() == expected
    if tokenizer.bos_token_id is not None:
        assert expected.count(tokenizer.bos_token_id) == 1


def test_only_the_new_turn_is_encoded(monkeypatch: pytest.MonkeyPatch) -> None:
    chat = Chat(FAMILIES["smollm2"])
    for _ in range(30):
        chat.ask(say("user", "What is the weather like?"))
        chat.answer("I am fine.")
    encoded: list[str] = []
    encode = ChatTemplate._encode
    monkeypatch.setattr(
        ChatTemplate, "_encode", lambda self, text: encoded.append(text) or encode(self, text)
    )
    assert chat.ask(say("user", "Hello")) is None
    assert sum(map(len, encoded)) < 200


def test_the_log_need_not_be_whole() -> None:
    chat = Chat(FAMILIES["llama3"])
    chat.ask(say("user", "Hello"))
    chat.answer("Why not?")
    chat.ask(say("user", "How are you?"))
    start = len(chat.log) - 8
    chat.answer("I am fine")
    new = [say("user", "Hello")]
    whole = chat.template.encode_turn(chat.messages, new, logged_tail=chat.log)
    tail = chat.template.encode_turn(chat.messages, new, logged_tail=chat.log[start:].tolist())
    assert whole.note is None
    assert tail.note is None
    assert tail.token_ids.tolist() == whole.token_ids.tolist()


def after_answer(of: Family, question: str) -> str:
    """What follows an answer and its end token, up to the next answer."""
    return of.tokenizer.apply_chat_template(
        [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "QQQ"},
            {"role": "user", "content": question},
        ],
        tokenize=False,
        add_generation_prompt=True,
    ).partition("QQQ")[2]


def assert_continues(chat: Chat, before: int, *, ended: bool) -> None:
    """The tokens from `before` on are what the template writes after an answer."""
    text = after_answer(chat.family, chat.messages[-1].content)
    if ended:
        text = text.partition(chat.family.end)[2]
    decoded = chat.family.tokenizer.decode(chat.log[before:].tolist(), skip_special_tokens=False)
    # Some tokenizers put a space after each special token.
    assert decoded.replace(" ", "").strip() == text.replace(" ", "").strip()


def test_thinking_is_removed_from_earlier_answers() -> None:
    chat = Chat(FAMILIES["qwen3"])
    thought = "<think>\nlet me think\n</think>\n\nWhy not?"
    tokens = chat.family.tokenizer.encode(thought, add_special_tokens=False)
    assert chat.ask(say("user", "Hello")) is None
    chat.answer(thought, tokens)
    before = len(chat.log)
    note = chat.ask(say("user", "Hello again"))
    assert note is not None
    assert "thinking" in note
    assert_continues(chat, before, ended=True)
    assert (
        chat.log[before:].tolist()
        == chat.template._encode(
            "\n<|im_start|>user\nHello again<|im_end|>\n<|im_start|>assistant\n"
        ).tolist()
    )


def test_a_system_message_that_moves_to_the_last_question() -> None:
    chat = Chat(FAMILIES["mistral"])
    assert chat.ask(say("system", "You are a helpful AI"), say("user", "Hello")) is None
    chat.answer("Why not?", chat.family.tokenizer.encode("Why not?", add_special_tokens=False))
    before = len(chat.log)
    note = chat.ask(say("user", "How are you"))
    assert note is not None
    assert "earlier messages differently" in note
    text = chat.family.tokenizer.decode(chat.log[before:].tolist())
    assert text.replace(" ", "") == "[INST]YouareahelpfulAI\n\nHowareyou[/INST]"


@pytest.mark.parametrize("name", FAMILIES)
def test_tokens_that_are_not_the_canonical_ones(name: str) -> None:
    chat = Chat(FAMILIES[name])
    chat.ask(say("user", "Hello"))
    pieces = [i for c in "thank you" for i in chat.family.tokenizer.encode(c, add_special_tokens=False)[-1:]]
    chat.answer("thank you", pieces)
    before = len(chat.log)
    note = chat.ask(say("user", "Hello again"))
    assert note is not None
    assert_continues(chat, before, ended=True)
    # What follows is encoded as ever, and a difference in an earlier turn brings no second note.
    alone = Chat(FAMILIES[name])
    alone.ask(say("user", "Hello again"))
    chat.answer("Why not?", alone.canonical("Why not?"))
    assert chat.ask(say("user", "Hello")) is None


@pytest.mark.parametrize(
    ("text", "tokens_of", "ended", "said"),
    [
        ("Hello", "Hello\nuser:", False, "not given out"),
        ("\n\nHello", "\n\nHello", True, "other tokens|white space"),
        ("the weath", ["the", " w", "e", "a", "t", "h"], False, "cut where encoding"),
        ("the weather", ["the", " w", "e", "a", "t", "h", "e", "r"], True, "not those that encoding"),
    ],
)
def test_the_reason_is_given(text: str, tokens_of: str | list[str], ended: bool, said: str) -> None:
    chat = Chat(FAMILIES["llama3"])
    chat.ask(say("user", "Hello"))
    parts = [tokens_of] if isinstance(tokens_of, str) else tokens_of
    tokens = [i for part in parts for i in chat.family.tokenizer.encode(part, add_special_tokens=False)]
    chat.answer(text, tokens, ended=ended)
    before = len(chat.log)
    note = chat.ask(say("user", "x"))
    assert note is not None
    assert any(reason in note for reason in said.split("|"))
    assert note.endswith(".")
    assert_continues(chat, before, ended=ended)


def test_an_answer_cut_inside_a_character() -> None:
    chat = Chat(FAMILIES["smollm2"])
    chat.ask(say("user", "Hello"))
    chat.answer("a\ufffd", chat.family.tokenizer.encode("a👩")[:2], ended=False)
    before = len(chat.log)
    note = chat.ask(say("user", "x"))
    assert note is not None
    assert "inside a character" in note
    assert_continues(chat, before, ended=False)


def test_an_answer_that_ends_with_another_token() -> None:
    chat = Chat(FAMILIES["smollm2"])
    chat.ask(say("user", "Hello"))
    other = chat.family.tokenizer.convert_tokens_to_ids("<|endoftext|>")
    chat.answer("Why not?", [*chat.canonical("Why not?"), other], ended=False)
    before = len(chat.log)
    assert chat.ask(say("user", "x")) is not None
    assert_continues(chat, before, ended=False)


def test_an_empty_answer() -> None:
    chat = Chat(FAMILIES["smollm2"])
    chat.ask(say("user", "Hello"))
    chat.answer("", [])
    assert chat.ask(say("user", "x")) is None
    chat.assert_equals_whole()


def test_earlier_turns_of_tokens() -> None:
    template = ChatTemplate(FAMILIES["llama3"].tokenizer)
    turn = template.encode_turn((), [say("user", "Hello")], logged_tail=[20, 30])
    assert turn.note is not None
    assert "given as tokens" in turn.note
    assert turn.token_ids.tolist() == template.encode_whole([say("user", "Hello")]).tolist()[1:]


def test_what_the_template_refuses() -> None:
    chat = Chat(FAMILIES["llama2"])
    with pytest.raises(InvalidArgumentError, match="refuses them: Conversation roles must alternate"):
        chat.ask(say("assistant", "Hello"))
    with pytest.raises(InvalidArgumentError, match="history"):
        chat.template.encode_turn([say("user", "a")], [say("user", "b")], logged_tail=[1])


PLAIN = {
    "byte_level": family(byte_level(), None, "<|im_end|>"),
    "byte_level_with_bos": family(byte_level("<|begin_of_text|>"), None, "<|im_end|>"),
    "sentence_piece": family(sentence_piece(legacy=False), None, "</s>"),
}


@pytest.mark.parametrize("name", PLAIN)
def test_plain_text_is_encoded_as_it_is(name: str) -> None:
    chat = Chat(PLAIN[name])
    assert chat.template.is_plain
    assert chat.ask(say("user", "The quick brown")) is None
    assert chat.log.tolist() == chat.family.tokenizer.encode("The quick brown")
    chat.answer(
        " fox",
        chat.template.encode_whole([say("user", "The quick brown fox")]).tolist()[len(chat.log) :],
        ended=False,
    )
    assert chat.ask(say("user", " jumps over")) is None
    chat.assert_equals_whole()
    assert chat.log.tolist() == chat.family.tokenizer.encode("The quick brown fox jumps over")


def test_plain_text_after_an_end_token_says_so() -> None:
    chat = Chat(PLAIN["sentence_piece"])
    chat.ask(say("user", "Hello"))
    chat.answer(" world", chat.family.tokenizer.encode(" world", add_special_tokens=False), ended=True)
    before = len(chat.log)
    assert chat.ask(say("user", " Hello")) is not None
    assert chat.family.tokenizer.decode(chat.log[before:].tolist()).strip() == "Hello"
    assert chat.log.tolist().count(chat.family.tokenizer.bos_token_id) == 1


def test_smollm2() -> None:
    chat = Chat(Family(smollm2(), "<|im_end|>"))
    for question, answer in (
        ("What is 12 + 30?", "12 + 30 = 42.\n\n* one\n* two"),
        ("Grüße aus 東京 👩‍👩‍👧", "Hello!\n```python\nprint(1)\n```"),
        ("  Thanks  ", "You're welcome"),
    ):
        assert chat.ask(say("user", question)) is None
        chat.assert_equals_whole()
        chat.answer(answer, ended=not question.startswith("Gr"))
    assert chat.ask(say("user", "Bye")) is None
    chat.assert_equals_whole()
