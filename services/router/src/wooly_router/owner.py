"""The owner of a local stack: the token in their file, codes with which a browser logs in once, and the browsers that did.

Only the owner's user can read the file, so whoever shows the token is the owner: administrator of everything, with tasks of the
tenant `default`. A code and a browser's secret live in this process's memory and end with it; what is kept of each is a hash.
"""

from __future__ import annotations

import secrets
from collections import OrderedDict
from collections.abc import Callable

from wooly_router.state.tenants import SECRET_PREFIX, hash_of

#: Seconds for which a code that was printed lets a browser in: time enough to click it, too little to find it in a scroll-back.
CODE_S = 300.0
#: Seconds for which a browser stays logged in: a working day, and the token itself never lies in a cookie.
BROWSER_S = 12 * 3600.0
#: Codes, and browsers, that are valid at once; the oldest end first.
MOST = 32


class _Tickets:
    """Hashes of secrets, each valid until its time."""

    def __init__(self, lasts_s: float, clock: Callable[[], float]) -> None:
        self._lasts_s, self._clock = lasts_s, clock
        self._until: OrderedDict[str, float] = OrderedDict()

    def make(self) -> str:
        secret = SECRET_PREFIX + secrets.token_urlsafe(32)
        self._until[hash_of(secret)] = self._clock() + self._lasts_s
        while len(self._until) > MOST:
            self._until.popitem(last=False)
        return secret

    def valid(self, secret_hash: str) -> bool:
        return self._clock() < self._until.get(secret_hash, 0.0)

    def end(self, secret_hash: str) -> None:
        self._until.pop(secret_hash, None)


class Owner:
    """Who started this router for themselves.

    Args:
        token: the secret in the owner's file.
        clock: seconds since the epoch.
    """

    def __init__(self, token: str, clock: Callable[[], float]) -> None:
        self._token_hash = hash_of(token)
        self._codes, self._browsers = _Tickets(CODE_S, clock), _Tickets(BROWSER_S, clock)

    def knows(self, secret_hash: str) -> bool:
        """Whether a secret of this hash is the owner's: the token, or that of a browser which logged in. A code is not."""
        return secret_hash == self._token_hash or self._browsers.valid(secret_hash)

    def code(self) -> str:
        """A code for one login."""
        return self._codes.make()

    def log_in(self, shown: str) -> str | None:
        """A browser's secret for a code, which ends with that, or for the token; None if it is neither."""
        shown_hash = hash_of(shown)
        if self._codes.valid(shown_hash):
            self._codes.end(shown_hash)
        elif shown_hash != self._token_hash:
            return None
        return self._browsers.make()

    def log_out(self, secret: str) -> None:
        """End a browser's secret."""
        self._browsers.end(hash_of(secret))
