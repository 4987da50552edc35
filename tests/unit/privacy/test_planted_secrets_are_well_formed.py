"""The planted secrets themselves: enough of each sort, each where it says it is, and a judge that can be satisfied."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from data.planted_secrets import PLACES, WINDOW, Planted, negatives, planted, readings, survivors

DATA = Path(__file__).resolve().parents[2] / "data"
CASES = planted()
NEGATIVES = negatives()
# What the brief asks for by name, beside the vendors.
NEEDED_KINDS = """
aws_access_key_id aws_secret_access_key gcp_service_account azure_storage azure_sas github_classic
github_fine_grained github_app github_oauth gitlab slack_bot slack_user slack_webhook stripe_live
stripe_restricted openai anthropic hugging_face npm pypi docker_hub sendgrid twilio_api_key telegram_bot
discord_bot discord_webhook google_api_key google_oauth_client_secret google_refresh_token jwt pem_block
pem_one_line postgres_url mysql_url mongodb_url redis_url amqp_url basic_header bearer_header cookie assignment
json_field yaml_field toml_field env_file export cli_flag netrc npmrc docker_config bare_hex bare_base64
named_only environment_value base64_form url_form json_escaped split file_diff shell_history curl_user
url_query sshpass kubeconfig terraform_tfvars
"""


def with_each_value_replaced(case: Planted, mark: str = "[x]") -> str:
    text = case.text
    for value in case.value:
        text = text.replace(value, mark)
    return text


def test_there_are_enough_of_every_sort(note):
    kinds, places = Counter(case.kind for case in CASES), Counter(case.place for case in CASES)
    note(f"planted secrets: {len(CASES)} of {len(kinds)} kinds, {len(NEGATIVES)} negatives; {dict(places)}")
    assert len(CASES) >= 200
    assert len(kinds) >= 25
    assert sorted(set(NEEDED_KINDS.split()) - set(kinds)) == []
    assert set(places) == set(PLACES)
    assert min(places.values()) >= 20
    assert len(NEGATIVES) >= 60


def test_the_same_cases_come_every_time():
    assert planted() == CASES
    assert negatives() == NEGATIVES


def test_no_text_and_no_value_comes_twice():
    texts = [case.text for case in CASES] + [negative.text for negative in NEGATIVES]
    values = [value for case in CASES for value in case.value]
    assert [text for text, count in Counter(texts).items() if count > 1] == []
    assert [value for value, count in Counter(values).items() if count > 1] == []


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.kind}-{case.place}")
def test_a_case_holds_its_secret_once_and_the_judge_sees_it(case):
    assert case.value
    assert [case.text.count(value) for value in case.value] == [1] * len(case.value)
    assert [len(value) >= WINDOW for value in case.value] == [True] * len(case.value)
    assert [value for value in case.value if not value.startswith(case.prefix)] == []
    assert [secret for secret in case.decoded if secret in case.text] == []
    assert set(survivors(case, case.text)) >= set(case.value)
    assert survivors(case, with_each_value_replaced(case)) == []


@pytest.mark.parametrize("case", [case for case in CASES if case.decoded], ids=lambda case: f"{case.kind}-{case.place}")
def test_an_encoded_secret_is_read_by_the_judge_wherever_the_rest_of_it_begins(case):
    assert len(survivors(case, case.text)) > len(case.value)
    for cut in range(1, 5):
        text = case.text
        for value in case.value:
            text = text.replace(value, f"[x] {value[cut:]}")
        assert survivors(case, text)


@pytest.mark.parametrize("case", [case for case in CASES if not case.decoded], ids=lambda c: f"{c.kind}-{c.place}")
def test_the_end_of_a_plain_secret_is_a_survivor_and_its_public_beginning_is_not(case):
    value = case.value[-1]
    assert survivors(case, f"[x]{value[-WINDOW:]}")
    assert survivors(case, f"{case.prefix}[x]") == []


def test_tool_arguments_are_json_objects():
    texts = [case.text for case in CASES if case.place == "tool_arguments"]
    assert [text for text in texts if not isinstance(json.loads(text), dict)] == []


def test_a_case_that_needs_the_environment_carries_it_and_no_other_does():
    for case in CASES:
        expected = list(case.decoded or case.value) if case.kind == "environment_value" else []
        assert list(case.env.values()) == expected


def test_no_secret_and_no_piece_of_one_stands_in_a_negative():
    text = "\n".join(negative.text for negative in NEGATIVES)
    views = list(readings(text))
    assert [case.kind for case in CASES if survivors(case, text, views=views)] == []
    assert [negative.why for negative in NEGATIVES if not negative.why or "{h" in negative.text] == []


def test_no_secret_stands_in_a_source_file():
    files = [*DATA.glob("*.py"), *DATA.glob("*.md")]
    assert len(files) >= 6
    source = "\n".join(path.read_text(encoding="utf-8") for path in files)
    assert [case.kind for case in CASES for value in case.value + case.decoded if value in source] == []
