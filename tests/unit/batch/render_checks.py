"""What every rendering must satisfy, checked against the template's own rendering of every prefix."""

from __future__ import annotations

import unicodedata
from functools import cache
from pathlib import Path

from composer_replication.batch.render.dialect import ALL_OWN, insert_raw
from composer_replication.batch.render.messages import to_chat
from composer_replication.batch.render.renderer import Renderer
from composer_replication.types import Conversation, Provenance, ToolCall, ToolResult, Turn
from tokenizer_assets import load

HERE = Provenance(file="s.jsonl", lines=(1,))
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "bash",
            "description": "Runs a command.",
            "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
        },
    }
]


@cache
def renderer_of(family, *, with_tools=False, stock=False, thinking=ALL_OWN):
    """Thinking is the student's own unless said otherwise: more of it is shown then."""
    tools = TOOLS if with_tools else None
    return Renderer(load(family), tools=tools, prefer_prefix_preserving=not stock, thinking=thinking)


def talk(*steps, identity="c"):
    """(role, text or fields) pairs as a conversation; results of a tool turn are (call id, text) pairs."""
    turns = []
    for number, (role, given) in enumerate(steps):
        fields = {"text": given} if isinstance(given, str) else dict(given)
        origin = {"user": "human", "assistant": "model", "tool": "tool", "system": "meta"}[role]
        turns.append(Turn(id=f"t{number}", role=role, origin=origin, provenance=HERE, **fields))
    return Conversation(id=identity, format="test", turns=tuple(turns))


def call(name="bash", identity="c1", raw=None, **arguments):
    return ToolCall(id=identity, name=name, arguments=arguments, raw_arguments=raw)


def results(*texts):
    found = (ToolResult(call_id=f"c{number + 1}", text=text, is_error=None) for number, text in enumerate(texts))
    return {"results": tuple(found)}


def coding_session():
    """A system prompt, thinking, a call, parallel calls, text beside a call, an error, two questions."""
    return talk(
        ("system", "You fix bugs."),
        ("user", "The test fails. Please look."),
        (
            "assistant",
            {"thinking": "First I look.", "calls": (call(command="ls\n\t'x' \"y\"", depth=[1, {"a": None}]),)},
        ),
        ("tool", results("a.py\nb.py\n")),
        (
            "assistant",
            {"text": "\n\nTwo files.", "calls": (call(command="cat a.py"), call(identity="c2", command="b"))},
        ),
        ("tool", results("print(1)", "No such file: ü ≠ 🦜")),
        ("assistant", {"text": "Fixed.  \n", "thinking": "It works."}),
        ("user", "And now?"),
        ("user", "Go on."),
        ("assistant", {"calls": (call(raw='{"command": "ls'),)}),
        ("tool", results("error: not JSON")),
        ("assistant", "Done."),
    )


def decode(renderer, ids):
    return renderer.tokenizer.backend_tokenizer.decode(list(ids), skip_special_tokens=False)


def normal(text):
    return unicodedata.normalize("NFC", text)  # Qwen's tokenizers do so


def check_exact(renderer, conversation):
    """Every assistant turn once; context, header and own tokens as the template renders them. Returns the sequences."""
    sequences = renderer.render(conversation)
    spans = [span for sequence in sequences for span in sequence.spans]
    assert [span.turn_id for span in spans] == [turn.id for turn in conversation.turns if turn.role == "assistant"]
    expected = _Expected(renderer, conversation, sequences)
    for sequence in sequences:
        shown, at = "", 0
        for span in sequence.spans:
            assert at <= span.header_start <= span.start < span.end
            shown += decode(renderer, sequence.ids[at : span.start])
            expected.check_turn(sequence, span, shown)
            shown += decode(renderer, sequence.ids[span.start : span.end])
            at = span.end
        assert at == len(sequence.ids)
    return sequences


class _Expected:
    def __init__(self, renderer, conversation, sequences):
        self.renderer, dialect = renderer, renderer.dialect
        refused = bool(sequences) and "refused_by_template" in sequences[0].notes
        self.dialect = dialect = dialect.without_tools() if refused else dialect
        given = renderer.tools_for(conversation.format)
        escaped = [renderer.protected.escape_tree(tool) for tool in given]
        self.tools, as_text = (escaped, None) if dialect.tools else (None, given)
        self.chat = to_chat(conversation, dialect, renderer.protected, thinking=renderer.thinking, tools=as_text)
        self.at = {item.turn.id: index for index, item in enumerate(self.chat.items) if item.turn}
        opens = dialect.header.endswith("<think>\n")
        thinks = "<think>" in renderer.template.source
        self.empty_thought = "\n</think>\n\n" if opens else "<think>\n\n</think>\n\n" if thinks else ""

    def text(self, messages, prompt):
        rendered = self.renderer.template.render(messages, prompt=prompt, tools=self.tools)
        return normal(self.renderer.protected.unescape(insert_raw(rendered, self.chat.raw)))

    def check_turn(self, sequence, span, shown):
        messages = [item.message for item in self.chat.items]
        index = self.at[span.turn_id]
        prompt = self.text(messages[:index], True)
        whole = self.text(messages[: index + 1], False)
        shown, own = normal(shown), normal(decode(self.renderer, sequence.ids[span.start : span.end]))
        # What the model is asked with, all of it; behind it an empty thought where a model that thinks is to have none.
        has_thought = span.thinking == "target"
        quiet = "" if has_thought else self.empty_thought
        assert shown == prompt + quiet
        assert span.has_empty_thought == bool(quiet)
        header = decode(self.renderer, sequence.ids[span.header_start : span.start])
        assert header == self.dialect.header + quiet
        assert not own.startswith(("<think>\n\n</think>", "\n</think>"))
        assert own == normal(span.text)
        body, found, rest = whole.rpartition(own)
        assert found
        assert not rest.strip()
        if whole.startswith(shown):
            assert body == shown
        assert sequence.ids[span.end - 1] in {self.renderer.protected.ids[stop] for stop in self.dialect.stops}


@cache
def fixture_conversations(folder: Path):
    from composer_replication.ingestion import IngestReport, ingest

    return tuple(ingest([folder], IngestReport(), scrubber=None))
