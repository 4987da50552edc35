"""Arguments that mean the same have one key: order, defaults, nulls, numbers, paths, labels; and nothing else does."""

from __future__ import annotations

import json
import random

import pytest
from action_forms import CWD, call, key
from hypothesis import given
from hypothesis import strategies as st

from composer_replication.sites.actions.equality import ActionContext, _canonical_arguments, tool_schemas
from composer_replication.sites.actions.tools import normal_path

SEARCH = {
    "type": "object",
    "required": ["query"],
    "properties": {
        "query": {"type": "string"},
        "limit": {"type": "integer", "default": 10},
        "case": {"type": "boolean", "default": False},
        "scope": {"type": "string"},
        "after": {"type": ["string", "null"]},
        "owner": {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None},
        "root": {"type": "string", "format": "path"},
        "path": {"type": "string", "description": "The route of the endpoint"},
        "options": {"type": "object", "properties": {"deep": {"type": "boolean", "default": True}}},
    },
}
CONTEXT = ActionContext(cwd=CWD, tools={"search": SEARCH})
SAME = [
    ({"query": "a", "limit": 5}, {"limit": 5, "query": "a"}),
    ({"query": "a"}, {"query": "a", "limit": 10}),
    ({"query": "a"}, {"query": "a", "limit": 10.0, "case": False}),
    ({"query": "a", "limit": 5}, {"query": "a", "limit": 5.0}),
    ({"query": "a", "limit": 1000}, {"query": "a", "limit": 1e3}),
    ({"query": "a", "scope": None}, {"query": "a"}),
    ({"query": "a", "limit": None}, {"query": "a", "limit": 10}),
    ({"query": "a", "owner": None}, {"query": "a"}),
    ({"query": "a", "root": "src/"}, {"query": "a", "root": "/repo/./src"}),
    ({"query": "a", "options": {}}, {"query": "a", "options": {"deep": True}}),
]
DIFFERENT = [
    ({"query": "a"}, {"query": "A"}),
    ({"query": "a"}, {"query": "a "}),
    ({"query": "a"}, {"query": "a", "limit": 11}),
    ({"query": "a", "limit": 5}, {"query": "a", "limit": "5"}),
    ({"query": "a", "case": True}, {"query": "a", "case": 1}),
    ({"query": "a", "after": None}, {"query": "a"}),
    ({"query": None}, {}),
    ({"query": "a", "scope": ""}, {"query": "a"}),
    ({"query": "a", "unknown": None}, {"query": "a"}),
    ({"query": "a", "path": "/x/"}, {"query": "a", "path": "/x"}),
    ({"query": "a", "options": {"deep": False}}, {"query": "a", "options": {}}),
    ({"query": ["a", "b"]}, {"query": ["b", "a"]}),
]


@pytest.mark.parametrize(("first", "second"), SAME)
def test_arguments_that_a_schema_makes_equal(first, second):
    assert key(call("search", **first), CONTEXT) == key(call("search", **second), CONTEXT)


@pytest.mark.parametrize(("first", "second"), DIFFERENT)
def test_arguments_that_differ(first, second):
    assert key(call("search", **first), CONTEXT) != key(call("search", **second), CONTEXT)


KNOWN_SAME = [
    (call("Bash", command="ls", description="List"), call("Bash", command="ls", description="Show files")),
    (call("Bash", command="ls", timeout=120000), call("Bash", command="ls", run_in_background=False)),
    (call("Read", file_path="/repo/a.py"), call("Read", file_path="a.py", offset=None, limit=None)),
    (call("Read", file_path="a.py"), call("Read", file_path="./a.py", offset=1, limit=2000)),
    (call("Glob", pattern="*.py"), call("Glob", pattern="*.py", path="/repo")),
    (call("Grep", pattern="x", path="."), call("Grep", pattern="x", output_mode="files_with_matches")),
    (call("Edit", file_path="a", old_string="x", new_string="y"),
     call("Edit", new_string="y", old_string="x", replace_all=False, file_path="//repo//a")),
    (call("shell", command=["ls"], workdir="/repo"), call("shell", command=["ls"], justification="to see")),
    (call("read_file", target_file="src/a.py", explanation="why"), call("read_file", target_file="/repo/src/a.py")),
]  # fmt: skip
KNOWN_DIFFERENT = [
    (call("Bash", command="ls", timeout=1000), call("Bash", command="ls")),
    (call("Bash", command="ls", run_in_background=True), call("Bash", command="ls")),
    (call("Read", file_path="a.py"), call("Read", file_path="A.py")),
    (call("Read", file_path="a.py", offset=10), call("Read", file_path="a.py")),
    (call("Grep", pattern="x", path="src"), call("Grep", pattern="x")),
    (call("Grep", pattern="x", **{"-i": True}), call("Grep", pattern="x")),
    (call("Edit", file_path="a", old_string="x", new_string="y", replace_all=True),
     call("Edit", file_path="a", old_string="x", new_string="y")),
    (call("create_issue", title="t", description="a"), call("create_issue", title="t", description="b")),
    (call("http", path="/a/"), call("http", path="/a")),
    (call("Read", file_path="a.py"), call("Write", file_path="a.py")),
    (call("mcp__x__run", value=None), call("mcp__x__run")),
    (call("shell", command=["ls"], workdir="/repo/src"), call("shell", command=["ls"])),
    (call("Read", file_path="~/a"), call("Read", file_path="/repo/~/a")),
    (call("WebFetch", url="https://x.io/a/"), call("WebFetch", url="https://x.io/a")),
]  # fmt: skip


