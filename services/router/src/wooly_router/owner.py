"""The owner of a local stack: the token in the owner's file, codes for the login of a browser, and browsers that are logged in.

Only the owner's user can read the file. So a caller that shows the token is the owner: an administrator, whose tasks belong to
the tenant `default`. Codes and browser secrets exist only in the memory of this process, as hashes, and end with the process.
"""

from __future__ import annotations

import secrets
from collections import OrderedDict
from collections.abc import Callable

from wooly_router.state.tenants import SECRET_PREFIX, hash_of

#: Seconds for which a printed code is valid: long enough to click it, too short to find it later in a terminal's history.
CODE_S = 300.0
#: Seconds for which a browser stays logged in: a working day. The token itself is never stored in a cookie.
BROWSER_S = 12 * 3600.0
#: Maximum number of valid codes, and of logged-in browsers. Beyond it, the oldest ends.
MAX_SECRETS = 32


class _Tickets:
    """Hashes of secrets. Each secret is valid until its time."""

    def __init__(self, lasts_s: float, clock: Callable[[], float]) -> None:
        self._lasts_s, self._clock = lasts_s, clock
        self._until: OrderedDict[str, float] = OrderedDict()

    def make(self) -> str:
        secret = SECRET_PREFIX + secrets.token_urlsafe(32)
        self._until[hash_of(secret)] = self._clock() + self._lasts_s
        while len(self._until) > MAX_SECRETS:
            self._until.popitem(last=False)
        return secret

    def valid(self, secret_hash: str) -> bool:
        return self._clock() < self._until.get(secret_hash, 0.0)

    def end(self, secret_hash: str) -> None:
        self._until.pop(secret_hash, None)


class Owner:
    """The user who started this router.

    Args:
        token: the secret in the owner's file.
        clock: returns seconds since the epoch.
    """

    def __init__(self, token: str, clock: Callable[[], float]) -> None:
        self._token_hash = hash_of(token)
        self._codes, self._browsers = _Tickets(CODE_S, clock), _Tickets(BROWSER_S, clock)

    def knows(self, secret_hash: str) -> bool:
        """Tell whether this hash belongs to the owner's token or to a logged-in browser. A code does not count."""
        return secret_hash == self._token_hash or self._browsers.valid(secret_hash)

    def code(self) -> str:
        """Make a code for one login."""
        return self._codes.make()

    def log_in(self, shown: str) -> str | None:
        """Return a new browser secret for a code or the token; None if `shown` is neither. A code is used up."""
        shown_hash = hash_of(shown)
        if self._codes.valid(shown_hash):
            self._codes.end(shown_hash)
        elif shown_hash != self._token_hash:
            return None
        return self._browsers.make()

    def log_out(self, secret: str) -> None:
        """Make a browser's secret invalid."""
        self._browsers.end(hash_of(secret))
