"""A client on a system without Unix's names, as far as Linux can show it: the names are removed, then the client is imported.

Run: python without_unix.py TCP_ENDPOINT TOKEN
The modules of the client are the lines of standard input. The standard library and other people's packages choose by
`sys.platform`, so they are imported before the names go. What the script prints is one line of JSON.
"""

import importlib
import json
import os
import select
import signal
import socket
import sys

#: Modules of Unix's standard library, and names of others, that Python for Windows does not have.
MODULES = ("fcntl", "grp", "pty", "pwd", "readline", "resource", "syslog", "termios", "tty")
NAMES = {
    os: (
        *("fork", "forkpty", "register_at_fork", "getuid", "geteuid", "getgid", "getegid", "getpgid", "setsid", "killpg"),
        *("chown", "fchmod", "fchown", "lchown", "mkfifo", "wait", "waitid", "wait3", "wait4", "WNOHANG", "uname", "sysconf"),
        *("sched_getaffinity", "statvfs", "memfd_create", "pidfd_open", "getloadavg", "nice", "sendfile", "O_NOFOLLOW"),
        *("O_DIRECTORY", "O_CLOEXEC", "O_NONBLOCK", "pread", "pwrite", "preadv", "pwritev", "posix_spawn"),
    ),
    signal: (
        *("SIGKILL", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGCHLD", "SIGSTOP", "SIGCONT", "SIGPIPE", "SIGALRM", "SIGQUIT"),
        *("SIGWINCH", "SIGTSTP", "pthread_kill", "pthread_sigmask", "alarm", "setitimer", "sigwait", "siginterrupt"),
    ),
    socket: ("AF_UNIX", "send_fds", "recv_fds", "SCM_RIGHTS", "SO_REUSEPORT", "MSG_DONTWAIT", "MSG_NOSIGNAL"),
    socket.socket: ("sendmsg", "recvmsg", "recvmsg_into"),
    select: ("poll", "POLLIN", "POLLRDHUP", "epoll"),
}  # fmt: skip


def remove_names():
    """Remove the names. `socket.socket` inherits its methods from a class in C, so they raise instead of being absent."""
    for name in MODULES:
        sys.modules[name] = None
    for owner, names in NAMES.items():
        for name in names:
            if name in vars(owner):
                delattr(owner, name)

    missing = NAMES[socket.socket]

    class Socket(socket.socket):
        def __getattribute__(self, name):
            if name in missing:
                raise AttributeError(name)
            return super().__getattribute__(name)

    socket.socket = socket.SocketType = Socket


def main():
    # What other packages need of Unix is their matter.
    import asyncio  # noqa: F401
    import concurrent.futures.process  # noqa: F401
    import multiprocessing.util  # noqa: F401
    import subprocess  # noqa: F401
    import tempfile  # noqa: F401

    import torch
    import torch._dynamo
    import torch._inductor.codecache  # asks for the user's name when it is imported

    for name in (
        "nats",
        "opentelemetry.sdk.trace",
        "psutil",
        "pydantic_settings",
        "rich.live",
        "safetensors.torch",
        "typer",
    ):
        importlib.import_module(name)
    remove_names()
    modules = [importlib.import_module(name) for name in sys.stdin.read().split()]

    from wooly import api

    endpoint, token = sys.argv[1:]
    refused = ""
    try:
        api.attach(["unix:///nowhere"], "standalone", token)
    except api.NotConnectedError as e:
        refused = str(e)
    api.attach([endpoint], "standalone", token)
    api.install_facade()
    x = torch.arange(6.0).reshape(2, 3).to("cuda").requires_grad_()
    y = torch.compile(lambda a: (a @ a.T).sum())(x)
    y.backward()
    # more than a socket's buffer takes at once, in both directions
    large = torch.arange(4_000_000, dtype=torch.int32)
    same = bool((large.to("cuda").cpu() == large).all())
    api.session_stats()
    links = api._attached.links
    links[0].check_open()
    print(
        json.dumps({"modules": len(modules), "refused": refused, "y": y.item(), "grad": x.grad.tolist(), "same": same})
    )
    api.disable()


if __name__ == "__main__":
    main()
