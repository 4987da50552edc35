"""Strings that look random: what is left when a secret has no prefix and no name.

Shannon entropy alone flags paths and identifiers, so the test is rarity: how many of the letter pairs are pairs that
words have, and how often the character class changes. Hashes, uuids and message ids are random too but public; they are
known by their shape or by the words beside them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import lru_cache

from composer_replication.privacy.rules import PSEUDONYM, Span, has_digit, word_set
from composer_replication.privacy.shapes.vendors import FAMILY_RULE

KIND = "HIGH_ENTROPY"
HEX_KIND = "HEX_SECRET"
# Longer runs are data (images, archives), not keys; keys of that size have a frame of their own (PEM, JWT).
MAX_LENGTH = 512
_JUDGED = 256  # that much of a long string tells what it is
_STEPS = frozenset((0, 1))  # from one character to the next: a repetition or a sequence

# The pairs of letters that make up most of English and of identifiers; random letters hit one in four of them.
_PAIRS = word_set(
    "th he in er an re on at en nd ti es or te of ed is it al ar st to nt ng se ha as ou io le ve co me de hi ri ro"
    " ic ne ea ra ce li ch ll be ma si om ur ca el ta la ns di fo ho pe ec pr no ct us ac ot il tr ly nc et ut ss so"
    " rs un lo wa ge ie wh ee wi em ad ol rt po we na ul ni ts mo ow pa im mi ai sh ir su id os iv ia am fi ci vi pl"
    " ig tu ev ld ry mp fe bl ab gh ty op wo sa ay ex ke ui bo ag da ib ap ue od up cl ef gr ug ub pt xt ck sp ds fu"
    " fa bu qu if cr mm sc oo tt pp ff nn rr cc nk ks ys ob og ok do go my by pu pi ba va ga ru av ep ey ew ws aw dd"
    " gs ls ms ps"
)
_CLASSES = {
    code: "0" if chr(code).isdigit() else "l" if chr(code).islower() else "U" if chr(code).isupper() else "-"
    for code in range(128)
}
_SHORTEST = re.compile(r"[A-Za-z0-9+/_-]{18}")  # what every rule below needs at the least
_FAMILY_TAIL = re.compile(r"[_-][A-Za-z0-9]{18}")
_PIECE = re.compile(r"[A-Za-z0-9+/_-]{20,}")
_CUT = re.compile(r"[./_=~$+-]+")
# Possessive: `ab-ab-ab-...-Q9x` could otherwise be cut into words in 2^n ways before it fails.
_WORDLIKE = re.compile(
    r"[A-Z]?[a-z]{2,20}+(?:[A-Z][a-z]{2,20}+)*+|[A-Z]++|[0-9]++"
    r"|[A-Z]?[a-z]++(?:[_-](?:[A-Z]?[a-z]++|[0-9]{1,4}+))++"
)
# A digit beside letters, or capitals where no word has them. Tried on the parts of a run, which are short.
_MIXED = re.compile(
    r"(?=[A-Za-z0-9]{7})(?:[A-Za-z]++[0-9]|[0-9]++[A-Za-z]"
    r"|[A-Za-z0-9]{0,15}?(?:[a-z][A-Z][A-Z0-9]|[A-Z]{2}[a-z]))"
)
_LONE_HEX = re.compile(r"(?<![A-Za-z0-9])(?:0x)?[0-9a-fA-F]{32,}(?![A-Za-z0-9])")
_LETTER = re.compile(r"[a-fA-F]")
_UUID = r"[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}"
# Public names that agents and servers give to messages, calls and files; SSH public keys; subresource integrity.
_PUBLIC = re.compile(
    _UUID
    + r"|(?<![A-Za-z0-9])(?:(?:srv)?toolu(?:_bdrk|_vrtx)?|call|msg|req|resp|chatcmpl|cmpl|rs|fc|run|thread|asst|item"
    r"|evt|event|gen|agent|task|step|batch|prompt|file)[_-][A-Za-z0-9]{8,64}(?![A-Za-z0-9])"
    r"|[sS][hH][aA]-?(?:1|224|256|384|512)[-:=][A-Za-z0-9+/=_-]{20,}|AAAA[BC]3NzaC1[A-Za-z0-9+/=_-]+|AAAAE2VjZHNh[A-Za-z0-9+/=_-]+"
    # What IPFS and nix name their contents by.
    r"|(?<![A-Za-z0-9])(?:Qm[1-9A-HJ-NP-Za-km-z]{44}|bafy[a-z2-7]{55})(?![A-Za-z0-9])|(?<=/nix/store/)[0-9a-z]{32}(?=-)"
    # Objects of a payment service, an account on a chain, an application of Google.
    r"|(?<![A-Za-z0-9])(?:cus|price|prod|in|pi|ch|sub|si|il|pm|evt|acct|seti|plan|re|txn)_[A-Za-z0-9]{14,24}(?![A-Za-z0-9])"
    r"|(?<![A-Za-z0-9])bc1[a-z0-9]{25,60}(?![A-Za-z0-9])|[0-9]{8,14}-[a-z0-9]{32}(?=\.apps\.googleusercontent)"
    # A pod of Kubernetes, an extension of Chrome.
    r"|(?<![A-Za-z0-9-])[a-z][a-z0-9-]{2,50}-[a-z0-9]{8,10}-[a-z0-9]{5}(?![A-Za-z0-9-])|(?<![A-Za-z])[a-p]{32}(?![A-Za-z])"
    # A database of AWS, and a file named for the time it was made at.
    r"|(?<![A-Za-z0-9])db-[A-Z0-9]{26}(?![A-Za-z0-9])|[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{6}Z(?:-[0-9a-f]{7,12}(?![0-9A-Za-z]))?"
    # A version of Go made from a commit, and what `git describe` says.
    r"|(?<![0-9])[0-9]{14}-[0-9a-f]{12}(?![0-9A-Za-z])|(?<=-)[0-9]{1,5}-g[0-9a-f]{7,40}(?![0-9A-Za-z])"
)
# A trace of AWS, and a name of code as a compiler writes it.
_PUBLIC_WHOLE = re.compile(r"(?:Root=)?1-[0-9a-f]{8}-[0-9a-f]{24}|_Z[NLK][0-9A-Za-z_$.]++")


def rarity(value: str) -> tuple[float, float]:
    """Share of letter pairs that words have, and share of neighbours of different character class."""
    lower = value.lower()
    letters = [pair for pair in map(str.__add__, lower, lower[1:]) if pair.isalpha()]
    common = len([pair for pair in letters if pair in _PAIRS]) / len(letters) if len(letters) >= 4 else 0.0
    # A capital before small letters starts a word, in camelCase too: that is no change.
    classes = value.translate(_CLASSES).replace("Ul", "l")
    changes = sum(map(classes.count, ("l0", "0l", "lU", "0U", "U0")))
    return common, changes / max(1, len(value) - 1)


def share_of_changes(value: str) -> float:
    """Share of neighbours of different class: letters of each case, digits, signs. A capital belongs to its word."""
    classes = value.translate(_CLASSES).replace("Ul", "l")
    return sum(map(str.__ne__, classes, classes[1:])) / max(1, len(value) - 1)


@lru_cache(maxsize=1 << 12)
def looks_random(value: str) -> bool:
    """Whether a string of key characters is a rare one: not words, not a sequence, not one character repeated."""
    if "USER_" in value:
        value = PSEUDONYM.sub("USER", value)
    value = value[:_JUDGED]
    if len(set(value)) < 8:
        return False
    classes = value.translate(_CLASSES)
    digits, upper, lower = classes.count("0"), "U" in classes, "l" in classes
    codes = value.encode("latin-1", "replace")
    steps = sum(map(_STEPS.__contains__, map(int.__sub__, codes[1:], codes)))
    if steps > len(value) * 0.3:
        return False
    common, changes = rarity(value)
    if digits > len(value) * 0.75 and not (upper and lower):
        return False
    if digits == 0:
        mixed = upper and lower and changes >= 0.15 and common < 0.45
        return len(value) >= 32 and (mixed or common < 0.36)
    # Digits all over a string weigh more than pairs of letters, of which a short one has few.
    return common < (0.72 if changes >= 0.28 else 0.5) and changes >= 0.16


def _is_long_enough(piece: str) -> bool:
    body = piece.rstrip("=")
    mixed = body.lower() != body != body.upper() and has_digit(body)
    return 24 <= len(body) <= MAX_LENGTH if mixed else 30 <= len(body) <= MAX_LENGTH


def is_public_id(run: str) -> bool:
    """Whether a whole run is a uuid or the id of a message or a call."""
    return _PUBLIC.fullmatch(run) is not None or _PUBLIC_WHOLE.fullmatch(run) is not None


def _masked(run: str) -> str:
    """The run with public ids blanked out."""
    return _blank(_PUBLIC, run)


def _blank(pattern: re.Pattern[str], text: str) -> str:
    """Spaces where the pattern matches: every position stays."""
    return pattern.sub(lambda match: " " * len(match[0]), text)


def _piece_spans(run: str, start: int, end: int) -> Iterator[Span]:
    """Random parts of a piece. Folders that are words part a path; what is between them may itself hold slashes."""
    cursor, group = start, -1
    for part in [*run[start:end].split("/"), "word"]:
        word = not part or (len(part) >= 4 and bool(_WORDLIKE.fullmatch(part)))
        if not word and group < 0:
            group = cursor
        elif word and group >= 0:
            piece = run[group : cursor - 1]
            if _is_long_enough(piece) and looks_random(piece) and not _is_wordy_path(piece):
                yield Span(group, cursor - 1 + _padding(run, cursor - 1), KIND)
            group = -1
        cursor += len(part) + 1


def _padding(run: str, end: int) -> int:
    return len(run[end : end + 2]) - len(run[end : end + 2].lstrip("="))


def _is_wordy_path(piece: str) -> bool:
    """Base64 has a slash about every 64 characters, and what stands between is no word."""
    parts = [part for part in re.split(r"[/_-]", piece) if part]
    if len(parts) < 3 or len(piece) > 40 * len(parts):
        return False
    words = sum(len(part) for part in parts if re.fullmatch(r"[A-Z]?[a-z]{2,}|[A-Z]{2,}|\d{1,4}|v\d+", part))
    return words >= 0.5 * sum(map(len, parts))


def is_wordy(run: str) -> bool:
    """Short components, half of them words: a path or an identifier. Random characters do not fall into words."""
    parts = _CUT.split(run)
    if len(max(parts, key=len)) >= 16:
        return False
    words = sum(part.isalpha() and (part.islower() or part.istitle()) and len(part) > 2 for part in parts)
    return words >= 2 and words * 2 >= len(parts) and not any(map(_MIXED.match, parts))


def run_spans(run: str) -> Sequence[Span]:
    """Random pieces of one run of key characters. Pure hex has its own kind: the caller looks at its context."""
    if _SHORTEST.search(run) is None:
        return ()
    masked = _masked(run)
    spans: list[Span] = []
    if _FAMILY_TAIL.search(masked):
        spans += [span for span in FAMILY_RULE.spans(masked) if _is_family(run[span.start : span.end])]
    # Hex that stands for itself, not as part of a longer word.
    for match in _LONE_HEX.finditer(masked):
        if len(set(match[0])) >= 8 and _LETTER.search(match[0]):  # the digits of a number are no hex
            spans.append(Span(match.start(), match.end(), HEX_KIND))
    rest = _blank(_LONE_HEX, masked)
    for match in _PIECE.finditer(rest):
        spans += _piece_spans(run, match.start(), match.end())
    return spans


def _is_family(value: str) -> bool:
    tail = max(re.split(r"[_-]", value), key=len)
    return looks_random(tail) or bool(re.fullmatch(r"[0-9a-f]{24,}", tail) and len(set(tail)) >= 8)
