"""Chat templates and tokenizers that are there to hurt: one clear error, within limits of memory and time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

import composer_replication
from composer_replication.batch.model_folder import catch_tokenizer_panics
from composer_replication.batch.render import templates
from composer_replication.batch.render.dialect import ProtectedTokens
from composer_replication.batch.render.renderer import Renderer, _PieceEncoder
from composer_replication.batch.render.templates import PROCESS, ChatTemplate
from composer_replication.errors import InputError, SandboxError
from tokenizer_assets import load

SOURCE = str(load("llama3").chat_template)
TALK: list[dict[str, Any]] = [{"role": "user", "content": "question"}, {"role": "assistant", "content": "answer"}]
LARGE = {
    "repetition": "{{ 'a' * 10**10 }}",
    "percent": "{{ '%10000000000d' % 1 }}",
    "doubling": "{% set n = namespace(s='a') %}{% for i in range(50) %}{% set n.s = n.s ~ n.s %}{% endfor %}{{ n.s }}",
    "output in a loop": "{% for i in range(100000) %}{{ 'a' * 100000 }}{% endfor %}",
    "length alone": "{{ 'a' * 10**7 }}",
}
SLOW = {
    "loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "macros": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "power": "{{ (7 ** (7 ** 9)) is odd }}",
    "text": "{{ lipsum(10**7) }}",
}
MEASURE = """
import json, re, resource, sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from test_hostile_models import LARGE, TALK
from composer_replication.batch.render.templates import PROCESS
from composer_replication.batch.render.templates import ChatTemplate
from tokenizer_assets import load
tokenizer, ends = load("llama3"), {}
for name, source in LARGE.items():
    try:
        ChatTemplate(tokenizer, source).render(TALK)
    except Exception as error:
        ends[name] = type(error).__name__
PROCESS.close()
own = int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])
print(json.dumps([ends, own / 1000, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1000]))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the system limits memory on Linux only")
def test_templates_that_ask_for_gigabytes_are_refused_below_one():
    here = Path(__file__).parent
    path = os.pathsep.join([f"{composer_replication.__path__[0]}/..", str(here.parents[1])])
    command = [sys.executable, "-c", MEASURE, str(here)]
    done = subprocess.run(
        command, env={"PATH": os.environ["PATH"], "PYTHONPATH": path}, capture_output=True, text=True, check=True
    )
    ends, own, largest_child = json.loads(done.stdout)
    assert ends == dict.fromkeys(LARGE, "SandboxError")
    assert own + largest_child < 1000


@pytest.mark.parametrize("source", SLOW.values(), ids=SLOW)
def test_templates_that_take_too_long_are_stopped(monkeypatch, source):
    monkeypatch.setattr(templates, "_CREDIT_S", 0.3)
    with pytest.raises(SandboxError):
        ChatTemplate(load("llama3"), source).render(TALK)


def test_a_template_may_not_take_a_little_too_long_again_and_again(monkeypatch):
    monkeypatch.setattr(templates, "_CREDIT_S", 0.2)
    slow = ChatTemplate(load("llama3"), "{% for i in range(900) %}{% for j in range(900) %}{% endfor %}{% endfor %}")
    with pytest.raises(SandboxError):
        [slow.render(TALK) for _ in range(1000)]


def test_a_template_that_behaves_until_it_is_trusted_is_stopped_then():
    trap = "{% if messages[-1].content == 'now' %}{{ 'a' * 10**10 }}{% endif %}"
    renderer = Renderer(load("llama3"), chat_template=trap + SOURCE)
    assert "question" in renderer.template.render(TALK)
    with pytest.raises(SandboxError):
        renderer.template.render([{"role": "user", "content": "now"}])
    assert "question" in renderer.template.render(TALK)


def test_no_renderer_takes_a_template_beyond_the_limits_for_one_that_refuses_something():
    with pytest.raises(SandboxError):
        Renderer(load("llama3"), chat_template="{{ 'a' * 10**10 }}")
    with pytest.raises(SandboxError):  # only beside tools, which is asked about after all else
        Renderer(load("llama3"), chat_template=SOURCE + "{% if tools %}{{ 'a' * 10**10 }}{% endif %}")


