"""Programs that no table of options describes: those that run another, `find`, `echo`, `python`, `go`."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from composer_replication.actions.shell.argv import Key, Place, line_key, path_key, plain_key, words_key
from composer_replication.actions.shell.options import Program
from composer_replication.actions.shell.tree import shell_script
from composer_replication.actions.shell.words import Word, literal_word
from composer_replication.actions.tools import word_set

ShellKey = Callable[[str, Place], Key]
"""The key of a whole script, for a shell that is told one with -c."""

_MAX_RUNNERS = 4
_RUNNERS = word_set("sudo nohup time command uv poetry pipenv npx")
_NEEDS_RUN = word_set("uv poetry pipenv")
_SHELL_OWN = word_set(
    "cd export source . eval exec set unset alias read type ulimit umask trap shift return exit test [ : builtin"
)
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=", re.ASCII)
_DURATION = re.compile(r"\d+(?:\.\d+)?[smhd]?")
_PYTHON = re.compile(r"python(?:\d(?:\.\d+)?)?")
_SUBSTITUTES = re.compile(
    r"s(?P<mark>[^\w\s\\\x01])(?P<old>(?:(?!(?P=mark))[^\\\n\x01])+)(?P=mark)(?P<new>(?:(?!(?P=mark))[^\\\n\x01])*)(?P=mark)"
    r"(?P<flags>[gpIi0-9]*)"
)
_PYTHON_OPTIONS = Program(flags="uBEIsSqvO", valued="WX", permutes=False, operands="path then words")
# Tests of find that only look, with the number of words they take; of those the order does not matter.
_LOOKS = {"-empty": 0} | dict.fromkeys(
    word_set(
        "-name -iname -type -path -ipath -wholename -regex -iregex -size -mtime -mmin -newer -perm -user -group"
        " -maxdepth -mindepth -ctime -atime"
    ),
    1,
)
_GO_FLAGS = word_set("v race short cover x n a json failfast benchmem")
_GO_VALUED = word_set("run count timeout bench tags p coverprofile o ldflags gcflags parallel cpu mod")


def program_key(words: Sequence[Word], place: Place, shell: ShellKey, depth: int = 0) -> Key:
    """The key of one program with its words, whatever it is; `depth` counts programs that run another."""
    name = words[0].literal
    if name is None or depth > _MAX_RUNNERS:
        return plain_key(words)
    return _special_key(name, words, place, shell, depth) or words_key(words, place)


def env_prefix(words: Sequence[Word]) -> int:
    """How many assignments follow `env` where it does nothing but set them for a program; else 0."""
    number = 1
    while number < len(words) and _ASSIGNMENT.match(words[number].raw):
        number += 1
    program = words[number].literal if number < len(words) else None
    is_plain = program is not None and program not in _SHELL_OWN and not program.startswith("-")
    return number - 1 if is_plain and words[0].literal == "env" else 0


def _special_key(name: str, words: Sequence[Word], location: Place, shell: ShellKey, depth: int) -> Key | None:
    if name in _RUNNERS or name == "timeout":
        return _runner_key(name, words, location, shell, depth)
    script = shell_script([word.literal for word in words])
    if script is not None:
        return ["shell", name, words[1].literal, shell(script, location)]
    if name == "echo":
        return _echo_key(words)
    if name == "find":
        return _find_key(words, location)
    if _PYTHON.fullmatch(name):
        return _python_key(name, words, location, shell, depth)
    if name == "sed":
        return words_key([_with_one_delimiter(word) for word in words], location)
    if name == "make":
        return words_key(_with_jobs(words), location)
    if name == "tar":
        return words_key(_with_dash(words), location)
    return _go_key(words) if name == "go" and len(words) > 1 else None


def _with_one_delimiter(word: Word) -> Word:
    """`s|a|b|` and `s/a/b/` are the same where neither part needs the delimiter or a backslash."""
    match = _SUBSTITUTES.fullmatch(word.literal or "")
    if match is None:
        return word
    return literal_word("\x01".join(("s", match["old"], match["new"], match["flags"])))


def _runner_key(name: str, words: Sequence[Word], location: Place, shell: ShellKey, depth: int) -> Key | None:
    """`sudo rm -rf x`: the runner's own words, then the program it runs."""
    num_own = 1
    if name == "timeout" or name in _NEEDS_RUN:
        second = words[1].literal if len(words) > 1 else None
        is_known = second == "run" if name in _NEEDS_RUN else second is not None and _DURATION.fullmatch(second)
        num_own = 2 if is_known else 0
    following = words[num_own].literal if num_own and num_own < len(words) else None
    if following is None or following.startswith("-") or _ASSIGNMENT.match(following):
        return None
    if name == "npx":
        return ["runs", name, words_key(words[num_own:], location)]
    return ["runs", *(word.key for word in words[:num_own]), program_key(words[num_own:], location, shell, depth + 1)]


