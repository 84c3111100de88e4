"""How worn a disk is, and how long it lasts at a given rate of writing.

Covers asking the programs that can read a disk's own account (``nvme``, ``smartctl``), where they are installed and
permitted, and the life-time estimate that sysfs has for eMMC. The kernel does not offer NVMe's account in sysfs.
It changes nothing on the disk.

Rule: what is not known is said to be unknown, with the reason. A number is never made up from a disk's model.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
from collections.abc import Mapping
from typing import Any

from io_backend.devices import Device

_TIMEOUT_S = 5.0
_UNIT_NBYTES = 512_000
"""Of an NVMe disk's data units. Source: NVM Express base specification, SMART / health information log page."""
_LEAST_PERCENTAGE = 1.0  # disks count whole per cents: below the first nothing can be estimated


@dataclasses.dataclass(frozen=True, slots=True)
class DaysLeft:
    """How long a disk lasts, or why nobody knows."""

    days: float | None
    reason: str
    """How the days were found, or why there are none."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Wear:
    """A disk's own account of its life."""

    device: str
    """The kernel's name of it."""
    percentage_used: float | None = None
    """Of the life that its maker rated it for; above 100 it still works, without promise."""
    written_nbytes: int | None = None
    """Bytes that the host wrote to it, ever."""
    rated_nbytes: int | None = None
    """Bytes that it is rated for (TBW), as far as the caller knew it."""
    source: str = ""
    """Which program or file said so."""
    reason: str = ""
    """Why nothing is known; empty when something is."""

    def days_left(self, bytes_per_day: float) -> DaysLeft:
        """How many days it lasts when so much is written a day, counting host writes alone.

        Args:
            bytes_per_day: More than 0.

        Raises:
            ValueError: A rate of 0 or less.
        """
        if not bytes_per_day > 0:
            raise ValueError(f"bytes_per_day is {bytes_per_day}, expected more than 0")
        if self.rated_nbytes is not None and self.written_nbytes is not None:
            left_nbytes = max(0, self.rated_nbytes - self.written_nbytes)
            return DaysLeft(left_nbytes / bytes_per_day, "rated endurance less what was written so far")
        if self.percentage_used is None:
            return DaysLeft(None, self.reason or "the disk does not say how much of its life is used")
        if self.percentage_used >= 100:
            return DaysLeft(0.0, "its rated life is over")
        if self.rated_nbytes is not None:
            life_nbytes = self.rated_nbytes * (1 - self.percentage_used / 100)
            return DaysLeft(life_nbytes / bytes_per_day, "rated endurance and percentage used")
        if not self.written_nbytes:
            return DaysLeft(None, "the disk does not say how much was written to it")
        if self.percentage_used < _LEAST_PERCENTAGE:
            return DaysLeft(None, "less than 1 % of its life is used: too early to tell without its rated endurance")
        # What it took to use this percentage, taken as typical for the rest.
        rest_nbytes = self.written_nbytes * (100 - self.percentage_used) / self.percentage_used
        return DaysLeft(rest_nbytes / bytes_per_day, "estimated from the percentage used by what was written so far")


def read_wear(device: Device, *, rated_nbytes: int | None = None) -> Wear:
    """What a disk says of its wear. May run other programs, for some seconds at most. Never raises.

    Args:
        device: From `find_devices`.
        rated_nbytes: Endurance that its maker promises, in bytes, if known; disks do not tell it.
    """
    if device.kind in ("virtio", "loop") or device.name.startswith(("zram", "ram", "nbd")):
        reason = "it is a virtual disk, which keeps no account"
        return Wear(device=device.name, rated_nbytes=rated_nbytes, reason=reason)
    reasons = []
    for ask in (_ask_sysfs, _ask_nvme, _ask_smartctl):
        answer = ask(device)
        if isinstance(answer, Wear):
            return dataclasses.replace(answer, rated_nbytes=rated_nbytes)
        if answer:
            reasons.append(answer)
    reason = "; ".join(reasons) or "this kind of disk keeps no account"
    return Wear(device=device.name, rated_nbytes=rated_nbytes, reason=reason)


