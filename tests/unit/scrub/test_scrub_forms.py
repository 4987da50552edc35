"""One secret in every form a log can give it, and in every part of a record."""

from __future__ import annotations

import base64
import json
import re
import shlex
from urllib.parse import quote

import pytest
from scrub_examples import make

from composer_replication.privacy import Scrubber

WINDOW = 8
SECRETS = {
    shape: make(shape)
    for shape in ("github classic", "openai old", "aws secret", "jwt", "unknown base64", "azure storage", "stripe live")
} | {"with signs": "Zq8&kd/93+xP=" + "1mN7vB2cX4&", "password": "Tr0ub4dor&" + "3x/9!kPq"}


def escaped(text: str) -> str:
    return text.replace("&", "\\u0026").replace("/", "\\/")


def cut(text: str, mark: str) -> str:
    return text[: len(text) // 2] + mark + text[len(text) // 2 :]


FORMS = {
    "plain": lambda s: f"API_TOKEN={s}",
    "base64": lambda s: base64.b64encode(f"API_TOKEN={s}".encode()).decode(),
    "base64 of JSON in a query": lambda s: "?state=" + base64.urlsafe_b64encode(f'{{"token":"{s}"}}'.encode()).decode(),
    "percent-encoded": lambda s: f"GET /x?token={quote(s, safe='')} 200",
    "JSON with escaped signs": lambda s: f'{{"token": "{escaped(s)}"}}',
    "JSON in JSON": lambda s: json.dumps(json.dumps({"token": s})),
    "escaped equals sign": lambda s: f"API_TOKEN\\u003d{s}",
    "single quotes": lambda s: f"export API_TOKEN='{s}'",
    "double quotes": lambda s: f'export API_TOKEN="{s}"',
    "dollar quotes": lambda s: f"export API_TOKEN=$'{s}'",
    "backslashes": lambda s: "export API_TOKEN=" + re.sub(r"([^A-Za-z0-9])", r"\\\1", s),
    "continued line": lambda s: f"tool --token {cut(s, chr(92) + chr(10))} --verbose",
    "continued assignment": lambda s: "API_TOKEN=" + cut(s, "\\\n") + "\n",
    "continued in quotes": lambda s: f'token: "{cut(s, chr(92) + chr(10) + "    ")}"',
    "continued in JSON": lambda s: f"tool --token {cut(s, chr(92) * 3 + 'n')} --verbose",
    "header": lambda s: f"curl -H 'X-Api-Key: {s}' https://api.example.org",
    "HTML attribute": lambda s: f'<x token="{s.replace("&", "&amp;")}">',
    # What prints an environment.
    "env": lambda s: f"PATH=/usr/bin\nAPI_TOKEN={s}\nSHLVL=1\n",
    "export -p": lambda s: f'declare -x PATH="/usr/bin"\ndeclare -x API_TOKEN="{s}"\ndeclare -x SHLVL="1"\n',
    "export -p of dash": lambda s: f"export PATH='/usr/bin'\nexport API_TOKEN='{s}'\nexport SHLVL='1'\n",
    "set": lambda s: f"BASH=/bin/bash\nAPI_TOKEN={shlex.quote(s)}\nIFS=$' \\t\\n'\n",
    "docker inspect": lambda s: f'"Env": [\n  "PATH=/usr/bin",\n  "API_TOKEN={s}",\n  "LANG=C"\n]',
    "docker inspect, escaped": lambda s: f'\\"Env\\": [\\"PATH=/usr/bin\\",\\"API_TOKEN={s}\\"]',
    "docker run": lambda s: f"docker run -e API_TOKEN={s} -e LANG=C app",
    "PowerShell": lambda s: f'$env:API_TOKEN = "{s}"',
    "PowerShell, no blanks": lambda s: f"$Env:API_TOKEN='{s}'",
    "Get-ChildItem Env:": lambda s: f"Name          Value\n----          -----\nAPI_TOKEN     {s}\nOS            x\n",
    "cmd.exe": lambda s: f"set API_TOKEN={s}",
    "setx": lambda s: f'setx API_TOKEN "{s}"',
    "fish": lambda s: f"set -Ux API_TOKEN {s}",
    "csh": lambda s: f"setenv API_TOKEN {s}",
    "systemd": lambda s: f'Environment="API_TOKEN={s}"',
    "Dockerfile": lambda s: f"ENV API_TOKEN {s}\nRUN make\n",
    "/proc/1/environ": lambda s: f"PATH=/usr/bin\0API_TOKEN={s}\0LANG=C",
    "Kubernetes": lambda s: f'- name: API_TOKEN\n  value: "{s}"\n',
}


def readable(text: str) -> str:
    """The text without escapes: what a reader of it sees."""
    return text.replace("\\u0026", "&").replace("&amp;", "&").replace("\\\n", "").replace("\\", "")


@pytest.mark.parametrize("form", FORMS)
def test_nothing_of_a_secret_is_left_in_any_form(form):
    left = {}
    for name, secret in SECRETS.items():
        text = FORMS[form](secret)
        scrubbed = Scrubber().scope().text(text)
        pieces = [secret[start : start + WINDOW] for start in range(len(secret) - WINDOW + 1)]
        if scrubbed == text or any(piece in scrubbed or piece in readable(scrubbed) for piece in pieces):
            left[name] = scrubbed
        assert Scrubber().scope().text(scrubbed) == scrubbed
    assert left == {}


@pytest.mark.parametrize("shape", ["github classic", "aws secret", "unknown base62", "anthropic"])
@pytest.mark.parametrize("path", ["/srv/uploads/{}.txt", "./{}/config.json", "C:\\keys\\{}", "backup-{}.tar.gz"])
def test_a_key_in_a_file_name_is_found(shape, path):
    text = path.format(make(shape).replace("/", "_"))
    assert make(shape).replace("/", "_") not in Scrubber().scope().text(text)


PHRASE = "otter-lantern-" + "4821"
RECORDS = [
    {make("github classic"): 1},
    {"files": {f"/srv/{make('aws secret')}": {"size": 3}}},
    {f"X-Api-Key: {PHRASE}": "y"},
    {f"password={PHRASE}": 2},
    {"env": {"API_TOKEN": PHRASE}},
    {"Env": [f"API_TOKEN={PHRASE}", "PATH=/usr/bin"]},
    {"env": [{"name": "API_TOKEN", "value": PHRASE}]},
    {"headers": [["X-Api-Key", PHRASE], ["Accept", "*/*"]]},
    {"args": ["tool", "--password", PHRASE]},
    {"args": ["tool", f"--token={PHRASE}"]},
    {"command": ["sshpass", "-p", PHRASE, "ssh", "host"]},
    {"command": ["/usr/bin/curl", "-u", f"ada:{PHRASE}", "https://example.org"]},
    {"pwd": PHRASE},
]


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: next(iter(record))[:12])
def test_no_part_of_a_record_keeps_a_secret(record):
    clean = Scrubber().scope().value(record)
    secrets = [PHRASE, make("github classic"), make("aws secret")]
    assert [secret for secret in secrets if secret in repr(clean)] == []
    assert Scrubber().scope().value(clean) == clean


INNOCENT = [
    {"command": ["bash", "-lc", "ls --token-file x"]},
    {"args": ["--password", "--user", "ada"]},
    {"required": ["password", "username"]},
    {"pwd": "/srv/app", "PWD": "C:\\work"},
    {"tokens": [1, 2, 3], "input_tokens": 12},
]


@pytest.mark.parametrize("record", INNOCENT, ids=lambda record: next(iter(record)))
def test_lists_that_only_name_secrets_stay(record):
    assert Scrubber().scope().value(record) is record


def test_numbers_follow_the_first_appearance_in_a_record():
    first, second = make("github classic"), make("github classic", 1)
    scope = Scrubber().scope()
    assert scope.value({"a": {first: second}, "b": [second, first]}) == {
        "a": {"<GITHUB_TOKEN_1>": "<GITHUB_TOKEN_2>"},
        "b": ["<GITHUB_TOKEN_2>", "<GITHUB_TOKEN_1>"],
    }
