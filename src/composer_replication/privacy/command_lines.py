"""Find secrets on command lines and in login files, where the program rather than a name identifies the value.

Examples are `curl -u`, `mysql -p`, .netrc and .pgpass. The first half has patterns for single commands; the second half
parses the options and positional arguments of the programs in a table.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence, Set
from typing import NamedTuple

from composer_replication.privacy.plausible import is_literal_secret, is_plausible, is_unknown
from composer_replication.privacy.rules import Span, is_strong
from composer_replication.privacy.secret_names import Strength

_VALUE = r"(?P<q>\\*[\"'])?(?P<value>(?(q)(?:(?!(?P=q))[^\0\n]){3,200}|[^\0\s\"'`\\;|&<>]{3,200}))"
_BARE_VALUE = r"(?P<value>[^\0\s\"'`\\<>]{3,200})"
# A blank, or the line end and indent of a continued line.
_S = r"\s{1,20}"
_ARG = r"[^\0\s]{1,200}"
_QUOTE = r"\\*[\"']?"
# After echo: options, a format, the text, and the rest of a bracketed group up to the pipe.
_PIPED_TEXT = (
    rf"{_S}(?:-\w{{1,4}}{_S})?(?:{_QUOTE}%s(?:\\{{1,2}}n)?{_QUOTE}{_S})?{_VALUE}{_QUOTE}"
    rf"(?:\s?;\s?echo{_S}[^\0\n|;()]{{1,100}}\)?)?\s{{0,10}}\|\s{{0,10}}(?P<reader>[^\0\n|]{{1,200}})"
)


class _Command(NamedTuple):
    """A pattern for a command that contains a secret.

    `trigger` is a word that must occur; `also` is an additional required string for common trigger words. With
    `strong`, only values that cannot be ordinary words are accepted, because the same trigger occurs in prose and in
    code.
    """

    trigger: bytes
    kind: str
    pattern: re.Pattern[str]
    also: str = ""
    strong: bool = False


def _row(trigger: str, kind: str, *parts: str, also: str = "", strong: bool = False) -> _Command:
    # Each row of `_COMMANDS` has an example.
    return _Command(trigger.encode(), kind, re.compile("".join(parts)), also, strong)


# Commands that read a password or a token from standard input: `sudo -S`, `docker login --password-stdin`,
# `vercel env add`, `tee db_password.txt`; not `grep login`.
_READER = re.compile(
    r"(?:^|[\s/|;&(\"'!])(?:(?:ch|smb|vnc|sla?p|mk)?passwd|sudo\s[^\0\n|;]{0,40}?-\w{0,3}S|su\s|kinit|"
    r"cryptsetup|secret-tool"
    r"|security\s|keychain|openconnect|ssh-add|wrangler|vault\s{1,4}login|gh\s{1,4}auth|npm\s{1,4}login)"
    r"|--(?:password|token|pass|secret|passwd|passphrase|access-token)-stdin|--passwd-on-stdin|--with-token|--stdin\b"
    r"|--passphrase-fd|\b(?:secrets?|env|vars?|pass)[ :](?:set|put|create|add|insert|store|import|versions)\b"
    r"|tee\s[^\0\n|;]{0,60}(?:pass|secret|token)"
)
_READER_WORDS = frozenset(
    word.encode()
    for word in (
        "passwd",
        "sudo",
        "kinit",
        "cryptsetup",
        "stdin",
        "login",
        "secret",
        "pass",
        "auth",
        "env",
        "keychain",
        "openconnect",
    )
)
# Text written into a file whose name refers to a secret: `echo hunter2 > db_password.txt`.
_REDIRECTED_TEXT = (
    rf"{_S}(?:-\w{{1,4}}{_S})?(?:{_QUOTE}%s(?:\\{{1,2}}n)?{_QUOTE}{_S})?{_VALUE}{_QUOTE}\s?>{{1,2}}\s?"
    r"[^\0\s;|&]{0,80}(?:pass|secret|token|passwd|\.key)"
)
# `echo 'hunter2' | sudo -S true` -> `hunter2`, with `sudo -S true` as its reader.
_PIPED = tuple((program.encode(), re.compile(program + _PIPED_TEXT)) for program in ("echo", "printf", "yes"))
# `echo hunter2 > db_password.txt` -> `hunter2`; not `echo done > build.log`.
_INTO_FILE = tuple((program.encode(), re.compile(program + _REDIRECTED_TEXT)) for program in ("echo", "printf"))
COMMAND_WHOLE_WORDS = frozenset(program for program, _ in _PIPED)
# `kinit ada <<< 'hunter2'` -> `hunter2`.
_HERE_STRING = re.compile(rf"<<<\s?{_VALUE}")
# The user in the input to chpasswd: `ada:hunter2` -> `ada:`.
_LOGIN_OF = re.compile(r"[\w.-]{1,40}:")
_MAX_LINE_CHARS = 300
# One pattern per row, with an example above it.
_COMMANDS = (
    # `openssl rsa -passin pass:hunter2` -> `hunter2`.
    _row("pass", "PASSWORD", "-(?:passin|passout|pass|k)", _S, "pass:", _VALUE, also=" pass:"),
    # `kubectl create secret generic db --from-literal=password=hunter2` -> `hunter2`.
    _row("literal", "SECRET", "--from-literal[= ]", _QUOTE, r"[\w.-]{1,80}=", _VALUE, also="from-literal", strong=True),
    # `gh secret set API_KEY --body zk39Qx81` -> `zk39Qx81`.
    _row("secret", "SECRET", r"secret set\b[^\0\n|;]{0,200}?\s(?:-b|--body)[ =]?", _VALUE, also="secret set",
         strong=True),
    # `supabase secrets set API_KEY=zk39Qx81` -> `zk39Qx81`.
    _row("secret", "SECRET", r"secrets set", _S, r"[\w.-]{1,80}=", _VALUE, also="secrets set", strong=True),
    # A line of .netrc: `machine example.org login ada password hunter2` -> `hunter2`.
    _row("machine", "PASSWORD", "machine", _S, _ARG, _S, rf"(?:login{_S}{_ARG}{_S})?(?:account{_S}{_ARG}{_S})?password",
         _S, _VALUE, also="password"),
    # The same without its first pair: `login ada password hunter2` -> `hunter2`.
    _row("login", "PASSWORD", "login", _S, _ARG, _S, "password", _S, _VALUE),
    # `echo db:5432:crm:ada:hunter2 >> ~/.pgpass` -> `hunter2`.
    _row("pgpass", "PASSWORD", r"(?<![\w.*-])[\w.*-]{1,80}:(?:\d{2,5}|\*):[\w.*-]{1,60}:[\w.*-]{1,60}:", _VALUE),
    # `requests.get(url, auth=("ada", "hunter2"))` -> `hunter2`.
    _row("auth", "USER_PASSWORD", r"uth(?:=|\w{0,10})\(\s{0,4}\\*[\"'][^\0\"'\\\n]{1,80}\\*[\"'],\s{0,4}", _VALUE,
         also="(", strong=True),
    # `smtp.login("ada", "hunter2")` -> `hunter2`.
    _row("login", "USER_PASSWORD", r"login\(\s{0,4}\\*[\"'][^\0\"'\\\n]{1,80}\\*[\"'],\s{0,4}", _VALUE, strong=True),
    # Redis: `AUTH ada hunter2` -> `hunter2`.
    _row("auth", "PASSWORD", r"AUTH (?:(?<![^\0\n]AUTH )|(?<=[> \"']AUTH ))(?:[\w-]{1,40} )?", _VALUE, also="AUTH ",
         strong=True),
    # A script for ftp: `ftp -n host <<END\nuser ada hunter2` -> `hunter2`.
    _row("ftp", "PASSWORD", r"(?m)^\s{0,8}user\s{1,3}[\w.@-]{1,60}\s{1,3}", _VALUE, also="user ", strong=True),
    # PowerShell: `ConvertTo-SecureString -String "hunter2" -AsPlainText` -> `hunter2`.
    _row("securestring", "PASSWORD", "ConvertTo-SecureString", _S, rf"(?:-[A-Za-z]{{2,20}}{_S}){{0,3}}", _VALUE),
    # Perl, PHP and Java: `DBI->connect("dbi:Pg:dbname=app", "ada", "hunter2")` -> `hunter2`.
    *(_row(trigger, "USER_PASSWORD", r"(?:onnect|PDO|onnection)\(\s{0,9}\\*[\"'][^\0\"'\n]{1,160}\\*[\"'],\s{0,"
                    r"9}\\*[\"']"
           r"[^\0\"'\n]{1,60}\\*[\"'],\s{0,9}", _VALUE, strong=True) for trigger in ("dbi", "pdo", "jdbc")),
    # SQL: `pgp_sym_decrypt(card, 'hunter2')` -> `hunter2`.
    *(_row(trigger, "PASSWORD", r"(?:crypt|CRYPT)\([^\0\n,()]{1,80},\s{0,4}(?=\\*[\"'])", _VALUE)
      for trigger in ("decrypt", "encrypt")),
    # PgBouncer's `userlist.txt\n"ada" "hunter2"` -> `hunter2`.
    *(_row(trigger, "PASSWORD", r"(?m)^\\*\"[\w.-]{1,40}\\*\" \\*\"(?P<value>[^\0\n\"\\]{4,100})", strong=True)
      for trigger in ("pgbouncer", "userlist")),
    # OpenVPN: `<auth-user-pass>\nada\nhunter2` -> `hunter2`.
    _row("auth", "PASSWORD", r"auth-user-pass>\s{1,9}[^\0\n<]{1,60}\n\s{0,9}", _BARE_VALUE, also="auth-user-pass>"),
    # `chpasswd <<END\nada:hunter2` -> `hunter2`, and cloud-init's `chpasswd:\n  list: |\n    ada:hunter2` -> `hunter2`.
    _row("chpasswd", "PASSWORD", r"chpasswd[^\0\n]{0,40}\n(?:[ \t]{0,20}(?:expire|list|users)[^\0\n]{0,40}\n)"
         r"{0,2}\s{0,20}"
         r"[\w-]{1,40}:", _BARE_VALUE, strong=True),
    # LDAP: `conn.simple_bind_s("cn=ada,dc=example", "hunter2")` -> `hunter2`.
    _row("bind", "PASSWORD", r"bind(?:_s)?\(\s{0,4}\\*[\"'][^\0\"'\n]{1,120}\\*[\"'],\s{0,4}", _VALUE, strong=True),
    # IMAP: `a1 LOGIN ada hunter2` -> `hunter2`.
    _row("login", "PASSWORD", r"LOGIN [^\0\s]{1,80} ", _VALUE, also="LOGIN ", strong=True),
    # IRC: `/msg NickServ IDENTIFY ada hunter2` -> `hunter2`.
    _row("identify", "PASSWORD", r"IDENTIFY (?:[\w-]{1,30} )?", _BARE_VALUE, strong=True),
    # FTP and POP3: `PASS hunter2` -> `hunter2`.
    _row("pass", "PASSWORD", r"(?m)(?:^|(?<=: )|(?<=> ))PASS (?P<value>[^\0\s\"'`\\<>/.]{6,100})$", also="P"
         "ASS ", strong=True),
    # Django: `create_superuser("ada", "ada@example.org", "hunter2")` -> `hunter2`.
    _row("superuser", "PASSWORD", r"superuser\((?:[^\0()\n]{0,120},\s{0,4})", _VALUE, strong=True),
    # SMTP asks for "Password:" in base64: `334 UGFzc3dvcmQ6\nC: aHVudGVyMg==` -> `aHVudGVyMg==`.
    _row("ugfzc", "PASSWORD", r"UGFzc3dvcmQ6\s{1,4}(?:C: )?(?P<value>[A-Za-z0-9+/=]{6,200})"),
    # The line below a command that prints a secret: `$ pass show mail/ada\nhunter2` -> `hunter2`.
    *(_row(trigger, "PASSWORD", rf"(?:{command})[^\0\n]{{0,160}}\n(?P<value>[^\0\s\"'`<>{{}}]{{6,200}})(?="
                    "\n|$)", also=also,
           strong=True)
      for trigger, command, also in (
          ("initial", "initial-password", "initial-password"), ("pass", "pass show", "pass show"),
          ("secret", "get secrets?[ /]", "get secret"), ("secret", "secrets versions access", "versions access"),
          ("secret", "get-secret-value", "get-secret-value"), ("password", "find-generic-password", "find-generic"))),
    # `Log in (user:pass): ada:hunter2` -> `hunter2`.
    _row("user", "USER_PASSWORD", r"ser(?:name)?:[Pp]ass(?:word)?[^\w\0@]{1,6}[\w.@+-]{1,60}:", _VALUE, also=":pass",
         strong=True),
)  # fmt: skip
_BY_TRIGGER: dict[bytes, list[_Command]] = {}
for _command in _COMMANDS:
    _BY_TRIGGER.setdefault(_command.trigger, []).append(_command)
_ORACLE_WORDS = frozenset((b"oracle", b"sqlplus"))
TRIGGERS: tuple[bytes, ...] = (*_BY_TRIGGER, *_READER_WORDS.difference(_BY_TRIGGER), *_ORACLE_WORDS)
_COMMAND_TRIGGERS = frozenset(_BY_TRIGGER)
# Values that only refer to a secret: `$PASSWORD`, `{{ token }}`, `your-token`, `***`; not `hunter2`.
_NO_SECRET = re.compile(r"\$\{?\w+\}?$|\$\(|\{|<|%s|\*{3}|your|pass(?:word)?$|PASSWORD$|redacted|-")
# A line of .pgpass without the name of its file, known by the usual port: `db:5432:crm:ada:hunter2` -> `hunter2`.
_PGPASS = re.compile(
    r"(?m)^(?:[ \t]{0,8}\d{1,4}[→:\t])?[\w.*-]{1,80}:(?:5432|\*):[\w.*-]{1,60}:[\w.*-]{1,60}:(?P<value"
    r">[^\0\s:]{6,200})$"
)

# A list of logins: `ada@example.org:hunter2` -> `hunter2`. A host without a dot or a path after the colon does not
# match: not `git@github.com:ada/repo`.
_AFTER_ACCOUNT = re.compile(
    r"@[\w-]{1,60}(?:\.[\w-]{1,40}){0,3}\.[a-z]{2,6}:(?P<value>[^\0\s:/@\"'`<>\\]{6,60})(?=\s|$)"
)
# `ada@example.org / hunter2` -> `hunter2`.
_AFTER_MAIL_ADDRESS = re.compile(
    r"@[\w-]{1,60}(?:\.[\w-]{1,40}){1,3}[\"'`*]{0,3}[ \t]/[ \t][\"'`*]{0,3}(?P<value>[^\0\s\"'`*,;()/]{4,60})"
)
# `sqlplus scott/tiger99@//db:1521/crm` -> `tiger99`.
_ORACLE_LOGIN = re.compile(
    r"(?<![\w/])[\w$#]{1,40}/\\*[\"']?(?P<value>[^\0\s@\"'\\/]{3,100})\\*[\"']?@(?://|\(|[\w.-]{1,80}[:/])"
)


def command_spans(text: str, active: Set[bytes]) -> Iterator[Span]:
    """Yield every secret on a command line or in a login file. `active` has the triggers that occur."""
    for trigger in sorted(active & _COMMAND_TRIGGERS):  # sorted, so that the kind of overlapping spans is deterministic
        for _, kind, pattern, also, strong in _BY_TRIGGER[trigger]:
            if also in text:
                yield from _matches(pattern, text, kind, strong)
    if active & _READER_WORDS or active & COMMAND_WHOLE_WORDS:
        yield from _stdin_spans(text, active)
    if ":5432:" in text:
        yield from _matches(_PGPASS, text, "PASSWORD", True)
    if "@" in text:
        yield from _matches(_AFTER_ACCOUNT, text, "USER_PASSWORD", True)
        yield from _matches(_AFTER_MAIL_ADDRESS, text, "USER_PASSWORD", True)
    if not active.isdisjoint(_ORACLE_WORDS):
        yield from _matches(_ORACLE_LOGIN, text, "PASSWORD", False)


def _stdin_spans(text: str, active: Set[bytes]) -> Iterator[Span]:
    """Yield the secrets that are piped to a program that reads a password, redirected to a file for a secret, or
    passed with `<<<`.
    """
    for pattern in [pattern for name, pattern in _PIPED if name in active] if "|" in text else ():
        for match in pattern.finditer(text):
            if _READER.search(match["reader"]):
                begin, end = match.span("value")
                login = _LOGIN_OF.match(text, begin, end) if "chpasswd" in match["reader"] else None
                yield from _checked(text, login.end() if login else begin, end)
    for pattern in [pattern for name, pattern in _INTO_FILE if name in active] if ">" in text else ():
        for match in pattern.finditer(text):
            yield from _checked(text, *match.span("value"))
    for match in _HERE_STRING.finditer(text) if "<<<" in text else ():
        line = max(text.rfind("\n", 0, match.start()) + 1, match.start() - _MAX_LINE_CHARS)
        if _READER.search(text[line : match.start()]) or _READER.search(
            text[match.end() : match.end() + 80].split("\n")[0]
        ):
            yield from _checked(text, *match.span("value"))


def _checked(text: str, begin: int, end: int) -> Iterator[Span]:
    value = text[begin:end]
    if is_plausible(value, Strength.PASSWORD, True) and not _NO_SECRET.match(value):
        yield Span(begin, end, "PASSWORD")


def _matches(pattern: re.Pattern[str], text: str, kind: str, strong: bool) -> Iterator[Span]:
    for match in pattern.finditer(text):
        value = match["value"]
        if (
            is_plausible(value, Strength.PASSWORD, True)
            and not _NO_SECRET.match(value)
            and (not strong or is_strong(value) or is_unknown(value))
        ):
            yield Span(*match.span("value"), kind)


# The second half: options and arguments of known programs, in any notation.

# Programs, followed by the options and arguments that hold a secret. `vault+login` is a subcommand. `-p` is an option
# with its value attached or in the next word; `-p=` only attached; `-p+` attached without any check of the value; `-u:`
# the value after the colon (`%` and `,` are other signs between user and secret); `!` only values that cannot be
# ordinary words; `#2` the second argument; `-b:3` htpasswd's batch mode, with the secret as the third argument; `/`
# Oracle's user/password; `=!` NAME=VALUE arguments; `@` user:password@host; `/p:` a Windows option.
_PROGRAM_TABLE = r"""
curl                -u: -U: --user: --proxy-user: --pass --oauth2-bearer --proxy-pass --tlspassword
http https xh       -a: --auth:
wget aria2c         --password --http-passwd --http-password --ftp-password --proxy-password
sshpass             -p+
airflow snowsql veracrypt racadm pihole -p
mysql mysqldump mysqladmin mysqlimport mysqlshow mysqlsh mysqlcheck mysqlpump mysqlslap mysqlbinlog -p=
mariadb mariadb-dump mariadb-admin mariadb-import mariadb-check -p=
mycli pgcli litecli -p
redis-cli valkey-cli keydb-cli -a --pass
redis-server valkey-server --requirepass --masterauth
login               -p
az                  -p --admin-password
mongo mongosh mongodump mongorestore mongoexport mongoimport mongostat mongotop -p --password
cqlsh cypher-shell psexec psexec.py evil-winrm crackmapexec netexec nxc hydra rdesktop -p
yt-dlp youtube-dl ncftpput ncftpget twine rabbitmqadmin supabase dsmadmc winexe borgbackup -p
influx              -t! -p
doctl glab hcloud   -t!
sqlcmd bcp isql osql tsql fisql mosquitto_pub mosquitto_sub ipmitool unzip zip zipcloak arangosh -P
ssh-keygen          -N -P
7z 7za 7zr 7zz rar unrar -p= -hp=
ldapsearch ldapmodify ldapadd ldapdelete ldapwhoami ldapcompare -w
ldappasswd slappasswd -s -a -w
smbclient rpcclient smbmap smbget winexe net -U%
lftp                -u,
openssl             -k -passin -passout -pass -password
openssl+passwd      #1! #2!
qpdf                --encrypt #1!
useradd usermod adduser -p
security            -w -p
snmpwalk snmpget snmpset snmpbulkwalk snmptable -c! -A -X
plink pscp psftp putty kitty -pw
x11vnc vncviewer    -passwd
swaks               -ap
sendemail           -xp
pdftotext pdfimages pdfinfo pdftoppm qpdf -upw -opw
hatch+publish poetry+publish uv+publish flit+publish -a -p -t!
nuget+push nuget+setapikey -k #1!
svn                 --password
xfreerdp wfreerdp   /p:
cmdkey              /pass:
net+user            #2
net+use             #3! #2! #4!
htpasswd            -b:3
mosquitto_passwd    -b:3
vault+login bw+unlock snyk+auth ngrok+authtoken config+add-authtoken wandb+login rclone+obscure cargo+login #1!
railway+login glab+login doppler+login netlify+login logfire+auth modal+token expo+login stripe+login #1!
bw+login lpass+login #2!
reset-admin-password reset-password #1! #2!
user:password       #2!
rabbitmqctl+add_user rabbitmqctl+change_password rabbitmqctl+authenticate_user #2
consul+kv+put etcdctl+put #2!
http-basic.*        #2!
pulumi+config+set   #2!
set-secret-key rootpw #1!
mc+alias+set mc+config+host #3! #4!
wpa_passphrase      #2
kv+put vault+write secret+put secrets+set config:set config+set secrets+import env+set vars+set =!
keyvault+secret secretsmanager ssm+put-parameter secret+set secrets+create secret+create secret+add --value --body -b!
secretsmanager keyvault+secret --secret-string --secret
keychain            -p
sqlplus sqlldr exp expdp imp impdp rman /
impacket-psexec impacket-secretsdump secretsdump.py wmiexec.py psexec.py smbexec.py GetUserSPNs.py @
kafka-configs       --add-config
cryptsetup          --key
bundle+config       #2:
jenkins-cli java-cli -auth:
etcdctl elasticdump --user: --auth:
smbclient           #2!
"""


class _ProgramRow(NamedTuple):
    """One row of the table: a program and the options and arguments that hold secrets."""

    words: tuple[str, ...]  # the program and its subcommands: ("vault", "login")
    short: dict[str, str]  # option letter -> its flags in the table
    long: dict[str, str]
    positionals: dict[str, str]
    shapes: frozenset[str]
    name_pattern: re.Pattern[bytes]  # the program and a blank, lower-cased
    option_hint: re.Pattern[str]  # any of its options


def _program(name: str, entries: Sequence[str]) -> _ProgramRow:
    short: dict[str, str] = {}
    long: dict[str, str] = {}
    positionals: dict[str, str] = {}
    shapes: set[str] = set()
    for entry in entries:
        body = entry.rstrip("!=:%,+0123456789") if not entry.startswith("#") else entry[:2]
        marks = entry[len(body) :]
        if entry in ("/", "=!", "@"):
            shapes.add(entry[0])
        elif entry.startswith("#"):
            positionals[body[1:]] = marks
        elif entry.startswith("/"):
            long[entry] = "="
        elif re.fullmatch(r"-[A-Za-z]", body):
            short[body[1]] = marks
        else:
            long[body] = marks
    letters = "".join(map(re.escape, short))
    options = [rf"[\s\"']-[A-Za-z]{{0,8}}[{letters}]"] if letters else []
    # For curl: ` -u` or `--user` anywhere on the line.
    option_hint = re.compile("|".join([*options, *map(re.escape, long)]) or "(?!)")
    first = re.escape(name.split("+")[0].rstrip("*").lower()).encode()
    # `curl ` or a continued line; `http-basic.example.org` for the row "http-basic.*".
    name_pattern = re.compile(first + (rb"[^\0\s]{0,100}" if name.endswith("*") else rb"(?=[ \t\r\n]|\\+[\nn])"))
    return _ProgramRow(tuple(name.split("+")), short, long, positionals, frozenset(shapes), name_pattern, option_hint)


def _programs() -> dict[bytes, list[_ProgramRow]]:
    programs: dict[bytes, list[_ProgramRow]] = {}
    for row in _PROGRAM_TABLE.strip().splitlines():
        parts = row.split()
        first = next(i for i, part in enumerate(parts) if not re.match(r"[A-Za-z0-9]", part))
        for name in parts[:first]:
            program = _program(name, parts[first:])
            letters = max(re.findall("[a-z]+", program.words[0].lower()), key=len)
            programs.setdefault(letters.encode(), []).append(program)
    return programs


PROGRAMS = _programs()

_MAX_COMMAND_CHARS = 2000
_MAX_COMMAND_WORDS = 80
_MAX_CUT_LINE_CHARS = 120
# Between two words of a command: blanks and continued lines: `  `, ` \\ `.
_GAP = re.compile(r"(?:[ \t]|\\{1,4}+\r?\n|\\\\n)*+")
# A piece of a word: quoted, quoted in JSON, or bare. It has no capturing group, since it is repeated possessively.
_PIECE = (
    r"(?:\"[^\0\n\"]{0,300}+\"|'[^\0\n']{0,300}+'|\\++\"[^\0\n\"\\]{0,300}+\\++\"|\\++'[^\0\n'\\]{0,300}+\\++'"
    r"|[^\0\s\"'\\;|&<>()`]|\\(?![nrt\"'\s\\])|\\{2,4}+(?=\w)|\$\([^\0\n()]{0,80}+\)|&(?=[^\0\s&])"
    r"|[;<>|](?<=[A-Za-z0-9!#$%^*][;<>|])(?=[^\0\s\"';|&<>]{1,60}+(?:[\"']|\s|$)))"
)
# `--user='ada:hunter2' next` -> `--user='ada:hunter2'`.
_SHELL_WORD = re.compile(rf"{_PIECE}{{1,300}}+")
_BEFORE = frozenset("+-\0 \t\n\r\"'`(){}[]=|;&$!@/\\:>→»│")
# `'hunter2'` -> `hunter2`, `\\"hunter2\\"` -> `hunter2`.
_QUOTED = re.compile(r"(?P<q>\\*[\"'])(?P<value>[^\0]*)(?P=q)\Z")
# Several options in one word: `-nb`; not `--batch`.
_CLUSTER = re.compile(r"-[A-Za-z]{1,8}\Z")
# As above, and files, variables and ids of programs: `@secret.txt`, `env:TOKEN`, `/proc`; not `hunter2`.
_NO_OPTION_VALUE = re.compile(
    r"\$\{?\w+\}?$|\$\(|\{|<|%s|\*{3}|your|pass(?:word)?$|PASSWORD$|redacted|-|\.{3}|@|env:|file:|/\w*$|\*$"
)
# `scott/tiger99@db` -> `tiger99`, `scott/tiger99` -> `tiger99`.
_ORACLE_ARGUMENT = re.compile(r"[\w$#.]{1,60}/\\*[\"']?(?P<value>[^\0\s@\"'\\/]{3,100})\\*[\"']?(?:@|\Z)")
# The target of impacket's tools: `CORP/ada:hunter2@10.0.0.1` -> `hunter2`.
_AT_HOST = re.compile(r"(?:[\w.-]{1,60}/)?[\w.$-]{1,60}:[\"']?(?P<value>[^\0\s\"'\\]{3,100})[\"']?@[\w.-]+\Z")
_SIGNS = ":%,"

OPTION_WHOLE_WORDS: frozenset[bytes] = frozenset(PROGRAMS)  # a text is parsed only if one of them occurs

# Program names that also occur in addresses (http) or times (z). They count only in short texts with this option.
_COMMON_NAMES = {b"http": " -a", b"https": " -a", b"z": "7z "}
_MAX_TEXT_CHARS = 1500


def option_spans(text: str, lower: bytes, active: Set[bytes], unfinished: list[int] | None = None) -> Iterator[Span]:
    """Yield every secret in an option or argument of a known program. `active` has the words that occur in the text.

    For each program name with a line break before or within such an option, the position of its end is appended to
    `unfinished`.
    """
    for letters in sorted(active & OPTION_WHOLE_WORDS):
        if letters in _COMMON_NAMES and (len(text) > _MAX_TEXT_CHARS or _COMMON_NAMES[letters] not in text):
            continue
        for program in PROGRAMS[letters]:
            if not program.words[1:] or program.words[1] in text:
                yield from _calls(text, lower, program, unfinished)


def _calls(text: str, lower: bytes, program: _ProgramRow, unfinished: list[int] | None) -> Iterator[Span]:
    done = 0
    for match in program.name_pattern.finditer(lower):
        at, end = match.span()
        if at < done:  # an argument of the previous command
            continue
        if at and text[at - 1] not in _BEFORE and text[at - 2 : at] not in ("\\n", "\\t"):
            continue
        if unfinished is not None and _is_cut(text, end, program):
            unfinished.append(end)
        if _may_hold_secret(text, end, program):
            words = list(_words(text, end))
            done = words[-1][1] if words else end
            yield from _call(text, words, program)


def _may_hold_secret(text: str, end: int, program: _ProgramRow) -> bool:
    """Return whether the line has an option that holds a secret. Most lines with a program's name do not."""
    newline = text.find("\n", end, end + _MAX_COMMAND_CHARS)
    line = text[end : newline if newline >= 0 else end + _MAX_COMMAND_CHARS]
    if program.words[1:] and program.words[1] not in line:
        return False
    if program.positionals or program.shapes:
        return True
    return line.endswith("\\") or program.option_hint.search(line) is not None


