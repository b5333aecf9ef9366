"""What ``pegprof targets`` shows: the table of targets, and which of them can be compiled for now."""

import dataclasses

from pegprof.report.tables import WIDTH, Column, make_console, print_table, text_of
from pegprof.targets.compilers import why_not
from pegprof.targets.devices import DEVICES
from pegprof.targets.selection import Target, cpu_name, free_host_bytes
from pegprof.units import UNKNOWN, format_bytes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Listed:
    """One line of the list. ``remedy`` is what it takes to compile for it, empty where nothing is missing."""

    name: str
    title: str
    memory_bytes: int | None
    status: str
    remedy: str = ""


def list_targets(host: Target) -> list[Listed]:
    """The host first, then every device of the table."""
    here = Listed(
        name=host.name,
        title=cpu_name() if host.is_host else DEVICES[host.name].title if host.name in DEVICES else UNKNOWN,
        memory_bytes=free_host_bytes() if host.is_host else None,
        status="here: measured",
    )
    others = [device for device in DEVICES.values() if device.name != host.name]
    remedies = {device.compiler.extra: why_not(device.compiler) or "" for device in others}
    return [
        here,
        *(
            Listed(
                name=device.name,
                title=device.title,
                memory_bytes=device.memory_bytes,
                status="compiler missing" if remedies[device.compiler.extra] else "can be compiled for",
                remedy=remedies[device.compiler.extra],
            )
            for device in others
        ),
    ]


_STYLES = {"here: measured": "green", "can be compiled for": "green", "compiler missing": "yellow"}
_COLUMNS = (
    Column(header="target", cell=lambda listed: listed.name, right=False),
    Column(header="device", cell=lambda listed: listed.title, right=False),
    Column(header="memory", cell=lambda listed: format_bytes(listed.memory_bytes)),
    Column(
        header="status", cell=lambda listed: listed.status, right=False, style=lambda listed: _STYLES[listed.status]
    ),
)


def render(listed: list[Listed], *, width: int = WIDTH, color: bool = False) -> str:
    """The table, and below it what would make the rest of it work."""
    console = make_console(width, color)
    print_table(console, _COLUMNS, listed)
    missing: dict[str, list[str]] = {}
    for each in listed:
        if each.remedy:
            missing.setdefault(each.remedy, []).append(each.name)
    for remedy, names in missing.items():
        console.print(f"for {', '.join(names)}: {remedy}", markup=False, soft_wrap=True)
    return text_of(console)
