"""Programs whose options are certain, as tables for `options`; what is not listed keeps its words in order."""

from __future__ import annotations

from composer_replication.actions.shell.options import Program

_GREP_LONG = (
    "recursive=r ignore-case=i line-number=n files-with-matches=l files-without-match=L invert-match=v count=c"
    " word-regexp=w only-matching=o extended-regexp=E fixed-strings=F perl-regexp=P regexp:=e file:=f include: exclude:"
    " exclude-dir: color? colour? context:=C after-context:=A before-context:=B max-count:=m quiet=q silent=q"
    " no-messages=s with-filename=H no-filename=h line-regexp=x null=Z text=a"
)
_GREP = Program(
    flags="rRinlLvcwxohHsqEFGPIaUzZbTy",
    valued="ABCefmd",
    long=_GREP_LONG,
    # Of --include and --exclude the last that matches wins.
    decides="E,F,G,P h,H l,L include,exclude",
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
    decides="i,s,S n,N H,I g,iglob heading,no-heading",
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
    decides="e,f",
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
    path_values="c,rootdir,ignore,junitxml",
)
_CHECKER = Program(
    flags="qvsh",
    long="strict ext: ignore-missing-imports check diff fix no-fix verbose=v quiet=q version help config-file: config:"
    " select: ignore: extend-select: line-length: target-version: statistics no-cache show-error-codes pretty"
    " unsafe-fixes write list-different",
    decides="fix,no-fix select,ignore,extend-select",
    operands="paths",
    path_values="config,config-file",
)
_TABLE = Program(flags="cdui", valued="fsw", operands="paths")
_READ_END = Program(
    flags="qvz",
    valued="nc",
    long="lines:=n bytes:=c quiet=q silent=q verbose=v",
    decides="n,c q,v",
    number="n",
    operands="paths",
    assumed="n=10",
)