def _is_cut(text: str, end: int, program: _ProgramRow) -> bool:
    """Return whether the command's line breaks soon after the program name, within or shortly before an option that
    holds a secret.
    """
    newline = text.find("\n", end, end + _MAX_CUT_LINE_CHARS)
    if newline < 0:
        newline = text.find("\\n", end, end + _MAX_CUT_LINE_CHARS)
    if newline < 0:
        return False
    return (
        text[end:newline].endswith(" -")
        or program.option_hint.search(text, end, newline + _MAX_CUT_LINE_CHARS) is not None
    )


def _words(text: str, begin: int) -> Iterator[tuple[int, int]]:
    limit = min(len(text), begin + _MAX_COMMAND_CHARS)
    for _ in range(_MAX_COMMAND_WORDS):
        gap = _GAP.match(text, begin, limit)
        begin = gap.end() if gap else begin
        word = _SHELL_WORD.match(text, begin, limit)
        if word is None:
            return
        yield word.span()
        begin = word.end()


def _call(text: str, words: Sequence[tuple[int, int]], program: _ProgramRow) -> Iterator[Span]:
    following = list(program.words[1:])
    position = 0
    index = 0
    while index < len(words):
        start, stop = words[index]
        word = text[start:stop]
        index += 1
        if following:
            if word == following[0]:
                del following[0]
                continue
            if not word.startswith("-"):
                return
            continue
        after = words[index] if index < len(words) else None
        if word[0] in "-/" and len(word) > 1 and (option := _option(text, start, stop, after, program)) is not None:
            span, separate = option
            index += separate
            if span is not None:
                yield span
            continue
        if word[0] == "-" and "3" in program.short.get("b", "") and _CLUSTER.match(word) and "b" in word:
            position = 100 + ("n" in word)  # with `-n` there is no file argument
            continue
        if word[0] == "-":
            if (
                after
                and "=" not in word
                and not text.startswith("-", after[0])
                and program.positionals
                and _takes_value(word)
            ):
                index += 1
            continue
        position += 1
        yield from _positional(text, start, stop, position, program)