@pytest.mark.parametrize("source", ["{{ ''.__class__.__mro__ }}", "{% for %}", "{{ 1 / 0 }}", "{{ nothing.at.all }}"])
def test_what_a_template_refuses_or_the_sandbox_is_an_error_about_the_input(source):
    with pytest.raises(InputError):
        ChatTemplate(load("llama3"), source).render(TALK)


def test_a_template_of_many_megabytes_is_refused_before_it_is_read():
    with pytest.raises(InputError):
        ChatTemplate(load("llama3"), "a" * (templates.MAX_TEMPLATE_CHARS + 1))


@pytest.mark.parametrize("name", ["llama3", "qwen3", "mistral", "gemma"])
def test_a_rendering_is_byte_for_byte_that_of_the_tokenizer(name):
    tokenizer = load(name)
    talk: list[dict[str, Any]] = [
        {"role": "user", "content": "é 漢 \ud800 <|eot_id|>\n"},
        {"role": "assistant", "content": " yes "},
    ]
    own = tokenizer.apply_chat_template(talk, tokenize=False, add_generation_prompt=False)
    assert ChatTemplate(tokenizer, str(tokenizer.chat_template)).render(talk) == own


def test_the_process_has_no_keys_of_ours(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "a secret")
    PROCESS.close()
    assert ChatTemplate(load("llama3"), "{{ messages|length }}").render(TALK) == "2"
    assert PROCESS._process is not None
    environment = Path(f"/proc/{PROCESS._process.pid}/environ")
    if environment.exists():
        assert b"HF_TOKEN" not in environment.read_bytes()


def test_threads_get_their_own_answers():
    template, texts = ChatTemplate(load("llama3"), "{{ messages[0].content }}"), dict[int, str]()

    def render(number):
        for _ in range(20):
            texts[number] = template.render([{"role": "user", "content": str(number)}])

    threads = [threading.Thread(target=render, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert texts == {number: str(number) for number in range(4)}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_process_starts_a_process_of_its_own():
    template = ChatTemplate(load("llama3"), "{{ messages[0].content }}")
    template.render(TALK)
    pid = os.fork()
    if pid == 0:
        is_right = template.render(TALK) == "question"
        PROCESS.close()
        os._exit(0 if is_right else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert template.render(TALK) == "question"


@pytest.fixture
def panicking():
    """A tokenizer with an expression that takes more steps over a text than its library allows."""
    tokenizer: Any = load("llama3")
    settings = json.loads(tokenizer.backend_tokenizer.to_str())
    split = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
    settings["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, settings["pre_tokenizer"]]}
    tokenizer._tokenizer = Tokenizer.from_str(json.dumps(settings))
    return tokenizer


HARD = "a" * 40 + "!"


def test_a_tokenizer_that_panics_is_an_error_about_the_input(panicking):
    encoder = _PieceEncoder(panicking, ProtectedTokens(panicking, ""))
    assert encoder.encode(["easy"])
    with pytest.raises(InputError):
        encoder.encode([HARD])
    with pytest.raises(InputError), catch_tokenizer_panics(panicking):
        panicking(HARD)


def test_a_panic_anywhere_is_one_line_of_the_command(panicking, monkeypatch, capsys):
    from composer_replication.cli import doctor, main

    monkeypatch.setattr(doctor, "run", lambda _args: panicking(HARD))
    assert main.main(["doctor"]) == main.FAILED
    error = capsys.readouterr().err
    assert "CRF_DEBUG" not in error  # which is asked for where nobody foresaw what happened
    assert "tokenizer" in error


def test_an_interrupt_is_no_panic(panicking):
    with pytest.raises(KeyboardInterrupt), catch_tokenizer_panics(panicking):
        raise KeyboardInterrupt
