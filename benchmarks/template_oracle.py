"""Render messages with a student's chat template, independently of the package; the oracle for training targets.

It uses `apply_chat_template`, offsets and the design pages, and nothing from `batch/`, so that it does not repeat its
mistakes. Texts are bytes in which every control token that the template writes is enclosed in two MARKs. The same
string in the text of a log has no MARKs, and its tokens must have none either.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jinja2.exceptions import TemplateError

from composer_replication.types import Conversation, Message, ToolCall, Turn

MARK = b"\xff"
"""A byte that does not occur in UTF-8."""
Q: Message = {"role": "user", "content": "Qqq"}
_SAID, _NAME, _VALUE, _BACK, _THOUGHT, _RULES = "Sss", "nnn_tool", "vvv", "Bbb", "Ttt", "Rrr"


class Manners(NamedTuple):
    """The kinds of messages that a template supports; others must be written as text or with another role."""

    tools: bool
    calls: bool
    parallel: bool
    string_arguments: bool
    results: bool
    system_first: bool
    system_later: bool
    users_in_a_row: bool
    assistants_in_a_row: bool
    assistant_first: bool
    thinking: bool

    def as_text(self) -> Manners:
        """Return a copy with calls and results as text, which every template supports."""
        return self._replace(tools=False, calls=False, results=False)


class Student:
    """A tokenizer with its template: renders messages as marked bytes, and returns the bytes of tokens."""

    def __init__(
        self,
        tokenizer: Any,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> None:
        self.tokenizer, self.variables = tokenizer, dict(variables or {})
        self.tools: Sequence[Mapping[str, Any]] = list(tools or ())
        self.manners = self._manners()
        self.shows_results_late = self._shows_results_late()
        """Whether the template shows results only with the turn after them, so that it has no prompt for that turn."""
        self.controls = self._controls()
        self._control_bytes = re.compile(b"|".join(re.escape(control.encode()) for control in self.controls) or b"(?!)")
        self.bytes_of = self._token_bytes()
        prompt, said = self.text([Q], prompt=True), self.text([Q, _assistant(_SAID)])
        own = said[len(prompt) :].partition(_SAID)[0] if said.startswith(prompt) else ""
        self.own_block = self.marked(own)
        """The empty block that the template puts before a turn without thinking; it is never a target."""
        before = self.text([Q])
        self.header = self.marked(prompt[len(before) :] if prompt.startswith(before) else "")
        opened = re.escape(self.header) + b"(?:" + re.escape(self.own_block) + b")?\n*"
        self._own_blocks = re.compile(opened) if self.header and self.own_block else None

    def text(self, messages: Sequence[Message], *, prompt: bool = False, with_tools: bool = False) -> str:
        """Return the template's output as text."""
        tools = self.tools if with_tools and self.tools and self.manners.tools else None
        return self._made(messages, tools, prompt)

    def _made(self, messages: Sequence[Message], tools: Any, prompt: bool) -> str:
        """Render a batch of one conversation, which may have no messages."""
        options = {"tools": tools, "tokenize": False, "add_generation_prompt": prompt, **self.variables}
        return str(self.tokenizer.apply_chat_template([list(messages)], **options)[0])

    def marked(self, text: str, shield: Shield | None = None) -> bytes:
        """Return bytes with MARKs around the template's control tokens; shielded strings are restored without MARKs."""
        found = self._control_bytes.sub(lambda hit: MARK + hit[0] + MARK, text.encode("utf-8", "surrogatepass"))
        return found if shield is None else shield.restored(found)

    def without_own_blocks(self, marked: bytes) -> bytes:
        """Return the bytes without the empty blocks that a template writes only in some turns.

        A training template may keep them in the history where the original does not (formats.md 5.3, point 6).
        """
        return marked if self._own_blocks is None else self._own_blocks.sub(self._header_alone, marked)

    def ends_alike(self, context: bytes, has_own_block: bool) -> bool:
        """Return whether the context ends with an empty block exactly if the template puts one before the target."""
        return not self.own_block or context.endswith(self.own_block) == has_own_block

    def _header_alone(self, _: re.Match[bytes]) -> bytes:
        return self.header

    def _shows(self, *messages: Message, words: Sequence[str], tools: Any = None, prompt: bool = False) -> bool:
        try:
            made = self._made(messages, tools, prompt)
        except (TemplateError, TypeError, ValueError, KeyError, IndexError):
            return False
        return all(word in made for word in words)

    def _manners(self) -> Manners:
        call, text_call = _calling({"key": _VALUE}), _calling(_VALUE)
        schema = {"type": "function", "function": {"name": _NAME, "description": "", "parameters": {}}}
        rules: Message = {"role": "system", "content": _RULES}
        two = {**call, "tool_calls": [*call["tool_calls"], _calling({"key": "www"})["tool_calls"][0]]}
        back: Message = {"role": "tool", "tool_call_id": "call_0", "name": _NAME, "content": _BACK}
        thoughtful = {**_assistant(_SAID), "reasoning_content": _THOUGHT}
        return Manners(
            tools=self._shows(Q, words=[_NAME], tools=[schema]),
            calls=self._shows(Q, call, words=[_NAME, _VALUE]),
            parallel=self._shows(Q, two, words=[_VALUE, "www"]),
            string_arguments=self._shows(Q, text_call, words=[_NAME, _VALUE]),
            results=self._shows(Q, call, back, _assistant(_SAID), words=[_NAME, _BACK, _SAID]),
            system_first=self._shows(rules, Q, words=[_RULES]),
            system_later=self._shows(Q, _assistant(_SAID), rules, Q, words=[_RULES]),
            users_in_a_row=self._shows(Q, {"role": "user", "content": _BACK}, _assistant(_SAID), words=[_BACK, _SAID]),
            assistants_in_a_row=self._shows(Q, _assistant(_SAID), _assistant(_BACK), words=[_SAID, _BACK]),
            assistant_first=self._shows(_assistant(_SAID), words=[_SAID])
            and self._shows(words=[], prompt=True)
            and self._shows(rules, _assistant(_SAID), words=[_SAID]),
            thinking=self._shows(Q, thoughtful, words=[_THOUGHT, _SAID]),
        )

    def _shows_results_late(self) -> bool:
        back: Message = {"role": "tool", "tool_call_id": "call_0", "name": _NAME, "content": _BACK}
        shown = self._shows(Q, _calling({"key": _VALUE}), back, words=[_BACK], prompt=True)
        return self.manners.results and not shown

    def _controls(self) -> list[str]:
        """Return the added tokens that are special or written by the template; others, such as HTML tags, are text."""
        written = ""
        call = _calling({"key": _VALUE})
        back: Message = {"role": "tool", "tool_call_id": "call_0", "name": _NAME, "content": _BACK}
        thoughtful = {**_assistant(_SAID), "reasoning_content": _THOUGHT}
        for messages in ([Q, _assistant(_SAID)], [Q, thoughtful], [Q, call], [Q, call, back, _assistant(_SAID)]):
            if self._shows(*messages, words=[]):
                written += self.text(messages) + self.text(messages, prompt=True)
        added = self.tokenizer.added_tokens_decoder.values()
        found = {each.content for each in added if each.special or (each.content.strip() and each.content in written)}
        return sorted(found, key=len, reverse=True)

    def _token_bytes(self) -> list[bytes]:
        """Return the bytes of each token id of a byte-level vocabulary, such as those of Qwen, Llama 3 and SmolLM2."""
        alphabet = _byte_alphabet()
        vocabulary = self.tokenizer.get_vocab()
        added, controls = self.tokenizer.get_added_vocab(), set(self.controls)
        table = [b""] * (max(vocabulary.values()) + 1)
        for token, number in vocabulary.items():
            if token in added:
                table[number] = self.marked(token) if token in controls else token.encode()
            else:
                table[number] = bytes(alphabet[each] for each in token)
        probe = "a b\n\ncé 漢\t{}"
        ids = self.tokenizer.encode(probe, add_special_tokens=False)
        if b"".join(table[token_id] for token_id in ids) != probe.encode():
            raise ValueError(f"{self.tokenizer.name_or_path}: not a byte-level vocabulary, which this check reads")
        return table