PROGRAMS: dict[str, Program] = {
    "ls": Program(
        flags="1aAbBcCdfFgGhHiklLmnNopqQrRsStuUvxXZ",
        long="all=a almost-all=A recursive=R human-readable=h reverse=r size=s directory=d inode=i color? classify=F",
        decides="a,A t,S,U,X,v,f c,u C,x,m,1 l,C,x,m g,C,x,m n,C,x,m o,C,x,m b,q,Q,N H,L h,k",
        operands="paths",
        default=".",
        any_order=True,  # it sorts them itself
        ordered_with="U,f",
    ),
    "cat": Program(flags="AbeEnstTuv", long="number=n show-all=A squeeze-blank=s", operands="paths"),
    "head": _READ_END,
    "tail": Program(
        flags="qvzfFr",
        valued="ncs",
        long="lines:=n bytes:=c follow?=f quiet=q verbose=v retry pid:",
        decides="n,c q,v f,F",
        number="n",
        operands="paths",
        assumed="n=10",
    ),
    "wc": Program(flags="lwcmL", long="lines=l words=w bytes=c chars=m max-line-length=L", operands="paths"),
    "rm": Program(
        flags="rRfivdI",
        alias="Rr",
        long="recursive=r force=f verbose=v dir=d",
        decides="f,i,I",
        operands="paths",
        any_order=True,
    ),
    "mkdir": Program(flags="pv", valued="m", long="parents=p verbose=v mode:=m", operands="paths", any_order=True),
    "rmdir": Program(flags="pv", long="parents=p verbose=v", operands="paths", any_order=True),
    "touch": Program(
        flags="acmhf",
        valued="dtr",
        long="no-create=c date:=d reference:=r",
        operands="paths",
        path_values="r",
        any_order=True,
    ),
    "cp": Program(
        flags="aRrfivnpuLPHdlsTxb",
        valued="tS",
        alias="Rr",
        long="recursive=r archive=a force=f interactive=i verbose=v no-clobber=n update=u target-directory:=t",
        decides="i,n f,i f,n a,L,P,H,d",
        operands="paths",
        path_values="t",
        keeps_slash=True,
    ),
    "mv": Program(
        flags="fivnuTb",
        valued="tS",
        long="force=f interactive=i verbose=v no-clobber=n update=u target-directory:=t",
        decides="f,i,n",
        operands="paths",
        path_values="t",
        keeps_slash=True,
    ),
    # The text of a symbolic link's target is what is stored.
    "ln": Program(flags="sfinvrTLP", long="symbolic=s force=f verbose=v relative=r", decides="f,i L,P"),
    "chmod": Program(flags="Rvfc", long="recursive=R verbose=v", operands="word then paths", any_order=True),
    "chown": Program(flags="Rvfch", long="recursive=R verbose=v", operands="word then paths"),
    "stat": Program(flags="Lft", valued="c", long="format:=c dereference=L", operands="paths"),
    "file": Program(flags="biLkz", long="brief=b mime=i", operands="paths"),
    "du": Program(
        flags="ahscbkmxLH",
        valued="d",
        long="max-depth:=d human-readable=h summarize=s all=a total=c",
        decides="h,b,k,m",
        operands="paths",
    ),
    "df": Program(flags="hTaikH", decides="h,k,H", operands="paths"),
    "tree": Program(flags="adfilnsupgDFACxhvQ", valued="LIPo", operands="paths", path_values="o"),
    "diff": Program(
        flags="urNqbBwiyas",
        valued="UCx",
        long="unified?=U recursive=r brief=q new-file=N ignore-all-space=w ignore-case=i color?",
        decides="u,U,C,y,q",
        operands="paths",
    ),
    "sort": Program(
        flags="nrufhbdiMVgRzmcsC", valued="kto", long="numeric-sort=n reverse=r unique=u key:=k", operands="paths"
    ),
    "uniq": _TABLE,
    "cut": Program(flags="s", valued="dfcb", long="delimiter:=d fields:=f", operands="paths"),
    "tee": Program(flags="ai", long="append=a", operands="paths"),
    "which": Program(flags="a"),
    "grep": _GREP,
    "egrep": _GREP,
    "fgrep": _GREP,
    "rg": _RG,
    "sed": _SED,
    "awk": Program(valued="Fvf", permutes=False, operands="word then paths"),
    "jq": Program(
        flags="rcesnSajM", long="raw-output=r compact-output=c slurp=s null-input=n", operands="word then paths"
    ),
    "pytest": _PYTEST,
    "py.test": _PYTEST,
    "mypy": _CHECKER,
    "black": _CHECKER,
    "isort": _CHECKER,
    "flake8": _CHECKER,
    "eslint": _CHECKER,
    "prettier": _CHECKER,
    "bash": Program(flags="exuv", permutes=False, operands="path then words"),
    "sh": Program(flags="exuv", permutes=False, operands="path then words"),
    "node": Program(permutes=False, operands="path then words"),
    "make": Program(
        flags="kBnsiqe",
        valued="CfI",
        attached="j",
        long="keep-going=k always-make=B dry-run=n silent=s directory:=C",
        path_values="C,f",
    ),
    "cmake": Program(
        valued="BSGD",
        long="build: target: config: parallel? install: preset: fresh",
        path_values="B,S,build",
    ),
    "tsc": Program(valued="p", long="noEmit watch project:=p strict pretty? skipLibCheck build"),
    "jest": Program(
        flags="iuw",
        valued="t",
        long="runInBand=i updateSnapshot=u watch=w coverage silent verbose ci testNamePattern:=t passWithNoTests",
    ),
    "apt-get": Program(flags="yqfd", long="yes=y assume-yes=y quiet=q no-install-recommends"),
    "apt": Program(flags="yqfd", long="yes=y assume-yes=y quiet=q no-install-recommends"),
    "ps": Program(flags="efAldjF", valued="opU"),
    "ss": Program(flags="tulpnaemois46"),
    "netstat": Program(flags="tulpnaeor46"),
    # Here a final slash says what is copied, and the words stand for either side.
    "rsync": Program(
        flags="avzrlptunhPqHAXcogDxWiI",
        valued="e",
        long="archive=a verbose=v compress=z recursive=r dry-run=n human-readable=h delete progress exclude: include:",
        decides="include,exclude",
    ),
    "curl": Program(
        flags="sSLfikIvOgGNJR",
        valued="XHdouAbcFTmDew",
        long="silent=s show-error=S location=L fail=f include=i insecure=k head=I verbose=v remote-name=O request:=X"
        " header:=H data:=d output:=o user:=u user-agent:=A max-time:=m connect-timeout: write-out:=w form:=F"
        " cookie:=b cookie-jar:=c data-raw: data-binary: data-urlencode: json: compressed retry:",
        decides="d,data-raw,data-binary,data-urlencode,json",
        path_values="o",
    ),
    "tar": Program(
        flags="xctzjJvpkhaOm",
        valued="fCTX",
        long="extract=x create=c list=t gzip=z verbose=v file:=f directory:=C strip-components:",
        permutes=False,  # what is named before an --exclude is not excluded
        path_values="f,C",
    ),
}
