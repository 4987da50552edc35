"""Text that looks like a special token never becomes one, wherever in a conversation it stands."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from render_checks import call, check_exact, decode, normal, renderer_of, results, talk
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from composer_replication.batch.render.dialect import ProtectedTokens, insert_raw, raw_marker
from composer_replication.batch.render.renderer import Renderer, _PieceEncoder
from composer_replication.types import ToolCall
from tokenizer_assets import FAMILIES, load

SENTINELS = "\U000f0000\U000f0001\U000f0002\U00100000\U0010fffd"


def session(planted):
    """`planted` in every field a log can fill."""
    arguments = {planted: [planted, {"deep": planted}]}
    return talk(
        ("system", f"Rules {planted}"),
        ("user", f"{planted} please"),
        (
            "assistant",
            {
                "text": f"I say {planted}",
                "thinking": f"I think {planted}",
                "calls": (call(f"tool{planted}", **arguments), call(identity="c2", raw=f"{planted}{{")),
            },
        ),
        ("tool", results(f"{planted} came back", planted)),
        ("assistant", f"{planted}"),
        ("user", planted),
        ("assistant", {"text": "x", "calls": (call(f"t{planted}", identity=f"c1{planted}", a=planted),)}),
    )


def structure(renderer, conversation):
    """The special tokens of a rendering, in order, for each sequence, and those of each turn."""
    protected = set(renderer.protected.ids.values())
    sequences = renderer.render(conversation)
    return [
        (
            [index for index in sequence.ids if index in protected],
            [[index for index in sequence.ids[span.start : span.end] if index in protected] for span in sequence.spans],
        )
        for sequence in sequences
    ]


@pytest.mark.parametrize("family", FAMILIES)
def test_planted_special_tokens_change_no_token_of_the_structure(family):
    renderer = renderer_of(family)
    harmless = structure(renderer, session("word"))
    assert harmless
    for planted in renderer.protected.ids:
        assert structure(renderer, session(planted)) == harmless
    everything = "".join(renderer.protected.ids)
    assert structure(renderer, session(everything)) == harmless
    check_exact(renderer, session(everything))


@pytest.mark.parametrize("family", FAMILIES)
def test_planted_special_tokens_are_still_there_as_text(family):
    renderer = renderer_of(family)
    end = renderer.dialect.stops[0]
    (sequence,) = renderer.render(talk(("user", f"What is {end}?"), ("assistant", f"{end} ends a turn.")))
    (span,) = sequence.spans
    assert f"What is {end}?" in decode(renderer, sequence.ids)
    assert decode(renderer, sequence.ids[span.start : span.end]).endswith(f"{end} ends a turn.{end}")
    assert sequence.ids.count(renderer.protected.ids[end]) == _ends_of_the_template(renderer, end)


def _ends_of_the_template(renderer, end):
    (sequence,) = renderer.render(talk(("user", "What is it?"), ("assistant", "It ends a turn.")))
    return sequence.ids.count(renderer.protected.ids[end])


@pytest.mark.parametrize("family", FAMILIES)
def test_planted_special_tokens_in_schemas_and_hints_of_tools(family):
    tokenizer = load(family)
    plain = Renderer(tokenizer)

    def schema(text):
        parameters = {"type": "object", "properties": {text: {"type": "string", "description": text}}}
        return {"type": "function", "function": {"name": f"t{text}", "description": text, "parameters": parameters}}

    talked = talk(("user", "A"), ("assistant", "B"))
    harmless = structure(Renderer(tokenizer, tools=[schema("word")]), talked)
    planted = "".join(plain.protected.ids)
    assert structure(Renderer(tokenizer, tools=[schema(planted)]), talked) == harmless


@pytest.mark.parametrize("family", FAMILIES)
def test_text_that_holds_our_own_sentinels_comes_through_unchanged(family):
    renderer = renderer_of(family)
    text = f"a{SENTINELS}b{renderer.dialect.stops[0]}{SENTINELS}"
    (sequence,) = renderer.render(talk(("user", text), ("assistant", text)))
    (span,) = sequence.spans
    assert decode(renderer, sequence.ids[span.start : span.end]).endswith(text + renderer.dialect.stops[0])
    assert text in decode(renderer, sequence.ids[: span.start])
    assert structure(renderer, session(text)) == structure(renderer, session("word"))


def test_a_lone_surrogate_becomes_the_replacement_character_and_a_pair_one_character():
    renderer = renderer_of("llama3")
    (sequence,) = renderer.render(talk(("user", "A"), ("assistant", "x\ud83d y\ud83e\udd9c")))
    assert sequence.spans[0].text == "x� y🦜<|eot_id|>"


def test_only_tokens_that_a_template_writes_are_protected():
    """HTML tags and newlines are ordinary text to Gemma, in inference too."""
    renderer = renderer_of("gemma")
    assert set(renderer.protected.ids) == {"<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"}
    (sequence,) = renderer.render(talk(("user", "A"), ("assistant", "<table>\n\n<b>")))
    tags = [renderer.tokenizer.convert_tokens_to_ids(each) for each in ("<table>", "\n\n", "<b>")]
    assert sequence.ids[sequence.spans[0].start : -1] == tags


def test_a_look_alike_that_the_tokenizer_would_normalise_is_no_token_either():
    tokenizer = Tokenizer(models.BPE({"<": 0, "K": 1, ">": 2, "?": 3}, [], unk_token="?"))
    tokenizer.normalizer = normalizers.NFC()  # turns the Kelvin sign into a K
    tokenizer.add_tokens([AddedToken("<K>", special=False, normalized=True)])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    look_alike = "<\u212a>"
    assert fast(look_alike)["input_ids"] == [4]
    protected = ProtectedTokens(fast, "<K>")
    assert _PieceEncoder(fast, protected).encode([protected.escape(look_alike)]) == [[0, 1, 2]]


parts_of_text = st.sampled_from([*"ab \n<|>", *SENTINELS, "é", "\u212a", "<|eot_id|>", "<|eot", "_id|>", "word"])


@given(st.lists(parts_of_text).map("".join))
def test_escaping_can_be_undone_and_leaves_no_special_token(text):
    protected = renderer_of("llama3").protected
    escaped = protected.escape(text)
    assert protected.unescape(escaped) == text
    assert not protected.pattern.search(escaped)


@given(st.lists(parts_of_text, min_size=1))
def test_the_encoder_is_exact_and_knows_which_token_holds_a_character(parts):
    renderer = renderer_of("llama3")
    # A template's own tokens stand between texts of the log.
    escaped_parts = [renderer.protected.escape(part) for part in parts]
    escaped = "<|eot_id|>".join(escaped_parts)
    (ids,) = renderer.encoder.encode([escaped])
    assert decode(renderer, ids) == renderer.protected.unescape(escaped)
    assert ids.count(renderer.protected.ids["<|eot_id|>"]) == len(parts) - 1
    for number in range(len(parts)):
        position = len("<|eot_id|>".join([*escaped_parts[:number], ""]))
        index = renderer.encoder.token_at(escaped, position)
        before, after = (len(decode(renderer, ids[:end])) for end in (index, index + 1))
        assert before <= len(renderer.protected.unescape(escaped[:position])) < after
    assert renderer.encoder.token_at(escaped, len(escaped)) == len(ids)


def test_raw_text_replaces_its_marker_and_the_quotes_around_it():
    quoted = f'{{"a": "{raw_marker(0)}", "b": {raw_marker(1)}}}'
    assert insert_raw(quoted, ["{x", '"y']) == '{"a": {x, "b": "y}'


def test_an_encoder_that_treats_the_start_of_a_text_in_its_own_way_gets_a_token_before_it():
    vocabulary = {token: index for index, token in enumerate(["<unk>", "▁", "a", "b", "▁a", "<s>"])}
    tokenizer = Tokenizer(models.BPE(vocabulary, [("▁", "a")], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="first")
    tokenizer.add_special_tokens([AddedToken("<s>", special=True, normalized=False)])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>")
    encoder = _PieceEncoder(fast, ProtectedTokens(fast, "<s>"))
    assert encoder.encode(["ab", "<s>a", " a"]) == [[2, 3], [5, 2], [4]]
    assert fast("<s>ab", add_special_tokens=False)["input_ids"] == [5, 2, 3]


@pytest.mark.parametrize("family", FAMILIES)
def test_content_is_never_changed(family):
    text = normal("Ünïcode \t\ttabs\n\n\nlines \u200b zero 'quotes' \"double\" \\ back {brace}")
    renderer = renderer_of(family)
    (sequence,) = renderer.render(talk(("user", text), ("assistant", text)))
    assert text in sequence.spans[0].text
    assert text in decode(renderer, sequence.ids[: sequence.spans[0].start])


FUNCTIONS = """{%- for tool in tools or [] %}{{- '<|start_header_id|>system<|end_header_id|>' }}
{%- for key in tool.function %}{{- '<' + key + '>' }}{%- endfor %}{{- '<|eot_id|>' }}{%- endfor %}
{%- for m in messages %}{{- '<|start_header_id|>' + m.role + '<|end_header_id|>' + m.content }}
{%- for call in m.tool_calls or [] %}{{- '<function=' + call.function.name + '>' }}
{%- for key, value in call.function.arguments|items %}{{- '<parameter=' + key + '>' + value|string + '</' + key + '>' }}
{%- endfor %}{%- endfor %}{{- '<|eot_id|>' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>' }}{%- endif %}"""
HALVES = ["x<|eot_id|", "<|eot_id|", "|eot_id|", "eot_id|", "<|start_header_id|", "<|begin_of_text|", "<"]


@pytest.mark.parametrize("half", HALVES)
def test_half_a_token_is_not_completed_by_what_the_template_writes_around_it(half):
    tokenizer = load("llama3")
    schema = {"type": "function", "function": {"name": "f", "parameters": {}, half: "x"}}

    def specials(name, key, tools):
        renderer = Renderer(tokenizer, chat_template=FUNCTIONS, tools=tools)
        calling = ToolCall(id="c1", name=name, arguments={key: "v"})
        session = talk(
            ("user", "hi"), ("assistant", {"calls": (calling,)}), ("tool", results("ok")), ("assistant", ".")
        )
        rendered = renderer.render(session)[-1]
        span = rendered.spans[0]
        found = [index for index in rendered.ids if index in renderer.encoder.protected_ids]
        assert tokenizer.decode(rendered.ids[span.start : span.end]) == span.text
        return found

    harmless = specials("name", "key", None)
    assert specials(half, "key", None) == harmless
    assert specials("name", half, None) == harmless
    with_tools = [{"type": "function", "function": {"name": "f", "parameters": {}, "key": "x"}}]
    assert specials("name", "key", [schema]) == specials("name", "key", with_tools)


@pytest.mark.parametrize("options", [{}, {"rstrip": True}, {"lstrip": True}, {"rstrip": True, "lstrip": True}])
def test_special_tokens_that_swallow_blanks_do_so_as_in_the_tokenizer(options):
    template = (
        "{%- for m in messages %}{{- '<|' + m.role + '|>\\n' + m.content + '<|end|>\\n' }}{%- endfor %}"
        "{%- if add_generation_prompt %}{{- '<|assistant|>\\n' }}{%- endif %}"
    )
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(["hello there my friend\nyes\n\n"] * 3, trainer)
    names = ("<|user|>", "<|assistant|>", "<|end|>", "<|system|>")
    backend.add_special_tokens([AddedToken(name, special=True, **options) for name in names])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>", chat_template=template)
    chat = talk(("user", "hello  "), ("assistant", "yes"), ("user", " my"), ("assistant", "friend"))
    (rendered,) = Renderer(tokenizer).render(chat)
    messages = [{"role": turn.role, "content": turn.text} for turn in chat.turns]
    own = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False)
    assert rendered.ids == own[: len(rendered.ids)]
    assert tokenizer.decode(own[len(rendered.ids) :]).strip() == ""


def test_a_tokenizer_that_lowers_text_forges_no_token():
    backend = Tokenizer.from_str(load("llama3").backend_tokenizer.to_str())
    backend.normalizer = normalizers.Lowercase()
    backend.add_special_tokens([AddedToken("<|stop|>", special=True, normalized=True)])
    lowering = PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=load("llama3").chat_template)
    lowering.add_special_tokens({"eos_token": "<|eot_id|>"})
    renderer = Renderer(lowering)
    (rendered,) = renderer.render(talk(("user", "say <|STOP|> now"), ("assistant", "ok")))
    assert lowering.convert_tokens_to_ids("<|stop|>") not in rendered.ids
