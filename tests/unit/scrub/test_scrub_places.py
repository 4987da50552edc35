"""Places that hold nothing but a secret, with values of several shapes; beside each kind of them what stays."""

from __future__ import annotations

import pytest

from composer_replication.privacy import Scrubber

# Words with a number, small words in a row, letters without a number: none is a password by its looks.
VALUES = ("tangerine42", "plum-kettle-heron", "kSvAXgzbktMGcsRt")
PLACES = """
sql.Open("mysql", "shop:@@@tcp(10.0.0.2:3306)/shop")
dsn := "app:@@@unix(/run/mysqld.sock)/app"
mira : EAP "@@"
%any 10.0.0.1 : PSK @@
# /etc/ppp/chap-secrets\\n"isp" * "@@" *
127.0.0.1:6379> ACL SETUSER worker on >@@ ~* +@all
rocommunity @@ 10.0.0.0/8
createUser monitor SHA "@@" AES "otherone77x"
username ada privilege 15 password 0 @@
tacacs-server key @@
option key '@@'
uci set wireless.radio0.key='@@'
    Key Content            : @@
WIFI:S:home;T:WPA;P:@@;;
Authorization: Basic erp @@
define( 'DB_PASSWORD', '@@' );
{"type": "random_password", "result": "@@"}
["mysql", "-uroot", "-p@@"]
+ mysql -h db -u shop '-p@@' -e 'select 1'
ada:{PLAIN}@@:::
Content-Disposition: form-data; name="password"\\n\\n@@
<p>Password: <code>@@</code></p>
rootpw --plaintext @@
AT+CWJAP="home","@@"
Password for the [elastic] user successfully reset.\\nNew value: @@
sed -i "s/__PASSWORD__/@@/" app.ini
jq --arg pw @@ '.password=$pw' x.json
schtasks /create /ru ada /rp @@ /tn x
host=db user=app password=@@ dbname=app
$ cat .vault_pass\\n@@
$ cat /run/secrets/db\\n@@\\n$ ls
$ op read op://Prod/db/password\\n@@
expect "assword:"\\nsend "@@\\\\r"
driver.find_element(By.ID, "password").send_keys("@@")
User.withUsername("ops").password("{noop}@@")
{default_pass, <<"@@">>}
stats auth admin:@@
password: [-@@-]{+otherone77x+}
new NetworkCredential("svc", "@@", "CORP");
new mysqli('localhost', 'shop', '@@', 'shop');
DriverManager.getConnection("jdbc:x", "app", "@@");
.basic_auth("deploy", Some("@@"))
WiFi.begin("home", "@@");
generate_password_hash("@@")
ldap_bind($ds, "cn=admin,dc=corp", "@@");
sshpass -p@@ ssh host
rabbitmqctl add_user ada @@
[database]\\nuser = app\\npassword = @@
HOST        USER    PASSWORD            ROLE\\n10.0.0.1    ada     @@   admin
| Service | User | Password |\\n|---|---|---|\\n| NAS | ada | @@ |
{:user "app" :password "@@"}
admin's password? it's @@ on all machines
I've set the password for `reporting` to `@@`. Done.
creds for the NAS: ada / @@
qa@corp.dev / @@
密码是@@
A senha do banco é @@, certo
"""
STAYS = """
sql.Open("mysql", os.Getenv("DSN"))
// dsn format: user:password@tcp(host:3306)/dbname
user default on nopass ~* +@all
interface Gi0/1\\n description uplink to core
new mysqli($host, $user, $pass, $db);
WiFi.begin(ssid, password);
generate_password_hash(form.password.data)
bcrypt.hash('Secret Message!', 10)
conn = connect(host=host, user=user, password=password)
sed -i "s/__PASSWORD__/$DB_PASSWORD/" app.ini
$ cat passwords.md\\n# How to choose a password
$ cat token.py\\nimport os
kubectl create secret generic db --from-literal=password="$PW"
[auth]\\npassword_min_length = 12
[database]\\npassword = ${DB_PASSWORD}
| Field | Type |\\n|---|---|\\n| password | string |
 user | password\\n------+----------\\n ada  | ********
Is the password correct? It's possible that it expired.
What's the password? It should be in 1Password.
The admin / user split is in roles.py.
PIN 13 is the LED, PIN 2 the button
exit code: 137, zip code: 90210
Wifi is slow, the key issue is roaming
La contraseña es obligatoria y debe tener 12 caracteres.
Salasana on pakollinen ja vähintään kaksitoista merkkiä.
self.password = password\\nself.scopes = scopes
const password = req.body.password;
LoadCredential=db_password:/etc/credstore/db_password
SecretKeyFactory.getInstance("PBKDF2WithHmacSHA256")
      - uses: docker/login-action@2929a6f181ded71e26dbb996c66e04135dccf44a # v3.3.0
x-amz-id-2: Pb9WHhKZRMovoPBgFGHobPTPgd+iAvgRoYewp2HzuqzgGBqmDr3Q4UMrR2oyz4aQpeK6MP3hbbSj
gpg:                using EDDSA key 9C95183C43CD2EEC527F8894A93BC25DFA85B710
Deployed Token to 0xf8e9bd06056630f25e351a8b9549c65555919f38
First pass: 12 warnings; second pass: 0.\\nproxy_pass http://127.0.0.1:9001;
"""


def lines(table: str) -> list[str]:
    return [line.replace("\\n", "\n") for line in table.strip().splitlines()]


@pytest.mark.parametrize("place", lines(PLACES))
def test_whatever_stands_there_goes(place):
    for value in VALUES:
        scrubbed = Scrubber().scope().text(place.replace("@@", value, 1))
        assert value not in scrubbed
        assert Scrubber().scope().text(scrubbed) == scrubbed


@pytest.mark.parametrize("text", lines(STAYS))
def test_what_is_no_secret_stays(text):
    assert Scrubber().scope().text(text) == text
