"""What lock files, listings, files in base64, translations and documentation hold stays as it is."""

from __future__ import annotations

import base64
import hashlib

import pytest

from composer_replication.privacy import Scrubber

SHA256 = hashlib.sha256(b"a").hexdigest()
SHA1 = hashlib.sha1(b"a").hexdigest()
OTHER = hashlib.sha1(b"b").hexdigest()
FILE = base64.encodebytes(b"PK\x03\x04" + b"".join(hashlib.sha512(bytes([n])).digest() for n in range(6))).decode()
TEXTS = {
    "a digest alone": SHA256,
    "a log of commits": f"{SHA1} fix token refresh\n{OTHER} add password reset form\n",
    "yarn": f'resolved "https://registry.yarnpkg.com/csrf-token/-/csrf-token-2.0.1.tgz#{SHA1}"',
    "deno": f'{{"https://deno.land/std@0.224.0/assert/mod.ts":"{SHA256}"}}',
    "mix": f'"jose": {{:hex, :jose, "1.11.10", "{SHA256}", [:mix], [], "hexpm", "{SHA256}"}},',
    "pods": f"SPEC CHECKSUMS:\n  KeychainAccess: {SHA1}\n  SAMKeychain: {OTHER}\n",
    "terraform": f'hashes = [\n    "zh:{SHA256}",\n  ]',
    "md5 and sha1": f"MD5 (a.iso) = {SHA256[:32]}\nSHA1 (a.iso) = {SHA1}",
    "a file in base64": f"$ base64 out.zip\n{FILE}",
    "a fingerprint": "ED25519 key fingerprint is SHA256:FxfKZEZn1XGiJ3zLzXJ0Wsn92KZcT0M27JPh0KIiHcY.",
    "a translation": '{"password": "Wachtwoord", "forgot": "Wachtwoord vergeten?"}',
    "a message of a shell": "POSTGRES_PASSWORD: ${POSTGRES_PASSWORD:?required}",
    "a module": 'key_salt = "django.contrib.auth.tokens.PasswordResetTokenGenerator"',
    "an example": "AWS_ACCESS_KEY_ID=AKIAIOSFODNN7" + "EXAMPLE",
    "a mask": "export GITHUB_TOKEN=ghp_" + "x" * 36,
    "a call": '{"tool_use_id":"toolu_bdrk_01Fa6VPem1LORaSmwT1Ra2IX"}',
    "a name of a compiler": "_ZN4core3fmt9Formatter9write_fmt17h1c2d3e4f5a6b7c8dE",
    "code below code": "url = configure(model, api_key=api_key)\n            else:\n                pass\n",
}


@pytest.mark.parametrize("name", TEXTS)
def test_it_stays(name):
    assert Scrubber().scope().text(TEXTS[name]) == TEXTS[name]
