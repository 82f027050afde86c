"""`torch.cuda._sleep`: work that only takes time."""

from __future__ import annotations

from wooly_wis.limits import MAX_SLEEP_NS
from wooly_wis.program import Form

from wooly.devices import Devices
from wooly.origins import origin

#: Maximum time of one call, in ns.
LONGEST_NS = 60_000_000_000


def sleep(devices: Devices, cycles: int) -> None:
    """Occupy the current device for `cycles` nanoseconds: a device counts as one of 1 GHz. The call does not wait.

    The time is split into instructions, so that other sessions of a higher class need not wait for all of it. The session is
    billed for the time.

    Raises:
        ValueError: it is more than a minute.
    """
    left = int(cycles)
    if left > LONGEST_NS:
        raise ValueError(
            f"torch.cuda._sleep({cycles}): at most {LONGEST_NS} cycles (one minute) are possible on a shared device"
        )
    recorder = devices.recorders[devices.current]
    with recorder.lock:
        where = origin()
        while left > 0:
            form = recorder.forms.intern(Form("sleep", (), (), (("ns", min(left, MAX_SLEEP_NS)),)))
            recorder.operations += 1
            recorder.emit(form, [], where)
            if len(recorder.origins) >= recorder.room:
                recorder.close_if_due(form)
            left -= MAX_SLEEP_NS
        recorder.flush()  # the device begins now
