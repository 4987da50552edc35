"""Nothing is read from a checkpoint but plain files that its manifest lists, and an odd manifest is passed over."""

from __future__ import annotations

import errno
import json
import shutil

import pytest
import torch
from checkpoint_folders import ABOUT, MODEL, NEEDED, change_manifest, checkpoint, files_of
from safetensors.torch import load_file, save_file

from composer_replication.errors import ArtefactCorruptError, ArtefactNotFoundError
from composer_replication.trainer.checkpoints import check_manifest, newest_complete, write_manifest
from composer_replication.trainer.checkpoints.weights import load_weights
from kill_and_resume.small_runs import small_model, small_trainer, weights_of, write_weights_manifest
from refusals import refusal

ENTRY = {"num_bytes": 0, "sha256": "0" * 64}


def assert_passed_over(output, folder, **facts):
    with refusal(ArtefactCorruptError, **facts):
        check_manifest(folder)
    assert newest_complete(output).name == "checkpoint-9"


@pytest.mark.parametrize(
    ("changes", "got"),
    [
        ({"files": ...}, "files None"),
        ({"files": []}, "files []"),
        ({"files": {}}, "model.safetensors"),
        ({"files": {"a.json": 3}}, "files['a.json'].num_bytes"),
        ({"files": {"a.json": {"num_bytes": "11", "sha256": "0" * 64}}}, "files['a.json'].num_bytes"),
        ({"files": {"a.json": {"num_bytes": -1, "sha256": "0" * 64}}}, "files['a.json'].num_bytes"),
        ({"files": {"a.json": {"num_bytes": 11, "sha256": None}}}, "files['a.json'].sha256"),
        ({"step": True}, "step True"),
        ({"step": 10**30}, "step 1e+30"),
        ({"about": None}, "about None"),
        ({"about": {}}, "about.model"),
        ({"about": {**ABOUT, "data": []}}, "about.data []"),
        ({"about": {**ABOUT, "weights_only": "no"}}, "about.weights_only 'no'"),
        ({"about": {**ABOUT, "process": "0"}}, "about.process '0'"),
        ({"about": {**ABOUT, "model": {**MODEL, "adapters": ["default"]}}}, "about.model.adapters ['default']"),
        ({"about": {**ABOUT, "model": {"class": "Tiny"}}}, "about.model.config"),
    ],
    ids=str,
)
def test_a_manifest_of_other_types_is_passed_over_and_says_what_is_odd(tmp_path, changes, got):
    checkpoint(tmp_path, 9)
    folder = checkpoint(tmp_path, 10)
    change_manifest(folder, **changes)
    assert_passed_over(tmp_path, folder, what=str(folder / "manifest.json"), got=got)


@pytest.mark.parametrize(
    "name",
    [
        "/etc/hostname",
        "../checkpoint-9/a.json",
        "a/../a.json",
        "./a.json",
        "a//b",
        "",
        "a\\b",
        "C:x",
        "a\0b",
        "x" * 300,
    ],
)
def test_a_name_that_is_not_one_of_a_file_inside_is_passed_over(tmp_path, name):
    checkpoint(tmp_path, 9)
    folder = checkpoint(tmp_path, 10)
    change_manifest(folder, files={**files_of(folder), name: ENTRY})
    if len(name) > 99:  # what the operating system says of it
        assert_passed_over(tmp_path, folder, what=name, got=f"[Errno {errno.ENAMETOOLONG}]")
    else:
        assert_passed_over(tmp_path, folder, what=str(folder / "manifest.json"), got=repr(name))


@pytest.mark.parametrize("name", NEEDED)
def test_a_manifest_that_lists_too_little_to_go_on_from_is_neither_taken_nor_written(tmp_path, name):
    checkpoint(tmp_path, 9)
    folder = checkpoint(tmp_path, 10)
    files = files_of(folder)
    del files[name]
    change_manifest(folder, files=files)
    assert_passed_over(tmp_path, folder, what="manifest.json", got=name)
    (folder / "manifest.json").unlink()
    (folder / name).unlink()
    with refusal(ArtefactCorruptError, what=str(folder), got=name):
        write_manifest(folder, step=10, about=ABOUT)
    assert not (folder / "manifest.json").exists()


