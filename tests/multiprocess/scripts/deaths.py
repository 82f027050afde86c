"""Processes that die while they share a tensor, and sessions on different executors.

deaths.py sender | receiver  ADDRESS  sender-dies | receiver-dies | elsewhere
"""

import os
import signal
import sys
import time
from multiprocessing.connection import Client, Listener
from multiprocessing.reduction import ForkingPickler

import torch


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def sender(address, what):
    with Listener(address) as listener:
        way = listener.accept()
    t, late = torch.arange(4.0, device="cuda"), torch.ones(4, device="cuda")
    way.send(t)
    if what == "elsewhere":
        assert way.recv().startswith("HandleError")
        print(t.sum().item())
        return
    assert way.recv() == "received"
    t += 1
    way.send_bytes(ForkingPickler.dumps(late))
    if what == "sender-dies":
        die()
    assert not way.poll(None) or not way_is_open(way)
    for _ in range(3):  # what was shared goes on, and can be sent to others
        t *= 2
        ForkingPickler.dumps(t)
    print(t.tolist(), late.tolist())


def way_is_open(way):
    try:
        way.recv()
    except EOFError:
        return False
    return True


def receiver(address, what):
    way = connect(address)
    if what == "elsewhere":
        torch.ones(1, device="cuda").sum().item()
        try:
            way.recv()
        except Exception as e:
            print(e)
            way.send(f"{type(e).__name__}: {e}")
        return
    t = way.recv()
    way.send("received")
    raw = way.recv_bytes()
    if what == "receiver-dies":
        die()
    assert not way_is_open(way)
    while True:  # until the executor has noticed the death of the sender
        try:
            ForkingPickler.loads(raw)
        except RuntimeError as e:
            print(e)
            break
        time.sleep(0.01)
    print((t * 10).tolist())


def connect(address):
    while True:
        try:
            return Client(address)
        except (FileNotFoundError, ConnectionRefusedError):
            time.sleep(0.01)


if __name__ == "__main__":
    {"sender": sender, "receiver": receiver}[sys.argv[1]](*sys.argv[2:])
