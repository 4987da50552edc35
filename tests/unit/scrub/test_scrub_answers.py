"""Secrets that one message asks for and the next one gives, through the whole scrub of a conversation."""

from __future__ import annotations

import pytest

from composer_replication.ingestion.gate_view import arguments_as_data
from composer_replication.ingestion.last_gate import LastGate
from composer_replication.ingestion.scrubbing import ScrubSettings, scrub_conversation
from composer_replication.ingestion.states import states
from composer_replication.privacy import Scrubber
from composer_replication.types import Conversation, Provenance, ToolCall, ToolResult, Turn

WHERE = Provenance(file="log.jsonl", lines=(1,))


def turn(role, text="", *, number, **fields):
    origin = {"user": "human", "assistant": "model", "tool": "tool"}[role]
    return Turn(id=f"t{number}", role=role, origin=origin, text=text, provenance=WHERE, **fields)


def scrubbed(*turns):
    return scrub_conversation(Conversation(id="c", format="test", turns=turns), Scrubber().scope())


def talk(*texts):
    """Return the scrubbed texts of a conversation in which assistant and user take turns."""
    roles = ("assistant", "user")
    turns = [turn(roles[number % 2], text, number=number) for number, text in enumerate(texts)]
    return [each_turn.text for each_turn in scrubbed(*turns).turns]


def printed(command, output):
    """Return the scrubbed result of a command."""
    call = ToolCall(id="call", name="Bash", arguments={"command": command})
    result = ToolResult(call_id="call", text=output, is_error=False)
    conversation = scrubbed(
        turn("assistant", number=1, calls=(call,)), turn("tool", number=2, results=(result,)), turn("user", number=3)
    )
    return conversation.turns[1].results[0].text


@pytest.mark.parametrize(
    ("question", "answer", "secret"),
    [
        ("Which password does the staging database have?", "kestrel-otter-4821", "kestrel-otter-4821"),
        ("What's the root password of db.internal?", "it should be Zwetschge77! as on the old box", "Zwetschge77!"),
        ("Wie lautet das Passwort für den NAS?", "Nordlicht&Krabbe77", "Nordlicht&Krabbe77"),
        ("Jakie jest hasło do pliku release.jks?", "KotNaPlocie1987, alias to upload", "KotNaPlocie1987"),
        ("ステージング環境のパスワードを教えてください。", "sakura-Densha#731 です", "sakura-Densha#731"),
        ("请把预共享密钥发给我。", "对端发来的是 NjqgtxoxS1eFzaVqOCFQUy", "NjqgtxoxS1eFzaVqOCFQUy"),
        ("Please paste the API key.", "f3a9c1d27b604e58a1c2", "f3a9c1d27b604e58a1c2"),
        ("GitHub asks for a second factor. Do you have a backup code?", "yes: ba0a3-7d17d", "ba0a3-7d17d"),
        (
            "I need the 12 recovery words in order.",
            "eager orbit olive ketchup cactus jungle walnut ocean copper puzzle harvest swallow",
            "olive ketchup cactus",
        ),
    ],
)
def test_a_short_answer_to_a_request_is_the_secret(question, answer, secret):
    asked, answered = talk(question, answer)
    assert asked == question
    assert secret not in answered
    assert "<PASSWORD_1>" in answered


@pytest.mark.parametrize(
    ("question", "answer"),
    [
        ("What is the database password?", "I don't know, ask Maria"),
        ("What is the database password?", "it is in the vault, under prod/db"),
        ("What is the database password?", "use port 5432 on db-01.internal"),
        ("Which token did you set?", "the one from .env.example"),
        ("Do you want me to rename the password field?", "yes, to passphrase_hint"),
        ("Where is the secret kept?", "src/config/settings.py"),
        ("How many tokens did the prompt use?", "4821"),
    ],
)
def test_an_answer_without_a_value_stays(question, answer):
    assert talk(question, answer) == [question, answer]


def test_an_answer_is_known_in_all_that_follows():
    texts = talk("Which password?", "kestrel-otter-4821", "I ran it with kestrel-otter-4821.", "fine")
    assert texts[1:3] == ["<PASSWORD_1>", "I ran it with <PASSWORD_1>."]


@pytest.mark.parametrize(
    ("command", "output"),
    [
        ("terraform -chdir=infra output -raw grafana_db_password", "flds{5JnAdCus=56>6Wb+:m5\n"),
        ("pwgen -sy 24 2", ":zh=747w791+:|Xt'`]!XmD*\nk[9}Q(w-T,2xB8$m^Lq)A5zE\n"),
        ("cat /run/secrets/db", "Kestrel.2291-otter"),
        ("openssl rand -hex 24", "9f2c7d1ab04e8836c5d19e07f4a2b6688d3e5c1f0a7b9d24"),
    ],
)
def test_what_a_command_prints_that_names_a_secret_goes(command, output):
    for line in output.split():
        assert line not in printed(command, output)


@pytest.mark.parametrize(
    ("command", "output"),
    [
        ("git rev-parse HEAD:token.py", "9f2c7d1ab04e8836c5d19e07f4a2b6688d3e5c1f"),
        ("grep -c password app.log", "214"),
        ("ls secrets", "staging-2024\nproduction-2024"),
        ("python -c 'print(tokenizer.token_type)'", "wordpiece"),
        ("cat password_policy.md", "Passwords have at least 12 characters."),
    ],
)
def test_other_output_stays(command, output):
    assert printed(command, output) == output


def test_a_second_scrub_changes_nothing():
    texts = ("Enter the password:", "kestrel-otter-4821", "Password of the second box?", "Zwetschge77! or so")
    once = talk(*texts)
    assert talk(*once) == once


def test_arguments_written_as_text_are_scrubbed_as_the_data_they_mean():
    """The outgoing check reads them as data, where a name that is written twice has two values."""
    raw = '{"command": "login", "password": "zwei drei", "password": "rot gr\\u00fcn"}'
    call = ToolCall(id="a", name="Do", arguments={"command": "login", "password": "rot grün"}, raw_arguments=raw)
    turns = (turn("user", "go", number=0), turn("assistant", number=1, calls=(call,)), turn("user", "ok", number=2))
    scrubber = ScrubSettings().family_scrubber()
    clean = scrubber.scrub(
        Conversation(id="c", format="test", turns=(*turns, turn("assistant", "done", number=3))), scrubber.scope()
    )
    written = clean.turns[1].calls[0].raw_arguments
    assert written is not None
    assert "drei" not in written
    assert "rot" not in written
    assert arguments_as_data(written)["command"] == "login"
    gate, (_, (messages, _)) = LastGate({}), states(clean)
    assert [gate.look(message, "request") for message in messages] == [None] * len(messages)
