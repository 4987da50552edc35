"""Names of secrets that are mistyped, in languages that come up seldom, and values that only their shape tells."""

from __future__ import annotations

import pytest

from composer_replication.privacy import Scrubber
from composer_replication.privacy.secret_names import CORRECTIONS, Strength, name_strength

VALUE = "zonne" + "bloem42"
UUID = "7c9e6679-7425-40de-" + "944b-e07fc1f90ae7"
HEX = "6bb4837eb74329105ee4" + "568dda7dc67ed2ca2ad9"


def scrubbed(text: str) -> str:
    return Scrubber().scope().text(text)


@pytest.mark.parametrize(
    "name", ["pasword", "passwrod", "passowrd", "passsword", "psasword", "pssword", "paswd", "pswd"]
)
@pytest.mark.parametrize("form", ["{}: {}", "the {} is {}", "{}={}", 'db.{} = "{}"', '{{"{}": "{}"}}'])
def test_a_mistyped_password_is_one(name: str, form: str) -> None:
    assert VALUE not in scrubbed(form.format(name, VALUE))
    assert VALUE not in scrubbed(form.format(name.upper(), VALUE))


def test_a_slip_means_the_word_it_is_nearest_to_and_no_other_word() -> None:
    strengths = {"password": Strength.PASSWORD, "passwort": Strength.PASSWORD, "secret": Strength.TOKEN}
    for slip, word in CORRECTIONS.items():
        assert name_strength(slip) == name_strength(word) >= strengths.get(word, Strength.TOKEN), slip
        assert name_strength(f"db_{slip}") == name_strength(f"db_{word}"), slip


@pytest.mark.parametrize("name", ["passport", "secretary", "section", "taken", "toe", "passion", "paste", "secure"])
def test_other_words_stay_what_they_are(name: str) -> None:
    assert name not in CORRECTIONS
    assert name_strength(name) == Strength.NONE
    assert scrubbed(f"{name}: {VALUE}") == f"{name}: {VALUE}"


@pytest.mark.parametrize(
    "said",
    [
        "şifrə {} oldu",
        "Şifrəsi: {}",
        "parolu {}",
        "پاس ورڈ {} ہے",
        "нууц \u04af\u0433 нь {}",
        "құпия сөз: {}",
        "ססמה: {}",
        "salasõna: {}",
        "cyfrinair: {}",
        "പാസ്\u200cവേഡ് {}",
        "పాస్\u200cవర్డ్ {}",
        "የይለፍ ቃል {}",
    ],
)
def test_a_password_in_a_language_that_comes_up_seldom(said: str) -> None:
    assert VALUE not in scrubbed(said.format(VALUE))


@pytest.mark.parametrize(
    "form", ["SecretID:     {}", "Secret ID = {}", 'secret_id: "{}"', '"SecretID": "{}"', "the api key is {}"]
)
def test_a_uuid_under_the_name_of_a_secret_goes(form: str) -> None:
    assert UUID not in scrubbed(form.format(UUID))


@pytest.mark.parametrize("form", ["AccessorID: {}", "request id = {}", "the session is {}"])
def test_any_other_uuid_stays(form: str) -> None:
    assert scrubbed(form.format(UUID)) == form.format(UUID)


@pytest.mark.parametrize(
    "value",
    [
        f"*{HEX.upper()}",
        "$7$101$Yk3w0f0kYwQd3b1c$" + "0Z2b1yF5b0c3kLw8fR7xYQ==",
        "SCRAM-SHA-256$4096:aGVsbG9oZWxsbw==$" + "c3RvcmVka2V5c3RvcmVka2V5:c2VydmVya2V5c2VydmVy",
        "7HJQW-KX4TM-R2D9V-" + "8BNCY-PPM63",
        "482913-118374-559201-330184-" + "772615-004913-610283-559017",
    ],
)
def test_hashes_of_passwords_and_keys_in_groups_need_no_name(value: str) -> None:
    assert value[4:] not in scrubbed(f"it prints\n{value}\nand ends")


@pytest.mark.parametrize("text", [f"* {HEX} Merge", f"commit {HEX}", "2024-01-15-10-22-31-482913", f"*{HEX}"])
def test_what_looks_like_them_stays(text: str) -> None:
    assert scrubbed(text) == text
