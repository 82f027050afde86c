"""A certificate authority for tests, and certificates that it signed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import trustme


@dataclass(frozen=True)
class Certificates:
    """PEM files of an authority and of a server: the authority's certificate, the server's certificate and its key."""

    authority: Path
    certificate: Path
    key: Path


def make_certificates(directory: Path, *names: str) -> Certificates:
    """Create an authority in `directory`, and the certificate of a server for `names` (host names or addresses)."""
    made = Certificates(directory / "ca.pem", directory / "server.pem", directory / "server.key")
    authority = trustme.CA()
    server = authority.issue_cert(*names)
    authority.cert_pem.write_to_path(str(made.authority))
    for n, blob in enumerate(server.cert_chain_pems):
        blob.write_to_path(str(made.certificate), append=n > 0)
    server.private_key_pem.write_to_path(str(made.key))
    return made
