"""Secrets with their name or their command right beside them, in the forms of shells, code, tables and browsers."""

from __future__ import annotations

import html
import json
import shlex

import pytest

from composer_replication.privacy import Scrubber, secret_looking_environment

PASSWORDS = ["Kx7!" + "vQ2m#Lp9", "kX72" + "vQ9mLp4w", "Sunflower" + "-92", "marigold" + "47"]
FOUND = [
    # Colours between the name and the value.
    "\x1b[32mpassword\x1b[0m: \x1b[31m{}\x1b[0m",
    "token: \x1b[33m{}\x1b[0m",
    "\x1b[1mAPI_KEY\x1b[0m=\x1b[33m{}\x1b[0m",
    "\\u001b[1mAPI_KEY\\u001b[0m=\\u001b[33m{}\\u001b[0m",
    "\\033[1mpassword\\033[0m: \\033[33m{}\\033[0m",
    # What is taken when the environment has nothing.
    "const PASSWORD = process.env.PASSWORD || '{}';",
    'password: process.env.DB_PASSWORD ?? "{}"',
    "ENV['PASS'] || '{}'",
    'os.getenv("PASS", "{}")',
    "os.environ.get('DB_PASSWORD', '{}')",
    # Names and signs.
    'psk="{}"',
    "Enter passphrase for key '/x': {}",
    "Das Passwort lautet {}",
    "password\uff1a{}",
    "Authorization: {}",
    "admin_password = <<EOT\n{}\nEOT",
    "spring.datasource.password={}",
    "helm upgrade x --set auth.password={} --set a=b",
    "psql 'host=h user=a password={}'",
    "h1 ansible_user=root ansible_password={}",
    "mount -t cifs //h/s /m -o username=a,password={}",
    "page.type('input[name=password]', '{}')",
    "cy.get('#pwd').type('{}')",
    # Tables.
    "username,password\nbob,{}\n",
    "user;password;host\r\nbob;{};x\r\n",
    '"user"\t"password"\nbob\t"{}"',
    "| user | password |\n|---|---|\n| bob | `{}` |",
    "INSERT INTO users (name, password) VALUES ('bob', '{}');",
    "insert into `users` (`name`, `password`, at) values (1, 'x', now()), ('bob', '{}', now())",
    # Commands.
    "keytool -storepass changeit9 -keypass {}",
    "keytool -keypass x1 -storepass {}",
    "sqlcmd -S h -U sa -P '{}'",
    "zip -P {} a.zip b",
    "7z a -p{} a.7z b",
    "twine upload -u __token__ -p {}",
    "http -a admin:{} GET https://x",
    "sqlplus scott/{}@orcl",
    "smbclient //h/s -U 'bob%{}'",
    "lftp -u bob,{} ftp://h",
    'echo "{}" | docker login -u me --password-stdin',
    "echo {} | gh secret set DEPLOY",
    "cargo login {}",
    "openssl enc -aes-256-cbc -k {} -in a",
    "db.internal:5432:orders:svc_orders:{}\n",
    "htpasswd -cbB .htpasswd bob {}",
    "curl --user='bot:{}' https://x",
]


@pytest.mark.parametrize("template", FOUND)
def test_a_password_beside_its_name_or_command_is_found(template):
    texts = {password: template.replace("{}", password) for password in PASSWORDS}
    assert [text for password, text in texts.items() if password in Scrubber().scope().text(text)] == []
    for text in texts.values():
        once = Scrubber().scope().text(text)
        assert Scrubber().scope().text(once) == once


@pytest.mark.parametrize(
    "record",
    [
        {"element": "Password field", "ref": "e12", "text": "sunflower" + "77"},
        {"selector": "#password", "value": "sunflower" + "77"},
        {"locator": "input[name=pwd]", "text": "sunflower" + "77"},
        {"headers": {"Authorization": "sunflower" + "77abc"}},
    ],
)
def test_what_is_typed_into_a_password_field_is_found(record):
    clean = Scrubber().scope().value(record)
    assert "sunflower" not in repr(clean)
    assert Scrubber().scope().value(clean) == clean


STAYS = [
    "const token = user.token || '';",
    "password = password || 'default'",
    "apiKey: config.apiKey2",
    "AuthToken: Type1Handler",
    "secret: mySecretName1",
    "connect(user=user1, password=password2)",
    "connect(\n    user=user1,\n    password=password2\n)",
    "Authorization: Bearer ${TOKEN}",
    "name,password\nstring,string\n",
    "| Field | Password |\n|---|---|\n| type | string |",
    "a, password, b = load()\nx1, y2, z3 = 1",
    "INSERT INTO users (name, password) VALUES (?, ?)",
    "INSERT INTO users (name, password) VALUES ($1, crypt($2, 'bf'))",
    "tar -P -xf archive1.zip",
    "list(zip(a, b))",
    "curl -u user:password https://x",
    "http -a user:password GET https://x",
    "echo $TOKEN | docker login --password-stdin",
    "cargo login first",
    "0.0.0.0:5432:5432",
    "\x1b[32mtoken\x1b[0m count: \x1b[31m4096\x1b[0m",
    "client.post('/login', json={'password': 'wrong-password'})",
    "1234567890123456789012345678901234567890",
    "3.14159265358979323846264338327950288",
    "/nix/store/0c7c96gikmzv87i7lv3vq5s1cmfjd6zf-python3-3.11.6",
    "balance of 0x1057dc006c436abe8316b7673c516f25f8db934c",
    "QmYwAPJzv5CZsnA625s3Xf2nemtYgPpHdWEz79ojWnPbdG",
    "see ab-ab-cd-Q9x",
]


