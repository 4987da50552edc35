"""Secrets in pieces: streamed lines, keys without a frame, and places that name a value from a distance."""

from __future__ import annotations

import json
import random

import pytest

from composer_replication.privacy import Scrubber

LINES = {
    "anthropic": lambda piece: (
        "event: content_block_delta\ndata: "
        + json.dumps({"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": piece}})
        + "\n"
    ),
    "openai": lambda piece: "data: " + json.dumps({"id": "c-1", "choices": [{"delta": {"content": piece}}]}),
    "ollama": lambda piece: json.dumps({"model": "q", "created_at": "2026-01-01T10:11:02.15Z", "response": piece}),
    "vercel": lambda piece: "0:" + json.dumps(piece),
    "frames": lambda piece: "14:02:07.747 < " + json.dumps({"t": "delta", "d": piece}),
    "tokens": lambda piece: f'sampled token: {len(piece) * 1217} -> "{piece}"',
}
MESSAGES = [
    ("Set the database password to ", "Copper-Giraffe!19", " and restart the pods."),
    ("export GITHUB_TOKEN=", "ghp_MQrF6Y3rLfvMx9YWtrMiDXQjDXoILaZApiAS", "\\nmake release"),
    ("X-Api-Key: ", "22d62d9f2730db9ad7eeed2463cc493a", " as header"),
]


def pieces_of(message: str, rng: random.Random) -> list[str]:
    pieces = []
    while message:
        size = rng.randint(2, 7)
        pieces.append(message[:size])
        message = message[size:]
    return pieces


@pytest.mark.parametrize("form", LINES)
@pytest.mark.parametrize(("before", "secret", "after"), MESSAGES)
def test_a_streamed_secret_goes_and_the_rest_of_the_lines_stays(form, before, secret, after):
    rng = random.Random(form + secret)
    secret_pieces = pieces_of(secret, rng)
    lines = [LINES[form](piece) for piece in (*pieces_of(before, rng), *secret_pieces, *pieces_of(after, rng))]
    clean = Scrubber().scope().text("\n".join(lines)).split("\n")
    assert len(clean) == "\n".join(lines).count("\n") + 1
    unchanged = [piece for piece in secret_pieces if LINES[form](piece) in "\n".join(clean)]
    assert unchanged == []
    assert "\n".join(clean).startswith(lines[0])
    assert "\n".join(clean).endswith(lines[-1])


def test_a_stream_beside_another_one_is_read_by_itself():
    rng = random.Random(0)
    pieces = pieces_of("database password to Copper-Giraffe!19 and restart the pods", rng)
    stream = "\n".join(LINES["openai"](piece) for piece in pieces)
    long_piece = LINES["openai"]("a long piece of a message that says nothing about anything and goes on and on " * 2)
    scrubber = Scrubber()
    assert "raffe" not in str(scrubber.scope().value({"a": stream, "b": f"{long_piece}\n{long_piece}"}))
    assert "raffe" not in scrubber.scope().text(stream)
    assert "raffe" not in Scrubber().scope().text(f"{stream}\n{long_piece}")


@pytest.mark.parametrize("form", LINES)
def test_a_streamed_sentence_stays(form):
    message = "The tests pass now. I renamed the password field and the token counter, and the docs are up to date."
    text = "\n".join(LINES[form](piece) for piece in pieces_of(message, random.Random(form)))
    assert Scrubber().scope().text(text) == text


def test_lines_that_hold_names_are_no_stream():
    text = "\n".join(
        json.dumps({"name": name, "kind": "field"}) for name in ["password", "token", "reset", "user", "key2", "mail"]
    )
    assert Scrubber().scope().text(text) == text


RNG = random.Random(7)
BASE64 = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"
BODY = ["".join(RNG.choices(BASE64, k=64)) for _ in range(6)]
HEX = ":".join(f"{RNG.randrange(256):02x}" for _ in range(15)) + ":"


