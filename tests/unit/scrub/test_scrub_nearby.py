"""Values known by their own shape near a word for a password, and lists that only their heading explains."""

from __future__ import annotations

import pytest

from composer_replication.privacy import Scrubber

FOUND = [
    ("mount -o username=svc,password=Amber_4417_maple,uid=1000", "Amber_4417_maple"),
    ("Heslo k databázi je Amber2004!k, spusť migraci.", "Amber2004!k"),
    ("Nenosiri la seva ni Amber1967#d, ingia.", "Amber1967#d"),
    ("$ bw get password erp\nmaple.otter771?\n", "maple.otter771?"),
    ('child.expect("Password:")\nchild.sendline("Maple#230Otter")\n', "Maple#230Otter"),
    ('$db = new mysqli("localhost", "forum", "Maple-636-Otter#", "forum");', "Maple-636-Otter#"),
    ("staging: ada@example.org / Maple!882Otter\n", "Maple!882Otter"),
    ("Enter passphrase for /dev/sdb1: sieben Raben fliegen weit\nok\n", "sieben Raben fliegen weit"),
    ("gpg --passphrase 'comet marmot amber maple' -d a.gpg", "comet marmot amber maple"),
    ("# recovery codes (keep safe)\n9jqz7-pj3ca\nt9kxt-qh5sy\n", "9jqz7-pj3ca"),
    ("My backup codes:\n1. 4471 9083\n2. 8820 1376\n", "8820 1376"),
    (" id | login | password | x\n----+-------+----------+---\n 17 | lea | Amber6776Maple | t\n", "Amber6776Maple"),
]
STAYS = [
    "the login test passes in 10*time.Second on host2.example.org",
    "pass: tests/unit/test_login_v2.py::test_auth_2024 PASSED",
    "index 4c826843971e8c196055652a1555f06fe8a61aad..46ac7ede364ea0feb7486e4476ca5630c2be48be 100644",
    "Key fingerprint = A4285295FC7B1A81600062A9605C66F00D6C9793",
    'const HEADER_TOKEN = "X-Auth-Token";',
    '<TextField type="password" value={apiKey} />',
    "docker login -u ci --password-stdin registry.corp < /run/secrets/reg",
    "KEY = 000102030405060708090a0b0c0d0e0f\n",
]


@pytest.mark.parametrize(("text", "secret"), FOUND)
def test_a_value_goes_by_its_shape_and_what_is_left_is_not_found_again(text, secret):
    clean = Scrubber().scope().text(text)
    assert secret not in clean
    assert Scrubber().scope().text(clean) == clean


@pytest.mark.parametrize("text", STAYS)
def test_what_only_stands_near_a_word_for_a_password_stays(text):
    assert Scrubber().scope().text(text) == text


@pytest.mark.parametrize("text", ["Hi.\nGH_TOKEN=3Dghp_{}=\n{}\nbye\n"], ids=["quoted-printable"])
@pytest.mark.parametrize("column", [4, 12, 24, 31])
def test_a_value_that_a_mail_has_broken_is_found_whole(text, column):
    secret = "a1B2" * 9
    clean = Scrubber().scope().text(text.format(secret[:column], secret[column:]))
    assert not any(secret[at : at + 10] in clean for at in range(len(secret) - 9))
