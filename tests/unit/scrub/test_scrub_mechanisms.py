"""Secrets by mechanism: declarations, commands, documents, speech, encodings; and what only looks like them."""

from __future__ import annotations

import base64
import gzip
import json

import pytest
from scrub_examples import make

from composer_replication.privacy import Scrubber

SECRETS = ("Kestrel-41-" + "marble!", "otter$" + "53COPPER", "aB3dE5fG7h" + "I9kL", "Falcon.Tundra" + ".52")
DECLARATIONS = (
    'password: str = "{}"',
    'api_key: Optional[str] = "{}"',
    "const apiKey: string = '{}';",
    'let token: String = "{}".to_string();',
    'static API_KEY: &\'static str = "{}";',
    'pub const SMTP_PASS: &[u8] = b"{}";',
    'private val password: String? = "{}"',
    'let password: String! = "{}"',
    'char token[] = "{}";',
    'char *db_passwd = (char *)"{}";',
    'std::string password{{"{}"}};',
    'var token string = "{}"',
    'public string Password {{ get; set; }} = "{}";',
    'Const DB_PASSWORD As String = "{}"',
    "v_password VARCHAR2(30) := '{}';",
    'password: Annotated[str, Field(min_length=3)] = "{}"',
    'secret_key: SecretStr = SecretStr("{}")',
    'def connect(user: str, password: str = "{}") -> None:',
    'fun connect(host: String, password: String = "{}"): Conn {{',
    'Config {{ user: "app".into(), password: "{}".into() }}',
    'builder.with_password("{}").build()',
    'client.setPassword("{}");',
    'if (pwd.equals("{}")) {{',
    "jwt.sign(payload, '{}', {{ expiresIn: '1h' }})",
    'new NetworkCredential("ada", "{}")',
    "my $password = q({});",
    'password <- "{}"',
)
COMMANDS = (
    "curl -su ada:{} https://x.example.org",
    "curl -ksu ada:{} https://x.example.org",
    "mariadb -uroot -p{} shop",
    "sshpass -p '{}' ssh ada@host",
    "echo '{}' | passwd --stdin ada",
    "sudo -S <<< '{}' apt update",
    "zip -rP {} a.zip b",
    "ldapsearch -xw {} -D cn=admin",
    "ssh-keygen -t ed25519 -N '{}' -f k",
    "rabbitmqctl add_user app {}",
    "impdp system/{}@pdb1 full=y",
    "plink -ssh ada@h -pw {} ls",
    "REDISCLI_AUTH={}",
    "SSHPASS='{}' sshpass -e ssh ada@host",
    "requirepass {}",
    "masterauth {}",
    "jdbc:oracle:thin:app/{}@//db.example.org:1521/XE",
)
DOCUMENTS = (
    '<input type="password" name="p" value="{}">',
    "<input value=\"{}\" type='password' id=x>",
    "<key>AdminPassword</key>\n\t<string>{}</string>",
    '<wsse:Password Type="x">{}</wsse:Password>',
    '<property name="hibernate.connection.password">{}</property>',
    "apiVersion: v1\nkind: Secret\nstringData:\n  config: {}\n",
    '{{"value": "{}", "type": "password"}}',
    '{{"Name": "/prod/db/password", "Type": "SecureString", "Value": "{}"}}',
    'variable "db_password" {{\n  type    = string\n  default = "{}"\n}}',
    's:8:"password";s:12:"{}";',
)
SPEECH = (
    "use {} as the password",
    '"{}" is my password',
    "Das Passwort lautet {}",
    "nimm {} als Passwort",
    "Le mot de passe est {}",
    "usa {} como contraseña",
    "A palavra-passe é {}",
    "La password è {}",
    "gebruik {} als wachtwoord",
    "Lösenordet är {}",
    "Adgangskoden er {}",
    "Salasana on {}",
    "Hasło to {}",
    "Heslo je {}",
    "Jelszó: {}",
    "Parola este {}",
    "Şifre: {}",
    "пароль от базы {}",
    "κωδικός: {}",
    "הסיסמה היא {}",
    "كلمة المرور هي {}",
    "पासवर्ड {} है",
    "รหัสผ่านคือ {}",
    "Mật khẩu là {}",
    "Kata sandi: {}",
    "密码是{}",
    "用 {} 作为密码",
    "パスワードは{}です",
    "비밀번호는 {} 입니다",
)