@pytest.mark.parametrize(
    ("text", "secret"),
    [
        ("MIIEvgIBADANBgkqhkiG9w0BAQEFAASC" + BODY[0][:32] + "\n" + "\n".join(BODY), BODY[3]),
        ("MIIEpAIBAAKCAQEA" + BODY[0][:48] + "\n" + "\n".join(BODY), BODY[5]),
        ("MHcCAQEEI" + BODY[0][:55] + "\n" + BODY[1], BODY[1]),
        ("\n".join(BODY) + "\n-----END PRIVATE KEY-----", BODY[1]),
        (
            "\n".join(f"    {n}→{line}" for n, line in enumerate(BODY)) + "\n     9→-----END RSA PRIVATE KEY-----",
            BODY[0],
        ),
        ("publicExponent: 65537 (0x10001)\nprivateExponent:\n    " + HEX + "\n    " + HEX, HEX[:30]),
    ],
)
def test_a_private_key_without_its_frame_goes(text, secret):
    assert secret[:20] not in Scrubber().scope().text(text)


@pytest.mark.parametrize("frame", ["CERTIFICATE", "PUBLIC KEY", "PGP SIGNATURE"])
def test_the_end_of_a_public_block_stays(frame):
    text = "\n".join(BODY[:3]) + f"\n-----END {frame}-----"
    assert Scrubber().scope().text(text) == text


UUID = "76affddd-92cf-440c-a932-f5d6ff7f845b"


@pytest.mark.parametrize(
    "text",
    [
        f"Cookie: theme=dark; session={UUID}",
        f"https://shop.test/a.do;jsessionid={UUID}?op=1",
        f's.cookies.set("connect.sid", "{UUID}", domain="shop.test")',
        f'{{"cookies":[{{"name":"__Host-session","value":"{UUID}","path":"/"}}]}}',
        f'New-Object System.Net.Cookie("ASP.NET_SessionId", "{UUID}", "/")',
    ],
)
def test_a_session_of_a_browser_goes_though_it_is_a_uuid(text):
    assert UUID not in Scrubber().scope().text(text)


@pytest.mark.parametrize("name", ["request_id", "x-request-id", "session_id", "Idempotency-Key", "traceparent"])
def test_other_ids_stay(name):
    assert UUID in Scrubber().scope().text(f"{name}: {UUID}\n")


@pytest.mark.parametrize(
    ("text", "secret"),
    [
        ('{"master": {"value": "g0)U_Jl{8SGhLEe9c?x>", "type": "string", "sensitive": true}}', "8SGhLEe9c"),
        ("COPY smtp (id, host, login, secret) FROM stdin;\n3\tmail.test\tada\tj(U7Ps:0h(J$:<K8pw\n\\.", "U7Ps:0h"),
        ("| Ambiente | Usuário | Senha |\n|---|---|---|\n| hml | testador | Tatu.bola@2020 |", "bola@2020"),
        ("connecting to tcp:sqlprd03,1433 as sa with 'Gr0ssk@tze-Ost'", "ssk@tze"),
        ("entra con soporte y Llueve3nBogota", "Llueve3nBogota"),
        ("mi sono collegato a ldap01 come cn=lettore usando vespa.Lambretta-50", "Lambretta"),
        ("/opt/mysqld_exporter --mysqld.username=exporter:Y7rUMYpC5drd67k940NN@(db-02:3306)/", "5drd67k"),
    ],
)
def test_a_value_that_something_names_from_a_distance_goes(text, secret):
    assert secret not in Scrubber().scope().text(text)


@pytest.mark.parametrize(
    "text",
    [
        'namespace = self.whoami(token=token)["name"]',
        "if cache and (cached_token := self._whoami_cache.get(token)):\n    return cached_token",
        '_HEX_PAT = "[0-9A-Fa-f]{1,4}"',
        "CREATE ROLE reporting LOGIN PASSWORD :'reporting_pw';",
        "[I] must-change-password=true\n2025/06/02 10:11:53 routers/init.go:77 [I] ORM engine initialized",
        "      6→      rootPasswordKey: mariadb-root-password\n      7→  primary:\n",
        "logged in as admin with the new role, see docs/roles.md",
    ],
)
def test_code_and_data_without_a_value_stay(text):
    assert Scrubber().scope().text(text) == text
