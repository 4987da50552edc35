"""Replace home directories and user names by USER_n, numbered by first appearance in the conversation.

Other people, such as senders of mail and authors of commits, are replaced only on request.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence, Set

from composer_replication.privacy.rules import PSEUDONYM, word_set

# User names in images, runners and documentation do not refer to people.
_NOT_A_PERSON = word_set(
    "user users username name me you root runner ubuntu node vscode app shared public default all linuxbrew git www"
    " admin administrator guest nobody ec2-user codespace gitpod coder dev docker jenkins circleci vagrant pi x xxx"
    " foo"
)
_USER_NAME = r"[A-Za-z0-9_][A-Za-z0-9_.@+-]*"
_PATH_SEPARATOR = r"(?:/|\\{1,4}|%2[Ff]|%5[Cc])"
# Folders below `home/` in the source code of an application, which are not user names.
_APPLICATION_FOLDERS = (
    "(?:components?|pages?|views?|src|lib|styles?|assets|images?|img|css|js|hooks|utils?|api|tests?|templates?|static|index"
    "|layouts?|sections?|widgets?|screens?|models?|services?|controllers?|routes?|common|constants|types|features|modules)"
)
# Without the first slash, as in archives and file lists: only at the start of a line, and before a file.
_RELATIVE_HOME = rf"/(?!{_APPLICATION_FOLDERS}/)(?={_USER_NAME}/)"
# Each pattern starts with a literal and looks back from there, which makes the search fast. Folders of agents have
# dashes for slashes. The first pattern of each matches `/home/ada`, the second `-home-ada-src`.
_HOME_PATTERNS = (
    (
        "home",
        re.compile(rf"(home(?:(?<=[/\\Ff]home){_PATH_SEPARATOR}|(?<![^\0\n]home){_RELATIVE_HOME}))({_USER_NAME})"),
        re.compile(r"(-home-(?<![A-Za-z0-9_.-]-home-))([A-Za-z0-9_]+)(?=-|$|[/\\\s\"'`])", re.M),
    ),
    (
        "Users",
        re.compile(
            rf"(Users(?:(?<=[/\\FfCc]Users){_PATH_SEPARATOR}|(?<![^\0\n]Users){_RELATIVE_HOME}))"
            rf"({_USER_NAME}(?: [A-Z][a-z]+(?=\\))?)"
        ),
        re.compile(r"(-Users-(?<![A-Za-z0-9_.]-Users-))([A-Za-z0-9_]+)(?=-|$|[/\\\s\"'`])", re.M),
    ),
)

WORDS = tuple(word.lower().encode() for word, *_ in _HOME_PATTERNS)


class Identity:
    """Finds people in text and replaces them. It is stateless: the caller numbers the people of each conversation."""

    def __init__(self, home_dirs: Sequence[str], user_names: Sequence[str], *, people: bool = False) -> None:
        """Compile the patterns. With `people`, e-mail addresses, phone numbers and adjacent names are replaced, too."""
        self._people = people
        homes = {home.rstrip("/\\") for home in home_dirs if len(home.rstrip("/\\")) > 1}
        names = {name for name in user_names if len(name) >= 2 and name.upper() != "USER"}
        self._known_names = frozenset(names | {re.split(r"[/\\]", home)[-1] for home in homes})
        self._homes = sorted(homes - {"/root"}, key=len, reverse=True)
        dashed_homes = {re.sub(r"[^A-Za-z0-9]", "-", home): home for home in self._homes}
        self._dashed_homes = sorted(dashed_homes, key=len, reverse=True)
        spelled = sorted(map(re.escape, names), key=len, reverse=True)
        # In a dump, underscores and digits may touch a name; a letter makes it a different word: `backup_ada2`, not
        # `adam`.
        self._names = re.compile(rf"(?<![A-Za-z0-9])(?:{'|'.join(spelled)})(?![A-Za-z0-9])") if spelled else None
        self._known_strings = tuple(names)

    def replace(self, text: str, pseudonym: Callable[[str], str], words: Set[bytes] | None = None) -> str:
        """Replace every user with a pseudonym. `words` has the words of `WORDS` that occur in the text, if the
        caller knows them.
        """
        for home in self._homes:
            if home in text:
                text = re.sub(re.escape(home) + r"(?![A-Za-z0-9_])", lambda _, h=home: self._home(h, pseudonym), text)
        for folder in self._dashed_homes:
            if folder in text:
                name = re.split(r"-", folder)[-1]
                text = re.sub(re.escape(folder) + r"(?![A-Za-z0-9])", lambda _, n=name: f"-home-{pseudonym(n)}", text)
        for word, path, folder in _HOME_PATTERNS:
            if word in text if words is None else word.lower().encode() in words:
                text = path.sub(lambda match: match[1] + self._name(match[2], pseudonym), text)
                if f"-{word}-" in text:
                    text = folder.sub(lambda match: match[1] + self._name(match[2], pseudonym), text)
        if self._names is not None and any(needle in text for needle in self._known_strings):
            text = self._names.sub(lambda match: pseudonym(match[0]), text)
        return _with_people_replaced(text, pseudonym) if self._people else text

    def touches(self, text: str, words: Set[bytes] | None = None) -> bool:
        """Return whether `replace` would change the text."""
        if self._homes or self._names is not None or self._people:
            return self.replace(text, lambda _: "", words) != text
        # A text repeats a few directories, so each name is checked once.
        return any(
            self._name(name, lambda _: "") != name
            for word, *patterns in _HOME_PATTERNS
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
        if bare not in self._known_names and (bare.lower() in _NOT_A_PERSON or PSEUDONYM.fullmatch(bare) or not bare):
            return name
        return pseudonym(bare) + name[len(bare) :]


# `ada@mail.example.org` -> `@mail.example.org`; not `@decorator.x`.
_EMAIL = re.compile(r"@(?<=[\w%+-]@)[A-Za-z0-9-]{1,60}(?:\.[A-Za-z0-9-]{1,60}){1,5}")
# The part before the @, read backward: `ada.b <` -> `ada.b`.
_LOCAL_PART_REVERSED = re.compile(r"[A-Za-z0-9_.%+-]{1,64}")
# Addresses that belong to no person, and versions: `git@github.com`, `noreply@example.dev`, `pkg@1.2.3`,
# `ada@example.org`; not `ada@mail.dev`.
_NOBODYS_ADDRESS = re.compile(
    r"(?i)(?:git|noreply|no-reply|donotreply|user|users|you|your|name|me|info|root|admin|test|example|"
    r"foo|bar|email|someone)@"
    r"|[\w.%+-]{1,64}@(?:(?:[\w-]++\.)*+(?<=@|\.)(?:test|invalid|localhost|local)$|(?:[\w-]{1,40}+\.)"
    r"{0,3}example\.(?:com|org|net)$"
    r"|[\d.]+$|[\w.-]*\.(?:js|ts|tsx|py|json|md|css|png|jpg|svg|service|target|socket|timer|mount|git|local|test)$)"
    r"|noreply@anthropic\.com$"
)
# With a country code, or in North American groups: `+49 30 1234567`, `(555) 123-4567`; not `5551234567`.
_PHONE = re.compile(
    r"(?<![\w.+/#=-])(?:\+\d{1,3}[ .-]?(?:\(\d{1,4}\)[ .-]?)?\d{2,4}(?:[ .-]?\d{2,4}){2,4}|\(\d{3}\) ?"
    r"\d{3}-\d{4}|\d{3}-\d{3}-\d{4})(?![\w-]|\.\d)"
)
_NAME_WORD = r"[^\W\d_][\w.'\u2019-]{0,30}"
_FULL_NAME = rf"{_NAME_WORD}(?: {_NAME_WORD}){{1,3}}"
# `Ada Lovelace <ada@mail.dev>` -> `Ada Lovelace`.
_BEFORE_ADDRESS = re.compile(rf"(?P<name>{_FULL_NAME}) \\*[<(]\\*[\w.%+-]{{1,64}}@")
# Lines where git, mail and package files store a name: `Author: Ada Lovelace <` -> `Ada Lovelace`; not
# `file: Ada Lovelace`.
_NAME_LINE = re.compile(
    rf"(?im)^[ \t>+-]{{0,8}}(?:author|committer|commit|tagger|from|to|cc|signed-off-by|co-authored-by|r"
    rf"eviewed-by|acked-by|tested-by"
    rf"|reported-by|maintainer|full name|display name)\s?:\s{{1,9}}(?-i:(?P<name>{_FULL_NAME}))(?=\s*(?:$|<|\())"
)
# `Claude Code`, `The Team`; not `Ada Lovelace`.
_NOT_A_NAME = re.compile(
    r"(?i)\b(?:claude|github|gitlab|copilot|dependabot|bot|actions?|team|support|anthropic|openai|codex|the)\b"
)


def _people_in(text: str) -> Iterator[str]:
    """Yield every e-mail address, phone number and name in a text, longest first because names may overlap."""
    people = {*_addresses(text), *(match[0] for match in _PHONE.finditer(text) if _is_phone(match[0]))}
    for match in (*_BEFORE_ADDRESS.finditer(text), *_NAME_LINE.finditer(text)):
        name = match["name"].strip()
        if name[0].isupper() and not _NOT_A_NAME.search(name):
            people.add(name)
    yield from sorted(people, key=lambda person: (-len(person), person))


def _addresses(text: str) -> Iterator[str]:
    for match in _EMAIL.finditer(text) if "@" in text else ():
        at = match.start()
        local = _LOCAL_PART_REVERSED.match(text[max(0, at - 64) : at][::-1])
        address = (local[0][::-1] if local else "") + match[0]
        if local and not _NOBODYS_ADDRESS.match(address) and not text.startswith((":", "/"), match.end()):
            yield address.lstrip(".%+-")


def _is_phone(number: str) -> bool:
    return 9 <= sum(map(str.isdigit, number)) <= 15


def _with_people_replaced(text: str, pseudonym: Callable[[str], str]) -> str:
    """Replace people other than the user with pseudonyms. Returns the same object if the text names none."""
    for name in _people_in(text):
        text = re.sub(rf"(?<!\w){re.escape(name)}(?!\w)", lambda _, person=name: pseudonym(person), text)
    return text
