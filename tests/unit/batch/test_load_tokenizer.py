"""A tokenizer that cannot be had is an error in our words, and what lies on this machine needs no network."""

from __future__ import annotations

import re

import pytest
import transformers

from composer_replication.batch import model_folder
from composer_replication.batch.model_folder import load_config, load_model, load_tokenizer
from composer_replication.errors import InputError
from refusals import refusal
from tokenizer_assets import load


def test_a_folder_is_loaded(tmp_path):
    load("llama3").save_pretrained(tmp_path / "model")
    loaded = load_tokenizer(str(tmp_path / "model"))
    assert loaded.chat_template == load("llama3").chat_template
    assert len(loaded) == len(load("llama3"))


OFFLINE = "We couldn't connect."


@pytest.fixture
def asked(monkeypatch):
    """What is asked of the loader; nothing is found, and no network is used."""
    calls = []

    def from_pretrained(name, **options):
        calls.append(options)
        raise OSError(f"{OFFLINE}\nMore advice.")

    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", from_pretrained)
    return calls


def test_a_models_name_is_looked_for_here_first_and_then_on_the_network(asked, monkeypatch):
    monkeypatch.setattr(model_folder, "hub_absence_reason", lambda _name: "")
    with refusal(InputError, what="owner/model", got=OFFLINE) as caught:
        load_tokenizer("owner/model")
    assert "More advice" not in str(caught.value)
    assert asked == [{"trust_remote_code": False, "local_files_only": True}, {"trust_remote_code": False}]


def hub_error(name, status):
    """What the hub's client raises for an answer with this status."""
    from huggingface_hub import errors

    try:
        from httpx2 import Request, Response
    except ImportError:  # earlier clients
        from httpx import Request, Response
    return getattr(errors, name)("refused", response=Response(status, request=Request("GET", "http://hub")))


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (lambda: hub_error("RepositoryNotFoundError", 404), "HF_TOKEN"),
        (
            lambda: OSError("Name or service not known"),
            "OSError: Name or service not known",
        ),
    ],
)
def test_a_name_that_the_hub_will_not_give_is_asked_for_once_and_no_file_of_it_is(monkeypatch, asked, answer, said):
    from huggingface_hub import HfApi

    questions = []

    def model_info(_self, name, **given):
        questions.append((name, given["timeout"]))
        raise answer()

    def from_pretrained(_name, **options):
        asked.append(options)
        raise OSError("not in the cache")

    monkeypatch.setattr(HfApi, "model_info", model_info)
    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", from_pretrained)
    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", from_pretrained)
    for load_it in (load_tokenizer, lambda n: load_config(n, what="model"), lambda n: load_model(n, what="model")):
        with refusal(InputError, got=said):
            load_it("owner/model")
    assert [each["local_files_only"] for each in asked] == [True, True, True]
    assert [name for name, _ in questions] == ["owner/model"] * 3
    assert all(seconds <= 5 for _, seconds in questions)


def test_a_path_below_a_folder_that_is_there_is_no_name_on_the_hub(monkeypatch, asked, tmp_path):
    from huggingface_hub import HfApi

    monkeypatch.setattr(HfApi, "model_info", lambda *_a, **_k: pytest.fail("the network was asked"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "out").mkdir()
    with refusal(InputError, what="out/model") as caught:
        load_tokenizer("out/model")
    assert re.search(r"\bout\b", caught.value.got)
    assert len(asked) == 1


@pytest.mark.parametrize("name", ["nowhere/", "./nowhere", "../a", "/no/where", "~/x", "a/b/c", ""])
def test_a_path_is_never_asked_of_the_network(asked, name):
    with refusal(InputError, what=repr(name), got="folder", fix="tokenizer.json"):
        load_tokenizer(name)
    assert asked == [{"trust_remote_code": False, "local_files_only": True}]


@pytest.mark.parametrize("text", [None, '{"a": 1}', '{"a": '])
def test_a_folder_without_a_tokenizer_says_so(tmp_path, text):
    if text is not None:
        (tmp_path / "tokenizer.json").write_text(text)
        (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    with refusal(InputError, what=str(tmp_path), got="Error", fix="tokenizer.json"):
        load_tokenizer(str(tmp_path))