def test_weights_alone_need_no_trees_but_their_weights(tmp_path):
    (tmp_path / "adapter_model.safetensors").write_text("x")
    adapted = {**MODEL, "adapters": {"default": {}, "second": {}}}
    about = {**ABOUT, "weights_only": True, "model": adapted}
    with refusal(ArtefactCorruptError, got="second/adapter_model.safetensors"):
        write_manifest(tmp_path, step=1, about=about)
    (tmp_path / "second").mkdir()
    (tmp_path / "second" / "adapter_model.safetensors").write_text("x")
    write_manifest(tmp_path, step=1, about=about)
    assert check_manifest(tmp_path)["about"] == about


def test_the_states_of_the_process_that_wrote_the_manifest_are_the_needed_ones(tmp_path):
    folder = checkpoint(tmp_path, 1, complete=False)
    for tree in ("rng", "cursor", "extra"):
        for kind in ("json", "safetensors"):
            (folder / f"{tree}-0.{kind}").rename(folder / f"{tree}-8.{kind}")
    with refusal(ArtefactCorruptError, got="rng-0.json"):
        write_manifest(folder, step=1, about=ABOUT)
    write_manifest(folder, step=1, about={**ABOUT, "process": 8})
    assert newest_complete(tmp_path) == folder


def test_a_manifest_that_cannot_be_read_is_passed_over(tmp_path):
    checkpoint(tmp_path, 9)
    folder = checkpoint(tmp_path, 10, complete=False)
    (folder / "manifest.json").mkdir()
    assert_passed_over(tmp_path, folder, what="manifest.json")


@pytest.mark.parametrize("name", ["a.json", "adapter"])
def test_a_link_among_the_files_is_refused_though_what_it_points_to_is_the_same(tmp_path, name):
    checkpoint(tmp_path, 9)
    folder = checkpoint(tmp_path, 10)
    (folder / name).rename(tmp_path / "elsewhere")
    (folder / name).symlink_to(tmp_path / "elsewhere")
    assert_passed_over(tmp_path, folder, what=str(folder / name), got="link")


def test_a_link_is_not_given_a_manifest(tmp_path):
    folder = checkpoint(tmp_path, 10, complete=False)
    (folder / "more.json").symlink_to(folder / "a.json")
    with refusal(ArtefactCorruptError, what="more.json", got="link"):
        write_manifest(folder, step=10, about=ABOUT)


@pytest.mark.parametrize(
    "name",
    [
        "model.safetensors.index.json",
        "second/adapter_model.safetensors",
        "scaler.safetensors",
        "entropy_ctrl_state.json",
    ],
)
def test_a_file_that_could_be_read_and_is_not_listed_is_refused(tmp_path, name):
    checkpoint(tmp_path, 9)
    folder = checkpoint(tmp_path, 10)
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text("{}")
    assert_passed_over(tmp_path, folder, what=str(folder), got=name)


def test_a_tokenizer_or_a_note_that_was_put_there_later_does_no_harm(tmp_path):
    folder = checkpoint(tmp_path, 10)
    for name in ("tokenizer.json", "notes.md"):
        (folder / name).write_text("{}")
    assert newest_complete(tmp_path) == folder


@pytest.fixture
def in_parts(tmp_path):
    """A checkpoint whose weights are in several files with an index, the model it is of, and the index."""
    folder, model = tmp_path / "checkpoint-1", small_model(seed=1)
    model.save_pretrained(folder, max_shard_size="20KB")
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 1
    return folder, model, index


