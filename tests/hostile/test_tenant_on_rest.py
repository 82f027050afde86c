"""The attacker is a tenant with its own API token, on REST."""

import pytest

pytestmark = pytest.mark.connected
