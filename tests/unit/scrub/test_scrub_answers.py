"""Secrets that one message asks for and the next one gives, through the whole scrub of a conversation."""

from __future__ import annotations

import pytest

from composer_replication.ingestion.scrubbing import ScrubSettings, scrub_conversation
from composer_replication.ingestion.states import states
from composer_replication.privacy import Scrubber
from composer_replication.privacy.answers import answer_spans, chat_spans, printed_spans
from composer_replication.privacy.outgoing import LastGate, arguments_as_data
from composer_replication.types import Conversation, Provenance, ToolCall, ToolResult, Turn
from cpu_time import least_cpu_seconds

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
    return [message.text for message in scrubbed(*turns).turns]


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
    scrubber = ScrubSettings().session_scrubber()
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


@pytest.mark.parametrize(
    "raw",
    [
        '{"command": "export DB_PASSWORD=hK29xQpLm4Zt7v; ls", "x": ',  # cut short
        "*** Begin Patch\n+DB_PASSWORD=hK29xQpLm4Zt7v\n",
        "{'password': 'hK29xQpLm4Zt7v'}",
    ],
)
def test_arguments_that_are_no_json_keep_their_form(raw):
    call = ToolCall(id="a", name="Do", arguments={}, raw_arguments=raw)
    written = scrubbed(turn("assistant", number=1, calls=(call,))).turns[0].calls[0].raw_arguments
    assert written == raw.replace("hK29xQpLm4Zt7v", "<PASSWORD_1>")


def test_arguments_keep_their_layout_and_names_that_are_written_twice():
    raw = '{"a":1.50,"a":2,"password":"hK29xQpLm4Zt7v\\/x"}'
    call = ToolCall(id="a", name="Do", arguments={}, raw_arguments=raw)
    written = scrubbed(turn("assistant", number=1, calls=(call,))).turns[0].calls[0].raw_arguments
    assert written == '{"a":1.50,"a":2,"password":"<PASSWORD_1>"}'


ASKED = turn("assistant", "Which password?", number=0)


def after_answer(answer, *turns):
    return scrubbed(ASKED, turn("user", answer, number=1), *turns).turns[2:]


def test_an_answer_goes_from_thoughts_results_and_names_of_fields():
    call = ToolCall(id="a", name="Do", arguments={"users": {"kestrel-otter-4821": "ada"}})
    result = ToolResult(call_id="a", text="ok kestrel-otter-4821", is_error=False)
    later = after_answer(
        "kestrel-otter-4821",
        turn("assistant", number=2, thinking="so it is kestrel-otter-4821", calls=(call,)),
        turn("tool", number=3, results=(result,)),
    )
    assert "otter" not in repr(later)


def test_an_answer_that_other_texts_may_hold_is_not_looked_for():
    for answer in ("20241105", "2024-11-05"):
        (later,) = after_answer(answer, turn("assistant", f"see /data/{answer}/x.csv", number=2))
        assert later.text == f"see /data/{answer}/x.csv"


def test_an_answer_is_a_whole_word_and_the_longer_one_goes_first():
    scope = Scrubber().scope()
    for answer in ("kestrel-otter-48", "kestrel-otter-48-Zq9"):
        scope.answer(answer, answer_spans)
    assert scope.answer("kestrel-otter-48-Zq9 now, kestrel-otter-480 not", lambda _: ()) == (
        "<PASSWORD_2> now, kestrel-otter-480 not"
    )


def test_numbers_of_placeholders_that_a_text_has_are_not_given_away():
    text = "ada: what is the db password?\nbob: kestrel-otter-4821\nada: thanks, <PASSWORD_1> is the old one"
    assert "bob: <PASSWORD_2>" in Scrubber().scope().answer(text, chat_spans)


def test_a_scrub_of_a_talk_is_complete_at_once():
    key = "aB3dE5fG7h" * 24
    text = f"ada: password={key} or which password is it?\nbob: kestrel-otter-4821\nada: ok"
    once = Scrubber().scope().answer(text, chat_spans)
    assert "otter" not in once
    assert Scrubber().scope().answer(once, chat_spans) == once


def test_many_answers_take_time_in_proportion():
    def seconds(number):
        text = "".join(f"value_{index}: k[9}}Q(w-T,{index:05d}xB\n" for index in range(number))
        scope = Scrubber().scope()

        def work():
            scope.answer(text, printed_spans)
            for index in range(number // 8):
                scope.answer(f"a short message of nothing, number {index}", chat_spans)

        return least_cpu_seconds(work, enough=0.02)

    few, many = seconds(2000), seconds(8000)
    assert many < 10 * max(few, 0.05)
