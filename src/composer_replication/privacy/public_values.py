"""Decide from the text around a random string whether the string is public: a hash, a signature, an image or an id."""

from __future__ import annotations

import re
from collections import Counter
from functools import lru_cache
from itertools import pairwise

from composer_replication.privacy.entropy import HEX_KIND, KIND
from composer_replication.privacy.rules import Span, word_set

# `0123456789abcdef0123456789abcdef`; not `0123456789abcdef`.
_LONG_HEX = re.compile(r"(?:0x)?[0-9a-fA-F]{32,}")
# Words that identify hex as a hash or an id, lower-cased: `commit `, `sha256:`, `using rsa key `, `user_id=`; not `key:
# `.
_HASH_WORDS = re.compile(
    r"using [a-z]{3,6} key |"
    r"commit|\bsha|sha\d|hash|md5|digest|checksum|integrity|etag|fingerprint|revision|\brev\b|\bref\b|\bpatch\b|\btree\b|parent|blob|object"
    r"|merge|\bhead\b|refs/|\bgit\b|\bindex\b|image|docker|layer|cache|build|version|trace|span|uuid|guid|resolved|locked"
    r"|\btx|block|address|\bpin(?:ned)?\b|snapshot|uses:|cherry|rebase|checkout|\breset\s|\bmain\b|\bmaster\b"
    r"|origin|branch|#diff-|\bpack\b|hexpm|plaintext|ciphertext|\bid[^\w\0]*$|(?<!key)_id[^\w\0]*$"
)
# A folder in a tree drawn with lines: `├─ `, `│ `.
_TREE_BRANCH = re.compile(r"[\u2500-\u257f] ?(?:\[[^\0\n\]]{1,12}\])?\s{0,4}\Z")
# `api`, `my_token`; not `commit`.
_SECRET_WORDS = re.compile(r"key|token|secret|passw|passphrase|api|auth|cred|private|bearer|login|license|wallet")
# `zk39/Qx81+Lm==` -> `zk39/Qx81+Lm`.
_BASE64_RUN = re.compile(r"[A-Za-z0-9+/_-]+")
# Videos, channels and shared notebooks have random names: `https://youtu.be/`, `drive.google.com/file/d/`; not
# `example.org/`.
_PUBLIC_SITE = re.compile(
    r"(?:youtube\.com|youtu\.be|colab\.research\.google\.com|drive\.google\.com|docs\.google\.com)/[^\0\s]{0,60}\Z"
)
# `app.js?v=`, `gist.github.com/ada/`; not `?token=`.
_URL_HASH = re.compile(r"[?&](?:s|v|h|ver|gist|etag|ixid|rev|t)=$|gist\.github[^\s\0]*/$")
# Part of a path, a file name or an option. Hex after it is public if it is as long as a digest: `cache/`, `--rev=`; not
# `x `.
_NAME_SEPARATOR = re.compile(r"[/=_-]$")
# A pinned action: `actions/checkout@`; not `ada@`.
_PINNED = re.compile(r"[\w.-]/[\w./-]+@\Z")
# A vendor's prefix of hex keys: `key = bkua_` -> `bkua`. Files and ids have prefixes, too: see the next set.
_KEY_PREFIX = re.compile(r"(?:^|[\s\"'`=:,(])([a-z]{2,6})[_-]\Z")
# Public prefixes of files and ids.
_NAME_PREFIXES = word_set(
    "file img blob tmp id ref obj page node item log data run job task user index main app chunk asset v web"
)
_DIGEST_LENGTHS = (32, 40, 56, 64, 96, 128)
_DIGEST_LENGTHS_64 = (22, 27, 38, 43, 64, 86)  # the same digests in base64 without padding
# MySQL's password hash: `*6BB4837EB74329105EE4568DDA7DC67ED2CA2AD9`.
_MYSQL_HASH = re.compile(r"\*[0-9A-F]{40}")
_ACCOUNT_CHARS = 42  # a blockchain address: 0x and 40 digits
# A hash in base64, as in lock files (go.sum, NuGet, Nix): `h1:`, `integrity: "`; not `rehashed`.
_HASH_NAME = re.compile(r"(?<![A-Za-z])h1:$|(?i:hash|checksum|digest|integrity|sha-?\d{1,3})[^\w\0]{1,5}$")
# Password hashes are not public: `password_hash`; not `file hash`.
_PASSWORD_HASH = re.compile(r"(?i)pass|pwd|secret|salt|token|user")
# The first bytes of an image, a document or a font, in base64: `iVBORw0KGgo`; not `QUJD`.
_MEDIA = re.compile(r"iVBORw0KGgo|/9j/[24]|R0lGOD[dl]h|UklGR|JVBERi0|PHN2Zy|AAABAAE|d09GM|AAAA[A-Z]GZ0eX")
# Headers and fields with random public values: the signature of a thinking block in a log that was itself printed, a
# page's CSRF token (useless without the session, which is redacted): `ETag: "`, `"signature": "`; not `"secret": "`.
_SIGNATURE_FIELD = re.compile(
    r"(?i:etag|x-amz-id-2|x-amz-cf-id|x-amz-version-id|x-goog-generation|x-guploader-uploadid)\\*[\"']?\s?[:=]\s?(?:W/)?\\*[\"']?$|csrf-token\\*\"\s?content=\\*\"$|[sS]ignature\\*\"\s?:\s?\\*\"$"
)
# A public key identified by its name, a host in known_hosts, and a mail signature: `public_key = "`, `|1|`,
# `v=DKIM1; p=`; not `private_key = "`.
_PUBLIC_NAME = re.compile(
    r"(?i)v=DKIM1[^\0]{0,30}p=\Z|(?:public[ _-]?key|\bpeer|\bhostid|versionid|\bserial(?=[=:])|x-amz-id-2)"
    r"\\*[\"']?\s{0,3}[:=]\s{0,3}\\*[\"']?\Z|\|1\|(?:[A-Za-z0-9+/]{27}=\|)?/?\Z"
)
# A public field in a JSON web key: `"n": "`; not `"k": "`.
_MODULUS = re.compile(r"[\"'](?:n|x|y|x5c|x5t|kid)\\*[\"']\s?:\s?\[?\\*[\"']$")
# What follows a digest in listings: `  src/app.js`, ` refs/heads/main`, `.js.map`; not ` is`.
_HASHED_FILE = re.compile(
    r"\s+\*?[./\w-]+\.\w+|\s+\d+\s+[\w.+-]+/[\w./+-]+|\s+refs/|\s+HEAD|\s+-$|\.(?:js|css|map|json|png|pack|idx|lock)\b"
    r"|\s+(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun) [A-Z][a-z]{2} "
)
# A file name or a version directly before a digest, as in lock files: `app.js  `, `1.2.3", "`; not `app `.
_FILE_BEFORE = re.compile(r"\.[a-z][a-z0-9]{0,5}(?:[\"']?\s?[:,=]\s?[\"']?|[ \t#]+)$|\d\.\d[\w.+-]*[\"'],?\s[\"']$")
# The output format of sha256sum: `  app.js`, ` *app.js`; not ` x`.
_LISTED_FILE = re.compile(r" [ *][\w./]")
_TRANSACTION_CHARS = 66  # `0x` and 64 digits
# A package after a digest, as in the URLs of PyPI: `/six-1.16.0-py3.whl`; not `/six`.
_PACKAGE_AFTER = re.compile(r"/[\w.+-]+\.(?:whl|tar|zip|tgz|gz|bz2|json|jar|nupkg|crate|gem)\b")
# `CHECKSUMS:`, `  hashes = [`; not `checksum_of(x)`.
_HASH_HEADING = re.compile(r"(?im)^[^\n\0]{0,40}\b(?:checksums?|hashes|digests)\b[^\w\n\0]{0,6}$")
# `openssl rand -hex 32`; not `sha256`.
_GENERATOR_WORD = re.compile(r"rand|generat|hex\b|uuid")
# The subject of a commit after its hash: ` Fix the tests`, ` (HEAD -> main) Fix`; not `: x`.
_LOG_LINE = re.compile(r" (?:\([^()\n\0]{1,80}\) )?[A-Za-z]")
_LINE_ENDS = frozenset(("", "\n", "\r", "\0"))
# `api_key="`, `token: `; not `keys are`.
_KEY_WORDS = re.compile(r"(?:key|token|secret|password|auth|bearer)[^\w\0]*$")
# At least two base64 lines of the same width, with a shorter last line.
# `QUJDREVGR0hJSktMTU5PUFFSU1RVVldYWVphYmNkZWZnaGlqa2xtbm9wcXJz\nd3h5eg==`.
_FILE_LINES = re.compile(
    r"[ \t]*+(?:(?:[A-Za-z0-9+/]{76}\r?\n[ \t]*+)++|(?:[A-Za-z0-9+/]{64}\r?\n[ \t]*+)++"
    r"|(?:[A-Za-z0-9+/]{60}\r?\n[ \t]*+)++)"
    r"[A-Za-z0-9+/]{1,76}={0,2}(?=[\s\"'<)]|$)"
)
_PUBLIC_KINDS = "(?:CERTIFICATE|[A-Z ]*PUBLIC KEY|PGP SIGNATURE|SSH SIGNATURE|PGP MESSAGE)"
# `-----BEGIN CERTIFICATE`, `-----END PGP SIGNATURE`.
_PUBLIC_BLOCK, _PUBLIC_BLOCK_END = (re.compile(f"-----{mark} {_PUBLIC_KINDS}") for mark in ("BEGIN", "END"))


