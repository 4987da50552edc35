"""Parse the options of well-known programs with tables: flags, options with a value, and what may be reordered.

`ls -la src` and `ls src -a -l` are equivalent. `find` and `echo` need special code (`shell_equality`). If a program has
no table, or an option is not in its table, the words keep their order.

A program has a table only if the table settles whether two actions are the same, in a labeled pair of the tests or in
real sessions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, NamedTuple

from composer_replication.sites.actions.shell_lexer import ShellWord, literal_word

_GREP_LONG = (
    "recursive=r ignore-case=i line-number=n files-with-matches=l files-without-match=L invert-match=v count=c"
    " word-regexp=w only-matching=o extended-regexp=E fixed-strings=F perl-regexp=P regexp:=e file:=f include: exclude:"
    " exclude-dir: color? colour? context:=C after-context:=A before-context:=B max-count:=m quiet=q silent=q"
    " no-messages=s with-filename=H no-filename=h line-regexp=x null=Z text=a"
)

Operands = Literal["words", "paths", "word then paths", "pattern then paths", "path then words", "tests"]


@dataclass(frozen=True, kw_only=True)
class Program:
    """The command-line syntax of one program.

    `long` lists the long options: `all=a` is an alias for the letter a, `include:` takes a value, `regexp:=e` takes a
    value and is an alias for the letter e, `color?` takes a value only after `=`.

    If two options contradict each other, the last one wins, so their order must be kept. `order_matters` groups such
    options (names joined by commas): a line with two options from the same group keeps its order.
    """

    flags: str = ""  # letters without a value
    valued: str = ""  # letters with a value, in the same word or the next one
    attached: str = ""  # letters with a value that must be in the same word
    long: str = ""
    alias: str = ""  # "Rr": -R is an alias for -r
    order_matters: str = ""
    number: str = ""  # the option that `-5` is short for
    operands: Operands = "words"
    any_order: bool = False  # the order of the operands does not matter
    ordered_with: str = ""  # options with which the order of the operands does matter
    permutes: bool = True  # options may follow operands
    keeps_slash: bool = False  # a trailing "/" in a path is significant, as in `cp a b/`
    keeps_dashes: bool = False  # `--` is significant
    paths_after_dashes: bool = False
    default: str = ""  # the operand if none is given
    assumed: str = ""  # "n=10": the option and value if no option of this kind is given
    pattern: str = ""  # the option whose value is the first operand
    no_pattern: str = ""  # options that replace the pattern, so that all operands are paths

    @cached_property
    def long_options(self) -> dict[str, tuple[str, str]]:
        """A mapping from each long option to its canonical name and its mark.

        The mark is `:` if the option takes a value, `?` if it takes one only after `=`, and otherwise "".
        """
        options: dict[str, tuple[str, str]] = {}
        for entry in self.long.split():
            name, _, letter = entry.partition("=")
            mark = name[-1] if name[-1] in ":?" else ""
            name = name.removesuffix(mark) if mark else name
            options[name] = (letter or name, mark)
        return options

    @cached_property
    def groups(self) -> list[frozenset[str]]:
        """The option groups of `order_matters`, each as a set."""
        return [frozenset(group.split(",")) for group in self.order_matters.split()]

    @cached_property
    def aliases(self) -> dict[str, str]:
        """A mapping from option letters to the canonical letters with the same meaning."""
        return {pair[0]: pair[1] for pair in self.alias.split()}


_GREP = Program(
    flags="rRinlLvcwxohHsqEFGPIaUzZbTy",
    valued="ABCefmd",
    long=_GREP_LONG,
    # If both --include and --exclude match, the last one wins.
    order_matters="E,F,G,P h,H l,L include,exclude",
    number="C",
    operands="pattern then paths",
    pattern="e",
    no_pattern="f",
)
_RG = Program(
    flags="inlvcwFSsuUoxIHNaPLpq.0z",
    valued="ABCefgtTmjMEdr",
    long="ignore-case=i line-number=n files-with-matches=l files glob:=g type:=t type-not:=T hidden=. fixed-strings=F"
    " word-regexp=w count=c context:=C after-context:=A before-context:=B max-count:=m no-ignore smart-case=S"
    " case-sensitive=s multiline=U only-matching=o pcre2=P no-heading heading regexp:=e json invert-match=v"
    " no-line-number=N with-filename=H no-filename=I follow=L quiet=q max-depth:=d iglob: sort: stats vimgrep",
    order_matters="i,s,S n,N H,I g,iglob heading,no-heading",
    operands="pattern then paths",
    pattern="e",
    no_pattern="f,files",
)
_SED = Program(
    flags="nErszu",
    valued="ef",
    attached="i",
    alias="rE",
    long="quiet=n silent=n regexp-extended=E expression:=e in-place?=i file:=f",
    order_matters="e,f",
    operands="pattern then paths",
    pattern="e",
    no_pattern="f",
)
_PYTEST = Program(
    flags="qvxslh",
    valued="kmnprcWo",
    long="verbose=v quiet=q exitfirst=x showlocals=l tb: maxfail: durations: durations-min: cov-report: cov-config:"
    " ignore: ignore-glob: deselect: rootdir: timeout: dist: numprocesses:=n color: capture: last-failed=lf lf"
    " failed-first=ff ff new-first=nf nf stepwise=sw sw pdb no-header no-summary collect-only=co co disable-warnings"
    " strict-markers strict-config no-cov junitxml: log-cli-level: import-mode: cache-clear reruns: benchmark-only"
    " benchmark-skip setup-show markers fixtures runslow",
    operands="tests",
)
_READ_END = Program(
    flags="qvz",
    valued="nc",
    long="lines:=n bytes:=c quiet=q silent=q verbose=v",
    order_matters="n,c q,v",
    number="n",
    operands="paths",
    assumed="n=10",
)
PROGRAMS: dict[str, Program] = {
    "ls": Program(
        flags="1aAbBcCdfFgGhHiklLmnNopqQrRsStuUvxXZ",
        long="all=a almost-all=A recursive=R human-readable=h reverse=r size=s directory=d inode=i color? classify=F",
        order_matters="a,A t,S,U,X,v,f c,u C,x,m,1 l,C,x,m g,C,x,m n,C,x,m o,C,x,m b,q,Q,N H,L h,k",
        operands="paths",
        default=".",
        any_order=True,  # ls sorts its operands itself
        ordered_with="U,f",
    ),
    "cat": Program(flags="AbeEnstTuv", long="number=n show-all=A squeeze-blank=s", operands="paths"),
    "head": _READ_END,
    "tail": Program(
        flags="qvzfFr",
        valued="ncs",
        long="lines:=n bytes:=c follow?=f quiet=q verbose=v retry pid:",
        order_matters="n,c q,v f,F",
        number="n",
        operands="paths",
        assumed="n=10",
    ),
    "wc": Program(flags="lwcmL", long="lines=l words=w bytes=c chars=m max-line-length=L", operands="paths"),
    "rm": Program(
        flags="rRfivdI",
        alias="Rr",
        long="recursive=r force=f verbose=v dir=d",
        order_matters="f,i,I",
        operands="paths",
        any_order=True,
    ),
    "mkdir": Program(flags="pv", valued="m", long="parents=p verbose=v mode:=m", operands="paths", any_order=True),
    "touch": Program(
        flags="acmhf",
        valued="dtr",
        long="no-create=c date:=d reference:=r",
        operands="paths",
        any_order=True,
    ),
    "cp": Program(
        flags="aRrfivnpuLPHdlsTxb",
        valued="tS",
        alias="Rr",
        long="recursive=r archive=a force=f interactive=i verbose=v no-clobber=n update=u target-directory:=t",
        order_matters="i,n f,i f,n a,L,P,H,d",
        operands="paths",
        keeps_slash=True,
    ),
    "chmod": Program(flags="Rvfc", long="recursive=R verbose=v", operands="word then paths", any_order=True),
    "du": Program(
        flags="ahscbkmxLH",
        valued="d",
        long="max-depth:=d human-readable=h summarize=s all=a total=c",
        order_matters="h,b,k,m",
        operands="paths",
    ),
    "sort": Program(
        flags="nrufhbdiMVgRzmcsC", valued="kto", long="numeric-sort=n reverse=r unique=u key:=k", operands="paths"
    ),
    "cut": Program(flags="s", valued="dfcb", long="delimiter:=d fields:=f", operands="paths"),
    "grep": _GREP,
    "rg": _RG,
    "sed": _SED,
    "pytest": _PYTEST,
    "make": Program(
        flags="kBnsiqe",
        valued="CfI",
        attached="j",
        long="keep-going=k always-make=B dry-run=n silent=s directory:=C",
    ),
    "apt-get": Program(flags="yqfd", long="yes=y assume-yes=y quiet=q no-install-recommends"),
    # Operands are not normalized: a trailing slash changes what is copied, and an operand may name another machine.
    "rsync": Program(
        flags="avzrlptunhPqHAXcogDxWiI",
        valued="e",
        long="archive=a verbose=v compress=z recursive=r dry-run=n human-readable=h delete progress exclude: include:",
        order_matters="include,exclude",
    ),
    "curl": Program(
        flags="sSLfikIvOgGNJR",
        valued="XHdouAbcFTmDew",
        long="silent=s show-error=S location=L fail=f include=i insecure=k head=I verbose=v remote-name=O request:=X"
        " header:=H data:=d output:=o user:=u user-agent:=A max-time:=m connect-timeout: write-out:=w form:=F"
        " cookie:=b cookie-jar:=c data-raw: data-binary: data-urlencode: json: compressed retry:",
        order_matters="d,data-raw,data-binary,data-urlencode,json",
    ),
    "tar": Program(
        flags="xctzjJvpkhaOm",
        valued="fCTX",
        long="extract=x create=c list=t gzip=z verbose=v file:=f directory:=C strip-components:",
        permutes=False,  # --exclude has no effect on the operands before it
    ),
}
_DIFF_LONG = (
    "cached staged=cached stat? name-only name-status no-color color? word-diff? unified:=U ignore-all-space=w"
    " ignore-space-change=b summary numstat shortstat exit-code quiet patch=p no-patch=s no-ext-diff"
)
_LOG_LONG = (
    f"{_DIFF_LONG} oneline graph all decorate? reverse no-merges merges follow author: since: until: after:=since"
    " before:=until grep: format: pretty? abbrev-commit max-count:=n first-parent date: skip: branches? tags?"
    " no-decorate"
)
_LOG = Program(
    flags="pugiswbm",
    valued="nSGLU",
    alias="up",
    long=_LOG_LONG,
    number="n",
    order_matters="oneline,format,pretty p,s color,no-color decorate,no-decorate",
    keeps_dashes=True,
    paths_after_dashes=True,
)
GIT: dict[str, Program] = {
    "status": Program(
        flags="sbvz",
        attached="u",
        long="short=s branch=b verbose=v porcelain? long ignored? untracked-files?=u",
        order_matters="s,porcelain,long",
        operands="paths",
    ),
    "add": Program(
        flags="AufnvpN",
        long="all=A update=u force=f dry-run=n verbose=v patch=p intent-to-add=N",
        order_matters="A,u",
        operands="paths",
        any_order=True,
    ),
    "commit": Program(
        flags="asvqnepo",
        valued="mFCct",
        long="message:=m all=a amend no-edit edit=e no-verify=n allow-empty allow-empty-message signoff=s quiet=q"
        " verbose=v file:=F author: date: reuse-message:=C fixup: squash: no-gpg-sign dry-run",
        order_matters="e,no-edit q,v",
        operands="paths",
    ),
    "diff": Program(
        flags="pswbRzau",
        valued="USG",
        alias="up",
        long=_DIFF_LONG,
        order_matters="p,s color,no-color",
        keeps_dashes=True,
        paths_after_dashes=True,
    ),
    "log": _LOG,
    "restore": Program(
        flags="SWqp",
        valued="s",
        long="staged=S worktree=W source:=s quiet=q patch=p ours theirs",
        operands="paths",
        any_order=True,
    ),
    "push": Program(
        flags="ufnqvd",
        long="set-upstream=u force=f force-with-lease? tags dry-run=n delete=d no-verify all quiet=q verbose=v",
    ),
    "clean": Program(flags="dfnqxX", long="force=f dry-run=n quiet=q", operands="paths", any_order=True),
}
# Everything after the image or the container belongs to the program inside, so options cannot follow operands.
_DOCKER_RUN = Program(
    flags="itdPq",
    valued="evpwuhlm",
    long="rm init privileged read-only detach=d interactive=i tty=t publish-all=P quiet=q env:=e volume:=v publish:=p"
    " workdir:=w user:=u hostname:=h label:=l memory:=m name: network: entrypoint: platform: cpus: env-file: mount:"
    " restart: gpus: pull: add-host: shm-size: tmpfs: cap-add: cap-drop: device:",
    permutes=False,
)
_DOCKER_EXEC = Program(
    flags="itd",
    valued="ewu",
    long="interactive=i tty=t detach=d privileged env:=e workdir:=w user:=u env-file:",
    permutes=False,
)
_KUBECTL = Program(
    flags="Aw",
    valued="nlo",
    long="namespace:=n selector:=l output:=o all-namespaces=A watch=w context: kubeconfig: show-labels no-headers"
    " field-selector: sort-by:",
)
_CARGO = Program(
    flags="rvq",
    valued="pFj",
    long="release=r verbose=v quiet=q all workspace all-targets all-features no-default-features locked offline lib"
    " bins tests examples benches no-run no-fail-fast package:=p features:=F bin: test: example: bench: target: jobs:=j"
    " manifest-path: exclude: profile: message-format: fix allow-dirty",
    keeps_dashes=True,
)
_NPM_INSTALL = Program(
    flags="DgEPSOf",
    long="save-dev=D global=g save-exact=E save-prod=P save=S save-optional=O force=f legacy-peer-deps no-save"
    " ignore-scripts no-audit no-fund silent",
    order_matters="D,P,S,O",
    any_order=True,
)
_PIP = Program(
    flags="Uqvy",
    valued="rec",
    long="upgrade=U quiet=q verbose=v yes=y requirement:=r editable:=e constraint:=c user no-deps pre no-cache-dir"
    " force-reinstall index-url: extra-index-url: no-build-isolation break-system-packages",
    any_order=True,
)
# The action (`create`, `view`) is the first operand and stays first; the options may come in any order.
_GH = Program(
    flags="dfwc",
    valued="tbBHlarRFLs",
    long="title:=t body:=b base:=B head:=H draft=d fill=f web=w label:=l assignee:=a reviewer:=r repo:=R body-file:=F"
    " limit:=L state:=s json: comments=c squash delete-branch",
)
_DOCKER_BUILD = Program(
    flags="q",
    valued="tf",
    long="tag:=t file:=f no-cache pull quiet=q rm build-arg: target: platform: progress: label:",
)
SUBCOMMANDS: dict[str, dict[str, Program]] = {
    "git": GIT,
    "cargo": dict.fromkeys(("test", "build", "check", "clippy"), _CARGO),
    "npm": {"install": _NPM_INSTALL},
    "pip": {"install": _PIP},
    "pip3": {"install": _PIP},
    "gh": {"pr": _GH},
    "kubectl": {"get": _KUBECTL},
    "docker": {"run": _DOCKER_RUN, "exec": _DOCKER_EXEC, "build": _DOCKER_BUILD},
}
# Aliases of subcommands, from the programs' own help.
SAME_SUBCOMMAND: dict[str, dict[str, tuple[str, ...]]] = {"npm": {"i": ("install",), "test": ("run", "test")}}


class Option(NamedTuple):
    """An option: its canonical name and its value, if any."""

    name: str
    value: ShellWord | None


@dataclass
class CommandLine:
    """A command line with options and operands separated.

    `rest` begins with a word that may expand to options, so everything from there on keeps its order.
    """

    options: list[Option] = field(default_factory=list[Option])
    operands: list[ShellWord] = field(default_factory=list[ShellWord])
    rest: list[ShellWord] = field(default_factory=list[ShellWord])
    dashes_at: int | None = None


def parse_command_line(words: Sequence[ShellWord], program: Program) -> CommandLine | None:
    """Parse the words after the program's name. Return None if one of them is not in the program's table."""
    line, at = CommandLine(), 0
    while at < len(words):
        word = words[at]
        at += 1
        text = word.literal
        # From here on, any word may be an option, so nothing can be reordered.
        if word.splits:
            line.rest = list(words[at - 1 :])
            break
        if text == "--":
            line.dashes_at = len(line.operands)
            line.operands += words[at:]
            if any(operand.splits for operand in words[at:]):
                return None
            break
        if not _is_option(word):
            line.operands.append(word)
            # `python a.py -v`: what follows the first operand belongs to another program.
            if not program.permutes:
                line.operands += words[at:]
                break
            continue
        following = words[at] if at < len(words) else None
        num_values = _add_option(word, following, program, line.options)
        if num_values is None:
            return None
        at += num_values
    return line if _order_is_free(line.options, program) else None


def _is_option(word: ShellWord) -> bool:
    # A lone "-" is an operand: standard input.
    first = word.pieces[0] if word.pieces else None
    return first is not None and first.kind == "text" and first.text.startswith("-") and word.literal != "-"


def _add_option(word: ShellWord, following: ShellWord | None, program: Program, options: list[Option]) -> int | None:
    """Add the options in a word. Return how many of the following words are values, or None for an unknown option."""
    text = word.literal
    if text is None:
        return _add_expanding_option(word, program, options)
    if text.startswith("--"):
        return _add_long_option(text[2:], following, program, options)
    if text[1:].isdigit() and program.number:
        options.append(Option(program.number, literal_word(text[1:])))
        return 0
    # Letters may be combined, as in `-la`, and the last one may be followed by its value, as in `-n5`.
    for index, letter in enumerate(text[1:], start=1):
        name, value = program.aliases.get(letter, letter), text[index + 1 :]
        if letter in program.flags:
            options.append(Option(name, None))
        elif letter in program.attached:
            options.append(Option(name, literal_word(value) if value else None))
            return 0
        elif letter not in program.valued:
            return None
        elif value:
            options.append(Option(name, literal_word(value)))
            return 0
        else:
            return _add_option_with_value(name, following, options)
    return 0


def _add_long_option(text: str, following: ShellWord | None, program: Program, options: list[Option]) -> int | None:
    """Add a long option: `--name`, `--name=value` or `--name value`.

    Return how many of the following words are values, or None for an unknown option.
    """
    name, equals, value = text.partition("=")
    canonical_name, mark = program.long_options.get(name, (None, ""))
    if equals:
        # With `=`, the name and the value are clear even if the option is not in the table.
        options.append(Option(canonical_name or f"--{name}", literal_word(value)))
        return 0
    if canonical_name is None:
        return None
    if mark == ":":
        return _add_option_with_value(canonical_name, following, options)
    options.append(Option(canonical_name, None))
    return 0


def _add_expanding_option(word: ShellWord, program: Program, options: list[Option]) -> int | None:
    """Add an option such as `--name="$X"`, which stays a single word whatever the value of X.

    Return 0, since no following word is a value, or None if the word has a different form.
    """
    name, equals, value = word.pieces[0].text.partition("=")
    if not equals or not name.startswith("--"):
        return None
    canonical_name, _ = program.long_options.get(name[2:], (None, ""))
    pieces = (word.pieces[0]._replace(text=value), *word.pieces[1:])
    options.append(Option(canonical_name or name, ShellWord(tuple(piece for piece in pieces if piece.text), word.raw)))
    return 0


def _add_option_with_value(name: str, following: ShellWord | None, options: list[Option]) -> int | None:
    if following is None or following.splits:
        return None
    options.append(Option(name, following))
    return 1


def _order_is_free(options: list[Option], program: Program) -> bool:
    names = {option.name for option in options}
    return all(len(names & group) < 2 for group in program.groups)
