"""Secrets in another form than their own: base64, URL-encoded, escaped, in two halves, or told by the environment."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from urllib.parse import quote, quote_plus

from data.planted_secrets_types import Maker, Planted, pem, placed


def encoded_cases(maker: Maker) -> Iterator[Planted]:
    for make in (_basic, _docker, _jwt, _base64, _base64_wrapped, _url, _json_escaped, _json_inside_json, _split):
        yield from make(maker)
    for make in (_environment_plain, _environment_encoded):
        yield from make(maker)


def _b64(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


def _basic(maker: Maker) -> Iterator[Planted]:
    for place, template, password in (
        ("bash", "curl -H 'Authorization: Basic {s}' https://nexus.internal.test/x", maker.phrase()),
        ("tool_result", "> Authorization: Basic {s}\n< HTTP/1.1 401 Unauthorized\n", maker.password()),
        ("write", 'headers = {"authorization": "Basic {s}"}\n', maker.alnum(20)),
        ("assistant_text", "It sends `Authorization: Basic {s}`, which is fine over TLS.", maker.symbols()),
    ):
        coded = _b64(f"ada:{password}")
        yield Planted("basic_header", (coded,), *placed(template.replace("{s}", coded), place), decoded=(password,))


def _docker(maker: Maker) -> Iterator[Planted]:
    for place in ("tool_result", "write", "env_dump"):
        password = maker.alnum(24)
        coded = _b64(f"ada:{password}")
        text = json.dumps({"auths": {"registry.internal.test": {"auth": coded}}})
        text = f"DOCKER_AUTH_CONFIG={text}" if place == "env_dump" else text
        yield Planted("docker_config", (coded,), *placed(text, place), decoded=(password,))


def _jwt(maker: Maker) -> Iterator[Planted]:
    for number, (place, template) in enumerate(
        (
            ("bash", "curl -H 'Authorization: Bearer {s}' https://api.internal.test/me"),
            ("user_text", "decode this for me: {s}"),
            ("tool_result", '{"id_token":"{s}","expires_in":3599}'),
            ("thinking", "{s} has expired, so a new login is needed."),
            ("path", "/auth/callback/{s}/done"),
            ("env_dump", "SUPABASE_ANON={s}"),
        )
    ):
        claims = {"sub": f"ada-{number}", "iss": "https://id.internal.test", "exp": 1_790_000_000 + number}
        parts = [
            _b64(json.dumps(part, separators=(",", ":"))).rstrip("=")
            for part in ({"alg": "HS256", "typ": "JWT"}, claims)
        ]
        signature = maker.url(43)
        text = template.replace("{s}", ".".join((*parts, signature)))
        yield Planted("jwt", (signature,), *placed(text, place))


def _base64(maker: Maker) -> Iterator[Planted]:
    key = "SHOP_API_" + "KEY"
    for place, template, plain, secret in (
        ("bash", "echo {s} | base64 -d > .env", f"{key}=%s\nDEBUG=0\n", maker.alnum(32)),
        ("tool_result", "apiVersion: v1\nkind: Secret\ndata:\n  password: {s}\n", "%s", maker.password()),
        ("tool_result", '{"kind": "Secret", "data": {"api-token": "{s}"}}', "%s", maker.alnum(40)),
        ("user_text", "the blob is {s}", "db: {user: shop, password: %s}", maker.alnum(24)),
        ("thinking", "Decoding {s} gives a connection string.", "postgres://shop:%s@db/shop", maker.alnum(20)),
        ("env_dump", "KEYSTORE_B64={s}", "storePassword=%s\nkeyAlias=upload\n", maker.alnum(18)),
        ("path", "/tmp/cache/{s}/body", "https://ada:%s@git.internal.test/shop", maker.alnum(20)),
        ("assistant_text", "Set `user_data` to `{s}`.", "#!/bin/sh\nexport TOKEN=%s\n", "ghp_" + maker.alnum(36)),
    ):
        coded = _b64(plain % secret)
        yield Planted("base64_form", (coded,), *placed(template.replace("{s}", coded), place), decoded=(secret,))
    secret = maker.alnum(30)
    coded = _b64(_b64(f"token: {secret}"))
    yield Planted("base64_form", (coded,), f"value: |-\n  {coded}\n", "tool_result", decoded=(secret,))
    secret = maker.alnum(30)
    coded = f"{key}={secret}".encode().hex()
    yield Planted("hex_form", (coded,), f"$ xxd -p -c 200 .env\n{coded}\n", "tool_result", decoded=(secret,))


def _base64_wrapped(maker: Maker) -> Iterator[Planted]:
    lines = tuple(maker.b64(64) for _ in range(3))
    blob = _b64(pem("OPENSSH PRIVATE" + " KEY", lines))
    rows = tuple(blob[start : start + 76] for start in range(0, len(blob), 76))
    text = "$ base64 ~/.ssh/id_ed25519\n" + "\n".join(rows) + "\n"
    yield Planted("base64_form", rows, text, "tool_result", decoded=lines)


def _url(maker: Maker) -> Iterator[Planted]:
    for place, template, code in (
        ("env_dump", "DATABASE_URL=postgres://shop:{s}@db.internal.test/shop", quote),
        ("tool_result", "GET /login?user=ada&password={s} 302", quote_plus),
        ("bash", "curl -d 'grant_type=password&username=ada&password={s}' https://id.internal.test", quote),
        ("user_text", "redirected to /cb?next=https%3A%2F%2Fx.test%2F%3Faccess_token%3D{s}", quote),
        ("path", "amqp://shop:{s}@queue.internal.test:5672/vhost", quote),
        ("thinking", "Body: client_id=shop&client_secret={s}&scope=all", quote_plus),
    ):
        plain = f"{maker.alnum(4)}/{maker.alnum(5)}+{maker.alnum(4)}={maker.alnum(3)}@{maker.alnum(3)}"
        coded = code(plain, safe="")
        yield Planted("url_form", (coded,), *placed(template.replace("{s}", coded), place), decoded=(plain,))


def _json_escaped(maker: Maker) -> Iterator[Planted]:
    """The secret itself holds characters that JSON escapes."""
    for character, template in (
        ('"', "password = '{s}'\n"),
        ("\\", "export DB_PASSWORD='{s}'\n"),
        ("é", "api_secret: '{s}'\n"),
        ("\t", "SMTP_PASSWORD='{s}'\n"),
    ):
        secret = f"{maker.alnum(9)}{character}{maker.alnum(10)}"
        text = json.dumps({"file_path": "/home/ada/shop/.env", "content": template.replace("{s}", secret)})
        shown = json.dumps(secret)[1:-1]
        yield Planted("json_escaped", (shown,), text, "tool_arguments", decoded=(secret,))


def _json_inside_json(maker: Maker) -> Iterator[Planted]:
    """The secret is plain, and the name beside it stands behind one or two levels of escapes."""
    for levels, fields in (
        (1, {"client_id": "shop", "client_secret": maker.phrase()}),
        (1, {"user": "ada", "password": maker.password(), "remember": True}),
        (2, {"api_key": maker.alnum(22), "region": "eu-north-1"}),
        (2, {"Authorization": "Bearer " + maker.alnum(30)}),
        (2, {"db": {"host": "db.internal.test", "passwd": maker.phrase()}}),
    ):
        (secret,) = _secrets_in(fields)
        text = json.dumps(fields)
        for _ in range(levels):
            text = json.dumps({"tool": "http", "body": text})
        yield Planted("json_escaped", (secret,), text, "tool_arguments")


def _secrets_in(fields: dict) -> list[str]:
    flat = {**fields, **fields.get("db", {})}
    names = ("client_secret", "password", "api_key", "Authorization", "passwd")
    return [flat[name].removeprefix("Bearer ") for name in names if name in flat]


def _split(maker: Maker) -> Iterator[Planted]:
    for place, template in (
        ("write", 'API_KEY = "{a}" + "{b}"\n'),
        ("write", 'api_secret = (\n    "{a}"\n    "{b}"\n)\n'),
        ("bash", "export SHOP_TOKEN='{a}'\"{b}\""),
        ("tool_result", 'const apiToken = "{a}" +\n  "{b}";'),
        ("assistant_text", "Join the halves: `token = '{a}' '{b}'`."),
        ("bash", "shopctl login --password {a}\\\n{b}"),
    ):
        halves = maker.alnum(24), maker.alnum(24)
        yield Planted("split", halves, *placed(template.replace("{a}", halves[0]).replace("{b}", halves[1]), place))


def _environment_plain(maker: Maker) -> Iterator[Planted]:
    """No shape, no name, little randomness: only the exact value of the variable gives it away."""
    for name, place, template, recipe in (
        ("DB_PASS", "user_text", "I typed {s} and it let me in", "phrase"),
        ("DB_PASS", "assistant_text", "The login works with `{s}`.", "password"),
        ("ACCOUNT_PASSWORD", "thinking", "ada / {s} are the credentials from the fixture.", "digits:12"),
        ("ADMIN_LOGIN", "bash", "printf '%s\\n' ada {s} | ./login", "phrase"),
        ("SHOP_TOKEN", "tool_result", "Logged in as ada ({s})\n", "lower:14"),
        ("CI_DEPLOY_AUTH", "path", "/srv/www/{s}/index.html", "phrase"),
        ("VENDOR_ACCESS", "env_dump", "COPY_OF_IT={s}", "phrase"),
        ("DB_PASS", "tool_result", "argv: ['login', 'ada', '{s}']", "symbols"),
        ("LICENSE_CODE", "write", "activate('{s}')\n", "phrase"),
        ("SHOP_TOKEN", "path", "prefix{s}suffix.txt", "lower:18"),
    ):
        secret = maker.make(recipe)
        yield Planted(
            "environment_value", (secret,), *placed(template.replace("{s}", secret), place), env={name: secret}
        )


def _environment_encoded(maker: Maker) -> Iterator[Planted]:
    for place, template, code in (
        ("tool_result", "body: {s}", _b64),
        ("bash", "./login {s}", lambda plain: quote(plain, safe="")),
        ("user_text", "it prints '{s}' in the log", lambda plain: json.dumps(plain)[1:-1]),
        ("thinking", "{s} looks like base64 of something", _b64),
    ):
        plain = f'{maker.alnum(6)}/"{maker.alnum(6)}"+{maker.alnum(4)}'
        coded = code(plain)
        text, place = placed(template.replace("{s}", coded), place)
        yield Planted("environment_value", (coded,), text, place, decoded=(plain,), env={"SHOP_LOGIN": plain})
