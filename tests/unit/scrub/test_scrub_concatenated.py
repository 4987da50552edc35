"""Values that source code puts together from string literals, or that YAML folds: at every column nothing stays."""

from __future__ import annotations

import json
import os

import pytest
from scrub_examples import make

from composer_replication.privacy import Scrubber

PASSWORD = "Kestrel-14-" + "marble-Otter"
# What stands in the literal, and the name of the variable; in the literal `{}` is where the secret is.
KINDS = {
    "github": ("gh", "{}", make("github classic")),
    "anthropic": ("client_key", "{}", make("anthropic")),
    "aws secret": ("aws_secret_access_key", "{}", make("aws secret")),
    "aws id": ("key_id", "{}", make("aws id")),
    "jwt": ("session", "Bearer {}", make("jwt")),
    "password": ("db_password", "{}", PASSWORD),
    "signs": ("password", "{}", "s*gq!Kestrel" + ".14Zmarble"),
    "words": ("admin_password", "{}", "marble-otter-" + "4821-kestrel"),
    "random": ("api_token", "{}", "aB3dE5fG7hI9" + "kLmN0pQr"),
    "hex": ("secret_key", "{}", "9631ac63045cfabddacc69fc06e919b4" + "c13eb9139631ac63045cfabddacc69fc"),
    "address": ("dsn", "postgres://app:{}@db.example.org:5432/shop", PASSWORD),
    "known": ("label", "{}", "giMmDS8UXgCo" + "-ipkPfUCqND2R"),
}
# name, first and second half; the halves stand in literals.
FORMS = {
    "python plus": '{0} = "{1}" + "{2}"\nx = 1',
    "python implicit": '{0} = (\n    "{1}"\n    "{2}"\n)\n',
    "python implicit in a call": 'connect(\n    {0}="{1}"\n    "{2}",\n    port=5432,\n)\n',
    "python plus over lines": "{0} = ('{1}' +\n       '{2}')\n",
    "python plus first": "{0} = ('{1}'\n       + '{2}')\n",
    "python prefixes": '{0} = f"{1}" rf"{2}"\n',
    "python comment": '{0} = (\n    "{1}"  # the first half\n    # and the second\n    "{2}"\n)\n',
    "python backslash": '{0} = "{1}" \\\n    "{2}"\n',
    "python augmented": '{0} = "{1}"\n{0} += "{2}"\n',
    "python join": "{0} = ''.join(['{1}', '{2}'])\n",
    "dict": 'settings = {{\n    "{0}": "{1}"\n    "{2}",\n    "port": 1,\n}}\n',
    "javascript": "const {0} = '{1}' +\n  '{2}';\n",
    "javascript comment": "const {0} = '{1}' + // rotate me\n  '{2}';\n",
    "javascript field": "module.exports = {{\n  {0}: '{1}' + '{2}',\n  port: 3000,\n}};\n",
    "javascript template": "const {0} = `{1}` + `{2}`;\n",
    "javascript template parts": "const {0} = `${{'{1}'}}${{'{2}'}}`;\n",
    "javascript continuation": 'const {0} = "{1}\\\n{2}";\n',
    "javascript join": 'const {0} = ["{1}", "{2}"].join("");\n',
    "javascript concat": 'const {0} = "{1}".concat("{2}");\n',
    "java": '    private static final String {0} = "{1}"\n            + "{2}";\n',
    "java builder": 'String {0} = new StringBuilder().append("{1}").append("{2}").toString();\n',
    "go": '\t{0} := "{1}" +\n\t\t"{2}"\n',
    "go raw": "var {0} = `{1}` + `{2}`\n",
    "c#": '    string {0} = @"{1}" + @"{2}";\n',
    "c": 'static const char *{0} = "{1}"\n                         "{2}";\n',
    "c define": '#define {0} "{1}" \\\n    "{2}"\n',
    "c comment": 'char {0}[] = "{1}" /* part 1 */ "{2}"; /* end */\n',
    "rust": '    let {0}: String = "{1}".to_owned() + "{2}";\n',
    "rust concat": 'const {0}: &str = concat!("{1}", "{2}");\n',
    "rust continuation": 'let {0} = "{1}\\\n          {2}";\n',
    "kotlin": 'val {0}: String = "{1}" +\n    "{2}"\n',
    "swift": 'let {0}: String = "{1}" + "{2}"\n',
    "php": "${0} = '{1}' . '{2}';\n",
    "php over lines": "${0} = '{1}'\n    . '{2}';\n",
    "php array": "return [\n    '{0}' => '{1}' .\n        '{2}',\n];\n",
    "php augmented": "${0} = '{1}';\n${0} .= '{2}';\n",
    "lua": 'local {0} = "{1}" .. "{2}"\n',
    "lua over lines": 'local {0} = "{1}"\n  .. "{2}"\n',
    "lua skip": 'local {0} = "{1}\\z\n             {2}"\n',
    "perl": 'my ${0} = "{1}" . "{2}";\n',
    "ruby": "{0} = '{1}' \\\n  '{2}'\n",
    "ruby append": "{0} = '{1}' << '{2}'\n",
    "vb": 'Dim {0} As String = "{1}" & _\n    "{2}"\n',
    "vba": '{0} = "{1}" & "{2}"\n',
    "powershell": "${0} = '{1}' + `\n  '{2}'\n",
    "shell": "{0}='{1}''{2}'\nexport {0}\n",
    "shell continuation": 'export {0}="{1}"\\\n"{2}"\n',
    "sql": "SET {0} = '{1}' || '{2}';\n",
    "elixir": '{0} = "{1}" <> "{2}"\n',
    "haskell": '{0} = "{1}" ++ "{2}"\n',
    "terraform": '{0} = join("", ["{1}", "{2}"])\n',
    "r": '{0} <- paste0("{1}", "{2}")\n',
    "in a diff": '+    {0} = ("{1}"\n+        "{2}")\n',
    "numbered": '     7→    {0} = (\n     8→        "{1}"\n     9→        "{2}"\n    10→    )\n',
    "in json": '{{"content": "{0} = \\"{1}\\" + \\"{2}\\"\\n"}}',
    "in json over lines": '{{"content": "{0} = (\\"{1}\\"\\n    \\"{2}\\")\\n"}}',
    "yaml folded": "db:\n  {0}: >-\n    {1}\n    {2}\n  host: db\n",
    "yaml literal": "db:\n  {0}: |\n    {1}\n    {2}\n  host: db\n",
    "yaml plain": "db:\n  {0}: {1}\n    {2}\n  host: db\n",
    "yaml below": "db:\n  {0}:\n    {1}\n    {2}\n  host: db\n",
    "yaml double": 'db:\n  {0}: "{1}\n    {2}"\n  host: db\n',
    "yaml escaped": 'db:\n  {0}: "{1}\\\n    {2}"\n  host: db\n',
    "yaml single": "db:\n  {0}: '{1}\n    {2}'\n  host: db\n",
    "yaml list": "env:\n  - name: {0}\n    value: >-\n      {1}\n      {2}\n",
}
THREE = ("python plus", "python implicit", "java", "go", "php", "lua", "c", "vb")


