"""Vendor tokens with a known shape, each in several places with nothing beside it that names it."""

from __future__ import annotations

import base64
import itertools
import string
from collections.abc import Iterator

from data.planted_secrets_types import Maker, Planted, placed

BASE32 = string.ascii_uppercase + "234567"
PER_KIND = 4

# Seven places in turn, three times over; the number is prime to PER_KIND, so each kind meets other carriers.
CARRIERS = (
    ("user_text", "Here is the one you asked for: {s}\nPlease keep it out of the commit."),
    ("bash", "curl -sS -H 'X-Request-Source: agent' https://api.internal.test/v1/check/{s} | jq ."),
    ("tool_result", 'src/shop/client.py:14:    client = Client("{s}", timeout=30)\n1 match'),
    ("assistant_text", "The upload works once `{s}` is passed to the client; without it the server answers 401."),
    ("thinking", "The user pasted {s} above. I should not repeat it, but the next call needs it."),
    ("path", "/home/ada/.cache/shop/{s}/index.json"),
    ("env_dump", "DEPLOY_INPUT_1={s}"),
    ("user_text", "why does this print 401?\n>>> connect('{s}')\nHTTPError: 401 Client Error"),
    ("write", 'region = "eu-north-1"\n\nclient = connect(\n    "{s}",\n    retries=3,\n)\n'),
    ("tool_result", '{"status": 401, "error": {"message": "Incorrect key provided: {s}."}}'),
    ("assistant_text", "I found it in the history of the file:\n\n```diff\n-connect({s})\n+connect()\n```\n"),
    ("thinking", "Options: (a) read it from the keyring, (b) hardcode {s}, which is bad. Take (a)."),
    ("path", "backups/2026-03-14/dump_{s}.sql.gz"),
    ("env_dump", "INPUT_WITH='{s}'"),
    ("user_text", "old={s}, new one comes tomorrow"),
    ("bash", "./deploy.sh --target staging --as {s} && echo done"),
    ("tool_result", "    12\t  with:\n    13\t    value: {s}\n    14\t  if: always()\n"),
    ("assistant_text", "Two changes:\n1. dropped `{s}` from `ci.yml`;\n2. rotated it (you have to confirm by e-mail)."),
    ("thinking", "grep printed one hit ({s}) in a notebook cell output, so the notebook has to be cleaned too."),
    ("path", "C:\\Users\\ada\\AppData\\Local\\Temp\\{s}.log"),
    ("env_dump", "npm_config_x={s}"),
)

Parts = tuple[str, str]  # the public prefix and the rest


def vendor_cases(maker: Maker) -> Iterator[Planted]:
    """Every vendor kind in `PER_KIND` places."""
    carriers = itertools.cycle(CARRIERS)
    for kind, make in KINDS.items():
        for place, template in itertools.islice(carriers, PER_KIND):
            prefix, rest = make(maker)
            yield Planted(kind, (prefix + rest,), *placed(template.replace("{s}", prefix + rest), place), prefix=prefix)


def _gitlab(maker: Maker) -> Parts:
    rest = maker.url(20), f"{maker.url(27)}.01.{maker.lower(9)}"  # the old form and the routable one
    return "glpat-", rest[int(maker.turn("0", "1"))]


def _slack_user(maker: Maker) -> Parts:
    return "xoxp-", f"{maker.digits(12)}-{maker.digits(12)}-{maker.digits(13)}-{maker.hex(32)}"


def _slack_app(maker: Maker) -> Parts:
    return "xapp-", f"1-A{maker.of(BASE32, 10)}-{maker.digits(13)}-{maker.hex(64)}"


def _openai(maker: Maker) -> Parts:
    middle = "T3Blbk" + "FJ"
    prefix = maker.turn("sk-", "sk-proj-", "sk-svcacct-")
    size = 20 if prefix == "sk-" else 74
    return prefix, f"{maker.alnum(size)}{middle}{maker.alnum(size)}"


def _anthropic(maker: Maker) -> Parts:
    return maker.turn("sk-ant-api03-", "sk-ant-admin01-", "sk-ant-oat01-"), maker.url(93) + "AA"


def _telegram(maker: Maker) -> Parts:
    return f"{maker.digits(10)}:", "AA" + maker.url(33)


def _discord_bot(maker: Maker) -> Parts:
    owner = base64.b64encode(maker.digits(18).encode()).decode()
    return f"{owner}.", f"{maker.alnum(6)}.{maker.url(38)}"


def _sendgrid(maker: Maker) -> Parts:
    return "SG.", f"{maker.url(22)}.{maker.url(43)}"


def _slack_bot(maker: Maker) -> Parts:
    return "xoxb-", f"{maker.digits(12)}-{maker.digits(13)}-{maker.alnum(24)}"


KINDS = {
    "aws_access_key_id": lambda m: (m.turn("AKIA", "ASIA"), m.of(BASE32, 16)),
    "github_classic": lambda m: ("ghp_", m.alnum(36)),
    "github_fine_grained": lambda m: ("github_pat_", f"{m.alnum(22)}_{m.alnum(59)}"),
    "github_app": lambda m: (m.turn("ghs_", "ghu_"), m.alnum(36)),
    "github_oauth": lambda m: ("gho_", m.alnum(36)),
    "gitlab": _gitlab,
    "slack_bot": _slack_bot,
    "slack_user": _slack_user,
    "slack_app": _slack_app,
    "stripe_live": lambda m: ("sk_live_", m.alnum(24)),
    "stripe_restricted": lambda m: ("rk_live_", m.alnum(99)),
    "stripe_webhook": lambda m: ("whsec_", m.alnum(32)),
    "openai": _openai,
    "anthropic": _anthropic,
    "openrouter": lambda m: ("sk-or-v1-", m.hex(64)),
    "hugging_face": lambda m: ("hf_", m.of(string.ascii_letters, 34)),
    "npm": lambda m: ("npm_", m.alnum(36)),
    "pypi": lambda m: ("pypi-AgEIcHlwaS5vcmc", m.url(150)),
    "docker_hub": lambda m: ("dckr_pat_", m.url(27)),
    "sendgrid": _sendgrid,
    "twilio_api_key": lambda m: ("SK", m.hex(32)),
    "telegram_bot": _telegram,
    "discord_bot": _discord_bot,
    "google_api_key": lambda m: ("AIza", m.url(35)),
    "google_oauth_client_secret": lambda m: ("GOCSPX-", m.url(28)),
    "google_access_token": lambda m: ("ya29.", "a0" + m.url(160)),
    "digitalocean": lambda m: ("dop_v1_", m.hex(64)),
    "shopify": lambda m: ("shpat_", m.hex(32)),
    "databricks": lambda m: ("dapi", m.hex(32)),
    "vault": lambda m: ("hvs.", "CAES" + m.url(86)),
    "grafana": lambda m: ("glsa_", f"{m.alnum(32)}_{m.hex(8)}"),
    "groq": lambda m: ("gsk_", m.alnum(52)),
    "linear": lambda m: ("lin_api_", m.alnum(40)),
    "atlassian": lambda m: ("ATATT3xFfGF0", m.url(172) + "=" + m.hex(8).upper()),
}
