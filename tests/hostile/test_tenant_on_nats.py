"""The attacker is a tenant with its own credentials, on NATS."""

import pytest

pytestmark = pytest.mark.connected
