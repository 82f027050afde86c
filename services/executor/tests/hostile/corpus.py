"""The lawful calls with which both passes of `make hostile` begin. They are made once and kept in a folder."""

import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent


def collected(folder, quick):
    """Return the path of the lawful calls, and the operators' names.

    Makes the calls if they do not exist. `quick`: without the samples.
    """
    folder.mkdir(parents=True, exist_ok=True)
    corpus, names = folder / "lawful.pickle", folder / "operators.txt"
    if not corpus.exists():
        print("collecting lawful calls" + ("" if quick else " (minutes)"), flush=True)
        made = folder / "lawful.partial"
        done = subprocess.run(
            [sys.executable, str(HERE / "lawful.py"), str(made), *(["--quick"] if quick else [])],
            stdout=subprocess.PIPE,
            text=True,
        )
        if done.returncode:
            raise SystemExit(f"lawful.py ended with {done.returncode}")
        print(done.stdout.splitlines()[-1], flush=True)
        made.rename(corpus)
        names.unlink(missing_ok=True)
    if not names.exists():
        show = "import pickle, sys; print(*pickle.load(open(sys.argv[1], 'rb')), sep='\\n')"
        command = [sys.executable, "-c", show, str(corpus)]
        names.write_text(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, cwd=HERE).stdout)
    return corpus, names.read_text().split()
