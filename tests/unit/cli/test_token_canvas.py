"""Token text on a terminal: every character one can see is itself, every other one is spelled out."""

from __future__ import annotations

import pytest

from composer_replication.cli.site_page import _Canvas, _cells, _cut_to, _one_line, _PageToken, _visible

OPEN, CLOSE = "\u2039", "\u203a"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain [bold] ü 日 \U0001f99c", "plain [bold] ü 日 \U0001f99c"),
        ("a\n\n\tb", "a⏎\n⏎\n⇥b"),
        ("\x1b[2J", "{U+001B}[2J"),
        ("\r\x00\x7f\x9b", "{U+000D}{U+0000}{U+007F}{U+009B}"),
        ("\u202ea\u2066\u200b\ufeff\u2028\xa0", "{U+202E}a{U+2066}{U+200B}{U+FEFF}{U+2028}{U+00A0}"),
        ("⟦│⟫⋯⏎⇥", "{U+27E6}{U+2502}{U+27EB}{U+22EF}{U+23CE}{U+21E5}"),
        (f"{OPEN}e2{CLOSE}", "{U+2039}e2{U+203A}"),
        ("\udce2\udc98x", "{e2 98}x"),
        ("\u0301e\u0301", "{U+0301}e\u0301"),  # at the start it would sit on the mark before it
        ("\U000e0041\U000f0001\ud800", "{U+E0041}{U+F0001}{U+D800}"),
        ("", ""),
    ],
)
def test_characters_are_shown_or_spelled_out(text, shown):
    assert _visible(text) == shown.replace("{", OPEN).replace("}", CLOSE)
    assert all(each.isprintable() or each == "\n" for each in _visible(text))
    assert "\n" not in _one_line(text)


def page(tokens, *, width=24, uses_color=False, **options):
    canvas = _Canvas(width, uses_color=uses_color)
    canvas.label("part")
    canvas.tokens(tokens, **options)
    return canvas.text()


def test_lines_break_between_tokens_and_where_the_text_does():
    words = [_PageToken(word, "target") for word in ("one", " two", " three", "\n", "x\ny", "z")]
    assert page(words, draws_edges=True, marks=("⟦", "⟧")).splitlines() == [
        "  part    ⟦one│ two",
        "          │ three│⏎",
        "          │x⏎",
        "          y│z⟧",
    ]


def test_a_token_wider_than_the_terminal_stays_whole():
    assert page([_PageToken("a" * 30, "hint"), _PageToken("日" * 8, "hint"), _PageToken("b", "hint")]).splitlines() == [
        "  part    " + "a" * 30,
        "          " + "日" * 8,
        "          b",
    ]


def test_colours_take_turns_and_end_with_every_token():
    painted = page(
        [_PageToken("a", "target"), _PageToken("b", "target"), _PageToken("<s>", "context", True)], uses_color=True
    )
    assert painted == "  \x1b[1mpart\x1b[0m    \x1b[30;46ma\x1b[0m\x1b[30;106mb\x1b[0m<s>\n"


@pytest.mark.parametrize("text", ["", "short", "日" * 20, "a" * 8, "a" * 9])
def test_cells_are_filled_and_cut_to_a_width(text):
    assert _cells(_cut_to(text, 8)) == 8
    assert _cut_to(text, 8).startswith(text[:3])
