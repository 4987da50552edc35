"""What is installed is what was tested: every dependency pinned, every file of it known by its hash."""

from __future__ import annotations

import re
import tomllib

import pytest
from repository import ROOT

PIN = re.compile(r"^([A-Za-z0-9._-]+)==([^\s;\\]+)", re.MULTILINE)
# They have environments of their own (constraints/NAME.txt), or none here: kingfisher is an optional scanner.
ELSEWHERE = {"replaysim", "docs", "privacy", "verifiers", "openenv", "modal", "ray", "prime-rl", "monarch", "verl"}

# Each would bring gigabytes, or versions that the tested set does not want.
ENGINES = {
    "data-juicer",
    "py-data-juicer",
    "modal",
    "openenv",
    "openenv-core",
    "prime-rl",
    "ray",
    "torchmonarch",
    "verifiers",
    "verl",
    "vllm",
}


def pins(*files: str) -> dict[str, str]:
    found = {}
    for file in files:
        found |= {normal(name): version for name, version in PIN.findall((ROOT / "constraints" / file).read_text())}
    return found


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def direct(*extras: str) -> set[str]:
    """What the package asks for by itself, and with these extras."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *(each for name in extras for each in project["optional-dependencies"][name])]
    return {normal(re.split(r"[\s<>=!~;\[]", each, maxsplit=1)[0]) for each in wanted}


def extras_of_setup() -> set[str]:
    rule = re.search(r"^\$\(STAMP\):.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert rule is not None
    (named,) = re.findall(r"-e '\.\[([a-z,-]+)\]'", rule[1])
    return {*named.split(",")}


def test_every_direct_dependency_is_pinned():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    names = direct(*(name for name in extras if name not in ELSEWHERE)) - {"composer-replication"}
    assert names - pins("main.txt").keys() == set()


def test_the_main_environment_has_no_engine():
    """`make setup` installs the pins, and the package itself without dependencies."""
    assert ENGINES & pins("main.txt", "main.hashes.txt", "triton.hashes.txt").keys() == set()
    assert {"dev", "train"} <= extras_of_setup()
    assert ENGINES & direct(*extras_of_setup()) == set()
    assert extras_of_setup() & ELSEWHERE == set()
    assert ENGINES & direct("modal", "ray", "verl", "monarch", "verifiers", "openenv", "replaysim") == (
        {"modal", "ray", "verl", "torchmonarch", "verifiers", "openenv", "py-data-juicer"}
    )  # by the names that the engines have on the index


@pytest.mark.parametrize(
    ("extra", "file"),
    [
        ("docs", "docs"),
        ("verifiers", "verifiers"),
        ("openenv", "openenv"),
        ("modal", "diloco"),
        ("ray", "diloco"),
        ("prime-rl", "prime"),
        ("monarch", "monarch"),
        ("verl", "verl"),
    ],
)
def test_an_environment_of_its_own_has_pinned_packages(extra, file):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = {normal(re.split(r"[\s<>=]", each, maxsplit=1)[0]) for each in project["optional-dependencies"][extra]}
    lines = (ROOT / "constraints" / f"{file}.txt").read_text().splitlines()
    assert wanted <= pins(f"{file}.txt").keys()
    assert [line for line in lines if not line.startswith("#") and not PIN.match(line)] == []


def test_every_pin_but_torchs_has_hashes():
    assert pins("main.txt").keys() - pins("main.hashes.txt", "triton.hashes.txt").keys() == {"torch"}
    assert pins("main.hashes.txt", "triton.hashes.txt").items() <= pins("main.txt").items()


def test_every_pinned_file_has_a_whole_hash():
    for file in ("main.hashes.txt", "triton.hashes.txt"):
        text = (ROOT / "constraints" / file).read_text()
        assert len(re.findall(r"--hash=sha256:[0-9a-f]{64}\b", text)) >= len(PIN.findall(text))
        for block in re.split(r"\n(?=[A-Za-z])", text.strip()):
            assert "--hash=sha256:" in block, block.splitlines()[0]
