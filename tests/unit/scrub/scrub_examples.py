"""Example secrets for the scrub tests, made at run time from parts: no key stands in this file."""

from __future__ import annotations

import base64
import json
import random
import string
from urllib.parse import quote

LOWER_HEX = "0123456789abcdef"
ALNUM = string.ascii_letters + string.digits
URL_SAFE = ALNUM + "_-"
BASE64 = ALNUM + "+/"
UPPER_DIGITS = string.ascii_uppercase + string.digits
LOWER_DIGITS = string.ascii_lowercase + string.digits

# kind of key: prefix in pieces, alphabet, length of the random part, suffix
SHAPES: dict[str, tuple[tuple[str, ...], str, int, str]] = {
    "anthropic": (("sk-", "ant-", "api03-"), URL_SAFE, 93, "AA"),
    "openai project": (("sk-", "proj-"), URL_SAFE, 120, ""),
    "openai old": (("sk", "-"), ALNUM, 48, ""),
    "openrouter": (("sk-", "or-v1-"), LOWER_HEX, 64, ""),
    "aws id": (("AK", "IA"), UPPER_DIGITS, 16, ""),
    "aws session id": (("AS", "IA"), UPPER_DIGITS, 16, ""),
    "aws secret": ((), BASE64, 40, ""),
    "github classic": (("gh", "p_"), ALNUM, 36, ""),
    "github server": (("gh", "s_"), ALNUM, 36, ""),
    "github fine": (("github", "_pat_"), ALNUM, 82, ""),
    "gitlab": (("gl", "pat-"), URL_SAFE, 20, ""),
    "hugging face": (("h", "f_"), string.ascii_letters, 34, ""),
    "google api": (("AI", "za"), URL_SAFE, 35, ""),
    "google oauth": (("GOC", "SPX-"), URL_SAFE, 28, ""),
    "google access": (("ya", "29."), URL_SAFE, 120, ""),
    "slack bot": (("xo", "xb-"), string.digits, 12, "-" + "9" * 12 + "-AbCdEf" + "GhIjKlMnOpQrStUv12"),
    "stripe live": (("sk", "_live_"), ALNUM, 24, ""),
    "stripe restricted": (("rk", "_live_"), ALNUM, 24, ""),
    "stripe webhook": (("wh", "sec_"), ALNUM, 32, ""),
    "twilio": (("S", "K"), LOWER_HEX, 32, ""),
    "sendgrid": (("S", "G."), ALNUM, 22, "." + "aB3" * 14),
    "mailgun": (("ke", "y-"), LOWER_HEX, 32, ""),
    "npm": (("np", "m_"), ALNUM, 36, ""),
    "pypi": (("py", "pi-"), URL_SAFE, 150, ""),
    "docker": (("dckr", "_pat_"), URL_SAFE, 27, ""),
    "digitalocean": (("dop", "_v1_"), LOWER_HEX, 64, ""),
    "databricks": (("da", "pi"), LOWER_HEX, 32, ""),
    "shopify": (("shp", "at_"), LOWER_HEX, 32, ""),
    "square": (("sq0", "atp-"), URL_SAFE, 22, ""),
    "telegram": (("123456", "789:"), URL_SAFE, 35, ""),
    "discord": (("M",), ALNUM, 23, ".Gx" + "Yz12." + "aB3_" * 7),
    "linear": (("lin", "_api_"), ALNUM, 40, ""),
    "notion": (("nt", "n_"), ALNUM, 46, ""),
    "airtable": (("pa", "t"), ALNUM, 14, "." + "0a1b" * 16),
    "atlassian": (("ATA", "TT3x"), URL_SAFE, 180, ""),
    "figma": (("fi", "gd_"), URL_SAFE, 40, ""),
    "vault": (("hv", "s."), ALNUM, 24, ""),
    "terraform": ((), ALNUM, 14, ".atlas" + "v1." + "aB3-" * 16),
    "tavily": (("tv", "ly-"), ALNUM, 32, ""),
    "groq": (("gs", "k_"), ALNUM, 52, ""),
    "replicate": (("r", "8_"), ALNUM, 37, ""),
    "perplexity": (("pp", "lx-"), LOWER_HEX, 48, ""),
    "xai": (("xa", "i-"), ALNUM, 80, ""),
    "nvidia": (("nv", "api-"), URL_SAFE, 64, ""),
    "supabase": (("sb", "p_"), LOWER_HEX, 40, ""),
    "grafana": (("gl", "sa_"), ALNUM, 32, "_0a1b2c3d"),
    "new relic": (("NR", "AK-"), UPPER_DIGITS, 27, ""),
    "azure": (("aB3", "8Q~"), ALNUM, 34, ""),
    "azure storage": ((), BASE64, 86, "=="),
    "unknown base62": ((), ALNUM, 40, ""),
    "unknown base64": ((), BASE64, 44, ""),
    "unknown url-safe": ((), URL_SAFE, 43, ""),
    "unknown lower": ((), LOWER_DIGITS, 40, ""),
    "unknown prefix": (("acme", "_live_"), ALNUM, 32, ""),
    "jwt": (("ey", "JhbGciOiJIUzI1NiJ9.", "ey", "JzdWIiOiIxMjM0In0."), URL_SAFE, 43, ""),
}
PASSWORDS = (
    "Tr0ub4dor&" + "3x!",
    "hunter2" + "horse",
    "P@ss" + "w0rd-2024",
    "Xk39" + "fQ2zLm",
    "s3cr3t#" + "Value",
    "qwe" + "rty!99",
)


