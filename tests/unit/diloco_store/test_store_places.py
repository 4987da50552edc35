"""Where a store is, said in a way that cannot be mistaken; looked at without a trace; refused with what to check."""

from __future__ import annotations

import os
import re
import time
from typing import Any, get_args

import pytest

from composer_replication.diloco.store import StoreDenied, StoreUnavailable, open_store
from composer_replication.diloco.store.objects import Operation
from composer_replication.errors import InputError
from refusals import refusal


@pytest.mark.parametrize("uri", ["s3:/x", "s3:x", "file:/x", "gcs://box/a", "ftp://a/b", "S3://box/a", "mybox:a/b"])
def test_what_is_no_place_of_ours_is_refused_and_becomes_no_folder(uri, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with refusal(InputError, got=repr(uri), expected="file://, s3://, gs://, az://, hf://"):
        open_store(uri)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("uri", "expected"), [("file://box/a", "file:///folder"), ("s3:///a", "bucket")])
def test_a_place_without_the_part_that_counts_is_refused(uri, expected):
    with refusal(InputError, got=repr(uri), expected=expected):
        open_store(uri)


@pytest.mark.parametrize(
    "uri", ["s3:/key:SECRET@box", "s3:AKIAABC:SECRET/b", "s3:///AKIAABC:SECRET", "file://a:SECRET"]
)
def test_what_may_be_a_credential_is_not_repeated(uri):
    with pytest.raises(InputError) as caught:
        open_store(uri)
    assert "SECRET" not in str(caught.value)


@pytest.mark.parametrize("uri", ["s3://AKIAABC:SECRET/b", "s3://[SECRET", "file://[SECRET/b"])
def test_what_is_no_name_of_a_bucket_is_refused_without_repeating_it(uri):
    with refusal(InputError, what="URI", expected="scheme://") as caught:
        open_store(uri)
    assert "SECRET" not in str(caught.value)
    assert caught.value.__cause__ is None


def test_plain_paths_stay_folders(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for place in ("plain", "./s3:/x", (tmp_path / "as-uri").as_uri()):
        open_store(place).put("a", b"1")
    assert sorted(path.name for path in tmp_path.rglob("a") if path.is_file()) == ["a"] * 3
    assert (tmp_path / "s3:" / "x" / "a").read_bytes() == b"1"


def test_who_only_looks_leaves_no_folder(tmp_path):
    store: Any = open_store(str(tmp_path / "none"), probes=False)
    assert (store.keys(""), store.size("a"), store.written_at("a")) == ([], None, None)
    assert list(tmp_path.iterdir()) == []


def test_a_file_says_when_it_was_written(tmp_path):
    store: Any = open_store(str(tmp_path))
    store.put("a", b"1")
    assert store.written_at("a") == pytest.approx(time.time(), abs=60)


def variables_in(said: str) -> list[list[str]]:
    """The variables that an error lists: those that are set, if any, and after them those that are not."""
    (lists,) = re.findall(r"\(([^()]*\bAWS_[^()]*)\)", said)
    return [re.findall(r"AWS_\w+", part) for part in lists.split(";")]


class TestBucket:
    @pytest.fixture
    def bucket(self, monkeypatch):
        pytest.importorskip("obstore")
        from s3_loopback import serving

        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "VALUE-IN-NO-MESSAGE")
        monkeypatch.delenv("AWS_SESSION_TOKEN", raising=False)
        with serving() as bucket:
            yield bucket

    def test_who_only_looks_writes_no_probe(self, bucket):
        store: Any = open_store("s3://box/runs", options=bucket.options, probes=False)
        assert store.keys("") == []
        assert {method for method, _ in bucket.requests} == {"GET"}
        bucket.objects["runs/a"] = (b"1", {})
        assert store.written_at("a") > 0
        assert store.written_at("none") is None

    def test_a_bucket_that_is_not_there_is_said_to_be_missing_also_to_those_who_look(self, bucket):
        bucket.judge = lambda _method, _key: "404"
        with pytest.raises(StoreDenied) as caught:
            open_store("s3://box/runs", options=bucket.options, probes=False).keys("launch")
        assert (caught.value.uri, caught.value.cause_kind) == ("s3://box/runs", "404")

    @pytest.mark.parametrize(
        ("operation", "ask"),
        [
            ("list", lambda store: store.keys("launch")),
            ("get", lambda store: store.get("a", most_bytes=1)),
            ("put", lambda store: store.put("a", b"1")),
            ("conditional create", lambda store: store.create("a", b"1")),
            ("delete", lambda store: store.delete(["a"])),
        ],
    )
    def test_a_refusal_says_what_was_refused_where_and_what_to_check(self, bucket, operation, ask):
        store = open_store("s3://box/runs", options=bucket.options)
        bucket.judge = lambda _method, _key: "403"
        with pytest.raises(StoreDenied) as caught:
            ask(store)
        said = str(caught.value)
        assert said.startswith("s3://box/runs/")
        assert re.search(rf"\bbox\b.*\b{operation} \(403 AsAsked\)", said)
        are_set, are_not = variables_in(said)
        assert "AWS_ACCESS_KEY_ID" in are_set
        assert "AWS_SESSION_TOKEN" in are_not
        assert [each for each in get_args(Operation) if said.count(each) < 1 + (each == operation)] == []
        assert "VALUE-IN-NO-MESSAGE" not in said


class TestServiceThatGivesCredentials:
    """Instance metadata that refuses: the bucket, which it is asked for, has said nothing."""

    @pytest.fixture
    def metadata(self, monkeypatch):
        pytest.importorskip("obstore")
        from s3_loopback import serving

        for name in [name for name in os.environ if name.startswith("AWS_")]:
            monkeypatch.delenv(name)
        with serving() as metadata:
            monkeypatch.setenv("AWS_METADATA_ENDPOINT", metadata.url)
            yield metadata

    @pytest.mark.parametrize("status", ["400", "401", "403", "404"])
    @pytest.mark.parametrize(
        "ask",
        [
            lambda store: store.keys("launch"),
            lambda store: store.get("a", most_bytes=1),
            lambda store: store.put("a", b"1"),
            lambda store: store.delete(["a"]),
        ],
        ids=["list", "get", "put", "delete"],
    )
    def test_its_refusal_is_not_the_bucket_s_and_may_pass(self, metadata, ask, status):
        metadata.judge = lambda _method, _key: status
        options = {"endpoint": metadata.url, "region": "us-east-1", "allow_http": "true"}
        store = open_store("s3://box/runs", deadline_s=5, options=options, probes=False)
        with pytest.raises(StoreUnavailable) as caught:
            ask(store)
        assert caught.value.cause_kind.startswith(f"credentials {status}")
        (are_not,) = variables_in(str(caught.value))
        assert are_not[0] == "AWS_ACCESS_KEY_ID"
        assert metadata.url not in str(caught.value)
        assert metadata.requests