def test_weights_in_parts_are_loaded(in_parts):
    folder, model, _ = in_parts
    other = small_model(seed=2)
    write_weights_manifest(folder, model)
    check_manifest(folder)
    load_weights(other, folder)
    assert weights_of(other) == weights_of(model)


@pytest.mark.parametrize(
    "place", ["../elsewhere.safetensors", "{outside}", "unlisted.safetensors", "config.json", 3, None]
)
def test_an_index_that_points_to_a_file_that_is_not_listed_is_refused(tmp_path, in_parts, place):
    folder, model, index = in_parts
    evil = {name: torch.full_like(each, 7.0) for name, each in small_model().state_dict().items()}
    save_file({name: each.contiguous() for name, each in evil.items()}, tmp_path / "elsewhere.safetensors")
    place = str(tmp_path / "elsewhere.safetensors") if place == "{outside}" else place
    index["weight_map"] = dict.fromkeys(index["weight_map"], place)
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    write_weights_manifest(folder, model)
    shutil.copy(tmp_path / "elsewhere.safetensors", folder / "unlisted.safetensors")
    before = weights_of(model)
    facts = {"what": "model.safetensors.index.json", "got": f"{place!r:.80}"}
    with refusal(ArtefactCorruptError, **facts):
        load_weights(model, folder)
    assert weights_of(model) == before
    (folder / "unlisted.safetensors").unlink()
    with refusal(ArtefactCorruptError, **facts):
        check_manifest(folder)
    assert newest_complete(tmp_path) is None


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": {}}'])
def test_an_index_that_is_none_is_refused(in_parts, text):
    folder, model, _ = in_parts
    (folder / "model.safetensors.index.json").write_text(text)
    write_weights_manifest(folder, model)
    with pytest.raises(ArtefactCorruptError, match=r"index\.json"):
        check_manifest(folder)


def test_the_hash_of_an_index_is_compared_before_it_is_parsed(in_parts):
    folder, model, _ = in_parts
    write_weights_manifest(folder, model)
    index = folder / "model.safetensors.index.json"
    index.write_text("[" * index.stat().st_size)
    with refusal(ArtefactCorruptError, what=index.name, expected="SHA-256"):
        check_manifest(folder)


@pytest.mark.parametrize("lora", [False, True])
def test_weights_without_a_manifest_or_through_a_link_are_not_loaded(tmp_path, lora):
    model = small_model(lora=lora)
    model.save_pretrained(tmp_path / "saved")
    with refusal(ArtefactNotFoundError, what="saved", expected="manifest.json"):
        load_weights(model, tmp_path / "saved")
    write_weights_manifest(tmp_path / "saved", model)
    load_weights(model, tmp_path / "saved")
    weights = tmp_path / "saved" / ("adapter_model.safetensors" if lora else "model.safetensors")
    weights.rename(tmp_path / "elsewhere")
    weights.symlink_to(tmp_path / "elsewhere")
    with refusal(ArtefactCorruptError, what=weights.name, got="link"):
        load_weights(model, tmp_path / "saved")


def test_a_run_does_not_go_on_with_weights_that_were_put_beside_its_own(tmp_path):
    trainer = small_trainer(tmp_path / "run", max_steps=2)
    trainer.train()
    folder = tmp_path / "run" / "checkpoint-2"
    own = load_file(folder / "model.safetensors")
    save_file({name: torch.full_like(each, 7.0) for name, each in own.items()}, tmp_path / "evil.safetensors")
    index = {"weight_map": dict.fromkeys(own, "../../evil.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    newest = (True, ArtefactNotFoundError, {"what": str(folder.parent)})
    this_one = (str(folder), ArtefactCorruptError, {"what": str(folder), "got": "model.safetensors.index.json"})
    for wanted, error, facts in (newest, this_one):
        later = small_trainer(tmp_path / "run", max_steps=4)
        before = weights_of(later.model)
        with refusal(error, **facts):
            later.train(resume_from_checkpoint=wanted)
        assert weights_of(later.model) == before
