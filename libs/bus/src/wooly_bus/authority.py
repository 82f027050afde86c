"""Makes the keys of an installation: operator and account of NATS, its configuration, credentials of services and administrators.

`python -m wooly_bus.authority FOLDER` makes them once; the local stack makes them in its own folder. Afterwards, routers need
`signing.seed` and `channel.seed`. Keep `operator.seed` and `account.seed` elsewhere: they sign a new `signing.seed` if it is
lost.
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
    """The key files of an installation. Only their owner may read them.

    Attributes:
        folder: folder of the files.
    """

    folder: Path

    @property
    def server_conf(self) -> Path:
        """Configuration that nats-server must include."""
        return self.folder / "nats.conf"

    @property
    def signing_seed(self) -> Path:
        """Seed of the key with which routers sign credentials."""
        return self.folder / "signing.seed"

    @property
    def channel_seed(self) -> Path:
        """Seed of the key with which routers sign the tokens of data channels."""
        return self.folder / "channel.seed"

    @property
    def channel_public_file(self) -> Path:
        """File with `channel_public`, for deployments that set variables from files."""
        return self.folder / "channel.public"

    @property
    def channel_public(self) -> str:
        """Public key with which executors verify the tokens of data channels."""
        return Key.read(self.channel_seed.read_text(), "cluster").public

    @property
    def checkpoint_key(self) -> Path:
        """Key with which executors encrypt checkpoints."""
        return self.folder / "checkpoint.key"

    @property
    def service_creds(self) -> Path:
        """Credentials of services for NATS."""
        return self.folder / "service.creds"

    @property
    def admin_creds(self) -> Path:
        """Credentials of administrators for NATS."""
        return self.folder / "admin.creds"

    def issuer(self) -> Issuer:
        """The issuer of further credentials."""
        return read_issuer(self.signing_seed, self.service_creds)


def read_issuer(signing_seed: Path, creds: Path) -> Issuer:
    """The issuer of credentials for the account of a service.

    Args:
        signing_seed: file with the seed of the signing key.
        creds: file with the credentials of the service.

    Raises:
        KeyFormatError: the file does not contain the seed of an account's key.
        CredentialsError: the credentials cannot be read.
        OSError: the file of the key cannot be read.
    """
    return Issuer(Key.read(signing_seed.read_text(), "account"), Credentials.load(creds).account)


def make_authority(folder: Path) -> Authority:
    """The keys in a folder. If the folder has no keys, make them.

    Raises:
        OSError: the folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    folder.chmod(0o700)
    authority = Authority(folder)
    if not authority.checkpoint_key.exists():  # installations of before do not have it
        _write(authority.checkpoint_key, secrets.token_hex(32))
    if authority.server_conf.exists():  # this file is written last
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
    """Run `python -m wooly_bus.authority FOLDER`. Returns the exit status."""
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        print("usage: python -m wooly_bus.authority FOLDER", file=sys.stderr)
        return 2
    try:
        authority = make_authority(Path(sys.argv[1]))
        public = authority.channel_public
    except (OSError, BusError) as e:
        print(f"cannot make keys in {sys.argv[1]}: {e}", file=sys.stderr)
        return 1
    print(f'nats-server:  include "{authority.server_conf}"')
    print(f"services:     WOOLY_NATS_CREDS={authority.service_creds}")
    print(
        f"routers:      WOOLY_ROUTER_SIGNING_KEY={authority.signing_seed} WOOLY_ROUTER_CHANNEL_KEY={authority.channel_seed}"
    )
    print(f"executors:    WOOLY_EXECUTOR_CHANNEL_KEY={public} WOOLY_EXECUTOR_CHECKPOINT_KEY={authority.checkpoint_key}")
    print(f"administrator: WOOLYAI_NATS_CREDS={authority.admin_creds}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
