"""Find strings that look random, and keys with a vendor prefix.

Shannon entropy alone flags paths and identifiers. Therefore the test measures rarity: the share of letter pairs that
occur in real words, and the frequency of changes between character classes. Hashes, uuids and message ids are random as
well, but public; they are recognized by their shape or by the surrounding words (`surroundings.py`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import lru_cache

from composer_replication.privacy.rules import BARE_KEY, PSEUDONYM, Rule, Span, has_digit, word_set

KIND = "HIGH_ENTROPY"
HEX_KIND = "HEX_SECRET"
# Longer runs are data such as images and archives. Keys of that size have delimiters (PEM, JWT) and separate rules.
MAX_LENGTH = 512
_MAX_COMPARED_CHARS = 256  # a prefix of a long string is enough
# Differences between neighboring characters in a repetition or a sequence.
_STEPS = frozenset((0, 1))
# Most letter pairs in English and in identifiers are among these, but only one in four pairs of random letters.
_COMMON_PAIRS = word_set(
    "th he in er an re on at en nd ti es or te of ed is it al ar st to nt ng se ha as ou io le ve co me de hi ri ro"
    " ic ne ea ra ce li ch ll be ma si om ur ca el ta la ns di fo ho pe ec pr no ct us ac ot il tr ly nc et ut ss so"
    " rs un lo wa ge ie wh ee wi em ad ol rt po we na ul ni ts mo ow pa im mi ai sh ir su id os iv ia am fi ci vi pl"
    " ig tu ev ld ry mp fe bl ab gh ty op wo sa ay ex ke ui bo ag da ib ap ue od up cl ef gr ug ub pt xt ck sp ds fu"
    " fa bu qu if cr mm sc oo tt pp ff nn rr cc nk ks ys ob og ok do go my by pu pi ba va ga ru av ep ey ew ws aw dd"
    " gs ls ms ps"
)
_CLASS_OF = {
    code: "0" if chr(code).isdigit() else "l" if chr(code).islower() else "U" if chr(code).isupper() else "-"
    for code in range(128)
}
# The minimum that every rule below requires: `zk39Qx81LmPq04Tn55`; not `zk39Qx81.LmPq04Tn5`.
_CANDIDATE = re.compile(r"[A-Za-z0-9+/_-]{18}")
# `acme_live_zk39Qx81LmPq04Tn55`; not `acme_live`.
_FAMILY_TAIL = re.compile(r"[_-][A-Za-z0-9]{18}")
# `zk39Qx81/LmPq04Tn55+Aa` and no dots or equals signs.
_PIECE = re.compile(r"[A-Za-z0-9+/_-]{20,}")
# `src/auth-store` -> `/`, `a.b` -> `.`.
_SEPARATORS = re.compile(r"[./_=~$+-]+")
# `tokenStore`, `AUTH`, `2024`, `token-store-2`; not `zk39Qx81`. Possessive: "ab-ab-ab-Q9x" could otherwise be cut into
# words in 2^n ways before it fails.
_WORDLIKE = re.compile(
    r"[A-Z]?[a-z]{2,20}+(?:[A-Z][a-z]{2,20}+)*+|[A-Z]++|[0-9]++"
    r"|[A-Z]?[a-z]++(?:[_-](?:[A-Z]?[a-z]++|[0-9]{1,4}+))++"
)
# A digit next to letters, or capitals where no word has them: `zk39Qx8`, `abcDEfg`; not `tokenStore`. Tried on the
# parts of a run, which are short.
_MIXED = re.compile(
    r"(?=[A-Za-z0-9]{7})(?:[A-Za-z]++[0-9]|[0-9]++[A-Za-z]"
    r"|[A-Za-z0-9]{0,15}?(?:[a-z][A-Z][A-Z0-9]|[A-Z]{2}[a-z]))"
)
# `0123456789abcdef0123456789abcdef`; not `x0123456789abcdef0123456789abcdefx`.
_STANDALONE_HEX = re.compile(r"(?<![A-Za-z0-9])(?:0x)?[0-9a-fA-F]{32,}(?![A-Za-z0-9])")
# `3fb2`; not `3092`.
_LETTER = re.compile(r"[a-fA-F]")
_UUID = r"[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}"
# Public ids of agents, servers and files, SSH public keys and subresource integrity:
# `123e4567-e89b-12d3-a456-426614174000`, `toolu_01AbCdEfGhIjKlMnOp`,
# `sha256-47DEQpj8HBSa+/TImW+5JCeuQeRkm5NMpJWZG3hSuFU=`; not `zk39Qx81LmPq04Tn55`.
_PUBLIC = re.compile(
    _UUID
    + r"|(?<![A-Za-z0-9])(?:(?:srv)?toolu(?:_bdrk|_vrtx)?|call|msg|req|resp|chatcmpl|cmpl|rs|fc|run|thread|asst|item"
    r"|evt|event|gen|agent|task|step|batch|prompt|file)[_-][A-Za-z0-9]{8,64}(?![A-Za-z0-9])"
    r"|[sS][hH][aA]-?(?:1|224|256|384|512)[-:=][A-Za-z0-9+/=_-]{20,}|AAAA[BC]3NzaC1[A-Za-z0-9+/=_-]+|AAAAE2VjZHNh[A-Za-z0-9+/=_-]+"
    # Content identifiers in IPFS and nix.
    r"|(?<![A-Za-z0-9])(?:Qm[1-9A-HJ-NP-Za-km-z]{44}|bafy[a-z2-7]{55})(?![A-Za-z0-9])|(?<=/nix/store/)[0-9a-z]{32}(?=-)"
    # Object ids of a payment service, an account on a blockchain, a Google application.
    r"|(?<![A-Za-z0-9])(?:cus|price|prod|in|pi|ch|sub|si|il|pm|evt|acct|seti|plan|re|txn)_[A-Za-z0-9]{14,24}(?![A-Za-z0-9])"
    r"|(?<![A-Za-z0-9])bc1[a-z0-9]{25,60}(?![A-Za-z0-9])|[0-9]{8,14}-[a-z0-9]{32}(?=\.apps\.googleusercontent)"
    # A Kubernetes pod, a Chrome extension.
    r"|(?<![A-Za-z0-9-])[a-z][a-z0-9-]{2,50}-[a-z0-9]{8,10}-[a-z0-9]{5}(?![A-Za-z0-9-])|(?<![A-Za-z])[a-p]{32}(?![A-Za-z])"
    # An AWS database, and a file named after its creation time.
    r"|(?<![A-Za-z0-9])db-[A-Z0-9]{26}(?![A-Za-z0-9])|[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{6}Z(?:-[0-9a-f]{7,12}(?![0-9A-Za-z]))?"
    # A Go version built from a commit, and output of `git describe`.
    r"|(?<![0-9])[0-9]{14}-[0-9a-f]{12}(?![0-9A-Za-z])|(?<=-)[0-9]{1,5}-g[0-9a-f]{7,40}(?![0-9A-Za-z])"
)
# An AWS trace id, and a mangled C++ name: `1-5759e988-bd862e3fe1be46a994272793`, `_ZN4auth5tokenE`.
_PUBLIC_WHOLE = re.compile(r"(?:Root=)?1-[0-9a-f]{8}-[0-9a-f]{24}|_Z[NLK][0-9A-Za-z_$.]++")


def _pair_and_change_shares(value: str) -> tuple[float, float]:
    """Return the share of letter pairs that occur in words, and the share of neighboring characters in different
    classes.
    """
    lower = value.lower()
    letters = [pair for pair in map(str.__add__, lower, lower[1:]) if pair.isalpha()]
    common = len([pair for pair in letters if pair in _COMMON_PAIRS]) / len(letters) if len(letters) >= 4 else 0.0
    # A capital before lower-case letters starts a word, as in camelCase, and does not count as a change.
    classes = value.translate(_CLASS_OF).replace("Ul", "l")
    changes = sum(map(classes.count, ("l0", "0l", "lU", "0U", "U0")))
    return common, changes / max(1, len(value) - 1)


def fraction_of_class_changes(value: str) -> float:
    """Return the share of neighboring characters that are in different classes: lower-case letters, capitals, digits,
    signs.

    A capital before a lower-case letter belongs to the same word and does not count as a change.
    """
    classes = value.translate(_CLASS_OF).replace("Ul", "l")
    return sum(map(str.__ne__, classes, classes[1:])) / max(1, len(value) - 1)


@lru_cache(maxsize=1 << 12)
def looks_random(value: str) -> bool:
    """Return whether a string of key characters looks random: no words, no sequence, no single repeated character."""
    if "USER_" in value:
        value = PSEUDONYM.sub("USER", value)
    value = value[:_MAX_COMPARED_CHARS]
    if len(set(value)) < 8:
        return False
    classes = value.translate(_CLASS_OF)
    digits, upper, lower = classes.count("0"), "U" in classes, "l" in classes
    codes = value.encode("latin-1", "replace")
    steps = sum(map(_STEPS.__contains__, map(int.__sub__, codes[1:], codes)))
    if steps > len(value) * 0.3:
        return False
    common, changes = _pair_and_change_shares(value)
    if digits > len(value) * 0.75 and not (upper and lower):
        return False
    if digits == 0:
        mixed = upper and lower and changes >= 0.15 and common < 0.45
        return len(value) >= 32 and (mixed or common < 0.36)
    # A short string has few letter pairs, so many changes outweigh common pairs.
    return common < (0.72 if changes >= 0.28 else 0.5) and changes >= 0.16


def _is_long_enough(piece: str) -> bool:
    body = piece.rstrip("=")
    mixed = body.lower() != body != body.upper() and has_digit(body)
    return 24 <= len(body) <= MAX_LENGTH if mixed else 30 <= len(body) <= MAX_LENGTH


def is_public_id(run: str) -> bool:
    """Return whether a whole run is a uuid or the id of a message or a call."""
    return _PUBLIC.fullmatch(run) is not None or _PUBLIC_WHOLE.fullmatch(run) is not None


def _without_public_ids(run: str) -> str:
    """Return the run with public ids replaced by spaces, so that positions stay the same."""
    return _blanked(_PUBLIC, run)


def _blanked(pattern: re.Pattern[str], text: str) -> str:
    """Replace the pattern's matches with spaces, so that positions stay the same."""
    return pattern.sub(lambda match: " " * len(match[0]), text)


