"""The attacker is without a token: it reaches the ports, and has nothing else."""

import pytest

pytestmark = pytest.mark.connected
