"""Generated passwords on lines of data: whatever signs a generator draws, the value goes as a whole.

The generators are written from the documentation of each product; they know nothing of the rules that they test.
"""

from __future__ import annotations

import csv
import io
import json
import os
import random
import string
from xml.sax.saxutils import escape

import pytest

from composer_replication.privacy import Scrubber

IS_FULL = os.environ.get("CRF_TEST_PROFILE") == "full"
NUM_PASSWORDS = 200 if IS_FULL else 40
_AWS = string.ascii_letters + string.digits + "!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~"
_TERRAFORM = string.ascii_letters + string.digits + "!@#$%&*()-_=+[]{}<>:?"
_BITWARDEN = string.ascii_letters + string.digits + "!@#$%^&*"


def draw(alphabet: str, length: int, rng: random.Random) -> str:
    """A password with a letter of each case and a digit, as all four generators promise."""
    while True:
        value = "".join(rng.choice(alphabet) for _ in range(length))
        if any(map(str.islower, value)) and any(map(str.isupper, value)) and any(map(str.isdigit, value)):
            return value


GENERATORS = {
    "aws": lambda rng: draw(_AWS, 32, rng),  # get-random-password, its defaults
    "terraform": lambda rng: draw(_TERRAFORM, 16, rng),  # random_password, as its page shows it
    "bitwarden": lambda rng: draw(_BITWARDEN, 14, rng),
    "alphanumeric": lambda rng: draw(string.ascii_letters + string.digits, 16, rng),
}


def csv_row(password: str) -> str:
    buffer = io.StringIO()
    csv.writer(buffer).writerows([["host", "user", "password", "port"], ["db.internal", "shop", password, "5432"]])
    return buffer.getvalue()


FORMATS = {
    "yaml": lambda password: f"database:\n  host: db.internal\n  user: shop\n  password: {password}\n  pool: 5\n",
    "yaml quoted": lambda password: f"database:\n  user: shop\n  password: {json.dumps(password)}\n  pool: 5\n",
    "ini": lambda password: f"[database]\nhost = db.internal\nuser = shop\npassword = {password}\nport = 5432\n",
    "env": lambda password: f"DB_HOST=db.internal\nDB_USER=shop\nDB_PASSWORD={password}\nDB_PORT=5432\n",
    "properties": lambda password: f"spring.datasource.username=shop\nspring.datasource.password={password}\nx.y=1\n",
    "json": lambda password: json.dumps({"host": "db.internal", "user": "shop", "password": password}, indent=2),
    "toml": lambda password: f'[database]\nuser = "shop"\npassword = {json.dumps(password)}\npool = 5\n',
    "xml": lambda password: f"<db>\n  <user>shop</user>\n  <password>{escape(password)}</password>\n</db>\n",
    "csv": csv_row,
    "log": lambda password: (
        f"2026-03-01 10:00:00 INFO db.pool connect host=db.internal user=shop password={password} pool=5\n"
    ),
}
_ESCAPED = {"json", "toml", "yaml quoted"}


def pieces_left(text: str, password: str, file_format: str) -> bool:
    """Whether half of a password or more is still in a text, as its format writes it."""
    written = (
        escape(password) if file_format == "xml" else password.replace('"', '""') if file_format == "csv" else password
    )
    written = json.dumps(password)[1:-1] if file_format in _ESCAPED else written
    length = len(written) // 2
    return any(written[start : start + length] in text for start in range(len(written) - length + 1))


@pytest.mark.parametrize("generator", GENERATORS)
def test_generated_passwords_on_lines_of_data(generator):
    rng = random.Random(f"data lines {generator}")
    passwords = [GENERATORS[generator](rng) for _ in range(NUM_PASSWORDS)]
    left = {
        name: sum(pieces_left(Scrubber().scope().text(write(password)), password, name) for password in passwords)
        for name, write in FORMATS.items()
    }
    print(f"{generator}, {NUM_PASSWORDS} passwords (make test-full: 200), left by format: {left}")
    assert sum(left.values()) <= 0.02 * NUM_PASSWORDS * len(FORMATS), left