def _piece_spans(run: str, start: int, end: int) -> Iterator[Span]:
    """Yield the random parts of a path or another run.

    Folder names that are words separate the parts; a random part may itself contain slashes.
    """
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
    """Return whether at least half of a path's parts are words. In base64, slashes are rare and the text between
    them is not words.
    """
    parts = [part for part in re.split(r"[/_-]", piece) if part]
    if len(parts) < 3 or len(piece) > 40 * len(parts):
        return False
    words = sum(len(part) for part in parts if re.fullmatch(r"[A-Z]?[a-z]{2,}|[A-Z]{2,}|\d{1,4}|v\d+", part))
    return words >= 0.5 * sum(map(len, parts))


def is_wordy(run: str) -> bool:
    """Return whether a run has short parts, half of them words, as paths and identifiers do. Random strings do not."""
    parts = _SEPARATORS.split(run)
    if len(max(parts, key=len)) >= 16:
        return False
    words = sum(part.isalpha() and (part.islower() or part.istitle()) and len(part) > 2 for part in parts)
    return words >= 2 and words * 2 >= len(parts) and not any(map(_MIXED.match, parts))


def random_spans(run: str) -> Sequence[Span]:
    """Return the random pieces of a run. Pure hex has a kind of its own, because the caller must check its context."""
    if _CANDIDATE.search(run) is None:
        return ()
    masked = _without_public_ids(run)
    spans: list[Span] = []
    if _FAMILY_TAIL.search(masked):
        spans += [span for span in FAMILY_RULE.spans(masked) if _has_random_tail(run[span.start : span.end])]
    # Hex that is not part of a longer word.
    for match in _STANDALONE_HEX.finditer(masked):
        if len(set(match[0])) >= 8 and _LETTER.search(match[0]):  # digits alone are a number
            spans.append(Span(match.start(), match.end(), HEX_KIND))
    rest = _blanked(_STANDALONE_HEX, masked)
    for match in _PIECE.finditer(rest):
        spans += _piece_spans(run, match.start(), match.end())
    return spans