def _ask_sysfs(device: Device) -> Wear | str:
    """Source: Documentation/driver-api/mmc/mmc-dev-attrs.rst: two estimates in steps of 10 %, the worse one counts."""
    if device.kind != "mmc" or device.sysfs is None:
        return ""
    path = device.sysfs / "device" / "life_time"
    try:
        steps = [int(word, 16) for word in path.read_text().split()]
    except (OSError, ValueError):
        return "the kernel does not show its life time"
    worst = max(steps, default=0)
    if not 1 <= worst <= 11:
        return "it does not estimate its life time"
    return Wear(device=device.name, percentage_used=10.0 * worst, source="sysfs life_time, in steps of 10 %")


def _ask_nvme(device: Device) -> Wear | str:
    if device.kind != "nvme":
        return ""
    found = _run(["nvme", "smart-log", f"/dev/{device.name}", "-o", "json"])
    return found if isinstance(found, str) else _from_nvme(device, found, "nvme smart-log")


def _ask_smartctl(device: Device) -> Wear | str:
    if device.kind == "mmc":
        return ""
    found = _run(["smartctl", "-j", "-a", f"/dev/{device.name}"])
    if isinstance(found, str):
        return found
    log = found.get("nvme_smart_health_information_log")
    if isinstance(log, Mapping):
        return _from_nvme(device, log, "smartctl")
    endurance = found.get("endurance_used")
    used = _number(endurance.get("current_percent")) if isinstance(endurance, Mapping) else None
    if used is None:
        return f"smartctl: {_message(found) or 'it says nothing of its endurance'}"
    return Wear(device=device.name, percentage_used=used, source="smartctl")


def _from_nvme(device: Device, log: Mapping[str, Any], source: str) -> Wear | str:
    """Read the fields of the health log, under the names that versions of both programs give them."""
    used = _number(next((log[name] for name in ("percentage_used", "percent_used") if name in log), None))
    units = _number(log.get("data_units_written"))
    if used is None and units is None:
        return f"{source}: the answer has neither percentage used nor data units written"
    written_nbytes = None if units is None else int(units) * _UNIT_NBYTES
    return Wear(device=device.name, percentage_used=used, written_nbytes=written_nbytes, source=source)


def _run(command: list[str]) -> Mapping[str, Any] | str:
    """The JSON object that a program prints, or why there is none."""
    name = command[0]
    # These live in sbin, which is not on every user's path.
    program = shutil.which(name) or shutil.which(name, path="/usr/sbin:/sbin:/usr/local/sbin")
    if program is None:
        return f"{name} is not installed"
    try:
        done = subprocess.run(
            [program, *command[1:]],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_TIMEOUT_S,
            check=False,
            env={**os.environ, "LC_ALL": "C"},
        )
    except subprocess.TimeoutExpired:
        return f"{name} did not answer within {_TIMEOUT_S:g} s"
    except OSError as error:
        return f"{name} cannot be run: {error.strerror}"
    # Smartctl's exit status also tells of old errors in the disk's log: what was printed counts.
    try:
        found = json.loads(done.stdout)
    except (ValueError, RecursionError):
        words = done.stderr.decode(errors="replace").strip().splitlines()
        return f"{name}: {words[-1] if words else 'it printed no JSON'}"
    if not isinstance(found, dict):
        return f"{name}: it printed no JSON object"
    if done.returncode and "error" in found:
        return f"{name}: {found['error']}"
    return found


def _message(found: Mapping[str, Any]) -> str:
    """The first message in smartctl's JSON, if it is as its documentation says."""
    try:
        return str(found["smartctl"]["messages"][0]["string"])
    except (KeyError, IndexError, TypeError):
        return ""


def _number(value: object) -> float | None:
    """A number that some versions print as a text, with separators."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        number = float(value.replace(",", "")) if isinstance(value, str) else float(value)
    except ValueError:
        return None
    return number if 0 <= number < 1e18 else None
