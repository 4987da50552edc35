"""Home directories and user names become USER_n, n by first appearance in the conversation."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence, Set

from composer_replication.privacy.rules import PSEUDONYM, word_set

# Names that belong to images, runners and documentation say nothing about a person.
_NOBODY = word_set(
    "user users username name me you root runner ubuntu node vscode app shared public default all linuxbrew git www"
    " admin administrator guest nobody ec2-user codespace gitpod coder dev docker jenkins circleci vagrant pi x xxx"
    " foo"
)
_NAME = r"[A-Za-z0-9_][A-Za-z0-9_.@+-]*"
_AFTER = r"(?:/|\\{1,4}|%2[Ff]|%5[Cc])"
# What an application has under `home/`: its front page is no person.
_PARTS = (
    "(?:components?|pages?|views?|src|lib|styles?|assets|images?|img|css|js|hooks|utils?|api|tests?|templates?|static|index"
    "|layouts?|sections?|widgets?|screens?|models?|services?|controllers?|routes?|common|constants|types|features|modules)"
)
# Without the first slash, as archives and lists of files have it: only where a line begins, and before a file.
_RELATIVE = rf"/(?!{_PARTS}/)(?={_NAME}/)"
# Each pattern starts with a literal, and looks back from there: that is what makes the search fast.
_PATHS = (
    (
        "home",
        re.compile(rf"(home(?:(?<=[/\\Ff]home){_AFTER}|(?<![^\0\n]home){_RELATIVE}))({_NAME})"),
        re.compile(r"(-home-(?<![A-Za-z0-9_.-]-home-))([A-Za-z0-9_]+)(?=-|$|[/\\\s\"'`])", re.M),
    ),
    (
        "Users",
        re.compile(
            rf"(Users(?:(?<=[/\\FfCc]Users){_AFTER}|(?<![^\0\n]Users){_RELATIVE}))({_NAME}(?: [A-Z][a-z]+(?=\\))?)"
        ),
        re.compile(r"(-Users-(?<![A-Za-z0-9_.]-Users-))([A-Za-z0-9_]+)(?=-|$|[/\\\s\"'`])", re.M),
    ),
)

WORDS = tuple(word.lower().encode() for word, *_ in _PATHS)


class Identity:
    """Finds people in text. Holds no state: the numbering comes from the caller, one per conversation."""

    def __init__(self, home_dirs: Sequence[str], user_names: Sequence[str], *, others: bool = False) -> None:
        """`others`: e-mail addresses, phone numbers and names beside them become pseudonyms, too."""
        self._others = others
        homes = {home.rstrip("/\\") for home in home_dirs if len(home.rstrip("/\\")) > 1}
        names = {name for name in user_names if len(name) >= 2 and name.upper() != "USER"}
        self._known = frozenset(names | {re.split(r"[/\\]", home)[-1] for home in homes})
        self._homes = sorted(homes - {"/root"}, key=len, reverse=True)
        folders = {re.sub(r"[^A-Za-z0-9]", "-", home): home for home in self._homes}
        self._folders = sorted(folders, key=len, reverse=True)
        spelled = sorted(map(re.escape, names), key=len, reverse=True)
        # In a dump a name stands beside underscores and digits of other things; letters around it make another word.
        self._names = re.compile(rf"(?<![A-Za-z0-9])(?:{'|'.join(spelled)})(?![A-Za-z0-9])") if spelled else None
        self._needles = tuple(names)

    def replace(self, text: str, pseudonym: Callable[[str], str], words: Set[bytes] | None = None) -> str:
        """The text with every known or visible user as a pseudonym. `words`: which of `WORDS` occur, where known."""
        for home in self._homes:
            if home in text:
                text = re.sub(re.escape(home) + r"(?![A-Za-z0-9_])", lambda _, h=home: self._home(h, pseudonym), text)
        for folder in self._folders:
            if folder in text:
                name = re.split(r"-", folder)[-1]
                text = re.sub(re.escape(folder) + r"(?![A-Za-z0-9])", lambda _, n=name: f"-home-{pseudonym(n)}", text)
        for word, path, folder in _PATHS:
            if word in text if words is None else word.lower().encode() in words:
                text = path.sub(lambda match: match[1] + self._name(match[2], pseudonym), text)
                if f"-{word}-" in text:
                    text = folder.sub(lambda match: match[1] + self._name(match[2], pseudonym), text)
        if self._names is not None and any(needle in text for needle in self._needles):
            text = self._names.sub(lambda match: pseudonym(match[0]), text)
        return _without_people(text, pseudonym) if self._others else text

    def touches(self, text: str, words: Set[bytes] | None = None) -> bool:
        """Whether `replace` would change the text."""
        if self._homes or self._names is not None or self._others:
            return self.replace(text, lambda _: "", words) != text
        # The same few directories stand in a text over and over: each name counts once.
        return any(
            self._name(name, lambda _: "") != name
            for word, *patterns in _PATHS
            if (word in text if words is None else word.lower().encode() in words)
            for pattern in patterns
            for _, name in set(pattern.findall(text))
        )

    def _home(self, home: str, pseudonym: Callable[[str], str]) -> str:
        parent, separator, name = home.rpartition("\\" if "\\" in home else "/")
        home_root = (
            parent
            if re.fullmatch(r"/home|/Users|[A-Za-z]:\\Users|[A-Za-z]:/Users|/mnt/[a-z]/Users|/[a-z]/Users", parent)
            else "/home"
        )
        return home_root + (separator if home_root == parent else "/") + pseudonym(name)

    def _name(self, name: str, pseudonym: Callable[[str], str]) -> str:
        bare = name.rstrip(".")
        if bare not in self._known and (bare.lower() in _NOBODY or PSEUDONYM.fullmatch(bare) or not bare):
            return name
        return pseudonym(bare) + name[len(bare) :]


# Other people, when asked for: e-mail addresses, phone numbers, and names where a line says that one stands there.
_EMAIL = re.compile(r"@(?<=[\w%+-]@)[A-Za-z0-9-]{1,60}(?:\.[A-Za-z0-9-]{1,60}){1,5}")
_LOCAL = re.compile(r"[A-Za-z0-9_.%+-]{1,64}")
# Addresses that belong to nobody, and versions: `pkg@1.2.3`, `git@github.com`.
_PEOPLE_NOBODY = re.compile(
    r"(?i)(?:git|noreply|no-reply|donotreply|user|users|you|your|name|me|info|root|admin|test|example|"
    r"foo|bar|email|someone)@"
    r"|[\w.%+-]{1,64}@(?:(?:[\w-]++\.)*+(?<=@|\.)(?:test|invalid|localhost|local)$|(?:[\w-]{1,40}+\.)"
    r"{0,3}example\.(?:com|org|net)$"
    r"|[\d.]+$|[\w.-]*\.(?:js|ts|tsx|py|json|md|css|png|jpg|svg|service|target|socket|timer|mount|git|local|test)$)"
    r"|noreply@anthropic\.com$"
)
# With a country, or in the groups of North America; digits alone are no number of a phone.
_PHONE = re.compile(
    r"(?<![\w.+/#=-])(?:\+\d{1,3}[ .-]?(?:\(\d{1,4}\)[ .-]?)?\d{2,4}(?:[ .-]?\d{2,4}){2,4}|\(\d{3}\) ?"
    r"\d{3}-\d{4}|\d{3}-\d{3}-\d{4})(?![\w-]|\.\d)"
)
_WORD = r"[^\W\d_][\w.'\u2019-]{0,30}"
_PEOPLE_NAME = rf"{_WORD}(?: {_WORD}){{1,3}}"
# `Ada Lovelace <ada@...>`, and the lines where git, mail and package files keep a name.
_BEFORE_ADDRESS = re.compile(rf"(?P<name>{_PEOPLE_NAME}) \\*[<(]\\*[\w.%+-]{{1,64}}@")
_LINE = re.compile(
    rf"(?im)^[ \t>+-]{{0,8}}(?:author|committer|commit|tagger|from|to|cc|signed-off-by|co-authored-by|r"
    rf"eviewed-by|acked-by|tested-by"
    rf"|reported-by|maintainer|full name|display name)\s?:\s{{1,9}}(?-i:(?P<name>{_PEOPLE_NAME}))(?=\s*(?:$|<|\())"
)
_NO_NAMES = re.compile(
    r"(?i)\b(?:claude|github|gitlab|copilot|dependabot|bot|actions?|team|support|anthropic|openai|codex|the)\b"
)


def _people_in(text: str) -> Iterator[str]:
    """Every e-mail address, phone number and name in a text, longest first: a name may hold another."""
    people = {*_addresses(text), *(match[0] for match in _PHONE.finditer(text) if _is_phone(match[0]))}
    for match in (*_BEFORE_ADDRESS.finditer(text), *_LINE.finditer(text)):
        name = match["name"].strip()
        if name[0].isupper() and not _NO_NAMES.search(name):
            people.add(name)
    yield from sorted(people, key=lambda person: (-len(person), person))


def _addresses(text: str) -> Iterator[str]:
    for match in _EMAIL.finditer(text) if "@" in text else ():
        at = match.start()
        local = _LOCAL.match(text[max(0, at - 64) : at][::-1])
        address = (local[0][::-1] if local else "") + match[0]
        if local and not _PEOPLE_NOBODY.match(address) and not text.startswith((":", "/"), match.end()):
            yield address.lstrip(".%+-")


def _is_phone(number: str) -> bool:
    return 9 <= sum(map(str.isdigit, number)) <= 15


def _without_people(text: str, pseudonym: Callable[[str], str]) -> str:
    """The text with other people as pseudonyms; the same object when there are none."""
    for name in _people_in(text):
        text = re.sub(rf"(?<!\w){re.escape(name)}(?!\w)", lambda _, person=name: pseudonym(person), text)
    return text