def _has_random_tail(value: str) -> bool:
    tail = max(re.split(r"[_-]", value), key=len)
    return looks_random(tail) or bool(re.fullmatch(r"[0-9a-f]{24,}", tail) and len(set(tail)) >= 8)


# Vendor key formats, one per row: kind, triggers separated by `|`, pattern. The pattern describes what it matches. The
# prefixes are public knowledge, written by hand from the vendors' own documentation. A prefix that no word ends with
# needs no left boundary, so that the key is also found inside a path or an identifier. Flags: `*` before the triggers:
# tried only on runs of key characters, because the prefix is too common to search the whole text for; `^` before a
# trigger: at the start of a run; `?` after a kind: the match must contain a digit.
_VENDOR_TABLE = r"""
ANTHROPIC_KEY sk-ant- sk-ant-[A-Za-z0-9_-]{16,}
OPENROUTER_KEY sk-or- sk-or-[A-Za-z0-9_-]{16,}
OPENAI_KEY sk-proj-|sk-svcacct-|sk-admin-|sk-None- sk-(?:proj|svcacct|admin|None)-[A-Za-z0-9_-]{16,}
OPENAI_KEY T3BlbkFJ (?:(?<![A-Za-z0-9_-])[A-Za-z0-9_-]{1,120})?T3BlbkFJ[A-Za-z0-9_-]{10,}
AWS_ACCESS_KEY AKIA|ASIA|ABIA|ACCA (?:AKIA|ASIA|(?<![A-Za-z0-9])(?:ABIA|ACCA))[A-Z0-9]{16}
AWS_ACCESS_KEY A3T|AROA|AIDA|AGPA (?<![A-Za-z0-9])(?:A3T[A-Z0-9]|AROA|AIDA|AGPA)[A-Z0-9]{16}(?![A-Za-z0-9])
AWS_BEDROCK_KEY ABSK ABSK[A-Za-z0-9+/]{40,}={0,2}
AWS_SESSION_TOKEN GZXIvYXdz|IQoJb3JpZ2lu (?:F[wQ]oGZXIvYXdz|IQoJb3JpZ2lu)[A-Za-z0-9+/=]{20,}
GITHUB_TOKEN ghp_|gho_|ghu_|ghs_|ghr_ gh[pousr]_[A-Za-z0-9]{20,}
GITHUB_TOKEN github_pat_ github_pat_[A-Za-z0-9_]{20,}
GITLAB_TOKEN glpat-|gldt-|glrt-|glrtr-|glcbt-|glptt-|glft- gl(?:pat|dt|rtr?|cbt|ptt|ft)-[A-Za-z0-9_=.-]{16,}
GITLAB_TOKEN glsoat-|glimt-|glagent-|gloas-|glffct-|glwt- gl(?:soat|imt|agent|oas|ffct|wt)-[A-Za-z0-9_=.-]{16,}
GITLAB_TOKEN GR1348941 GR1348941[A-Za-z0-9_-]{16,}
HUGGINGFACE_TOKEN hf_|api_org_ (?:(?<![A-Za-z])|(?<=\\[nrt]))(?:hf_|api_org_)[A-Za-z0-9]{28,}
GOOGLE_API_KEY AIza AIza[A-Za-z0-9_-]{30,}
GOOGLE_OAUTH GOCSPX- GOCSPX-[A-Za-z0-9_-]{20,}
GOOGLE_OAUTH ya29. ya29\.[A-Za-z0-9_.-]{20,}
GOOGLE_OAUTH 1//0|4/0A (?<![A-Za-z0-9])(?:1//0|4/0A)[A-Za-z0-9_-]{24,}
GOOGLE_API_KEY AQ. (?<![A-Za-z0-9.])AQ\.[A-Za-z0-9_-]{30,}
SLACK_TOKEN xox xox[a-z](?:\.xox[a-z])?-[A-Za-z0-9-]{10,}
SLACK_TOKEN xapp-|xwfp- x(?:app|wfp)-[A-Za-z0-9-]{10,}
SLACK_WEBHOOK hooks.slack.com hooks\.slack\.com/(?:services|workflows|triggers)/[A-Za-z0-9/_+-]{20,}
WEBHOOK /api/webhooks/ discord(?:app)?\.com/api/webhooks/\d+/[A-Za-z0-9_-]{20,}
WEBHOOK? ebhook/|ebhooks/ https?://[^\0\s/"'<>]{3,100}/(?:[\w.-]{1,40}+/){0,4}[Ww]ebhooks?/(?=[^\0\s"'<>]{0,200}[0-9])[A-Za-z0-9@/_-]{24,}
WEBHOOK webhook.office.com [a-z0-9.-]{1,80}\.webhook\.office\.com/[A-Za-z0-9@/_-]{30,}
WEBHOOK hooks.zapier.com|hook.eu|hook.us (?:hooks\.zapier\.com/hooks/catch|hook\.[a-z0-9]+\.make\.com)/[A-Za-z0-9/]{8,}
DISCORD_TOKEN? *. (?:mfa\.[A-Za-z0-9_-]{60,}|[A-Z][A-Za-z0-9_-]{22,28}\.[A-Za-z0-9_-]{6}\.[A-Za-z0-9_-]{27,40})
STRIPE_KEY k_live_|k_test_|k_prod_ (?:sk|rk|pk)_(?:live|test|prod)_[A-Za-z0-9]{10,}
STRIPE_KEY whsec_ whsec_[A-Za-z0-9+/=]{16,}
TWILIO_KEY *SK|AC (?<![A-Za-z0-9])(?:SK|AC)[0-9a-fA-F]{32}(?![0-9A-Za-z])
SENDGRID_KEY SG. SG\.[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]{10,}
MAILGUN_KEY *key- (?<![A-Za-z0-9])(?:pub)?key-[0-9a-zA-Z]{32}
MAILGUN_KEY *- [0-9a-f]{32}-[0-9a-f]{8}-[0-9a-f]{8}(?![0-9a-f-])
MAILCHIMP_KEY *-us [0-9a-f]{32}-us\d{1,2}
SQUARE_TOKEN sq0 sq0[a-z]{3}-[A-Za-z0-9_-]{20,}
SQUARE_TOKEN EAAA (?<![A-Za-z0-9+/])EAAA[A-Za-z0-9_-]{56,}
FACEBOOK_TOKEN? EAA (?<![A-Za-z0-9+/])EAA[A-Z][A-Za-z0-9]{28,}
SHOPIFY_TOKEN shpat_|shpca_|shppa_|shpss_|shptka_|shprt_ shp(?:at|ca|pa|ss|tka|rt)_[A-Za-z0-9]{24,}
TWITCH_KEY live_ (?<![A-Za-z])live_\d{6,12}_[A-Za-z0-9]{24,}
NEON_PASSWORD npg_ (?<![A-Za-z])npg_[A-Za-z0-9]{12,}
NPM_TOKEN npm_ npm_[A-Za-z0-9]{30,}
PYPI_TOKEN pypi- pypi-[A-Za-z0-9_-]{32,}
RUBYGEMS_KEY rubygems_ rubygems_[0-9a-z]{32,}
DOCKER_TOKEN dckr_ dckr_[a-z]{3}_[A-Za-z0-9_-]{20,}
DIGITALOCEAN_TOKEN doo_v1_|dop_v1_|dor_v1_ do[opr]_v1_[0-9a-f]{40,}
SUPABASE_KEY sbp_|sb_secret_|sb_publishable_ (?:sbp_[0-9a-z_]{32,}|sb_(?:secret|publishable)_[A-Za-z0-9_-]{20,})
PLANETSCALE_TOKEN pscale_ pscale_[a-z]+_[A-Za-z0-9_.=-]{24,}
DATABRICKS_TOKEN dapi|dkea|dose (?:dapi|dkea|dose)[0-9a-f]{32}(?:-\d)?
NEWRELIC_KEY NRAK-|NRJS-|NRII-|NRAA-|NRIQ-|NRRA-|NRBR- NR(?:AK|JS|II|AA|IQ|RA|BR)-[A-Za-z0-9_-]{16,}
NEWRELIC_KEY NRAL [0-9a-f]{30,40}(?:FFFF)?NRAL
SENTRY_TOKEN sntry sntry[a-z]_[A-Za-z0-9_=+/.-]{24,}
GRAFANA_TOKEN glsa_|glc_|eyJrIjoi (?:gl(?:sa|c)_[A-Za-z0-9_+/=]{28,}|eyJrIjoi[A-Za-z0-9=+/]{40,})
LINEAR_KEY lin_ lin_(?:api|oauth|wh)_[A-Za-z0-9]{20,}
NOTION_TOKEN ntn_|secret_ (?:ntn_[A-Za-z0-9]{30,}|(?<![A-Za-z])secret_[A-Za-z0-9]{32,})
AIRTABLE_TOKEN *pat pat[A-Za-z0-9]{14}\.[0-9a-f]{40,}
ATLASSIAN_TOKEN? ATATT|ATCTT|ATBB|ATSTT AT(?:ATT|CTT|BB|STT)[A-Za-z0-9][A-Za-z0-9_=-]{20,}
FIGMA_TOKEN figd_|figo_|figu_|figr_ fig[dour]_[A-Za-z0-9_-]{30,}
POSTMAN_KEY PMAK-|PMAT- PMA[KT]-[A-Za-z0-9-]{20,}
DOPPLER_TOKEN dp. dp\.(?:pt|st|ct|sa|said|scim|audit)\.[A-Za-z0-9._-]{24,}
VAULT_TOKEN hvs.|hvb.|hvr. hv[sbr]\.[A-Za-z0-9_-]{20,}
VAULT_TOKEN? *s.|b.|r. (?<![A-Za-z0-9_.])[sbr]\.[A-Za-z0-9]{24}(?![A-Za-z0-9_])
TERRAFORM_TOKEN .atlasv1. [A-Za-z0-9]{10,40}\.atlasv1\.[A-Za-z0-9_-]{20,}
PULUMI_TOKEN pul- pul-[0-9a-f]{30,}
AGE_KEY AGE-SECRET-KEY- AGE-SECRET-KEY-1[A-Z0-9]{40,}
ONEPASSWORD_TOKEN ops_eyJ|A3- (?:ops_eyJ[A-Za-z0-9_+/=-]{40,}|A3-[A-Z0-9]{6}-(?:[A-Z0-9]{5,11}-){3,5}[A-Z0-9]{5})
TELEGRAM_TOKEN ^AA|3AAA (?<!\d)\d{8,10}(?::|%3A)AA[A-Za-z0-9_-]{32,34}(?![A-Za-z0-9_-])
AZURE_SECRET Q~ [A-Za-z0-9_~.-]{3}[0-9]Q~[A-Za-z0-9_~.-]{30,}
AZURE_KEY *== (?<![A-Za-z0-9+/])[A-Za-z0-9+/]{86}==
PHOENIX_TOKEN SFMyNTY. SFMyNTY\.[A-Za-z0-9_-]{16,}\.[A-Za-z0-9_-]{16,}
AZURE_KEY ACDb|AzFu|AzCa (?<![A-Za-z0-9+/])[A-Za-z0-9+/]{33,80}A[Cz][DFC][bua][A-Za-z0-9+/]{5,10}={0,2}
AZURE_KEY +ABa|+AMC|+ASt|AIoT (?<![A-Za-z0-9+/])[A-Za-z0-9+/]{33,80}(?:\+A[BMS][aCt]|AIoT)[A-Za-z0-9+/]{5,10}={0,2}
ALIBABA_KEY LTAI (?<![A-Za-z0-9+/])LTAI[A-Za-z0-9]{12,24}
TENCENT_KEY AKID (?<![A-Za-z0-9+/])AKID[A-Za-z0-9]{32,}
JFROG_TOKEN AKCp|cmVmdGtuO (?:AKCp[A-Za-z0-9]{60,}|cmVmdGtuO[A-Za-z0-9+/=]{40,})
SSH_PRIVATE_KEY b3BlbnNzaC1rZXktdjE b3BlbnNzaC1rZXktdjE(?:[A-Za-z0-9+/=]|\s|\\n){40,}
PASSWORD_HASH $2a$|$2b$|$2x$|$2y$ \$2[abxy]\$\d\d\$[./A-Za-z0-9]{53}
PASSWORD_HASH $1$|$5$|$6$|$7$|$8$|$9$|$y$|$P$|$H$ \$[156789yPH]\$[./A-Za-z0-9$=,+-]{20,}
PASSWORD_HASH $apr1$|$argon2|$pbkdf2 \$(?:apr1|argon2(?:id?|d)|pbkdf2[\w-]*)\$[./A-Za-z0-9$=,+-]{20,}
PRODUCT_KEY? *- (?<![A-Z0-9-])(?=[A-Z-]{0,28}\d)(?:[A-Z0-9]{5}-){4}[A-Z0-9]{5}(?![A-Z0-9-])
MAPBOX_TOKEN k.eyJ [stp]k\.eyJ[A-Za-z0-9_-]{20,}\.[A-Za-z0-9_-]{10,}
HEROKU_KEY HRKU- HRKU-[A-Za-z0-9_-]{30,}
OKTA_TOKEN? *00 (?<![\w+/-])00(?=[A-Za-z0-9_-]{0,40}[A-Z])(?=[A-Za-z0-9_-]{0,40}[g-z])[A-Za-z0-9_-]{40}(?![\w-])
DYNATRACE_TOKEN dt0 dt0[a-z]\d\d\.[A-Z0-9]{20,}\.[A-Z0-9]{40,}
FLYIO_TOKEN fo1_|fm1|fm2_ (?<![A-Za-z0-9])(?:fo1|fm1[rap]|fm2)_[A-Za-z0-9+/=_-]{30,}
EASYPOST_KEY EZAK|EZTK EZ[AT]K[A-Za-z0-9]{40,}
TWITTER_TOKEN? AAAAAAAAAAAAAAAAAA (?<![A-Za-z0-9+/])A{18,24}[B-Zb-z0-9%][A-Za-z0-9%]{40,}
VERCEL_TOKEN vercel_blob vercel_blob_rw_[A-Za-z0-9_]{20,}
NUGET_KEY oy2 (?<![A-Za-z0-9])oy2[a-z0-9]{43}(?![A-Za-z0-9])
PAYPAL_TOKEN access_token$ access_token\$[a-z]+\$[A-Za-z0-9]{10,}\$[0-9a-f]{32}
RAZORPAY_KEY rzp_ rzp_(?:live|test)_[A-Za-z0-9]{10,}
CIRCLECI_TOKEN CCIPAT_|CCIPRJ_ CCIP(?:AT|RJ)_[A-Za-z0-9_]{20,}
HUBSPOT_TOKEN pat-na|pat-eu pat-(?:na|eu)\d-[0-9a-f-]{36}
LAUNCHDARKLY_KEY sdk-|mob-|api- (?:sdk|mob|api)-[0-9a-f]{8}-(?:[0-9a-f]{4}-){3}[0-9a-f]{12}
PLAID_TOKEN access-sandbox-|access-prod|access-dev access-[a-z]+-[0-9a-f]{8}-(?:[0-9a-f]{4}-){3}[0-9a-f]{12}
SOURCEGRAPH_TOKEN sgp_ sgp_(?:[0-9a-f]{16}_|local_)?[0-9a-f]{40}
CLOUDFLARE_KEY v1.0- v1\.0-[0-9a-f]{24}-[0-9a-f]{100,}
RECOVERY_KEY *- (?<!\d)(?:\d{6}-){7}\d{6}(?!\d)
TAVILY_KEY tvly- tvly-[A-Za-z0-9_-]{16,}
PERPLEXITY_KEY pplx- pplx-[A-Za-z0-9]{24,}
GROQ_KEY gsk_ gsk_[A-Za-z0-9]{24,}
XAI_KEY xai- xai-[A-Za-z0-9]{24,}
NVIDIA_KEY nvapi- nvapi-[A-Za-z0-9_-]{24,}
PINECONE_KEY pcsk_ pcsk_[A-Za-z0-9_]{24,}
REPLICATE_KEY r8_ r8_[A-Za-z0-9]{24,}
LANGSMITH_KEY lsv2_ lsv2_[a-z]{2}_[A-Za-z0-9_]{20,}
CONTENTFUL_TOKEN CFPAT- CFPAT-[A-Za-z0-9_-]{24,}
CLOJARS_TOKEN CLOJARS_ CLOJARS_[0-9a-zA-Z]{30,}
BREVO_KEY xkeysib-|xsmtpsib- x(?:key|smtp)sib-[A-Za-z0-9-]{24,}
FLUTTERWAVE_KEY FLWSECK FLWSECK(?:_TEST)?-[A-Za-z0-9-]{10,}
WANDB_KEY wandb_v1_ wandb_v1_[A-Za-z0-9_]{24,}
NETLIFY_TOKEN nfp_ nfp_[A-Za-z0-9]{24,}
TAILSCALE_KEY tskey- tskey-[A-Za-z0-9-]{16,}
POSTHOG_KEY phc_|phx_|phs_ (?<![A-Za-z0-9])ph[cxs]_[A-Za-z0-9]{24,}
API_KEY? *k- (?<![A-Za-z0-9])[sprt]k-[A-Za-z0-9_-]{18,}
"""
# Vendors without a row: a short descriptive prefix, then a long random tail.
_FAMILY = (
    r"(?<![A-Za-z0-9])(?:[A-Za-z0-9]{1,12}[_-]){0,3}(?:live|test|prod|sk|rk|pk|pat|tok|token|secret|key|apikey|api|at|rt|oat|"
    r"svc|sess|access|refresh|bot|usr|sec|auth|pw|pwd|priv|fc|csk|jina|voyage|pa|fw|e2b|rnd|vc[pka]|cf[aut]*t|cio|ico|"
    r"hca[im]k|a[ks]|w[ks]|nyk|pn[ub]|rdme|tfp|duffel|shippo|sq[apu]|aio|napi|re|sm|v1)[_-]"
    r"(?=[A-Za-z0-9_-]{0,200}[0-9])[A-Za-z0-9]{18,}+(?:[_-][A-Za-z0-9]++)*+"
)