@pytest.mark.parametrize("text", STAYS)
def test_what_only_stands_beside_such_a_name_stays(text):
    assert Scrubber().scope().text(text) == text


def test_labels_of_a_password_field_stay():
    record = {"element": "Password field", "text": "Forgot your password?", "selector": "#login", "value": "ada"}
    assert Scrubber().scope().value(record) is record


SIGNS = "ab&cd<7>'x\"9Q"
LINES = "multi\nline-S3cret" + "-value\nend"
SPELLED = [
    ({"DB_PASSWORD": "sunflower"}, "connecting with sunflower now"),
    ({"APP_SECRET": "/Zk3/9fQ+x/Lm"}, "got /Zk3/9fQ+x/Lm from vault"),
    ({"ALERT_WEBHOOK": "https://alerts.corp/hook/9fkQz27LmWx"}, "POST https://alerts.corp/hook/9fkQz27LmWx"),
    *(({"X_TOKEN": SIGNS}, text) for text in (html.escape(SIGNS), html.escape(SIGNS, quote=False))),
    *(({"X_TOKEN": SIGNS}, f"export X='{text}'") for text in (SIGNS.replace("'", "'\\''"), shlex.quote(SIGNS)[1:-1])),
    ({"X_TOKEN": SIGNS}, json.dumps(json.dumps(json.dumps(SIGNS)))),
    ({"X_SECRET": LINES}, LINES.replace("\n", "\r\n")),
    ({"X_SECRET": LINES}, json.dumps(LINES.replace("\n", "\r\n"))),
]


@pytest.mark.parametrize(("env", "text"), SPELLED)
def test_a_known_value_is_found_as_logs_spell_it(env, text):
    assert "<ENV_SECRET_1>" in Scrubber(env_values=secret_looking_environment(env)).scope().text(text)


def test_common_words_and_paths_under_secret_names_are_not_searched_for():
    env = {"A_SECRET": "database", "GOOGLE_APPLICATION_CREDENTIALS": "/srv/keys/app.json", "TOKEN_STORE": "keychain"}
    env |= {"CI_SECRET": "/usr/local/share", "MODE": "sunflower", "HOOK_URL": "https://alerts.corp/hook"}
    assert secret_looking_environment(env) == {}


KEY = "sk-ant-api03-" + "AbCdEf0123456789AbCdEf"
OPAQUE = [
    {"type": "reasoning", "data": f"the key is {KEY}"},
    {"thoughtSignature": "password=Kx7!" + "vQ2m#Lp9"},
    {"type": "thinking", "signature": "Quokka-" + "7731-lime"},
    {"type": "thinking", "signature": KEY * 4},
    {"type": "base64", "media_type": "image/png", "data": "AWS_SECRET_ACCESS_KEY=" + "Kx7vQ2mLp9" * 2},
]


@pytest.mark.parametrize("record", OPAQUE)
def test_a_field_for_a_signature_that_holds_something_else_is_read(record):
    clean = Scrubber(env_values={"X_TOKEN": "Quokka-" + "7731-lime"}).scope().value(record)
    assert not [secret for secret in (KEY, "Kx7", "Quokka") if secret in repr(clean)]


def test_a_signature_stays_as_it_is():
    blob = "Eq" + "QBCkYIBxgCKkDk7Zx9" * 20 + "=="
    for record in ({"type": "thinking", "thinking": "hm", "signature": blob}, {"thoughtSignature": blob}):
        assert Scrubber().scope().value(record) is record
    held = {"type": "thinking", "signature": blob}
    assert Scrubber(env_values={"X_TOKEN": blob[40:80]}).scope().value(held) != held


PEOPLE = {
    "home/margaret/x.jsonl": "home/USER_1/x.jsonl",
    "Users/margaret/Library/x": "Users/USER_1/Library/x",
    "etc/passwd\nhome/margaret/.bashrc\n": "etc/passwd\nhome/USER_1/.bashrc\n",
    "home/components/Header.tsx": "home/components/Header.tsx",
    "home/margaret": "home/margaret",
    "go home/away today": "go home/away today",
}


@pytest.mark.parametrize("text", PEOPLE)
def test_a_home_directory_without_its_first_slash(text):
    assert Scrubber().scope().text(text) == PEOPLE[text]
    assert Scrubber().scope().value({"file": text, "n": "x"}) == {"file": PEOPLE[text], "n": "x"}
