"""A place that nobody answers at, or whose settings are missing, is reported once, soon, and with what to check."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator

import pytest

from composer_replication.diloco.store import StoreDenied, StoreUnavailable, open_store
from composer_replication.diloco.store.objects import FIRST_ANSWER_S
from composer_replication.errors import InputError

REPORTED_WITHIN_S = 10.0
PROFILE = os.environ.get("CRF_TEST_PROFILE", "ci")
KEYS = {
    "s3": {"access_key_id": "VALUE-IN-NO-MESSAGE", "secret_access_key": "b", "region": "us-east-1"},
    "gs": {},
    "az": {"account_name": "acct", "account_key": "a2V5"},
    "hf": {},
}
URIS = {"s3": "s3://box/runs", "gs": "gs://box/runs", "az": "az://box/runs", "hf": "hf://datasets/owner/runs"}


@pytest.fixture(autouse=True)
def no_settings(monkeypatch):
    for name in [name for name in os.environ if name.startswith(("AWS_", "AZURE_", "GOOGLE_", "HF_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)


@pytest.fixture
def closed() -> Iterator[str]:
    """The address of a port that is taken and at which nobody listens."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{taken.getsockname()[1]}"


@pytest.fixture
def silent() -> Iterator[str]:
    """The address of a server that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0), backlog=64) as listening:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"


def shorten(monkeypatch) -> None:
    """Wait for less in `make test`: the whole time is waited in `make test-full`."""
    if PROFILE != "full":
        monkeypatch.setattr("composer_replication.diloco.store.objects.FIRST_ANSWER_S", 1.0)


def opening(scheme: str, address: str, **options) -> None:
    if scheme != "hf":
        pytest.importorskip("obstore")
        options |= KEYS[scheme] | {"allow_http": "true"}
    open_store(URIS[scheme], options={**options, "endpoint": address})


def reported(scheme: str, address: str, caplog, capfd) -> StoreUnavailable:
    """The error of a place with nobody there, which is all that is said."""
    start = time.monotonic()
    with pytest.raises(StoreUnavailable) as caught:
        opening(scheme, address)
    assert time.monotonic() - start < REPORTED_WITHIN_S
    assert [record for record in caplog.records if record.levelname != "DEBUG" and record.name != "httpx"] == []
    assert capfd.readouterr() == ("", "")
    assert "VALUE-IN-NO-MESSAGE" not in str(caught.value)
    assert caught.value.__cause__ is None
    return caught.value


@pytest.mark.parametrize("scheme", ["s3", "az", "hf"])
def test_a_closed_port_is_reported_once_and_soon(scheme, closed, caplog, capfd, monkeypatch):
    shorten(monkeypatch)
    error = reported(scheme, closed, caplog, capfd)
    assert error.uri == URIS[scheme]
    assert {"s3": "AWS_REGION", "az": "AZURE_STORAGE_ACCOUNT_NAME", "hf": "HF_TOKEN"}[scheme] in str(error)


@pytest.mark.parametrize("scheme", ["s3", "az", "hf"])
def test_a_server_that_never_answers_is_reported_once_and_soon(scheme, silent, caplog, capfd, monkeypatch):
    shorten(monkeypatch)
    assert reported(scheme, silent, caplog, capfd).cause_kind == "no answer"


def test_the_limits_leave_room_below_ten_seconds():
    from composer_replication.diloco.store import objects as retries

    assert FIRST_ANSWER_S + retries._SHORTEST_REQUEST_S < REPORTED_WITHIN_S


def test_a_place_that_has_answered_once_gets_the_whole_deadline(monkeypatch):
    from hub_loopback import serving

    monkeypatch.setattr("composer_replication.diloco.store.objects.FIRST_ANSWER_S", 0.3)
    with serving() as repository:
        store = open_store("hf://owner/runs/a", options={"endpoint": repository.url, "token": "x"})
        until = time.monotonic() + 1.0
        repository.judge = lambda _method, _path: "hang" if time.monotonic() < until else ""
        assert store.size("none") is None


class TestSettings:
    @pytest.fixture(autouse=True)
    def obstore(self):
        pytest.importorskip("obstore")

    def test_azure_without_an_account_names_the_variable(self):
        with pytest.raises(InputError, match="AZURE_STORAGE_ACCOUNT_NAME") as caught:
            open_store(URIS["az"])
        assert "GenericError" not in str(caught.value)

    def test_an_azure_key_that_is_none_names_the_variable_and_not_its_value(self, monkeypatch):
        monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "acct")
        monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", "not-base64!")
        with pytest.raises(InputError, match="AZURE_STORAGE_ACCOUNT_KEY") as caught:
            open_store(URIS["az"])
        assert "not-base64!" not in str(caught.value)

    @pytest.mark.parametrize("variable", ["GOOGLE_APPLICATION_CREDENTIALS", "GOOGLE_SERVICE_ACCOUNT"])
    @pytest.mark.parametrize("text", [None, "{}"])
    def test_google_credentials_that_cannot_be_read_name_the_variable(self, variable, text, tmp_path, monkeypatch):
        file = tmp_path / "SECRET.json"
        if text is not None:
            file.write_text(text)
        monkeypatch.setenv(variable, str(file))
        with pytest.raises(InputError, match=variable) as caught:
            open_store(URIS["gs"])
        assert "SECRET" not in str(caught.value)

    def test_other_values_that_do_not_fit_name_the_variables(self):
        with pytest.raises(InputError, match="AWS_REGION") as caught:
            open_store(URIS["s3"], options={"region": "x", "conditional_put": "VALUE-IN-NO-MESSAGE"})
        assert "VALUE-IN-NO-MESSAGE" not in str(caught.value)

    def test_a_bucket_of_another_region_names_the_variable(self):
        from s3_loopback import serving

        with serving() as bucket:
            bucket.judge = lambda _method, _key: "301"
            with pytest.raises(StoreDenied, match="AWS_REGION") as caught:
                open_store("s3://box/runs", options=bucket.options)
        assert caught.value.cause_kind == "region"