def _is_media(text: str, start: int, run_start: int) -> bool:
    return _MEDIA.match(text, start) is not None or _MEDIA.match(text, run_start) is not None


def _names_hash(lead: str) -> bool:
    # The word in a pseudonym (USER_1) must not count as the word "user".
    return _HASH_NAME.search(lead) is not None and _PASSWORD_HASH.search(lead.replace("USER_", "")) is None


def _is_sequence(digits: str) -> bool:
    """Return whether the bytes only count up or down, like the keys in test vectors."""
    pairs = [int(digits[at : at + 2], 16) for at in range(digits[:2].lower() == "0x" and 2, len(digits) - 1, 2)]
    return len({(second - first) % 256 for first, second in pairwise(pairs)}) == 1


class Surroundings:
    """The text around random strings. Whatever applies to all strings of a text is computed once and cached."""

    def __init__(self, text: str, key: str) -> None:
        self._text, self._key = text, key
        self._hex_lengths: dict[int, Counter[int]] = {}
        self._file_bounds = (0, 0)

    def is_public(self, span: Span, run_start: int) -> bool:
        """Return whether the context shows that the string is a hash, a signature, a certificate or an image."""
        lead = self._before(run_start, 24)
        if lead.endswith(";base64,") or _SIGNATURE_FIELD.search(lead) or self._in_public_block(span.start):
            return True
        if _PUBLIC_NAME.search(self._before(span.start, 40)):
            return True
        if _MODULUS.search(lead) and '"kty' in self._text:  # a JSON web key set, which is public
            return True
        if span.kind == KIND and _PUBLIC_SITE.search(self._before(span.start, 90)):
            return True
        if span.kind == KIND and (_is_media(self._text, span.start, run_start) or self._in_file(span.start)):
            return True
        # A hash in base64 has a fixed length and follows a sign; the word "hash" alone may precede other values.
        # After a blank it must also have padding, because keys may have the same length.
        if span.kind == KIND and not lead.rstrip(" \t")[-1:].isalnum() and _names_hash(lead):
            whole = _BASE64_RUN.match(self._text, run_start)
            if whole is None or (lead[-1:].isspace() and not self._text.startswith("=", whole.end())):
                return False
            return len(whole[0]) in _DIGEST_LENGTHS_64
        if span.kind == HEX_KIND and _is_sequence(self._text[span.start : span.end]):
            return True
        return span.kind == HEX_KIND and (self._is_hash(span) or self._in_listing(span))

    def _in_file(self, position: int) -> bool:
        """Return whether a base64 line belongs to a file whose lines have the same width, unless the text before the
        file names a secret.
        """
        text = self._text
        if self._file_bounds[0] <= position < self._file_bounds[1]:
            return True
        line = text.rfind("\n", max(0, position - 90), position) + 1
        block = _FILE_LINES.match(text, line)
        if block is None:
            return False
        if mentions_secret(text[max(0, line - 80) : line].rstrip()):
            return False
        self._file_bounds = block.span()
        return position < block.end()

    def _before(self, position: int, length: int) -> str:
        """Return the text before a position within the same string. A NUL separates strings scanned together."""
        return self._text[max(0, position - length) : position].rpartition("\0")[2]

    def _is_hash(self, span: Span) -> bool:
        """Return whether the words before a hex run, or its field name, identify it as a hash or an id."""
        text = self._text
        before = f"{self._key} {self._before(span.start, 64)}".lower()
        line = before[before.rfind("\n", 0, len(before) - 1) + 1 :] if "\n" in before[:-1] else before
        hashed = max((match.end() for match in _HASH_WORDS.finditer(line)), default=-1)
        secret = max((match.end() for match in _SECRET_WORDS.finditer(line)), default=-1)
        digest = span.end - span.start in _DIGEST_LENGTHS
        if digest and before[-1:] in ("", " ", "\n") and _LISTED_FILE.match(text, span.end):
            return True
        if span.end - span.start == _TRANSACTION_CHARS and text.startswith("0x", span.start):
            return _SECRET_WORDS.search(before) is None
        if _MYSQL_HASH.fullmatch(line[-1:] + text[span.start : span.end]):  # MySQL's password hash
            return False
        if digest and _PINNED.search(line):
            return True
        if span.end - span.start == _ACCOUNT_CHARS and text.startswith("0x", span.start):  # private keys are longer
            return True
        if digest and (_FILE_BEFORE.search(line) or ("cache" in line and _NAME_SEPARATOR.search(line))):
            return True
        if line.endswith("\n") and not line.endswith(":\n") and _LOG_LINE.match(text, span.end):
            return True
        if secret > hashed:
            return digest and self._under_heading(span)
        after = text[span.end : span.end + 80]
        if hashed >= 0 or _URL_HASH.search(line) or _HASHED_FILE.match(after):
            return True
        if (prefix := _KEY_PREFIX.search(line)) and prefix[1] not in _NAME_PREFIXES:
            return False
        if _NAME_SEPARATOR.search(line) and span.end - span.start in _DIGEST_LENGTHS:
            return True
        if _TREE_BRANCH.search(line):
            return True
        if _PACKAGE_AFTER.match(text, span.end):
            return True
        # A digest alone on its line, or a commit hash, unless something before it identifies it as a key.
        length = span.end - span.start
        alone = length == 64 and text[span.end : span.end + 1] in _LINE_ENDS and line[-1:] in ("", " ")
        if (length == 40 or (alone and not _GENERATOR_WORD.search(before))) and not _SECRET_WORDS.search(before):
            return True
        return digest and self._under_heading(span)

    def _under_heading(self, span: Span) -> bool:
        """Return whether a line such as `CHECKSUMS:` or `hashes = [` comes before the string, with no empty line in
        between.
        """
        before = self._before(span.start, 800)
        block = before[before.rfind("\n\n") + 1 :]
        return _HASH_HEADING.search(block) is not None

    def _in_listing(self, span: Span) -> bool:
        """Return whether the text has at least five hex strings of this length, as lock files and checksum lists
        have.
        """
        text, length = self._text, span.end - span.start
        begin = text.rfind("\0", 0, span.start) + 1
        if length not in (32, 40, 64, 128) or _KEY_WORDS.search(text[max(begin, span.start - 16) : span.start].lower()):
            return False
        if begin not in self._hex_lengths:
            end = text.find("\0", span.end)
            self._hex_lengths[begin] = Counter(
                map(len, set(_LONG_HEX.findall(text, begin, end if end >= 0 else len(text))))
            )
        return self._hex_lengths[begin][length] >= 5

    def _in_public_block(self, position: int) -> bool:
        """Return whether the position is inside a certificate, a public key or a signature block."""
        text = self._text
        begin = text.rfind("-----BEGIN ", max(0, position - 12000), position)
        end = text.find("-----END ", position, position + 12000)
        if begin < 0 <= end and _PUBLIC_BLOCK_END.match(text, end) and text.find("\0", position, end) < 0:
            return True  # the block begins before the text
        if begin < 0 or text.find("\0", begin, position) >= 0:
            return False
        return bool(_PUBLIC_BLOCK.match(text, begin)) and text.find("-----END ", begin, position) < 0


def mentions_secret(lead: str) -> bool:
    """Return whether the last line before a string names it as a secret."""
    return _SECRET_WORDS.search(lead[lead.rfind("\n") + 1 :].lower()) is not None


@lru_cache(maxsize=4096)
def is_hash_name(key: str) -> bool:
    """Return whether a field with this name holds hashes or ids."""
    return _HASH_WORDS.search(key.lower()) is not None or key.endswith(("Id", "ID"))