def _is_no_example(value: str) -> bool:
    """Return whether a key is more than an example, which repeats one character or ends in "EXAMPLE"."""
    return len(set(value[-12:])) > 1 and not value.endswith("EXAMPLE")


def _has_digit_and_more(value: str) -> bool:
    return has_digit(value) and _is_no_example(value)


def _rule(row: str) -> tuple[bool, Rule]:
    kind, triggers, pattern = row.split(" ", 2)
    accept = _has_digit_and_more if kind.endswith("?") else _is_no_example
    # Runs are joined by newlines before the search, so a newline precedes each run.
    searched = tuple(triggers.lstrip("*").replace("^", "\n").split("|"))
    # The row of `GITHUB_TOKEN ghp_|gho_ gh[po]_[A-Za-z0-9]{20,}` is searched where `ghp_` or `gho_` occurs.
    rule = Rule(kind.rstrip("?"), re.compile(pattern), searched, 0, accept)
    return triggers.startswith("*"), rule


_ROWS = [_rule(row) for row in _VENDOR_TABLE.strip().splitlines()]
_BARE_KEY_TRIGGERS = (
    *("IBADANBgkqhkiG9w0BAQEFAAS", "IBAAKB", "IBAAKC", "BOBgkqhkiG9w0BBQ0"),
    *("AgEAMB", "AgEAMH", "AgEBBD", "MHcCAQEEI", "MC4CAQAwBQYDK2Vw"),
)
# A private key without its frame begins with fixed bytes, such as "MIIEvgIBADANBgkqhkiG9w0BAQEFAAS" (PKCS#8):
# `BARE_KEY` in rules.py.
VENDOR_RULES: tuple[Rule, ...] = (
    *(rule for in_runs, rule in _ROWS if not in_runs),
    Rule("PRIVATE_KEY", re.compile(BARE_KEY), _BARE_KEY_TRIGGERS),
)
RUN_RULES: tuple[Rule, ...] = tuple(rule for in_runs, rule in _ROWS if in_runs)
_PREFIXES = tuple(trigger for rule in VENDOR_RULES for trigger in rule.triggers if trigger[0] not in "\n.+")
# `acme_live_zk39Qx81LmPq04Tn55`, `fc-0123456789abcdef0123`; not `token_bucket_size`.
FAMILY_RULE = Rule("API_KEY", re.compile(_FAMILY))


def has_vendor_prefix(text: str) -> bool:
    """Return whether a text begins with a vendor's key prefix."""
    return text.startswith(_PREFIXES) and any(rule.pattern.match(text) for rule in VENDOR_RULES)
