"""`python -m wooly_testkit.simulate {pairs,shares,cluster,device}`."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from wooly_dispatch.events import Config

from wooly_testkit.simulate import study
from wooly_testkit.simulate.policies import POLICIES
from wooly_testkit.simulate.workload import read_profiles, read_tenants, synthetic_profiles


def main(arguments: list[str] | None = None) -> int:
    """Run a study and print its rows."""
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument(
        "--profiles", type=Path, help="kernel sequences (JSON, schema profiles/1); default: synthetic models"
    )
    shared.add_argument("--seconds", type=float, default=10.0, help="virtual time of each device (10)")
    shared.add_argument("--policies", default="wooly", help=f"comma-separated list of {', '.join(POLICIES)}; or all")
    shared.add_argument("--seed", type=int, default=0, help="seed of arrivals, noise and mixes (0)")
    shared.add_argument(
        "--latency-us", type=int, default=20, help="time from a decision to the start on the device (20)"
    )
    shared.add_argument("--processes", type=int, default=1, help="number of processes (1)")
    shared.add_argument("--audit", action="store_true", help="check all invariants at every decision of the core")
    shared.add_argument("--json", action="store_true", help="print rows as JSON instead of a table")
    shared.add_argument("--plot", type=Path, help="also draw the rows to this file (SVG)")
    parser = argparse.ArgumentParser(prog="python -m wooly_testkit.simulate", description=__doc__)
    commands = parser.add_subparsers(dest="study", required=True)
    pairs = commands.add_parser(
        "pairs", parents=[shared], help="each model as P0 beside each model that saturates the device"
    )
    pairs.add_argument("--background", type=int, default=1, help="number of saturating tenants (1)")
    shares = commands.add_parser("shares", parents=[shared], help="each two models that saturate one device together")
    shares.add_argument("--weights", default="1:1", help="weights of the two tenants (1:1)")
    cluster = commands.add_parser("cluster", parents=[shared], help="many tenants of all classes on many devices")
    cluster.add_argument("--gpus", type=int, default=100)
    cluster.add_argument("--tenants", type=int, default=1000)
    cluster.add_argument("--load", type=int, default=700, help="requested device time in permille (700)")
    device = commands.add_parser("device", parents=[shared], help="given tenants on one device")
    device.add_argument("tenants", type=Path, help="a JSON list; see workload.read_tenants")
    given = parser.parse_args(arguments)

    policies = tuple(POLICIES) if given.policies == "all" else tuple(given.policies.split(","))
    unknown = [name for name in policies if name not in POLICIES]
    if unknown:
        parser.error(f"the policy {unknown[0]} does not exist; choose from {', '.join(POLICIES)}")
    config = Config(latency_ns=given.latency_us * 1000)
    options = study.Options(given.seconds, given.seed, given.processes, policies, given.audit, config)
    profiles = read_profiles(given.profiles) if given.profiles else synthetic_profiles(given.seed)
    labels: tuple[str, ...]
    if given.study == "pairs":
        rows = study.pairs(profiles, options, given.background)
        labels, value = ("front", "background"), "p99"
    elif given.study == "shares":
        first, _, second = given.weights.partition(":")
        rows = study.shares(profiles, options, (int(first), int(second)))
        labels, value = ("first", "second"), "share_error"
    elif given.study == "device":
        rows = study.device(read_tenants(given.tenants, profiles), options)
        labels, value = ("tenant",), "p99"
    else:
        rows = study.cluster(profiles, options, given.gpus, given.tenants, given.load)
        labels, value = ("class",), "slowdown_p99"
    if given.json:
        json.dump(rows, sys.stdout, indent=1)
        print()
    else:
        from wooly_testkit.simulate.report import print_table

        print_table(rows, f"{given.study}, {given.seconds:g} s of virtual time")
    if given.plot:
        from wooly_testkit.simulate.report import plot

        plot(rows, labels, value, given.plot)
    return 1 if any(row.get("violations") for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
