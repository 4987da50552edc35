"""A tokenizer that cannot be had is an error in our words, and what lies on this machine needs no network."""

from __future__ import annotations

import pytest
import transformers

from composer_replication.batch.model_folder import load_tokenizer
from composer_replication.errors import InputError
from tokenizer_assets import load


def test_a_folder_is_loaded(tmp_path):
    load("llama3").save_pretrained(tmp_path / "model")
    loaded = load_tokenizer(str(tmp_path / "model"))
    assert loaded.chat_template == load("llama3").chat_template
    assert len(loaded) == len(load("llama3"))


@pytest.fixture
def asked(monkeypatch):
    """What is asked of the loader; nothing is found, and no network is used."""
    calls = []

    def from_pretrained(name, **options):
        calls.append(options)
        raise OSError("We couldn't connect.\nMore advice.")

    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", from_pretrained)
    return calls


def test_a_models_name_is_looked_for_here_first_and_then_on_the_network(asked):
    with pytest.raises(InputError, match=r"no folder of that name, and no model that is cached .*couldn't connect\.\)"):
        load_tokenizer("owner/model")
    assert asked == [{"trust_remote_code": False, "local_files_only": True}, {"trust_remote_code": False}]


@pytest.mark.parametrize("name", ["nowhere/", "./nowhere", "../a", "/no/where", "~/x", "a/b/c", ""])
def test_a_path_is_never_asked_of_the_network(asked, name):
    with pytest.raises(
        InputError, match=r"got no folder of that name, expected a tokenizer that loads\. Pass a folder"
    ):
        load_tokenizer(name)
    assert asked == [{"trust_remote_code": False, "local_files_only": True}]


@pytest.mark.parametrize("text", [None, '{"a": 1}', '{"a": '])
def test_a_folder_without_a_tokenizer_says_so(tmp_path, text):
    if text is not None:
        (tmp_path / "tokenizer.json").write_text(text)
        (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    with pytest.raises(InputError, match="a folder without one"):
        load_tokenizer(str(tmp_path))