def make(shape: str, seed: int = 0) -> str:
    prefix, alphabet, length, suffix = SHAPES[shape]
    rng = random.Random(f"{shape} {seed}")
    body = "".join(rng.choice(alphabet) for _ in range(length))
    if alphabet is not string.digits and alphabet is not string.ascii_letters:
        body = body[: length // 2] + "7" + body[length // 2 + 1 :]
    return "".join(prefix) + body + suffix


def pem(newline: str = "\n") -> str:
    rng = random.Random(5)
    lines = ["".join(rng.choice(BASE64) for _ in range(64)) for _ in range(12)]
    head = " ".join(("RSA", "PRIVATE", "KEY"))
    return newline.join([f"-----BEGIN {head}-----", *lines, f"-----END {head}-----"])


# Places where a bare key stands.
PLACES = {
    "sentence": "Please use {} for the deployment, thanks.",
    "end of sentence": "The credential you asked for: {}.",
    "path": "cat /srv/data/uploads/{}/config.json",
    "env line": "PATH=/usr/bin\nSERVICE_TOKEN={}\nHOME=/srv",
    "export": "export ACME_API_KEY='{}' && make",
    "json": '{{"api_key": "{}", "region": "eu"}}',
    "escaped json": '{{\\"api_key\\": \\"{}\\", \\"region\\": \\"eu\\"}}',
    "escaped newline": "first\\n{}\\nlast",
    "yaml": "service:\n  token: {}\n  region: eu",
    "header": 'curl -H "Authorization: Bearer {}" https://api.example.org/v1',
    "flag": "deploy --token {} --region eu",
    "flag equals": "deploy --token={} --region eu",
    "query": "GET https://api.example.org/v1?access_token={}&page=2",
    "quoted": "client = Client('{}')",
    "numbered": "     1→key: {}\n     2→region: eu",
    "url user": "git clone https://{}@github.com/acme/app.git",
}
# Places where a password stands: it is known only by its name.
PASSWORD_PLACES = {
    "env": "DB_HOST=db\nDB_PASSWORD={}\nDB_PORT=5432",
    "json": '{{"password": "{}"}}',
    "escaped json": '{{\\"password\\": \\"{}\\"}}',
    "python": 'connect(user="app", password="{}")',
    "yaml": "db:\n  password: {}\n",
    "toml": 'password = "{}"\n',
    "flag": "mysqladmin --password={} status",
    "flag space": "tool login --password {} --verbose",
    "url": "postgres://app:{}@db.example.org:5432/app",
    "speech": "The password for the staging database is {}, do not share it.",
    "speech colon": "Password: {}",
    "netrc": "machine example.org login bob password {}",
    "xml": "<password>{}</password>",
    "curl": "curl -u 'bob:{}' https://example.org/",
    "sql": "ALTER USER app WITH PASSWORD '{}';",
    "kubernetes": "- name: DB_PASSWORD\n  value: {}\n",
    "php": "define('DB_PASSWORD', '{}');",
    "ruby": ':password => "{}"',
}
ENCODINGS = {
    "base64": lambda text: base64.b64encode(text.encode()).decode(),
    "base64 url-safe": lambda text: base64.urlsafe_b64encode(text.encode()).decode().rstrip("="),
    "base64 of an assignment": lambda text: base64.b64encode(f"API_TOKEN={text}".encode()).decode(),
    "percent": lambda text: quote(f"token={text}", safe=""),
    "percent all": lambda text: "".join(f"%{byte:02X}" for byte in text.encode()),
    "json": lambda text: json.dumps(json.dumps({"token": text})),
    "hex": lambda text: text.encode().hex(),
    "base64 twice": lambda text: base64.b64encode(base64.b64encode(text.encode())).decode(),
}