@pytest.mark.parametrize("template", DECLARATIONS + COMMANDS + DOCUMENTS + SPEECH)
def test_every_form_is_found(template):
    texts = {template.format(secret): secret for secret in SECRETS}
    assert [text for text, secret in texts.items() if secret[:10] in Scrubber().scope().text(text)] == []


ENCODED = {
    "base32": base64.b32encode,
    "utf-16 in base64": lambda data: base64.b64encode(data.decode().encode("utf-16")),
    "big-endian utf-16 in base64": lambda data: base64.b64encode(data.decode().encode("utf-16-be")),
    "gzip in base64": lambda data: base64.b64encode(gzip.compress(data * 3, mtime=0)),
}


@pytest.mark.parametrize("name", ENCODED)
def test_an_encoded_secret_goes_as_a_whole(name):
    encoded = ENCODED[name](b"token=" + make("github classic").encode()).decode()
    clean = Scrubber().scope().text(f"payload {encoded}\n")
    assert [encoded[at : at + 16] for at in range(7, len(encoded) - 16) if encoded[at : at + 16] in clean] == []


@pytest.mark.parametrize(
    "record",
    [
        {"type": "password", "value": "{}"},
        {"ParameterKey": "DBPassword", "ParameterValue": "{}"},
        {"prompt": "[sudo] password for ada:", "stdin": "{}"},
        {"env": {"REDISCLI_AUTH": "{}"}},
    ],
    ids=lambda record: next(iter(record)),
)
def test_fields_beside_what_names_them(record):
    for secret in SECRETS:
        filled = json.loads(json.dumps(record).replace("{}", secret))
        assert secret not in repr(Scrubber().scope().value(filled))


HASH = "9631ac63045cfabddacc69fc06e919b4c13eb913"
STAYS = [
    f"$ git rev-parse HEAD\n{HASH}\n",
    f"{HASH}\n",
    f"  revision: {HASH}\n  ref: {HASH}\n",
    "pkg/a.py,sha256=47DEQpj8HBSa-_TImW-5JCeuQeRkm5NMpJWZG3hSuFU,1234\n",
    "github.com/chromedp/cdproto v0.0.0-20260804232424-e85f50dbfd32/go.mod "
    "h1:RwFsSODoIqkOTMlCGQRoM6d3bxLjZfnMbEFCcGQZcTU=",
    '    pg-connection-string: "npm:^2.14.0"\n',
    '  "password_confirmation.mismatching": "Zadaná hesla se neshodují",\n',
    "      reset_password: Restablecer contraseña\n    rules:\n",
    "        current_password: Ger-tremen a vremañ\n",
    "password: Optional[str] = None",
    "def login(user: str, password: str = DEFAULT_PASSWORD) -> None:",
    'password = getpass("Enter your password: ")',
    'token = os.environ["GITHUB_TOKEN"]',
    'api_key = settings.get("api_key")',
    '"golang.org/x/oauth2/clientcredentials"\n\t"golang.org/x/oauth2/jwt"',
    "--- PASS: TestWriteCommitted/detached_HEAD (0.01s)",
    "curl -u $USER:$PASS https://x.example.org",
    "mkdir -p build && docker run -p 8080:80 x",
]


@pytest.mark.parametrize("text", STAYS)
def test_what_is_common_and_no_secret_stays(text):
    assert Scrubber().scope().text(text) == text


def test_people_are_replaced_only_when_asked_for():
    text = (
        "Author: Ada Lovelace <ada@lovelace.dev>\ncall +49 170 1234567, says Ada Lovelace. git@github.com:x/y a@1.2.3"
    )
    assert Scrubber().scope().text(text) == text
    clean = Scrubber(people=True).scope().text(text)
    assert clean == "Author: USER_3 <USER_1>\ncall USER_2, says USER_3. git@github.com:x/y a@1.2.3"
