"""Texts that look like secrets and are none: a scrubber that changes one of them spoils the training data."""

from __future__ import annotations

import base64
import string
from collections.abc import Iterator
from uuid import UUID

from data.planted_secrets_types import BASE64, Maker, Negative

BASE58 = "".join(c for c in string.ascii_letters + string.digits if c not in "0OIl")
# The first bytes of every PNG of one pixel: signature, IHDR, size, depth, checksum.
PNG_HEAD = bytes.fromhex("89504e470d0a1a0a0000000d4948445200000001000000010806000000" + "1f15c489")

HASHES = (
    ("commit {h40}\nAuthor: Ada <ada@shop.test>\nDate:   Mon Mar 2 10:00:00 2026 +0100\n", "git log"),
    ("$ git rev-parse HEAD\n{h40}\n", "git rev-parse"),
    ("From {h40} Mon Sep 17 00:00:00 2001\nSubject: [PATCH] Fix login\n", "git format-patch"),
    ("diff --git a/a.py b/a.py\nindex {h7}..{h7} 100644\n--- a/a.py\n+++ b/a.py\n", "blob ids of a diff"),
    ("$ git ls-tree HEAD\n100644 blob {h40}\tREADME.md\n040000 tree {h40}\tsrc\n", "git ls-tree"),
    ("Merge: {h7} {h7}\nReverts commit {h40}.\n", "git merge and revert"),
    ("* {h7} (HEAD -> main, origin/main) Rotate the password column\n* {h7} Add tokens table\n", "git log --oneline"),
    ("https://github.com/ada/shop/blob/{h40}/src/auth/token.py#L10-L20", "GitHub permalink"),
    ("      - uses: actions/checkout@{h40} # v4.2.2\n", "pinned GitHub action"),
    ("rev = \"{h40}\"\ngit = 'https://git.example.com/shop'\n", "pinned git dependency"),
    (
        '"integrity": "sha512-{b86}==",\n"resolved": "https://registry.npmjs.org/left-pad/-/left-pad-1.3.0.tgz"',
        "npm lock",
    ),
    ('  resolved "https://registry.yarnpkg.com/ms/-/ms-2.1.3.tgz#{h40}"\n  integrity sha1-{b27}=\n', "yarn lock"),
    ('name = "serde"\nversion = "1.0.219"\nchecksum = "{h64}"\n', "Cargo.lock"),
    ("golang.org/x/text v0.21.0 h1:{b43}=\ngolang.org/x/text v0.21.0/go.mod h1:{b43}=\n", "go.sum"),
    ("torch==2.8.0 \\\n    --hash=sha256:{h64} \\\n    --hash=sha256:{h64}\n", "pip hashes"),
    ('{ url = "https://files.pythonhosted.org/packages/six.whl", hash = "sha256:{h64}", size = 11053 }', "uv.lock"),
    ("FROM python:3.12-slim@sha256:{h64}\nRUN pip install shop\n", "image digest"),
    ("Successfully built {h12}\nDigest: sha256:{h64}\nStatus: Image is up to date\n", "docker output"),
    ("$ sha256sum uv.lock\n{h64}  uv.lock\n", "sha256sum"),
    ("$ md5sum data.csv\n{h32}  data.csv\n", "md5sum"),
    ("SHA256 (model.safetensors) = {h64}\n", "shasum, BSD form"),
    ('<script src="/a.js" integrity="sha384-{b64}" crossorigin="anonymous"></script>', "subresource integrity"),
    ('< HTTP/1.1 304 Not Modified\n< ETag: "{h32}"\n', "ETag"),
    ("down_revision = '{h12}'\nrevision = '{h12}'\n", "alembic revisions"),
    ("/home/ada/.cache/huggingface/hub/models--Qwen--Qwen3-0.6B/snapshots/{h40}/config.json", "model snapshot"),
    (".git/objects/{h2}/{h38}", "git object"),
    ("traceparent: 00-{h32}-{h16}-01\n", "W3C trace context"),
)