@pytest.mark.parametrize(("first", "second"), KNOWN_SAME)
def test_calls_of_known_tools_that_do_the_same(first, second):
    assert key(first) == key(second)


@pytest.mark.parametrize(("first", "second"), KNOWN_DIFFERENT)
def test_calls_of_known_tools_that_differ(first, second):
    assert key(first) != key(second)


def test_a_default_of_the_schema_goes_before_the_usual_one():
    schema = {"properties": {"command": {"type": "string"}, "timeout": {"type": "integer", "default": 5}}}
    context = ActionContext(tools={"Bash": schema})
    assert key(call("Bash", command="ls"), context) == key(call("Bash", command="ls", timeout=5), context)
    assert key(call("Bash", command="ls"), context) != key(call("Bash", command="ls", timeout=120000), context)


def test_a_tool_in_other_letters_than_the_one_offered_is_not_that_tool():
    context = ActionContext(tools={"Bash": {}})
    assert key(call("bash", command="ls -la"), context) != key(call("Bash", command="ls -la"), context)
    assert key(call("bash", command="ls -la"), context) != key(call("bash", command="ls -al"), context)


def test_schemas_are_read_from_the_lists_of_three_interfaces_and_odd_entries_are_left_out():
    tools = [
        {"type": "function", "function": {"name": "a", "parameters": {"type": "object"}}},
        {"name": "b", "input_schema": {"x": 1}},
        {"name": "c", "inputSchema": {"y": 1}},
        {"name": "d"},
        {"function": 3},
        7,
    ]
    assert tool_schemas(tools) == {"a": {"type": "object"}, "b": {"x": 1}, "c": {"y": 1}}


@pytest.mark.parametrize(
    ("path", "base", "wanted"),
    [
        ("a/./b//c/", None, "a/b/c"),
        ("../a", "/repo/src", "/repo/a"),
        ("/../a", None, "/a"),
        ("..", None, ".."),
        (".", "/repo", "/repo"),
        ("//repo//a", None, "/repo/a"),
        ("", "/repo", ""),
        ("https://x/y/", "/repo", "https://x/y/"),
        ("src\\a.py", "C:\\repo", "C:/repo/src/a.py"),
        ("c:/repo/./a", None, "C:/repo/a"),
    ],
)
def test_paths_have_one_spelling(path, base, wanted):
    assert normal_path(path, base) == wanted


values = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**6), 10**6) | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


def shuffled(value, random):
    if isinstance(value, dict):
        items = [(name, shuffled(each, random)) for name, each in value.items()]
        random.shuffle(items)
        return dict(items)
    return [shuffled(each, random) for each in value] if isinstance(value, list) else value


@given(st.dictionaries(st.text(max_size=5), values, max_size=4), st.integers())
def test_the_order_of_keys_does_not_matter_at_any_depth(arguments, seed):
    other = shuffled(arguments, random.Random(seed))
    assert key(call("any", **arguments)) == key(call("any", **other))


@given(st.dictionaries(st.text(max_size=5), values, max_size=4), st.text(max_size=5), values, values)
def test_two_values_share_a_key_only_if_they_are_the_same_json(arguments, name, first, second):
    keys = {key(call("any", **{**arguments, name: each})) for each in (first, second)}
    assert len(keys) == len({json.dumps(each, sort_keys=True) for each in (first, second)})


@given(values)
def test_canonical_arguments_are_their_own_canonical_form(value):
    once = _canonical_arguments("search", {"query": value}, SEARCH, CWD)
    assert _canonical_arguments("search", once, SEARCH, CWD) == once