class Shield:
    """Replaces control strings in a conversation's text before rendering, and restores them in the output."""

    def __init__(self, student: Student, texts: Sequence[str]) -> None:
        found = {each for each in "".join(texts) if ord(each) >= 0xF0000}
        places = (chr(code) for code in range(0xF0000, 0x10FFFE))
        free = (place for place in places if place not in found)
        hidden = {
            **dict.fromkeys(student.controls, ""),
            "</think>": "",
            "<think>": "",
        }  # templates search for these two
        self._of = {control: next(free) for control in hidden}
        self._back = {sign.encode(): control.encode() for control, sign in self._of.items()}
        self._pattern = re.compile("|".join(map(re.escape, sorted(self._of, key=len, reverse=True))))
        self._signs = re.compile(b"|".join(map(re.escape, self._back)))
        self._free, self._raw = free, dict[bytes, bytes]()

    def hide(self, value: Any) -> Any:
        """Return a text, list or mapping with its control strings replaced."""
        if isinstance(value, str):
            return self._pattern.sub(lambda hit: self._of[hit[0]], value)
        if isinstance(value, Mapping):
            return {self.hide(key): self.hide(each) for key, each in value.items()}
        return [self.hide(each) for each in value] if isinstance(value, list | tuple) else value

    def raw(self, text: str) -> str:
        """Return a placeholder for arguments that are not JSON and must not be quoted."""
        sign = next(self._free)
        self._raw[sign.encode()] = text.encode("utf-8", "surrogatepass")
        return sign

    def restored(self, marked: bytes) -> bytes:
        for sign, text in self._raw.items():
            marked = marked.replace(b'"' + sign + b'"', text).replace(sign, text)
        return self._signs.sub(lambda hit: self._back[hit[0]], marked)