IDS = (
    ('{"type": "tool_use", "id": "toolu_01{a22}", "name": "Bash"}', "tool_use id"),
    ('{"type": "tool_result", "tool_use_id": "toolu_01{a22}", "content": "ok"}', "tool_result id"),
    ('{"message": {"id": "msg_01{a22}", "model": "claude-opus-4-7-20260101"}}', "message id and model id"),
    ('"requestId": "req_011{a21}"', "request id"),
    ('{"id": "call_{n24}", "type": "function", "function": {"name": "shell"}}', "call id"),
    ('{"type": "function_call", "id": "fc_{h48}", "call_id": "call_{n24}"}', "Responses API ids"),
    ('"id": "chatcmpl-{n29}", "object": "chat.completion"', "completion id"),
    ('"uuid":"{u}","parentUuid":"{u}","isSidechain":false', "record uuids"),
    ('"sessionId":"{u}","version":"2.1.39","gitBranch":"main"', "session id of a log record"),
    ("/home/ada/.claude/projects/-home-ada-shop/{u}.jsonl", "session file"),
    ("urn:uuid:{u}", "URN"),
    ("correlation id {u}, span {h16}", "correlation id"),
    ("subnet-{h17} in vpc-{h17}, instance i-{h17}", "AWS resource ids"),
    ("arn:aws:secretsmanager:eu-north-1:123456789012:secret:shop/db-AbCdEf", "ARN that names a secret"),
    ("fe80::1ff:fe23:4567:890a%eth0 and 2001:0db8:85a3:0000:0000:8a2e:0370:7334", "IPv6"),
    ("link/ether 02:42:ac:11:00:02 brd ff:ff:ff:ff:ff:ff", "MAC addresses"),
    ("color: #1a2b3c; background: #ffeedd80; border: 1px solid rgba(12, 34, 56, 0.5);", "CSS colours"),
    ("shop-2.14.0rc1.post3+g{h7}.d20260314-cp312-cp312-manylinux_2_28_x86_64.whl", "version string"),
    ("models: gpt-5.2-codex-2026-01-15, claude-haiku-4-5-20251001, Qwen/Qwen3-Coder-30B-A3B-Instruct", "model ids"),
    ("static/js/main.{h8}.chunk.js  142.3 kB\nstatic/css/main.{h8}.css  8.1 kB\n", "bundler output"),
    ("__pycache__/test_tokens.cpython-312-pytest-8.4.1.pyc", "cache file"),
    ("0x{h16} in torch::autograd::Engine::evaluate_function () from libtorch_cpu.so", "address in a backtrace"),
    ("<shop.auth.TokenStore object at 0x7f{h10}>", "repr with an address"),
    ("1772000000.123456 1772000000123 2026-03-14T15:09:26.535897+00:00", "timestamps"),
)

NAMES = (
    ("token_count=5, max_tokens=4096, tokens_per_second=118.4", "counts of tokens"),
    ('"usage": {"input_tokens": 12345, "cache_creation_input_tokens": 30211, "output_tokens": 88}', "usage"),
    ("def login(user: str, password: str, token: str | None = None) -> Session:", "annotated parameters"),
    ("class Settings(BaseSettings):\n    password: str\n    api_key: SecretStr\n    secret: bytes = b''\n", "fields"),
    ('password = os.environ["DB_PASSWORD"]', "read from the environment"),
    ('api_key=os.getenv("OPENAI_API_KEY")', "read from the environment"),
    ("const token = process.env.GITHUB_TOKEN;", "read from the environment"),
    ("password = getpass.getpass('Password: ')", "asked for"),
    ("token = request.headers.get('Authorization')", "read from a request"),
    ("eos_token = tokenizer.eos_token\npad_token_id: 151643", "tokens of a tokenizer"),
    ('"bos_token": "<|begin_of_text|>", "unk_token": null, "tokenizer_class": "Qwen2Tokenizer"', "tokenizer config"),
    ("password=None, secret=False, token=''", "empty values"),
    ("PASSWORD_HASHERS = ['django.contrib.auth.hashers.Argon2PasswordHasher']", "names of classes"),
    ("primary_key=True, foreign_key='users.id', sort_key=\"created_at\"", "keys of a database"),
    ('cache_key = f"{user.id}:{page}"', "cache key"),
    ('<input type="password" name="password" autocomplete=\'current-password\'>', "HTML form"),
    ("{% csrf_token %}", "template tag"),
    ('"token_type": "bearer", "expires_in": 3600', "OAuth answer without its token"),
    (
        "env:\n- name: DB_PASSWORD\n  valueFrom:\n    secretKeyRef:\n      name: db\n      key: password\n",
        "k8s reference",
    ),
    ("KeyError: 'password'\n  File \"/srv/shop/auth/password_reset.py\", line 31, in reset_password\n", "traceback"),
    ("tests/unit/auth/test_tokens.py::test_a_password_is_checked[postgres-argon2-True-0] PASSED [ 42%]", "pytest id"),
    ("test_secret_is_not_logged_when_the_authentication_backend_is_unavailable", "long test name"),
    ("AbstractSingletonProxyFactoryBeanAuthenticationTokenProvider", "long class name"),
    ("composer_replication.trainer.objective.alignment.shift_masks_to_predicting_rows", "dotted name"),
    ("src/main/java/org/example/shop/authentication/password/PasswordEncoderConfiguration.java", "long path"),
    ("node_modules/.pnpm/@babel+helper-create-class-features-plugin@7.25.9/node_modules/@babel/core", "pnpm path"),
    ("The password field is required. Password must be at least 12 characters.", "prose about passwords"),
    ("Fix: passwordless sudo, token refresh and secret rotation (see docs/secrets.md)", "prose"),
    ("docker login --username ada --password-stdin < ~/.config/registry", "flag without a value"),
    ("tokenize(text, add_special_tokens=False, return_tensors='pt')", "call with token in a name"),
    ('!function(e,t){"object"==typeof exports?t(exports):e.shopTokens={}}(this,function(_0x3f2a1b){', "minified JS"),
    (".Button_root__3xK9a .TokenInput_passwordMask__Zq1Lr { display: none }", "CSS module names"),
    ("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/", "the base64 alphabet"),
    ("=" * 64 + "\n" + "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa\n", "repeated characters"),
    ("ssh_key_path=/home/ada/.ssh/id_ed25519", "path of a key"),
    ("api_key_env: OPENAI_API_KEY\ntoken_file: /run/secrets/github_token\n", "where a secret is, not what it is"),
)

