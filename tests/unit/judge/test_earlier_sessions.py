"""What earlier sessions of a project knew: only those that had ended, and only those of the same project."""

from __future__ import annotations

import pytest

from composer_replication.sites.judge import EarlierSessions, judged_calls, state_at_end
from composer_replication.types import Conversation, Provenance, ToolCall, ToolResult, Turn

WHERE = Provenance(file="log", lines=(1,))
FILES = ("src/app/a.py", "src/app/b.py", "src/app/c.py", "src/app/d.py", "setup.cfg")
MISSING = "File does not exist."


def session(identity, day, steps, root="/repo"):
    """Reads of paths below the root: (path, what came back)."""
    turns = []
    for number, (path, text) in enumerate(steps):
        call = ToolCall(id=f"{identity}{number}", name="Read", arguments={"file_path": f"{root}/{path}"})
        when = f"2026-01-{day:02}T10:00:{number:02}.000Z"
        turns.append(
            Turn(id=f"a{number}", role="assistant", origin="model", calls=(call,), provenance=WHERE, timestamp=when)
        )
        results = (ToolResult(call_id=call.id, text=text, is_error=text == MISSING or "exceeds" in text),)
        turns.append(
            Turn(id=f"r{number}", role="tool", origin="tool", results=results, provenance=WHERE, timestamp=when)
        )
    return Conversation(id=identity, format="claude_code", turns=tuple(turns), cwd=root)


def looked_at(identity="old", day=1, root="/repo", more=()):
    return session(identity, day, [*((path, "     1→x\n") for path in FILES), *more], root)


def last_verdict(later, *earlier):
    known = EarlierSessions()
    for each in (*earlier, later):
        known.add(each, state_at_end(each))
    known.sort()
    *_, last = judged_calls(later, project=known.before(later))
    return last.judgement.says, last.judgement.rule


LOST, FOUND = ("src/app/lost.py", MISSING), ("src/app/lost.py", "     1→x\n")
ASKS = session("new", 5, [LOST])


@pytest.mark.parametrize(
    ("later", "earlier", "expected"),
    [
        (ASKS, [looked_at(more=[LOST])], ("fails", "missing_in_earlier_session")),
        (ASKS, [looked_at(more=[FOUND])], ("ok", "seen_in_earlier_session")),
        (ASKS, [looked_at(more=[LOST]), looked_at("mid", 3, more=[FOUND])], ("ok", "seen_in_earlier_session")),
        (ASKS, [looked_at()], ("fails", "in_no_earlier_session")),
        (ASKS, [looked_at(more=[("README.md", "     1→see src/app/lost.py\n")])], ("unknown", "unseen")),
        (ASKS, [looked_at(day=9, more=[LOST])], ("unknown", "unseen")),
        (ASKS, [], ("unknown", "unseen")),
        (session("new", 5, [("notes.md", "     1→x\n")]), [looked_at()], ("unknown", "unseen")),
        (session("new", 5, [("src/app/a.py", "x")]), [looked_at(more=[("src/app/a.py", "it exceeds maximum allowed")])],
         ("fails", "too_large")),
        (session("new", 5, [("src/lib/a.py", "x")]), [looked_at(more=[("src/lib", MISSING)])],
         ("fails", "missing_in_earlier_session")),
        (session("new", 5, [("src/lib/z.py", "x")]),
         [looked_at(more=[("src/lib", MISSING)]), looked_at("mid", 3, more=[("src/lib/a.py", "     1→lib/z.py\n")])],
         ("unknown", "unseen")),
        (session("new", 5, [("setup.toml", "x")]), [looked_at()], ("fails", "in_no_earlier_session")),
        (session("new", 5, [("src/app/fresh/a.py", "x")]), [looked_at()], ("unknown", "unseen")),  # a new folder
        (ASKS, [looked_at(more=[LOST]), looked_at("mid", 3, more=[("README.md", "     1→src/app/lost.py\n")])],
         ("unknown", "unseen")),  # missed, and spoken of since
        (session("new", 5, [("src/app", MISSING)]), [looked_at()], ("fails", "a_folder")),
    ],
)  # fmt: skip
def test_a_session_knows_what_earlier_ones_had_shown(later, earlier, expected):
    assert last_verdict(later, *earlier) == expected


def test_a_clone_of_the_project_is_recognised_by_its_files_and_another_project_is_not():
    clone = session("new", 5, [*((path, "     1→x\n") for path in FILES[:3]), LOST], root="/clones/7")
    other = session("new", 5, [("src/web/a.js", "x"), ("src/web/b.js", "x"), ("lib/c.js", "x"), LOST], root="/clones/7")
    assert last_verdict(clone, looked_at(more=[LOST])) == ("fails", "missing_in_earlier_session")
    assert last_verdict(other, looked_at(more=[LOST])) == ("unknown", "unseen")


def test_a_text_that_an_earlier_session_saw_whole_completes_a_part_that_agrees_with_it():
    whole = "".join(f"{number:6}→{'twice()' if number in (2, 8) else f'line {number}'}\n" for number in range(1, 11))
    before = session("old", 1, [("src/app/a.py", whole), *((path, "     1→x\n") for path in FILES[1:])])

    def says(part):
        read = session("new", 5, [("src/app/a.py", part)])
        call = ToolCall(id="e", name="Edit", arguments={"file_path": "/repo/src/app/a.py", "old_string": "twice()",
                                                        "new_string": "once()"})  # fmt: skip
        edit = Turn(id="e", role="assistant", origin="model", calls=(call,), provenance=WHERE)
        part_read = ToolCall(
            id="new0", name="Read", arguments={**read.turns[0].calls[0].arguments, "offset": 2, "limit": 2}
        )
        first = Turn(id="a0", role="assistant", origin="model", calls=(part_read,), provenance=WHERE,
                     timestamp=read.turns[0].timestamp)  # fmt: skip
        later = Conversation(id="new", format="claude_code", turns=(first, read.turns[1], edit), cwd="/repo")
        return last_verdict(later, before)

    assert says("     2→twice()\n     3→line 3\n") == ("fails", "ambiguous_in_earlier_session")
    assert says("     2→twice()\n     3→another line\n") == ("ok", "found_in_part")


@pytest.mark.parametrize(
    ("path", "read_before", "rule"),
    [
        ("src/app/z.py", FILES, "not_read_since"),
        ("src/app/a.py", FILES, "read_before"),  # read, and perhaps shown again after the summary
        ("src/app/z.py", None, "read_before"),  # that part is in no log
    ],
)
def test_what_a_sessions_part_before_a_summary_has_not_read_is_unread_after_it(path, read_before, rule):
    words = "This session is being continued from a previous conversation that ran out of context."
    edit = {"file_path": f"/repo/{path}", "old_string": "x", "new_string": "y"}
    call = ToolCall(id="e", name="Edit", arguments=edit)
    when = "2026-01-05T10:00:00.000Z"
    said = Turn(id="u", role="user", origin="human", text=words, provenance=WHERE, timestamp=when)
    turn = Turn(id="e", role="assistant", origin="model", calls=(call,), provenance=WHERE, timestamp=when)
    later = Conversation(id="s#1", format="claude_code", turns=(said, turn), cwd="/repo")
    earlier = [] if read_before is None else [session("s#0", 5, [(each, "     1→x\n") for each in read_before])]
    assert last_verdict(later, *earlier)[1] == rule