def _echo_key(words: Sequence[Word]) -> Key | None:
    """What is printed: words are joined by one blank."""
    texts = [word.literal for word in words[1:]]
    num_flags = 0
    while num_flags < len(texts) and texts[num_flags] in ("-n", "-e", "-E", "-ne", "-en"):
        num_flags += 1
    literals = [text for text in texts[num_flags:] if text is not None]
    return ["echo", texts[:num_flags], " ".join(literals)] if len(literals) == len(texts) - num_flags else None


def _find_key(words: Sequence[Word], location: Place) -> Key | None:
    at, paths = 1, list[object]()
    while at < len(words) and not _opens_expression(words[at]):
        if words[at].splits:
            return None
        paths.append(path_key(words[at], location))
        at += 1
    looks: list[Key] = []
    while at < len(words):
        negated = words[at].literal in ("!", "-not")
        test = words[at + negated].literal if at + negated < len(words) else None
        size = _LOOKS.get(test or "")
        end = at + negated + 1 + (size or 0)
        if test is None or size is None or end > len(words) or any(word.splits for word in words[at:end]):
            break
        looks.append([test, bool(negated), *(word.key for word in words[end - size : end])])
        at = end
    rest = [word.key for word in words[at:]]
    return ["find", paths or [location.path(".")], _ordered(looks), [] if rest == ["-print"] else rest]


def _ordered(looks: list[Key]) -> list[Key]:
    """By name and then by value, but for depths, of which the last counts."""
    return sorted(looks, key=lambda look: [str(look[0]), "" if "depth" in str(look[0]) else repr(look)])


def _opens_expression(word: Word) -> bool:
    return bool(word.pieces) and word.pieces[0].text.startswith(("-", "(", "!")) and word.pieces[0].kind == "text"


def _python_key(name: str, words: Sequence[Word], location: Place, shell: ShellKey, depth: int) -> Key | None:
    """`python -m module …` is the module's command line; `-c` is code; else a script with words of its own."""
    texts = [word.literal for word in words]
    at = next((number for number, text in enumerate(texts[1:], start=1) if not _is_python_flag(text)), len(words))
    flags = sorted(str(text) for text in texts[1:at])
    if at + 1 < len(words) and texts[at] == "-m":
        return [name, flags, "-m", program_key(words[at + 1 :], location, shell, depth + 1)]
    if at < len(words) and texts[at] == "-c":
        return [name, flags, "-c", [word.key for word in words[at + 1 :]]]
    script_key = line_key(words[at:], _PYTHON_OPTIONS, location)
    return [name, flags, script_key] if script_key is not None else None


def _is_python_flag(text: str | None) -> bool:
    return text in ("-u", "-B", "-I", "-s", "-S", "-E", "-q", "-O")


def _with_jobs(words: Sequence[Word]) -> list[Word]:
    """`make -j 4` is `make -j4`."""
    joined: list[Word] = []
    for word in words:
        if joined and joined[-1].literal == "-j" and (word.literal or "").isdigit():
            joined[-1] = literal_word(f"-j{word.literal}")
        else:
            joined.append(word)
    return joined


def _with_dash(words: Sequence[Word]) -> Sequence[Word]:
    """`tar xzf a` is `tar -xzf a`: letters without a dash, where the only one with a value comes last."""
    letters = words[1].literal if len(words) > 1 else None
    is_old = letters is not None and re.fullmatch(r"[xctzjJvpk]+f?", letters) is not None
    return [words[0], literal_word(f"-{letters}"), *words[2:]] if is_old else words


def _go_key(words: Sequence[Word]) -> Key | None:
    """go writes options with one dash, `-run X` or `-run=X`; only `go test` takes them behind the packages too."""
    command, options, packages, at = words[1].literal, list[tuple[str, object]](), list[object](), 2
    if command not in ("test", "build", "vet"):
        return None
    while at < len(words):
        text = words[at].literal
        if text is None or text == "-args":
            return None
        name, equals, value = text.lstrip("-").partition("=")
        at += 1
        if not text.startswith("-"):
            packages.append(text)
        elif packages and command != "test":
            return None
        elif equals and name in _GO_VALUED:
            options.append((name, value))
        elif name in _GO_FLAGS and not equals:
            options.append((name, None))
        elif name in _GO_VALUED and at < len(words) and not words[at].splits:
            options.append((name, words[at].key))
            at += 1
        else:
            return None
    return ["go", command, sorted(options, key=lambda option: option[0]), packages]
