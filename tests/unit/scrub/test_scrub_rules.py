"""Rules that one planted secret asked for, each on many secrets of its shape and on what only looks like them."""

from __future__ import annotations

import random

import pytest
from scrub_examples import ALNUM, BASE64, LOWER_DIGITS, LOWER_HEX

from composer_replication.privacy import Scrubber


def of(alphabet: str, length: int, seed: int = 0) -> str:
    rng = random.Random(f"{alphabet} {length} {seed}")
    return "".join(rng.choice(alphabet) for _ in range(length))


PASSWORDS = ["Bramble5!" + "cobalt14", "Otter4+" + "maple77", "kestrel-otter-" + "4821", "Xk39" + "fQ2zLm"]
SESSIONS = [of(LOWER_HEX, 32), of(LOWER_DIGITS, 26), of(ALNUM, 32)]
HEX = [of(LOWER_HEX, 64), of(LOWER_HEX, 64, 1), of(LOWER_HEX, 512)]
ODD_HEX = [of(LOWER_HEX, length) for length in (33, 36, 44, 48, 50, 72, 80)]
FOUND = {
    "signed address": (
        HEX,
        "GET https://b.s3.amazonaws.com/a?X-Amz-Date=20260101T000000Z&X-Amz-Signature={}&y=2",
        "https://storage.googleapis.com/b/o?X-Goog-Algorithm=GOOG4&X-Goog-Signature={}",
        "Authorization: AWS4-HMAC-SHA256 Credential=A/2026/s3, SignedHeaders=host, Signature={}",
        "https:\\/\\/b.s3.amazonaws.com\\/a?x=1\\u0026X-Amz-Signature={}\\u0026z=3",
        "next=https%3A%2F%2Fb.s3.amazonaws.com%2Fa%3FX-Amz-Signature%3D{}%26x%3D1",
    ),
    "connection string": (
        PASSWORDS,
        "Server=tcp:db,1433;User ID=sa;Password={};Encrypt=true",
        "Data Source=.;Initial Catalog=shop;User Id=sa;Pwd={};",
        "Driver={{ODBC Driver 18}};Server=db;UID=sa;PWD={};",
        "Password={};Server=db;Database=x",
        "Host=db; Username=app; Password={}; Database=shop",
        "jdbc:sqlserver://db:1433;databaseName=shop;user=sa;password={};encrypt=true",
    ),
    "pwd as a password": (
        PASSWORDS,
        '{{"login": "ada", "pwd": "{}"}}',
        "pwd: {}\n",
        "curl -d 'user=ada&pwd={}' https://api.example.org",
        "tool --pwd {} --user ada",
        '{{\\"pwd\\": \\"{}\\"}}',
        "<pwd>{}</pwd>",
    ),
    "session": (
        SESSIONS,
        "Cookie: lang=en; JSESSIONID={}\n",
        "log in with PHPSESSID={}",
        "curl --cookie 'x=1; ASP.NET_SessionId={}'",
        "Set-Cookie: sessionid={}; Path=/; Max-Age=3600",
        "https://shop.example.org/a;jsessionid={}?page=1",
        "session_id={}",
    ),
    "hex that is no digest": (
        ODD_HEX,
        "/run/shop/{}/socket",
        "/srv/keys/{}.txt",
        "./state-{}/x",
        "https://shop.example.org/reset/{}",
    ),
}


@pytest.mark.parametrize("rule", FOUND)
def test_secrets_of_the_shape_are_found(rule):
    secrets, *templates = FOUND[rule]
    texts = {template.format(secret): secret for template in templates for secret in secrets}
    assert [text for text, secret in texts.items() if secret[-8:] in Scrubber().scope().text(text)] == []


HASH = of(LOWER_HEX, 40)
STAYS = [
    f"From {HASH} Mon Sep 17 00:00:00 2001\nSubject: [PATCH] x\n",
    f"From {HASH} Fri Jan 2 10:00:00 2026\n",
    f"k8s.io/api v0.30.0 h1:{of(BASE64, 43)}=\nk8s.io/api v0.30.0/go.mod h1:{of(BASE64, 43, 1)}=\n",
    f'"contentHash": "{of(BASE64, 64)}",',
    f"checksum: {of(BASE64, 43)}=",
    "arn:aws-cn:secretsmanager:cn-north-1:123456789012:secret:prod/api-Xy12Zq",
    "valueFrom: arn:aws:secretsmanager:eu-west-1:123456789012:secret:app/jwt-a1B2c3:password::",
    '<input type="password" name="password" autocomplete="current-password">',
    "<input name=password autocomplete=off2>",
    '<input type=\\"password\\" name=\\"pwd\\" maxlength=\\"20\\">',
    "postgresql://USER:PASSWORD@HOST:5432/DBNAME",
    "mysql://user:password@localhost/db",
    "postgres://DB_USER:DB_PASSWORD@host/x",
    "amqp://user:xxxx@host",
    '{"type": "base64", "data": "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJ..."}',
    '{"type": "base64", "data": "/9j/4AAQSkZJRgABAQEASABIAAD2Q..."}',
    '{"type": "base64", "data": "JVBERi0xLjQKJcOkw7zDtsOfCjIgMCBvYmo8PC9..."}',
    "cd /srv && pwd && ls",
    "PWD=/srv/app/shop\nOLDPWD=/srv",
    '"pwd": "/srv/app"',
    "pwd = os.getcwd()",
    "['pwd', 'ls -1']",
    "`pwd`: prints the working directory",
    "Cookie: theme=dark; lang=en",
    "Set-Cookie: theme=dark; Path=/; Max-Age=31536000",
    "--session-id=258c7280-ae70-4798-800f-63464d01a85d",
    "signature=inspect.signature(f)",
    f"/var/lib/docker/overlay2/{of(LOWER_HEX, 64)}/merged",
    f"node_modules/.cache/{of(LOWER_HEX, 32)}.json",
    "if (a\\\n    && b) {",
    "sed 's/\\/usr\\/bin/\\/bin/' token_list.txt",
]


@pytest.mark.parametrize("text", STAYS)
def test_what_only_looks_like_it_stays(text):
    assert Scrubber().scope().text(text) is text


def test_known_values_that_stand_in_every_text_are_not_searched_for():
    env = {"DEBUG": "true", "PORT": "8080", "LANG": "en_US.UTF-8", "SHELL": "/bin/bash", "PWD": "/srv/shop"}
    text = "DEBUG is true on 8080, /bin/bash in /srv/shop with en_US.UTF-8"
    assert Scrubber(env_values=env).scope().text(text) is text
    short = "hunt" + "3r"
    assert Scrubber(env_values={"DB_PASSWORD": short}).scope().text(f"typed {short}.") == "typed <ENV_SECRET_1>."


@pytest.mark.parametrize("value", ["zq8/Kd+pw", "12345678901", "päss wörd 1", 'a"b"c\\d9', "token-key-secret"])
def test_a_known_value_is_found_by_any_of_its_letters_and_without_letters(value):
    scope = Scrubber(env_values={"DB_PASSWORD": value}).scope()
    assert scope.text(f"x{value}y and {value}") == "x<ENV_SECRET_1>y and <ENV_SECRET_1>"
    assert value not in scope.text("first, then " + value.replace("/", "\\/").replace('"', '\\"'))
