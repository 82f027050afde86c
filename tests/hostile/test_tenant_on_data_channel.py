"""The attacker is a tenant whose session is open, on its data channel."""

import pytest

pytestmark = pytest.mark.connected