def texts_of(conversation: Conversation) -> list[str]:
    """Return all texts of a conversation."""
    found: list[str] = []
    for turn in conversation.turns:
        found += [turn.text, turn.thinking, *(result.text for result in turn.results)]
        for call in turn.calls:
            found += [
                call.name,
                call.id,
                json.dumps(dict(call.arguments), ensure_ascii=False),
                call.raw_arguments or "",
            ]
    return found


def _assistant(text: str) -> Message:
    return {"role": "assistant", "content": text}


def _calling(arguments: object) -> dict[str, Any]:
    call = {"id": "call_0", "type": "function", "function": {"name": _NAME, "arguments": arguments}}
    return {**_assistant(""), "tool_calls": [call]}


def _byte_alphabet() -> dict[str, int]:
    """Return the byte of each letter of a byte-level vocabulary; unprintable bytes have letters from 256 on."""
    printed = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [each for each in range(256) if each not in set(printed)]
    return {chr(each): each for each in printed} | {chr(256 + n): each for n, each in enumerate(rest)}


def call_fields(call: ToolCall, shield: Shield, *, takes_strings: bool) -> dict[str, Any]:
    """Return a call in the form that templates expect."""
    arguments: Any = shield.hide(dict(call.arguments))
    if call.raw_arguments is not None:
        hidden = shield.hide(call.raw_arguments)
        arguments = shield.raw(call.raw_arguments) if takes_strings else {"raw_arguments": hidden}
    function = {"name": shield.hide(call.name), "arguments": arguments}
    return {"id": shield.hide(call.id), "type": "function", "function": function}


def is_own(turn: Turn, student_names: Sequence[str]) -> bool:
    """Return whether the student wrote the turn."""
    return turn.model is not None and turn.model in student_names
