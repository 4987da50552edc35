"""What a launch of `crf train` asks of its replicas, and what goes to the bucket for it."""

from __future__ import annotations

import hashlib
import json
import random
import tracemalloc
from pathlib import Path

import pytest

from composer_replication.cli.main import main
from composer_replication.cli.replicas import request as bucket_files
from composer_replication.cli.replicas.launches import list_launch_numbers
from composer_replication.cli.replicas.request import (
    LaunchRequest,
    bucket_for_replicas,
    download,
    hash_files,
    prepare_launch,
    trained_files,
    training_request,
    upload,
)
from composer_replication.diloco.store import ObjectTooLarge, open_store
from composer_replication.errors import ArtefactCorruptError, ConfigError, InputError
from composer_replication.runs import RunDir
from refusals import refusal

pytestmark = pytest.mark.usefixtures("state")
LOGS = Path(__file__).resolve().parents[3] / "examples" / "sessions"
OPTIONS = ["train.model=student", "train.optimiser.steps=100"]


@pytest.fixture
def state(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("launch") / "run"
    assert main(["ingest", str(LOGS), "-o", str(folder), "--workers", "1"]) == 0
    return str(folder)


def ask(run: str, *overrides: str, **outer) -> dict:
    given = [f"train.run={run}", *OPTIONS, *overrides]
    return training_request(None, given, outer, no_scrub=False, allowed=())


def test_the_run_s_files_and_the_config_go_to_the_bucket_and_come_out_of_it_the_same(run, tmp_path):
    options = {"secrets": ["AWS_SECRET_ACCESS_KEY"], "env": {"AWS_REGION": "eu-central-1"}}
    place = {"bucket": str(tmp_path / "bucket"), "executor": "local", "options": options}
    asked = LaunchRequest(**place, replicas=2, **ask(run, sync_every=50))
    store = open_store(asked.bucket)
    launch = prepare_launch(store, asked).read().launch
    files = launch.args["trainer_kwargs"]["files"]
    assert (asked.commits, launch.number) == (2, 0)
    assert launch.options["secrets"] == ["AWS_SECRET_ACCESS_KEY"]
    assert files == hash_files(asked.files)
    assert {"run.json", "conversations.jsonl", "conversations.meta.json", "config.toml"} <= files.keys()
    download(store, launch.key("input"), files, tmp_path / "there")
    assert RunDir.open(tmp_path / "there").meta("conversations").settings["scrubbed"] is True
    assert (tmp_path / "there" / "conversations.jsonl").read_bytes() == (Path(run) / "conversations.jsonl").read_bytes()
    (tmp_path / "bucket" / launch.key("input") / "run.json").write_bytes(b"{}")
    with refusal(
        ArtefactCorruptError, what=launch.key("input", "run.json"), expected=f"sha256 {files['run.json'][:12]}"
    ):
        download(store, launch.key("input"), files, tmp_path / "again")
    with refusal(ArtefactCorruptError, what=launch.key("input"), got="'../run.json'", expected=".json"):
        download(store, launch.key("input"), {"../run.json": ""}, tmp_path / "again")


def test_the_ids_of_a_split_are_no_secrets_and_a_secret_in_it_is_one(run, tmp_path):
    import shutil

    other = shutil.copytree(run, tmp_path / "split")
    assert main(["split", str(other)]) == 0
    assert {"split.jsonl"} <= ask(str(other))["files"].keys()
    path, key = other / "split.jsonl", "AKIA" + "Z7QK3M5XW2VR4T6B"
    path.write_text(path.read_text().replace('"project":"', f'"project":"/{key}'))
    with refusal(InputError, got="AWS_ACCESS_KEY", fix="split.jsonl, line 1: AWS_ACCESS_KEY") as caught:
        ask(str(other))
    assert key not in str(caught.value)


def test_steps_have_to_be_whole_exchanges_and_there_has_to_be_a_run(run):
    with refusal(ConfigError, what="train.optimiser.steps", got="100", expected="sync_every=30"):
        ask(run, sync_every=30)
    with refusal(ConfigError, got="train.run None", fix="--trainer-module"):
        training_request(None, OPTIONS, {}, no_scrub=False, allowed=())


@pytest.mark.parametrize(
    "given", [{"options": {"env": {"A": "{}"}}}, {"options": {"token": "{}"}}, {"arguments": {"key": "{}"}}]
)
def test_a_value_that_looks_like_a_secret_is_refused_and_not_repeated(tmp_path, given):
    token = "hf_" + "AbCdEfGhIjKlMnOpQrStUvWxYz012345ab"
    filled = json.loads(json.dumps(given).replace("{}", token))
    store = open_store(str(tmp_path))
    with refusal(InputError, got="HUGGINGFACE_TOKEN", fix="--secret NAME") as caught:
        prepare_launch(store, LaunchRequest(bucket=str(tmp_path), executor="local", replicas=1, module="x", **filled))
    assert token not in str(caught.value)
    assert list_launch_numbers(store) == []


def test_a_folder_is_no_bucket_for_other_machines_and_no_model_either(tmp_path):
    assert bucket_for_replicas("s3://bucket/x", "modal") == "s3://bucket/x"
    assert bucket_for_replicas(str(tmp_path), "local") == str(tmp_path)
    for executor in ("modal", "hf_jobs"):
        with refusal(InputError, what=executor, got="folder", expected="s3://"):
            bucket_for_replicas(f"file://{tmp_path}", executor)
        with refusal(InputError, what="train.model", got=str(tmp_path)):
            LaunchRequest(bucket="s3://b", executor=executor, replicas=1, model=str(tmp_path))


def test_files_travel_in_parts_and_no_more_of_them_is_held_in_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(bucket_files, "PART_BYTES", 1 << 20, raising=False)
    source, store = tmp_path / "model.safetensors", open_store(str(tmp_path / "bucket"))
    source.write_bytes(random.Random(0).randbytes(9_000_001))
    files = {source.name: source, "config.json": b"{}", "empty.txt": b""}
    tracemalloc.start()
    digests = hash_files(files)
    upload(store, "output/000", files)
    download(store, "output/000", digests, tmp_path / "there")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 5e6
    assert digests[source.name] == hashlib.sha256(source.read_bytes()).hexdigest()
    assert (tmp_path / "there" / source.name).read_bytes() == source.read_bytes()
    assert (tmp_path / "there" / "empty.txt").read_bytes() == b""
    assert len(store.keys("output/000")) == 11


def test_a_part_that_is_missing_larger_or_of_an_earlier_upload_is_not_taken(tmp_path, monkeypatch):
    monkeypatch.setattr(bucket_files, "PART_BYTES", 4)
    store = open_store(str(tmp_path / "bucket"))
    upload(store, "output/000", {"a.txt": b"0123456789", "b.txt": b"01"})
    files: dict[str, Path | bytes] = {"a.txt": b"01", "b.txt": b"01234567"}  # a replica that was started again
    upload(store, "output/000", files)
    assert store.keys("output/000") == ["output/000/a.txt", *(f"output/000/b.txt.parts/00000{n}" for n in (0, 1))]
    download(store, "output/000", hash_files(files), tmp_path / "there")
    assert (tmp_path / "there" / "b.txt").read_bytes() == b"01234567"
    store.put("output/000/b.txt.parts/000001", b"45678")
    with pytest.raises(ObjectTooLarge):
        download(store, "output/000", hash_files(files), tmp_path / "again")
    store.delete(["output/000/b.txt.parts/000000"])
    with refusal(ArtefactCorruptError, what="output/000/b.txt", got="1 part"):
        download(store, "output/000", hash_files(files), tmp_path / "again")
    assert not (tmp_path / "again" / "b.txt").exists()


def test_of_trained_weights_nothing_travels_that_would_be_unpickled(tmp_path):
    for name in ("adapter_model.safetensors", "adapter_config.json", "training_args.bin", "optimizer.pt", "x.pkl"):
        (tmp_path / name).touch()
    assert list(trained_files(tmp_path)) == ["adapter_config.json", "adapter_model.safetensors"]
