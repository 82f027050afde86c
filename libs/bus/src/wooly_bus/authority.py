"""Makes the keys of an installation: NATS's operator and account, its configuration, credentials of services and administrators.

`python -m wooly_bus.authority FOLDER` makes them, once; the local stack does so in its own folder. Only `signing.seed` and
`channel.seed` are needed afterwards, by routers. `operator.seed` and `account.seed` can be kept elsewhere: they sign another
`signing.seed` should this one be lost.
"""

from __future__ import annotations

import os
import secrets
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wooly_bus.credentials import HEADER, Credentials, Issuer
from wooly_bus.errors import BusError
from wooly_bus.keys import Key

_NO_LIMIT = -1
_LIMITS = ("subs", "data", "payload", "imports", "exports", "conn", "leaf")
_STORAGE = ("mem_storage", "disk_storage", "streams", "consumer")


@dataclass(frozen=True, slots=True)
class Authority:
    """The files of an installation's keys; only their owner may read them.

    Attributes:
        folder: where they are.
    """

    folder: Path

    @property
    def server_conf(self) -> Path:
        """What nats-server must include."""
        return self.folder / "nats.conf"

    @property
    def signing_seed(self) -> Path:
        """With which routers make credentials."""
        return self.folder / "signing.seed"

    @property
    def channel_seed(self) -> Path:
        """With which routers sign the tokens of data channels."""
        return self.folder / "channel.seed"

    @property
    def channel_public_file(self) -> Path:
        """By which executors verify them, for who sets variables from files."""
        return self.folder / "channel.public"

    @property
    def channel_public(self) -> str:
        """By which executors verify them."""
        return Key.read(self.channel_seed.read_text(), "cluster").public

    @property
    def service_creds(self) -> Path:
        """What services show NATS."""
        return self.folder / "service.creds"

    @property
    def admin_creds(self) -> Path:
        """What administrators show NATS."""
        return self.folder / "admin.creds"

    def issuer(self) -> Issuer:
        """What makes further credentials."""
        return read_issuer(self.signing_seed, self.service_creds)


def read_issuer(signing_seed: Path, creds: Path) -> Issuer:
    """What makes credentials for the account that a service's credentials are of.

    Raises:
        KeyFormatError: the file has no such key.
        CredentialsError: there are no credentials.
        OSError: the key's file cannot be read.
    """
    return Issuer(Key.read(signing_seed.read_text(), "account"), Credentials.load(creds).account)


def make_authority(folder: Path) -> Authority:
    """The keys in a folder, made if there are none.

    Raises:
        OSError: it cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    folder.chmod(0o700)
    authority = Authority(folder)
    if authority.server_conf.exists():  # written last
        return authority
    operator, system, account, signing = (Key.new(k) for k in ("operator", "account", "account", "account"))
    channel = Key.new("cluster")
    issuer = Issuer(signing, account.public)
    accounts = {
        system.public: _account("SYS", system, operator, (), storage=False),
        account.public: _account("WOOLY", account, operator, (signing.public,), storage=True),
    }
    whole = {"type": "operator", "version": 2, "system_account": system.public}
    for path, text in (
        (folder / "operator.seed", operator.seed),
        (folder / "account.seed", account.seed),
        (authority.signing_seed, signing.seed),
        (authority.channel_seed, channel.seed),
        (authority.channel_public_file, channel.public),
        (authority.service_creds, issuer.service().text()),
        (authority.admin_creds, issuer.administrator().text()),
        (authority.server_conf, _configuration(_signed("wooly", operator, operator, whole), system.public, accounts)),
    ):
        _write(path, text)
    return authority


def _write(path: Path, text: str) -> None:
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        os.fchmod(file.fileno(), 0o600)
        file.write(text)


def _signed(name: str, subject: Key, by: Key, body: Mapping[str, Any]) -> str:
    claims = {
        "jti": secrets.token_hex(16),
        "iat": int(time.time()),
        "iss": by.public,
        "name": name,
        "sub": subject.public,
        "nats": dict(body),
    }
    return by.claim(claims, HEADER)


def _account(name: str, key: Key, operator: Key, signing: tuple[str, ...], *, storage: bool) -> str:
    limits: dict[str, Any] = dict.fromkeys(_LIMITS, _NO_LIMIT) | {"wildcards": True}
    if storage:
        limits |= dict.fromkeys(_STORAGE, _NO_LIMIT)
    body: dict[str, Any] = {"limits": limits, "default_permissions": {"pub": {}, "sub": {}}}
    if signing:
        body["signing_keys"] = list(signing)
    return _signed(name, key, operator, body | {"type": "account", "version": 2})


def _configuration(operator: str, system: str, accounts: Mapping[str, str]) -> str:
    preload = "\n".join([f"  {public}: {jwt}" for public, jwt in accounts.items()])
    return f"operator: {operator}\nsystem_account: {system}\nresolver: MEMORY\nresolver_preload: {{\n{preload}\n}}\n"


def main() -> int:
    """`python -m wooly_bus.authority FOLDER`."""
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        print("usage: python -m wooly_bus.authority FOLDER", file=sys.stderr)
        return 2
    try:
        authority = make_authority(Path(sys.argv[1]))
        public = authority.channel_public
    except (OSError, BusError) as e:
        print(f"no keys could be made: {e}", file=sys.stderr)
        return 1
    print(f'nats-server:  include "{authority.server_conf}"')
    print(f"services:     WOOLY_NATS_CREDS={authority.service_creds}")
    print(
        f"routers:      WOOLY_ROUTER_SIGNING_KEY={authority.signing_seed} WOOLY_ROUTER_CHANNEL_KEY={authority.channel_seed}"
    )
    print(f"executors:    WOOLY_EXECUTOR_CHANNEL_KEY={public}")
    print(f"administrator: WOOLYAI_NATS_CREDS={authority.admin_creds}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
