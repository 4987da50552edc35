"""Folders that somebody else made: their code never runs, and what is wrong with them is one named error."""

from __future__ import annotations

import io
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from composer_replication.batch.model_folder import (
    check_model_name,
    load_adapter,
    load_config,
    load_model,
    load_tokenizer,
    resolve_model,
)
from composer_replication.envs.student import student_folder
from composer_replication.errors import InputError
from refusals import refusal
from tiny_models import build
from tokenizer_assets import load

CODE = "from pathlib import Path\nPath({mark!r}).write_text('ran')\n"


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model with its tokenizer, as anybody would save it."""
    folder = tmp_path_factory.mktemp("sound")
    build("llama-untied").save_pretrained(folder)
    load("llama3").save_pretrained(folder)
    return folder


def edit(folder: Path, file: str, **changes: Any) -> None:
    path = folder / file
    held = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(held | changes))


def unknown_with_code(folder: Path, mark: Path) -> None:
    (folder / "modeling_x.py").write_text(CODE.format(mark=str(mark)) + "class X: pass\n")
    maps = {"AutoConfig": "modeling_x.X", "AutoModelForCausalLM": "modeling_x.X"}
    edit(folder, "config.json", model_type="not_known", auto_map=maps)


def tokenizer_with_code(folder: Path, mark: Path) -> None:
    (folder / "tokenization_x.py").write_text(CODE.format(mark=str(mark)) + "class X: pass\n")
    edit(folder, "tokenizer_config.json", tokenizer_class="X", auto_map={"AutoTokenizer": ["tokenization_x.X", None]})


def code_of_another_folder(folder: Path, mark: Path) -> None:
    unknown_with_code(folder, mark)
    edit(folder, "config.json", auto_map={"AutoConfig": "../elsewhere--modeling_x.X"})


def adapter_of_a_coded_base(folder: Path, mark: Path) -> None:
    base = folder / "base"
    base.mkdir()
    shutil.copy(folder / "config.json", base)
    unknown_with_code(base, mark)
    (folder / "config.json").unlink()
    edit(folder, "adapter_config.json", peft_type="LORA", base_model_name_or_path=str(base), task_type="CAUSAL_LM")


def index_that_climbs(folder: Path, mark: Path) -> None:
    shutil.move(folder / "model.safetensors", mark.with_name("weights.safetensors"))
    edit(folder, "model.safetensors.index.json", metadata={}, weight_map={"x": "../weights.safetensors"})


def index_with_a_whole_path(folder: Path, mark: Path) -> None:
    shutil.move(folder / "model.safetensors", mark.with_name("weights.safetensors"))
    path = str(mark.with_name("weights.safetensors"))
    edit(folder, "model.safetensors.index.json", metadata={}, weight_map={"x": path})


def index_that_is_a_list(folder: Path, mark: Path) -> None:
    del mark
    (folder / "model.safetensors.index.json").write_text("[" * 2000)


def pickled_weights(folder: Path, mark: Path) -> None:
    class Runs:
        def __reduce__(self) -> Any:
            return (Path.write_text, (mark, "ran"))

    (folder / "model.safetensors").unlink()
    torch.save({"weights": Runs()}, folder / "pytorch_model.bin")


def weights_of_noise(folder: Path, mark: Path) -> None:
    del mark
    (folder / "model.safetensors").write_bytes(bytes(range(256)) * 40)


def weights_with_a_huge_header(folder: Path, mark: Path) -> None:
    del mark
    (folder / "model.safetensors").write_bytes((1 << 62).to_bytes(8, "little") + b"{}")


def config_of_odd_types(folder: Path, mark: Path) -> None:
    del mark
    edit(folder, "config.json", hidden_size="large", num_attention_heads=None, rope_theta={"a": []})


def config_with_no_heads(folder: Path, mark: Path) -> None:
    del mark
    edit(folder, "config.json", num_attention_heads=0)


def config_that_is_no_json(folder: Path, mark: Path) -> None:
    del mark
    (folder / "config.json").write_text("{" * 3000)


def tokenizer_of_no_kind(folder: Path, mark: Path) -> None:
    del mark
    edit(folder, "tokenizer.json", model={"type": "Nothing", "vocab": 7})


HOSTILE: tuple[Callable[[Path, Path], None], ...] = (
    unknown_with_code,
    tokenizer_with_code,
    code_of_another_folder,
    adapter_of_a_coded_base,
    index_that_climbs,
    index_with_a_whole_path,
    index_that_is_a_list,
    pickled_weights,
    weights_of_noise,
    weights_with_a_huge_header,
    config_of_odd_types,
    config_with_no_heads,
    config_that_is_no_json,
    tokenizer_of_no_kind,
)


def everything(folder: Path) -> list[InputError]:
    """What loading each part says; whatever else it raises is a failed test."""
    errors: list[InputError] = []
    for load_part in (
        lambda: load_tokenizer(str(folder)),
        lambda: load_config(str(folder), what="train.model"),
        lambda: load_model(str(folder), what="train.model", dtype=torch.float32),
    ):
        try:
            load_part()
        except InputError as error:
            errors.append(error)
    return errors


def test_a_sound_folder_loads(sound: Path) -> None:
    assert everything(sound) == []


@pytest.mark.parametrize("harm", HOSTILE, ids=lambda harm: harm.__name__)
def test_code_of_a_folder_never_runs_and_the_error_names_it(
    harm: Callable[[Path, Path], None], sound: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, mark = tmp_path / "model", tmp_path / "mark"
    shutil.copytree(sound, folder)
    harm(folder, mark)
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n" * 50))  # transformers asks whether to run it
    errors = everything(folder)
    assert not mark.exists()
    assert errors, "a harmed folder loaded without a word"
    assert all(str(folder) in str(error) for error in errors)


class Marking:
    """What a pickle can do when it is read: here it leaves a mark."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return Path.write_text, (self.mark, "ran")


def test_an_adapter_is_read_from_safetensors_and_never_from_a_pickle(sound: Path, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    folder, mark = tmp_path / "adapter", tmp_path / "mark"
    peft.get_peft_model(load_model(str(sound), what="model"), peft.LoraConfig(r=2)).save_pretrained(folder)
    model = load_model(str(sound), what="model")
    assert load_adapter(model, folder, what="--after").active_adapter == "default"
    (folder / "adapter_model.safetensors").unlink()
    torch.save(Marking(mark), folder / "adapter_model.bin")
    with refusal(InputError, what="--after", got="adapter_model.safetensors", fix="pickle"):
        load_adapter(load_model(str(sound), what="model"), folder, what="--after")
    assert not mark.exists()


def test_the_student_is_a_name_for_every_loader(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    folder = str(student_folder())
    assert resolve_model("student") == folder
    check_model_name("student", what="model")
    assert load_tokenizer("student").name_or_path == folder
    assert load_config("student", what="model")._name_or_path == folder
    assert load_model("student", what="model").config._name_or_path == folder
    assert [resolve_model(name) for name in ("owner/student", "./student", folder)] == [
        "owner/student",
        "./student",
        folder,
    ]


def test_a_folder_here_that_is_called_student_comes_before_the_packages(
    sound: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    shutil.copytree(sound, tmp_path / "student")
    monkeypatch.chdir(tmp_path)
    assert resolve_model("student") == "student"
    assert load_config("student", what="model").model_type == "llama"
