"""The figures of `wooly smi`, by the names of nvidia-smi's queries."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from wooly.errors import WoolyError

Node = Mapping[str, Any]
#: What nvidia-smi prints for a figure that the device does not have.
UNKNOWN = "[N/A]"
_MIB = 1 << 20


class Field(NamedTuple):
    """A field of a query.

    Attributes:
        value: the field of a device. Its arguments are the index of the device and its node.
        unit: unit of the value; empty: it has none.
    """

    value: Callable[[int, Node], object]
    unit: str = ""


def _mib(nbytes: int) -> int:
    return nbytes // _MIB


def _reserved(node: Node) -> int:
    return int((node.get("memory") or {}).get("reserve", 0))


FIELDS: Mapping[str, Field] = {
    "index": Field(lambda i, n: i),
    "name": Field(lambda i, n: n["device"]["name"]),
    "gpu_name": Field(lambda i, n: n["device"]["name"]),
    "uuid": Field(lambda i, n: n["executor_id"]),
    "gpu_uuid": Field(lambda i, n: n["executor_id"]),
    "count": Field(lambda i, n: n["count"]),
    "memory.total": Field(lambda i, n: _mib(n["device"]["total_memory"]), "MiB"),
    "memory.used": Field(lambda i, n: _mib(n["memory_used"]), "MiB"),
    "memory.free": Field(lambda i, n: _mib(n["device"]["total_memory"] - n["memory_used"] - _reserved(n)), "MiB"),
    "memory.reserved": Field(lambda i, n: _mib(_reserved(n)), "MiB"),
    "utilization.gpu": Field(lambda i, n: round(100 * n["utilization"]), "%"),
    "compute_mode": Field(lambda i, n: "Default"),
    **{
        name: Field(lambda i, n: UNKNOWN, unit)
        for name, unit in {
            "driver_version": "",
            "pci.bus_id": "",
            "serial": "",
            "fan.speed": "%",
            "pstate": "",
            "temperature.gpu": "",
            "utilization.memory": "%",
            "power.draw": "W",
            "power.limit": "W",
            "clocks.sm": "MHz",
            "clocks.mem": "MHz",
        }.items()
    },
}


class QueryError(WoolyError):
    """A query names a field or a format that does not exist."""


def query(nodes: Sequence[Node], names: str, how: str) -> str:
    """The answer to a query, as nvidia-smi prints it.

    Args:
        nodes: the devices, in order of their index.
        names: names of fields, separated by commas.
        how: csv, and noheader and nounits if wanted, separated by commas.

    Raises:
        QueryError: a field or format does not exist.
    """
    options = {option.strip() for option in how.split(",")}
    if "csv" not in options or options - {"csv", "noheader", "nounits"}:
        raise QueryError(f"the format is {how!r}; it must be csv, csv,noheader, csv,nounits or csv,noheader,nounits")
    wanted = [name.strip() for name in names.split(",")]
    for name in wanted:
        if name not in FIELDS:
            raise QueryError(f'Field "{name}" is not a valid field to query. Valid fields: {", ".join(FIELDS)}')
    fields = [FIELDS[name] for name in wanted]
    units = "nounits" not in options
    text = io.StringIO()
    lines = csv.writer(text, delimiter=",", lineterminator="\n", quoting=csv.QUOTE_NONE, escapechar="\\")
    if "noheader" not in options:
        lines.writerow(_spaced([f"{n} [{f.unit}]" if f.unit else n for n, f in zip(wanted, fields, strict=True)]))
    for i, node in enumerate(nodes):
        found = [str(f.value(i, {**node, "count": len(nodes)})) for f in fields]
        lines.writerow(
            _spaced(
                [
                    f"{v} {f.unit}" if units and f.unit and v != UNKNOWN else v
                    for v, f in zip(found, fields, strict=True)
                ]
            )
        )
    return text.getvalue()


def _spaced(cells: Sequence[str]) -> list[str]:
    """nvidia-smi separates cells by a comma and a space."""
    return [cells[0], *[f" {cell}" for cell in cells[1:]]]
