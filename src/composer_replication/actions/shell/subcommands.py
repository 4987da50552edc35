"""Programs with commands of their own: git, package managers and build tools, as tables for `options`."""

from __future__ import annotations

from dataclasses import replace

from composer_replication.actions.shell.options import Program

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
    decides="oneline,format,pretty p,s color,no-color decorate,no-decorate",
    keeps_dashes=True,
    paths_after_dashes=True,
)
GIT: dict[str, Program] = {
    "status": Program(
        flags="sbvz",
        attached="u",
        long="short=s branch=b verbose=v porcelain? long ignored? untracked-files?=u",
        decides="s,porcelain,long",
        operands="paths",
    ),
    "add": Program(
        flags="AufnvpN",
        long="all=A update=u force=f dry-run=n verbose=v patch=p intent-to-add=N",
        decides="A,u",
        operands="paths",
        any_order=True,
    ),
    "commit": Program(
        flags="asvqnepo",
        valued="mFCct",
        long="message:=m all=a amend no-edit edit=e no-verify=n allow-empty allow-empty-message signoff=s quiet=q"
        " verbose=v file:=F author: date: reuse-message:=C fixup: squash: no-gpg-sign dry-run",
        decides="e,no-edit q,v",
        operands="paths",
        path_values="F",
    ),
    "diff": Program(
        flags="pswbRzau",
        valued="USG",
        alias="up",
        long=_DIFF_LONG,
        decides="p,s color,no-color",
        keeps_dashes=True,
        paths_after_dashes=True,
    ),
    "log": _LOG,
    "show": _LOG,
    "branch": Program(
        flags="avrdDmMflq",
        long="list=l all=a delete=d force=f show-current remotes=r move=m merged? no-merged? contains? verbose=v",
        decides="d,D m,M",
    ),
    "checkout": Program(
        flags="fqpt",
        valued="bB",
        long="force=f quiet=q detach track? ours theirs orphan: patch=p",
        keeps_dashes=True,
        paths_after_dashes=True,
    ),
    "switch": Program(flags="fqd", valued="cC", long="create:=c force-create:=C detach=d quiet=q discard-changes"),
    "restore": Program(
        flags="SWqp",
        valued="s",
        long="staged=S worktree=W source:=s quiet=q patch=p ours theirs",
        operands="paths",
        any_order=True,
    ),
    "reset": Program(
        flags="qp",
        long="hard soft mixed keep merge quiet=q",
        decides="hard,soft,mixed,keep,merge",
        keeps_dashes=True,
        paths_after_dashes=True,
    ),
    "rm": Program(flags="rfnq", long="cached force=f dry-run=n quiet=q", operands="paths", any_order=True),
    "mv": Program(flags="fknv", long="force=f dry-run=n verbose=v", operands="paths", keeps_slash=True),
    "push": Program(
        flags="ufnqvd",
        long="set-upstream=u force=f force-with-lease? tags dry-run=n delete=d no-verify all quiet=q verbose=v",
    ),
    "pull": Program(
        flags="qv", long="rebase? no-rebase ff-only no-ff ff quiet=q", decides="rebase,no-rebase ff-only,no-ff,ff"
    ),
    "fetch": Program(flags="apqvtf", long="all prune=p tags=t depth: force=f quiet=q unshallow"),
    "clone": Program(flags="qnvl", valued="bo", long="depth: branch:=b single-branch recurse-submodules quiet=q"),
    "merge": Program(
        flags="nq",
        valued="m",
        long="no-ff ff-only ff squash abort continue no-commit no-edit",
        decides="no-ff,ff-only,ff",
    ),
    "clean": Program(flags="dfnqxX", long="force=f dry-run=n quiet=q", operands="paths", any_order=True),
    "tag": Program(flags="adlfn", valued="m", long="annotate=a delete=d list=l force=f message:=m"),
    "ls-files": Program(flags="comdstiz", long="cached=c others=o modified=m deleted=d exclude-standard"),
}
# What follows the image or the container is for the program inside.
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
_CARGO_RUN = replace(_CARGO, permutes=False)  # what follows the first operand is for the program that is run
_NPM_INSTALL = Program(
    flags="DgEPSOf",
    long="save-dev=D global=g save-exact=E save-prod=P save=S save-optional=O force=f legacy-peer-deps no-save"
    " ignore-scripts no-audit no-fund silent",
    decides="D,P,S,O",
    any_order=True,
)
_PIP = Program(
    flags="Uqvy",
    valued="rec",
    long="upgrade=U quiet=q verbose=v yes=y requirement:=r editable:=e constraint:=c user no-deps pre no-cache-dir"
    " force-reinstall index-url: extra-index-url: no-build-isolation break-system-packages",
    path_values="r,c",
    any_order=True,
)
_RUFF = Program(
    flags="qvn",
    long="fix no-fix diff check quiet=q verbose=v select: ignore: extend-select: config: line-length: unsafe-fixes"
    " statistics no-cache=n output-format: exit-zero target-version:",
    decides="fix,no-fix select,ignore,extend-select",
    operands="paths",
    path_values="config",
)
_JS_ADD = Program(flags="DEO", long="dev=D save-dev=D exact=E save-exact=E optional=O", any_order=True)
# What to do comes first and stays there; the title, the text and the rest come in any order.
_GH = Program(
    flags="dfwc",
    valued="tbBHlarRFLs",
    long="title:=t body:=b base:=B head:=H draft=d fill=f web=w label:=l assignee:=a reviewer:=r repo:=R body-file:=F"
    " limit:=L state:=s json: comments=c squash delete-branch",
    path_values="F",
)
_DOCKER_BUILD = Program(
    flags="q",
    valued="tf",
    long="tag:=t file:=f no-cache pull quiet=q rm build-arg: target: platform: progress: label:",
    path_values="f",
)
_IMAGES = Program(flags="aq", long="all=a quiet=q")
SUBCOMMANDS: dict[str, dict[str, Program]] = {
    "git": GIT,
    "cargo": dict.fromkeys(("test", "build", "check", "clippy", "bench", "doc"), _CARGO) | {"run": _CARGO_RUN},
    "npm": {"install": _NPM_INSTALL, "ci": _NPM_INSTALL},
    "pip": {"install": _PIP, "uninstall": _PIP},
    "pip3": {"install": _PIP, "uninstall": _PIP},
    "ruff": {"check": _RUFF, "format": _RUFF},
    "gh": {"pr": _GH, "issue": _GH},
    "yarn": {"add": _JS_ADD},
    "pnpm": {"add": _JS_ADD},
    "kubectl": {"get": _KUBECTL, "describe": _KUBECTL},
    "docker": {
        "run": _DOCKER_RUN,
        "exec": _DOCKER_EXEC,
        "build": _DOCKER_BUILD,
        "ps": Program(flags="aqsl", long="all=a quiet=q size=s"),
        "images": _IMAGES,
    },
}
# Other names of the same command, as the programs' own help gives them.
SAME_SUBCOMMAND: dict[str, dict[str, tuple[str, ...]]] = {
    "npm": {
        "i": ("install",),
        "add": ("install",),
        "t": ("run", "test"),
        "test": ("run", "test"),
        "start": ("run", "start"),
        "run-script": ("run",),
    },
    "cargo": {"t": ("test",), "b": ("build",), "c": ("check",), "r": ("run",)},
}
