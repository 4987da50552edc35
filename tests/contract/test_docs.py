"""Code in the documentation runs, links lead somewhere, and the printed tree and commands are the real ones."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from markdown_pages import blocks, make_targets, relative_links, tree_paths
from repository import PACKAGE, ROOT, SRC, fresh_python, markdown_files, relative, repository_files

from warm_crf import python_command

README = ROOT / "README.md"
# Guides are run by test_guides.py, with the commands between their Python blocks.
GUIDES = ROOT / "docs" / "guides"
DOCS = [
    path
    for path in markdown_files()
    if path == README or (path.is_relative_to(ROOT / "docs") and not path.is_relative_to(GUIDES))
]
TREE_ROOT = "src/composer_replication/"
NOT_CONFIGS = {"pyproject.toml", "arms.toml"}
# Of other engines: tests/recipes loads them.
ENGINES_CONFIGS = "recipes/prime_rl/configs"

# Runs the blocks of a page in one namespace; a traceback shows the page's own line numbers.
RUN_BLOCKS = """
import json, sys
sys.path.insert(0, {src!r})
page = json.load(sys.stdin)
namespace = {{"__name__": "__main__"}}
for line, code in page["blocks"]:
    exec(compile("\\n" * (line - 1) + code, page["name"], "exec"), namespace)
"""


def text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def run_page(text: str, name: str, cwd: Path) -> str:
    """What the page's Python blocks print, run in order from another folder."""
    run = [(block.line, block.code) for block in blocks(text) if block.language == "python" and block.not_run is None]
    page = json.dumps({"name": name, "blocks": run})
    code = RUN_BLOCKS.format(src=str(SRC))
    return fresh_python("-c", code, cwd=cwd, given=page, program=python_command(), HF_HUB_OFFLINE="1")


def readme_tree() -> list[str]:
    """The paths named by the one block of the README that prints the package's folder."""
    printed = [tree_paths(block.code) for block in blocks(text_of(README))]
    (paths,) = [paths for paths in printed if TREE_ROOT in paths]
    return paths


@pytest.mark.parametrize("path", DOCS, ids=relative)
def test_every_python_block_of_a_page_runs(path, tmp_path):
    run_page(text_of(path), relative(path), tmp_path)


def test_the_readme_has_python_that_runs():
    run = [block for block in blocks(text_of(README)) if block.language == "python" and block.not_run is None]
    assert run


def test_a_block_that_is_not_run_says_why(note):
    skipped = [(path, block) for path in DOCS for block in blocks(text_of(path)) if block.not_run is not None]
    note(f"documentation blocks not run: {len(skipped)}")
    for path, block in skipped:
        note(f"  {relative(path)}:{block.line}: {block.not_run}")
    assert [f"{relative(path)}:{block.line}" for path, block in skipped if not block.not_run] == []


@pytest.mark.parametrize("path", DOCS, ids=relative)
def test_every_toml_block_of_a_page_is_a_config_that_loads(path):
    from composer_replication.config import CrfConfig, loads

    for block in blocks(text_of(path)):
        if block.language == "toml" and block.not_run is None:
            loads(CrfConfig, block.code)


@pytest.mark.parametrize("path", markdown_files(), ids=relative)
def test_every_relative_link_leads_to_a_file_of_the_repository(path):
    targets = {link: (path.parent / link).resolve() for link in relative_links(text_of(path))}
    assert [link for link, target in targets.items() if not target.exists()] == []
    assert [link for link, target in targets.items() if not target.is_relative_to(ROOT)] == []


def test_the_readme_is_read_in_a_few_minutes():
    assert 700 <= len(text_of(README).split()) <= 900


def test_the_tree_in_the_readme_names_only_paths_that_exist():
    paths = readme_tree()
    assert len(paths) > 10
    assert [path for path in paths if not any(ROOT.glob(path.rstrip("/")))] == []


def test_the_tree_in_the_readme_names_every_part_of_the_package():
    named = {path.rstrip("/") for path in readme_tree()}
    folders = {relative(init.parent) for init in PACKAGE.glob("*/__init__.py")}
    assert sorted(folders - named) == []


def test_every_make_command_in_the_documentation_is_a_target():
    makefile = text_of(ROOT / "Makefile")
    targets = set(re.findall(r"^([a-z][a-z-]*):(?!=)", makefile, re.MULTILINE))
    assert {"test", "check", "demo"} <= make_targets(text_of(README))
    for path in markdown_files():
        assert sorted(make_targets(text_of(path)) - targets) == [], relative(path)


def test_every_shipped_config_loads():
    from composer_replication.config import CrfConfig, load

    shipped = [path for path in repository_files() if path.suffix == ".toml" and path.name not in NOT_CONFIGS]
    for path in shipped:
        if not path.parent.as_posix().endswith(ENGINES_CONFIGS):
            load(CrfConfig, path)


def test_every_shipped_plan_of_an_ablation_can_be_read():
    from composer_replication.evaluation.ablation.plan import read_plan

    for path in repository_files():
        if path.name == "arms.toml":
            assert len(read_plan(path).seeds) >= 1


PAGE = """
# Title with `make` in it

```python
x = 1
```

<!-- not run: needs a GPU -->

```python
1 / 0
```

A [file](docs/a.md#part), an ![image](<b.png> "title"), [the web](https://example.org/c), [here](#title), `[no](d.md)`.

~~~bash
make setup test   # and [not](a-link.md)
make demo
~~~

Type `make check` and make sure that it passes.

[e]: e.md

```python
print(x + 1)
```
"""


def test_blocks_are_found_with_their_lines_and_the_reason_not_to_run_them():
    found = [(block.language, block.line, block.not_run) for block in blocks(PAGE)]
    assert found == [("python", 5, None), ("python", 11, "needs a GPU"), ("bash", 17, None), ("python", 26, None)]


def test_blocks_share_a_namespace_and_a_failing_one_fails_with_its_line(tmp_path):
    assert run_page(PAGE, "page.md", tmp_path) == "2\n"
    with pytest.raises(AssertionError, match=r'"page\.md", line 11'):
        run_page(PAGE.replace("<!-- not run: needs a GPU -->", ""), "page.md", tmp_path)


def test_a_reason_must_stand_directly_above_its_block():
    (block,) = blocks("<!-- not run: x -->\nwords between\n```python\n1 / 0\n```")
    assert block.not_run is None
    with pytest.raises(ValueError, match="opened on line 1 is not closed"):
        blocks("```python\n1 / 0")


def test_links_and_make_commands_are_found_and_code_is_not_mistaken_for_them():
    assert relative_links(PAGE) == ["docs/a.md", "b.png", "e.md"]
    assert make_targets(PAGE) == {"setup", "test", "demo", "check"}


INDENTED = """src/pkg/
  a.py d.py    first, see b/c.py
  b/           the rest
    c.py       deep
tests/         unit/ parity/
"""
DRAWN = """src/pkg/
├── a.py d.py    first, see b/c.py
├── b/           the rest
│   └── c.py     deep
tests/           unit/ parity/
"""


@pytest.mark.parametrize("tree", [INDENTED, DRAWN], ids=["indented", "drawn"])
def test_the_paths_of_a_printed_tree_are_found_under_their_folders(tree):
    assert tree_paths(tree) == ["src/pkg/", "src/pkg/a.py", "src/pkg/d.py", "src/pkg/b/", "src/pkg/b/c.py", "tests/"]
