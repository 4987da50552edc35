"""Programs: which of their options and words hold a secret, and how options are written.

One row a program. `-p` is a short option with a secret, written `-pX`, `-p X`, `-p=X` or last in a cluster (`-ksp
X`); `-p=` only takes what is written directly behind it; `--name` and `-name` are long options. A sign behind an
option means that a user stands before the secret, with that sign between them (`-u:`, `-U%`, `-u,`). `a+b` is a
program with its verb. `#2` is the second word that is no option, `/` a word of the form user/secret, `@` one with
user:secret@host, `=` every `name=secret`. A `!` wants a value that no word could be; a
`+` takes any that is written directly behind its option.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

_TABLE = r"""
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


class Program(NamedTuple):
    """One program, as its row says."""

    words: tuple[str, ...]  # `vault login` is known by both
    short: dict[str, str]  # letter: the sign between user and secret, and marks
    long: dict[str, str]
    places: dict[str, str]
    shapes: frozenset[str]
    called: re.Pattern[bytes]  # its name and a blank, in small letters
    worth: re.Pattern[str]  # one of its options, as a line has them


def _program(name: str, entries: Sequence[str]) -> Program:
    short: dict[str, str] = {}
    long: dict[str, str] = {}
    places: dict[str, str] = {}
    shapes: set[str] = set()
    for entry in entries:
        body = entry.rstrip("!=:%,+0123456789") if not entry.startswith("#") else entry[:2]
        marks = entry[len(body) :]
        if entry in ("/", "=!", "@"):
            shapes.add(entry[0])
        elif entry.startswith("#"):
            places[body[1:]] = marks
        elif entry.startswith("/"):
            long[entry] = "="
        elif re.fullmatch(r"-[A-Za-z]", body):
            short[body[1]] = marks
        else:
            long[body] = marks
    letters = "".join(map(re.escape, short))
    options = [rf"[\s\"']-[A-Za-z]{{0,8}}[{letters}]"] if letters else []
    worth = re.compile("|".join([*options, *map(re.escape, long)]) or "(?!)")
    first = re.escape(name.split("+")[0].rstrip("*").lower()).encode()
    called = re.compile(first + (rb"[^\0\s]{0,100}" if name.endswith("*") else rb"(?=[ \t\r\n]|\\+[\nn])"))
    return Program(tuple(name.split("+")), short, long, places, frozenset(shapes), called, worth)


def _programs() -> dict[bytes, list[Program]]:
    found: dict[bytes, list[Program]] = {}
    for row in _TABLE.strip().splitlines():
        parts = row.split()
        first = next(i for i, part in enumerate(parts) if not re.match(r"[A-Za-z0-9]", part))
        for name in parts[:first]:
            program = _program(name, parts[first:])
            letters = max(re.findall("[a-z]+", program.words[0].lower()), key=len)
            found.setdefault(letters.encode(), []).append(program)
    return found


PROGRAMS = _programs()