PLACEHOLDERS = (
    ("OPENAI_API_KEY=YOUR_API_KEY", "placeholder"),
    ("api_key: <API_KEY>", "placeholder"),
    ('client = Client(api_key="<your-api-key-here>")', "placeholder"),
    ("export GITHUB_TOKEN=$(gh auth token)", "command substitution"),
    ("Authorization: Bearer $TOKEN", "shell variable"),
    ("Authorization: Bearer <token>", "placeholder"),
    ('headers = {"Authorization": f"Bearer {token}"}', "format field"),
    ("password: ${DB_PASSWORD}", "interpolation"),
    ("token: ${{ secrets.GITHUB_TOKEN }}", "GitHub Actions expression"),
    ("password: {{ .Values.db.password }}", "helm template"),
    ("password=********", "already masked"),
    ("API_KEY=[REDACTED]", "already redacted"),
    ("sk-... and ghp_... are rejected by the pre-commit hook", "prefixes in prose"),
    ("postgresql://USER:PASSWORD@HOST:5432/DBNAME", "URL of placeholders"),
    ("https://api.example.com/v1/tokens?limit=10&cursor=next", "example URL"),
    ("curl https://www.example.com/login -d username=USERNAME -d password=PASSWORD", "placeholders in a command"),
    ("mongodb+srv://<username>:<password>@cluster0.example.com/test", "placeholders of a vendor's page"),
    ('db_password = var.db_password\nsecret_string = jsonencode(local.secrets["db"])\n', "terraform references"),
    ("https://user@example.com:8443/path?key=value#section", "URL with a user and no password"),
    ("git@github.com:ada/shop.git", "ssh remote"),
)

ENVIRONMENTS = (
    ("DEBUG is true on port 8080, branch main", {"DEBUG": "true", "PORT": "8080", "BRANCH": "main"}, "short values"),
    (
        "cd /home/ada/shop && /bin/bash ./run.sh  # LANG is en_US.UTF-8",
        {"HOME": "/home/ada", "PWD": "/home/ada/shop", "SHELL": "/bin/bash", "LANG": "en_US.UTF-8", "USER": "ada"},
        "values of variables that every shell has",
    ),
)


def negative_cases(maker: Maker) -> Iterator[Negative]:
    for template, why in HASHES + IDS:
        yield Negative(_filled(maker, template), why)
    for text, why in NAMES + PLACEHOLDERS:
        yield Negative(text, why)
    for text, env, why in ENVIRONMENTS:
        yield Negative(text, why, env)
    head = base64.b64encode(PNG_HEAD).decode()
    yield Negative(f"![dot](data:image/png;base64,{head})", "first bytes of an image in a data URL")
    yield Negative(f'{{"type": "base64", "media_type": "image/png", "data": "{head[:24]}..."}}', "cut image block")


def _filled(maker: Maker, template: str) -> str:
    """Each `{h40}` replaced by 40 hex digits of its own; b base64, a base58, n letters and digits, u a UUID."""
    makers = {"h": maker.hex, "n": maker.alnum}
    alphabets = {"b": BASE64, "a": BASE58}
    parts = template.split("{")
    filled = parts[0]
    for part in parts[1:]:
        field, closed, rest = part.partition("}")
        if closed and field == "u":
            filled += str(UUID(int=maker.rng.getrandbits(128), version=4)) + rest
        elif closed and field[:1] in makers and field[1:].isdigit():
            filled += makers[field[0]](int(field[1:])) + rest
        elif closed and field[:1] in alphabets and field[1:].isdigit():
            filled += maker.of(alphabets[field[0]], int(field[1:])) + rest
        else:
            filled += "{" + part
    return filled