def _takes_value(word: str) -> bool:
    """Return whether this option is probably followed by its value rather than by a positional argument."""
    return word.startswith("--") and word not in (
        "--secret",
        "--plaintext",
        "--permanent",
        "--force",
        "--yes",
        "--batch",
    )


def _positional(text: str, start: int, stop: int, position: int, program: _ProgramRow) -> Iterator[Span]:
    marks = program.positionals.get(str(position))
    if position == 103 or marks is not None:
        yield from _secret(text, start, stop, marks or "")
    if "/" in program.shapes and (match := _ORACLE_ARGUMENT.match(text, *_inner(text, start, stop))):
        yield from _secret(text, *match.span("value"), "")
    if "@" in program.shapes and (match := _AT_HOST.match(text, *_inner(text, start, stop))):
        yield from _secret(text, *match.span("value"), "")
    sign = text.find("=", start, stop)
    if "=" in program.shapes and sign > start:
        yield from _secret(text, sign + 1, stop, "!")


def _option(
    text: str, start: int, stop: int, after: tuple[int, int] | None, program: _ProgramRow
) -> tuple[Span | None, int] | None:
    """Return the secret in an option (None if its value is no secret) and the number of following words it uses up;
    None if the word is not an option that holds a secret.
    """
    word = text[start:stop]
    name, sign, _ = word.partition("=")
    for long, marks in program.long.items():
        if long[0] == "/" and word.lower().startswith(long):
            return next(_secret(text, start + len(long), stop, ""), None), 0
        if name == long:
            if sign:
                return next(_secret(text, start + len(name) + 1, stop, marks), None), 0
            return (next(_secret(text, *after, marks), None), 1) if after else (None, 0)
    if word.startswith("--"):
        return None
    for letter, marks in program.short.items():
        if "3" in marks:
            continue
        if (
            word[1] == letter
            and len(word) > 2
            and not (after and _CLUSTER.match(word) and word[-1] == letter and "=" not in marks)
        ):
            begin = start + 2 + (word[2] == "=")
            plain = "+" in marks or text[begin] in "\"'\\" or "=" in marks or (marks and marks[0] in _SIGNS)
            return next(_secret(text, begin, stop, marks if plain else marks + "!"), None), 0
        if "=" not in marks and _CLUSTER.match(word) and word[-1] == letter and after and text[after[0]] != "-":
            return next(_secret(text, *after, marks), None), 1
    if "h" in word[1:2] and "-hp" in program.long and word.startswith("-hp"):
        return next(_secret(text, start + 3, stop, ""), None), 0
    return None


def _inner(text: str, start: int, stop: int) -> tuple[int, int]:
    """Return the bounds of a value without the quotes around it."""
    match = _QUOTED.match(text, start, stop)
    return match.span("value") if match else (start, stop)


def _secret(text: str, start: int, stop: int, marks: str) -> Iterator[Span]:
    start, stop = _inner(text, start, stop)
    kind = "PASSWORD"
    if (sign := next((mark for mark in marks if mark in _SIGNS), "")) and not marks.endswith("3"):
        at = text.find(sign, start, stop)
        if at < 0:
            return
        start, stop = _inner(text, at + 1, stop)
        kind = "USER_PASSWORD"
    if text.startswith("pass:", start, stop):
        start += 5
        start, stop = _inner(text, start, stop)
    value = text[start:stop]
    if len(value) < 3 or not is_plausible(value, Strength.PASSWORD, True) or _NO_OPTION_VALUE.match(value):
        return
    if "!" in marks and not (
        is_literal_secret(value)
        or is_unknown(value)
        or (is_strong(value) and "://" not in value and len(value) >= 10 and not value.isdigit())
    ):
        return
    yield Span(start, stop, kind)
