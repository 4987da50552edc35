"""Cloud credentials, private keys and databases: secrets with a shape or a file of their own."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from urllib.parse import quote

from data.planted_secrets_types import Maker, Planted, Row, body_lines, from_rows, pem, placed

SECRET_NAME = "aws_secret_access_" + "key"

AWS_ROWS: tuple[Row, ...] = (
    ("aws_secret_access_key", "tool_result", f"[default]\nregion = eu-north-1\n{SECRET_NAME} = {{s}}\n", "b64:40"),
    ("aws_secret_access_key", "env_dump", f"{SECRET_NAME.upper()}={{s}}", "b64:40"),
    ("aws_secret_access_key", "bash", f"aws configure set {SECRET_NAME} {{s}} --profile ci", "b64:40"),
    ("aws_secret_access_key", "write", 'boto3.client("s3", aws_secret_access_key="{s}")\n', "b64:40"),
    ("aws_secret_access_key", "user_text", "the id is in 1Password, the other half is {s}", "b64:40"),
    ("aws_secret_access_key", "tool_result", '{"AccessKey": {"Status": "Active", "SecretAccessKey": "{s}"}}', "b64:40"),
    ("aws_session_token", "env_dump", "AWS_SESSION_TOKEN={s}", "b64:344"),
    ("aws_session_token", "tool_result", '{"Credentials": {"SessionToken": "{s}", "Expiration": "2026-"}}', "b64:300"),
    ("aws_presigned_url", "assistant_text", "Link: https://b.s3.amazonaws.com/a.zip?X-Amz-Signature={s}", "hex:64"),
    ("aws_presigned_url", "bash", "curl -o a.zip 'https://b.s3.amazonaws.com/a?X-Amz-Signature={s}&x=1'", "hex:64"),
    ("twilio_auth_token", "env_dump", "TWILIO_AUTH_TOKEN={s}", "hex:32"),
    ("twilio_auth_token", "write", 'twilio:\n  account: main\n  auth_token: "{s}"\n', "hex:32"),
    ("twilio_auth_token", "user_text", "Twilio authToken: {s}", "hex:32"),
)

TERRAFORM_ROWS: tuple[Row, ...] = (
    ("terraform_tfvars", "write", 'region      = "eu-north-1"\ndb_password = "{s}"\n', "password"),
    ("terraform_tfvars", "tool_result", '# terraform.tfvars\nadmin_secret = "{s}"\ncount = 3\n', "phrase"),
    ("terraform_tfvars", "bash", "terraform apply -var 'db_password={s}' -auto-approve", "password"),
    ("terraform_tfvars", "env_dump", "TF_VAR_master_password={s}", "password"),
    ("terraform_tfvars", "tool_result", '  + environment = {\n      + "API_TOKEN" = "{s}"\n    }\n', "alnum:28"),
)

DATABASE_ROWS: tuple[Row, ...] = (
    ("postgres_url", "env_dump", "DATABASE_URL=postgres://shop:{s}@db.internal.test:5432/shop", "password"),
    ("postgres_url", "bash", "psql 'postgresql://shop:{s}@10.2.0.7/shop?sslmode=require' -c 'select 1'", "phrase"),
    ("postgres_url", "tool_result", "OperationalError: postgresql+asyncpg://ada:{s}@db/shop refused", "alnum:16"),
    ("postgres_url", "tool_result", "dsn: host=db.internal.test user=shop password={s} dbname=shop", "phrase"),
    ("mysql_url", "write", 'engine = create_engine("mysql+pymysql://root:{s}@db.internal.test/shop")\n', "password"),
    ("mysql_url", "user_text", "prod is mysql://root:{s}@db.internal.test:3306/shop", "alnum:12"),
    ("mysql_url", "tool_result", "jdbc:mysql://db.internal.test:3306/shop?user=root&password={s}", "alnum:14"),
    ("mongodb_url", "env_dump", "MONGO_URI=mongodb+srv://shop:{s}@cluster0.ab1cd.mongodb.net/?w=majority", "alnum:16"),
    (
        "mongodb_url",
        "thinking",
        "They connect with mongodb://shop:{s}@m0,m1,m2/shop?replicaSet=rs0 so it is a set.",
        "phrase",
    ),
    ("mongodb_url", "write", 'const uri = "mongodb+srv://ada:{s}@c0.ab1cd.mongodb.net/shop";\n', "alnum:20"),
    ("redis_url", "env_dump", "CELERY_BROKER_URL=redis://:{s}@cache.internal.test:6379/0", "alnum:24"),
    ("redis_url", "tool_result", "redis.exceptions.ConnectionError: rediss://default:{s}@cache:6380", "phrase"),
    ("redis_url", "bash", "redis-cli -u redis://default:{s}@cache.internal.test:6379 ping", "hex:32"),
    ("amqp_url", "env_dump", "RABBIT=amqps://shop:{s}@queue.internal.test/vhost", "alnum:32"),
    ("amqp_url", "assistant_text", "Use `amqp://shop:{s}@queue.internal.test:5672//` as the broker.", "phrase"),
    ("mssql_url", "tool_result", '"Server=tcp:db.internal.test,1433;User ID=sa;Password={s};Encrypt=true"', "password"),
    ("mssql_url", "path", "sqlserver://sa:{s}@db.internal.test:1433/shop", "alnum:18"),
)


def cloud_cases(maker: Maker) -> Iterator[Planted]:
    yield from from_rows(maker, AWS_ROWS + TERRAFORM_ROWS + DATABASE_ROWS)
    yield from _gcp(maker)
    yield from _azure(maker)
    yield from _pem_blocks(maker)
    yield from _kubeconfigs(maker)


def _gcp(maker: Maker) -> Iterator[Planted]:
    for place, indent in (("tool_result", 2), ("write", 2), ("env_dump", None)):
        lines = body_lines(maker, 5)
        account = {
            "type": "service_account",
            "project_id": "shop-prod",
            "private_key": pem("PRIVATE " + "KEY", lines),
            "client_email": "ci@shop-prod.iam.gserviceaccount.com",
        }
        text = json.dumps(account, indent=indent)
        text = f"GOOGLE_CREDENTIALS={text}" if place == "env_dump" else text
        yield Planted("gcp_service_account", lines, *placed(text, place))
    for place, template in (
        ("user_text", "my refresh token is {s}, it does not expire"),
        ("tool_result", '{"client_id": "77-a.apps.googleusercontent.com", "refresh_token": "{s}"}'),
        ("bash", "curl -d grant_type=refresh_token -d refresh_token={s} https://oauth2.googleapis.com/token"),
    ):
        secret = "1//0" + maker.url(99)
        text = template.replace("{s}", secret)
        yield Planted("google_refresh_token", (secret,), *placed(text, place), prefix="1//0")


def _azure(maker: Maker) -> Iterator[Planted]:
    text = "DefaultEndpointsProtocol=https;AccountName=shop;AccountKey={s};EndpointSuffix=core.windows.net"
    for place in ("env_dump", "tool_result", "bash", "user_text"):
        secret = maker.b64(86) + "=="
        shown = text.replace("{s}", secret)
        shown = {"env_dump": f"AZURE_STORAGE={shown}", "bash": f"az storage ls --connection-string '{shown}'"}.get(
            place, shown
        )
        yield Planted("azure_storage", (secret,), *placed(shown, place))
    for place, where in (("tool_result", "azcopy copy a '{s}'"), ("thinking", "{s} expired?"), ("bash", "wget '{s}'")):
        plain = maker.b64(21) + "+/" + maker.b64(20) + "="
        signature = quote(plain, safe="")
        url = f"https://shop.blob.core.windows.net/a?sv=2024-11-04&se=2026-12-01&sr=c&sp=rl&sig={signature}"
        yield Planted("azure_sas", (signature,), *placed(where.replace("{s}", url), place), decoded=(plain,))
    for place, where in (("env_dump", "ARM_CLIENT_SECRET={s}"), ("user_text", "app secret: {s}"), ("path", "/run/{s}")):
        secret = f"{maker.alnum(3)}8Q~{maker.url(34)}"
        yield Planted("azure_client_secret", (secret,), *placed(where.replace("{s}", secret), place))


PEM_PLACES = (
    ("RSA PRIVATE", "tool_result", "$ cat ~/.ssh/id_rsa\n{s}$ "),
    ("RSA PRIVATE", "write", "{s}"),
    ("EC PRIVATE", "user_text", "use this for signing\n{s}thanks"),
    ("OPENSSH PRIVATE", "tool_result", "$ cat ~/.ssh/id_ed25519\n{s}"),
    ("OPENSSH PRIVATE", "bash", "cat > ~/.ssh/deploy <<'EOF'\n{s}EOF\nchmod 600 ~/.ssh/deploy"),
    ("PRIVATE", "assistant_text", "The file `tls.key` holds\n\n```\n{s}```\n\nwhich belongs in the vault."),
    ("ENCRYPTED PRIVATE", "thinking", "It is PKCS#8:\n{s}so openssl needs -passin."),
)


def _pem_blocks(maker: Maker) -> Iterator[Planted]:
    for label, place, template in PEM_PLACES:
        lines = body_lines(maker, 5)
        block = pem(label + " KEY", lines)
        yield Planted("pem_block", lines, *placed(template.replace("{s}", block), place))
    for label, place, template in (
        ("RSA PRIVATE", "env_dump", 'JWT_SIGNER="{s}"'),
        ("EC PRIVATE", "tool_result", 'APP_SIGNER="{s}" # one line'),
        ("PRIVATE", "write", 'signer = "{s}"\n'),
        ("OPENSSH PRIVATE", "user_text", "in CI it is set to {s} and ssh says invalid format"),
    ):
        lines = body_lines(maker, 4)
        block = pem(label + " KEY", lines, newline="\\n")
        yield Planted("pem_one_line", lines, *placed(template.replace("{s}", block), place))
    yield from _pem_in_tool_output(maker)


def _pem_in_tool_output(maker: Maker) -> Iterator[Planted]:
    """A block as tools print it: numbered lines, an added file in a diff, an end that was cut off."""
    lines = body_lines(maker, 5)
    block = pem("RSA PRIVATE" + " KEY", lines).splitlines()
    text = "\n".join(f"{number:>6}\u2192{line}" for number, line in enumerate(block, start=1))
    yield Planted("pem_block", lines, text, "tool_result")
    lines = body_lines(maker, 5)
    text = "+++ b/deploy.pem\n@@ -0,0 +1,7 @@\n+" + pem("DSA PRIVATE" + " KEY", lines, newline="\n+")
    yield Planted("pem_block", lines, text, "tool_result")
    lines = body_lines(maker, 6)
    cut = pem("RSA PRIVATE" + " KEY", lines[:-1]).split("-----END")[0] + "... [output truncated]"
    yield Planted("pem_truncated", lines[:-1], cut, "tool_result")


def _kubeconfigs(maker: Maker) -> Iterator[Planted]:
    for place in ("tool_result", "write"):
        lines = body_lines(maker, 4)
        data = base64.b64encode(pem("EC PRIVATE" + " KEY", lines).encode()).decode()
        text = f"apiVersion: v1\nkind: Config\nusers:\n- name: ada\n  user:\n    client-key-data: {data}\n"
        yield Planted("kubeconfig", (data,), *placed(text, place), decoded=lines)
    rows: tuple[Row, ...] = (
        ("kubeconfig", "tool_result", "users:\n- name: ci\n  user:\n    token: {s}\n", "alnum:48"),
        ("kubeconfig", "tool_result", "users:\n- name: ada\n  user:\n    username: ada\n    password: {s}\n", "phrase"),
        ("kubeconfig", "bash", "kubectl config set-credentials ci --token={s}", "lower:40"),
        ("kubeconfig", "bash", "kubectl create secret generic db --from-literal=password={s}", "password"),
    )
    yield from from_rows(maker, rows)
