"""Beside a secret's name a value goes unless its words are known; some values tell by themselves what they are."""

from __future__ import annotations

from pathlib import Path

import pytest

from composer_replication.privacy import Scrubber
from composer_replication.privacy import secret_names as harmless

HEX = b"Knaeckebrot_Rund_11".hex()
ENTITIES = "".join(f"&#{ord(letter)};" for letter in "Maple77~Otter")
FOUND = [
    ("mqtt:\n  user: sensor\n  password: zwetschgenkuchen\n  port: 1883\n", "zwetschgenkuchen"),
    ("the ftp password is zwetschgenkuchen and the user is web", "zwetschgenkuchen"),
    ("log in as admin, password zwetschgenkuchen, and download the report", "zwetschgenkuchen"),
    ("Le mot de passe du wifi c'est papillonrougeatre\nmerci", "papillonrougeatre"),
    ("Das Passwort lautet BunterVogelkäfig.", "BunterVogelkäfig"),
    ("Passwort:\n\n    zwetschgenkuchen\n\nBitte danach löschen.", "zwetschgenkuchen"),
    ("KENNWORT_FTP=Fliederbusch22\n", "Fliederbusch22"),
    ("TLSPSKValue=9f3a77c1e05b42d8a6\n", "9f3a77c1e05b42d8a6"),
    ("password: 7741209935\n", "7741209935"),
    ('WIFI_PASSWORD="zwei kleine Zwetschgen im Laubhaufen"', "zwei kleine Zwetschgen im Laubhaufen"),
    ('conn = connect("10.0.0.2", "ola", "Elgkalv_paa_myr4")', "Elgkalv_paa_myr4"),
    ("HOST       USER   PASSWORD\n10.0.0.1   admin  Sperrholz_18mm\n", "Sperrholz_18mm"),
    ("rotated it just now. old: Knaeckebrot_Rund_11", "Knaeckebrot_Rund_11"),
    (f"echo {HEX} | xxd -r -p", HEX),
    (f"<p>password: <code>{ENTITIES}</code></p>", ENTITIES),
    ("пароль: ЗимнийСад2044 и посмотри", "ЗимнийСад2044"),  # noqa: RUF001
]
STAYS = [
    "the password is required and must have twelve characters",
    "Le mot de passe est obligatoire et doit contenir douze caractères.",
    'tr:\n  password: Şifre\n  forgot_password: "Şifrenizi mi unuttunuz?"\n',
    "class Login:\n    password: SecretStr\n    token: AccessTokenProvider\n",
    "self.password = password\nself.scopes = scope.split()\n",
    "'password_confirmation' => 'required|same:password',",
    "db_password: ENC[AES256_GCM,data:ORVEzN9Ix3Mhkybz3DqK7Q==,iv:39pLjKsOo9VdnI5xmD5Q,tag:gb/H5G==,type:str]",
    "$ANSIBLE_VAULT;1.1;AES256\n6eaab6545725aab00630548ceeb824eee0db9c1378fd9454f11d2a4daf333d23d7c4dd767fa26bd8\n",
    "check_password (pw=0x7fffffffe1c0) at auth.c:14",
    "import JinaEmbeddingsV3Layer, AudioFlamingo3Output\n    pass\n",
    "see GHSA-f3q8-7vw3-69v4, a bypass of the password check",
    'etag: W/"5c1-cd-Dv50X91OvG-mkdwjNUy91ve4"',
]


@pytest.mark.parametrize(("text", "secret"), FOUND)
def test_a_value_that_nobody_knows_goes_and_is_not_found_again(text, secret):
    clean = Scrubber().scope().text(text)
    assert secret not in clean
    assert Scrubber().scope().text(clean) == clean


@pytest.mark.parametrize("text", STAYS)
def test_words_of_code_and_messages_stay(text):
    assert Scrubber().scope().text(text) == text


@pytest.mark.parametrize("column", range(2, 38, 3))
def test_no_part_of_a_value_stays_beside_a_line_end(column):
    secret = "Xrg0AKGM4LlI70USOhA5HV7EBGKn+VgGXH8NIzkq"
    text = f"[default]\naws_secret_access_key = {secret[:column]}\n{secret[column:]}\nregion = eu-central-1\n"
    clean = Scrubber().scope().text(text)
    assert not any(secret[at : at + 10] in clean for at in range(len(secret) - 9))
    assert clean.endswith("region = eu-central-1\n")


def test_the_words_are_stems_in_order_as_many_as_the_first_line_says():
    head, *lines = Path(harmless.__file__).with_name("harmless_words.txt").read_text(encoding="utf-8").splitlines()
    words = " ".join(lines).split()
    assert words == sorted(set(words))
    assert head.startswith(f"# {len(words)} stems")
    assert {harmless._stem(word) for word in ("required", "expired", "obligatoire", "password")} <= set(words)


@pytest.mark.parametrize(
    ("value", "uncommon"),
    [("required", False), ("userName", False), ("db_password", False), ("zwetschge", True), ("db_zwetschge", True)],
)
def test_a_value_is_uncommon_when_one_of_its_words_is(value, uncommon):
    assert harmless.is_uncommon(value) is uncommon