STEP = 1 if os.environ.get("CRF_TEST_PROFILE") == "full" else 9  # all columns over all forms, where not in each


def left_over(form, kind, first=0, way=str):
    """The columns at which something of ten characters of a secret stays."""
    name, literal, secret = KINDS[kind]
    scrubber = Scrubber(env_values={"X_TOKEN": secret} if kind == "known" else {})
    begin, end = literal.split("{}")
    return [
        column
        for column in range(1 + first % STEP, len(secret), STEP)
        for text in [FORMS[form].format(name, begin + secret[:column], secret[column:] + end)]
        for clean in [scrubber.scope().text(way(text))]
        if any(secret[at : at + 10] in clean for at in range(len(secret) - 9))
    ]


@pytest.mark.parametrize("form", FORMS)
def test_nothing_of_ten_characters_stays_wherever_a_literal_ends(form):
    first = list(FORMS).index(form)
    assert {kind: left for kind in KINDS if (left := left_over(form, kind, first))} == {}


@pytest.mark.parametrize("form", THREE)
def test_nothing_stays_of_a_value_in_three_literals(form):
    """The second half once more cut in two, in the same way."""
    before, between, after = FORMS[form].replace("{0}", "{{0}}").replace("{1}", "\0").replace("{2}", "\0").split("\0")
    left = {}
    for kind, (name, literal, secret) in KINDS.items():
        scrubber = Scrubber(env_values={"X_TOKEN": secret} if kind == "known" else {})
        begin, end = literal.split("{}")
        for column in range(1, len(secret) - 1, 2 * STEP):
            other = column + 1 + (len(secret) - column - 1) // 2
            parts = (begin + secret[:column], secret[column:other], secret[other:] + end)
            text = (before + parts[0] + between + parts[1] + between + parts[2] + after).replace("{{", "{")
            clean = scrubber.scope().text(text.replace("}}", "}").replace("{0}", name))
            if any(secret[at : at + 10] in clean for at in range(len(secret) - 9)):
                left.setdefault(kind, []).append((column, other))
    assert left == {}


WRITTEN = {
    "carriage returns": lambda text: text.replace("\n", "\r\n"),
    "a diff": lambda text: "".join(f"+{line}\n" for line in text.splitlines()),
    "numbers": lambda text: "".join(f"{at:6}→{line}\n" for at, line in enumerate(text.splitlines(), 7)),
    "tabs and numbers": lambda text: "".join(f"{at:6}\t{line}\n" for at, line in enumerate(text.splitlines(), 7)),
    "JSON": lambda text: json.dumps({"content": text}),
    "code around it": lambda text: f"def f():\n    return 1\n\n{text}\nprint('done')\n",
}
# YAML's pairs of name and value are read as they are, and Lua's `\z` not in JSON.
PLAIN_ONLY = {"numbered", "in a diff", "in json", "in json over lines", "yaml list", "lua skip"}


@pytest.mark.parametrize("way", WRITTEN)
def test_the_same_holds_in_what_tools_show_of_a_file(way):
    left = {
        (form, kind): columns
        for first, form in enumerate(FORMS)
        for kind in (("github", "password", "random") if form not in PLAIN_ONLY else ())
        if (columns := left_over(form, kind, first, WRITTEN[way]))
    }
    assert left == {}


@pytest.mark.parametrize(
    "text",
    [
        'raise ValueError("no such file: a1b2 "\n    "in the folder of session 4711")\n',
        'names = ["alpha1", "beta22", "gamma333"]\nprint(", ".join(names))\n',
        '"550e8400e29b41d4"\n"a716446655440000"\n"c0ffee254729296a"\n',
        "  `1C050899334244A8AF75E53792EF661D867B9DFA`\n  `74F12602B6F1C4E913FAA37AD3A89613643B6201`\n",
        'path = "src/module1/" + "file2.py"\n',
        "description: >-\n  hello\n  world\n",
        'x = "sha256:" + "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"\n',
        "INSERT INTO t VALUES ('it''s', 'they''re 2');\n",
    ],
)
def test_literals_that_only_stand_beside_each_other_stay(text):
    assert Scrubber().scope().text(text) == text
