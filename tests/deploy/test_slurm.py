"""Slurm's prolog translates a reservation into settings."""

import subprocess
from pathlib import Path

import pytest

PROLOG = Path(__file__).parents[2] / "deploy" / "slurm" / "wooly-prolog.sh"
GIB = 1 << 30


def exported(tmp_path, config="", **environment):
    """The variables that the prolog would set, and its output."""
    path = tmp_path / "slurm.conf"
    path.write_text(config)
    env = {"PATH": "/usr/bin:/bin", "WOOLY_SLURM_CONFIG": str(path), **environment}
    ran = subprocess.run(["sh", str(PROLOG)], env=env, capture_output=True, text=True, check=True)
    lines = ran.stdout.splitlines()
    assert all(line.startswith(("export ", "print ")) for line in lines)
    variables = dict(line.removeprefix("export ").split("=", 1) for line in lines if line.startswith("export "))
    return variables, [line for line in lines if line.startswith("print ")]


@pytest.mark.parametrize(
    "gres",
    [
        "wooly_vram:8",
        "gres:wooly_vram:8",
        "gres/wooly_vram=8",
        "gpu:2,wooly_vram:8",
        "gres:wooly_vram:h100:8",
        "wooly_vram:8(IDX:)",
    ],
)
@pytest.mark.parametrize("variable", ["SLURM_JOB_GRES", "SLURM_STEP_GRES"])
def test_reservation_sets_required_vram(tmp_path, variable, gres):
    assert exported(tmp_path, **{variable: gres}) == ({"WOOLYAI_REQUIRED_VRAM": str(8 * GIB)}, [])


@pytest.mark.parametrize("gres", ["", "gpu:8", "other_wooly_vram:8", "wooly_vram_x:8"])
def test_job_without_reservation_is_unchanged(tmp_path, gres):
    assert exported(tmp_path, SLURM_JOB_GRES=gres) == ({}, [])


def test_job_with_smaller_request_keeps_it(tmp_path):
    less = exported(tmp_path, SLURM_JOB_GRES="wooly_vram:8", WOOLYAI_REQUIRED_VRAM="1000")
    assert less == ({"WOOLYAI_REQUIRED_VRAM": "1000"}, [])


@pytest.mark.parametrize(
    ("gres", "wanted", "word"),
    [
        ("wooly_vram:8", str(8 * GIB + 1), "more than"),
        ("wooly_vram:8", "8GiB", "no number"),
        ("wooly_vram:0", "", "nothing"),
    ],
)
def test_prolog_with_wrong_request_reports_error(tmp_path, gres, wanted, word):
    from pydantic import ValidationError
    from wooly.settings import Settings

    variables, said = exported(tmp_path, SLURM_JOB_GRES=gres, **({"WOOLYAI_REQUIRED_VRAM": wanted} if wanted else {}))
    assert word in said[0]
    with pytest.raises(ValidationError):
        Settings(required_vram=variables["WOOLYAI_REQUIRED_VRAM"])


def test_controller_address_of_job_overrides_cluster(tmp_path):
    config = "WOOLYAI_CONTROLLER_URL=nats://control:4222\nWOOLYAI_NODE_GROUPS=slurm\n"
    variables, _ = exported(tmp_path, config)
    assert variables == {"WOOLYAI_CONTROLLER_URL": "nats://control:4222", "WOOLYAI_NODE_GROUPS": "slurm"}
    variables, _ = exported(tmp_path, config, WOOLYAI_CONTROLLER_URL="nats://mine:4222")
    assert variables == {"WOOLYAI_NODE_GROUPS": "slurm"}
