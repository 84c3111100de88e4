"""Devices and fingerprints, on small sysfs trees.

Covers partitions, RAID, volumes, file systems with numbers of their own, and what a fingerprint must and must not
depend on.
"""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from io_backend import devices as module
from io_backend.devices import Device, find_devices, fingerprint
from io_backend.mounts import Mount, find_mount


class Sysfs:
    """A tree to which disks are added."""

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "dev" / "block").mkdir(parents=True)
        (root / "class" / "block").mkdir(parents=True)

    def add(self, path: str, number: str, **files: str) -> Path:
        node = self.root / "devices" / path
        node.mkdir(parents=True)
        for name, text in files.items():
            file = node / name.replace("__", "/")
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        (self.root / "dev" / "block" / number).symlink_to(node)
        (self.root / "class" / "block" / node.name).symlink_to(node)
        return node

    def member(self, volume: Path, disk: Path) -> None:
        (volume / "slaves").mkdir(exist_ok=True)
        (volume / "slaves" / disk.name).symlink_to(disk)


@pytest.fixture
def sysfs(tmp_path: Path) -> Sysfs:
    return Sysfs(tmp_path / "sys")


def nvme(sysfs: Sysfs, number: int = 0) -> Path:
    return sysfs.add(
        f"pci/nvme{number}n1",
        f"259:{number}",
        size="2000\n",
        device__model="FAST  DISK 1TB   \n",
        device__serial=f"S{number}\n",
        queue__rotational="0\n",
    )


def test_a_partition_is_its_disk(sysfs: Sysfs) -> None:
    node = nvme(sysfs)
    sysfs.add("pci/nvme0n1/nvme0n1p1", "259:7", partition="1")
    mount = Mount("/", "ext4", "/dev/nvme0n1p1", (), "259:7")
    (device,) = find_devices(mount, sysfs=sysfs.root)
    assert device == Device("nvme0n1", "FAST DISK 1TB", "S0", 2000 * 512, "nvme", False, node)
    assert str(device) == "nvme0n1 (FAST DISK 1TB)"


def test_a_volume_is_its_disks(sysfs: Sysfs) -> None:
    first, second = nvme(sysfs, 0), nvme(sysfs, 1)
    part = sysfs.add("pci/nvme1n1/nvme1n1p1", "259:9", partition="1")
    raid = sysfs.add("virtual/md0", "9:0")
    sysfs.member(raid, first)
    sysfs.member(raid, part)
    sysfs.member(raid, second)
    crypt = sysfs.add("virtual/dm-0", "253:0")
    sysfs.member(crypt, raid)
    found = find_devices(Mount("/", "xfs", "/dev/mapper/x", (), "253:0"), sysfs=sysfs.root)
    assert [device.name for device in found] == ["nvme0n1", "nvme1n1"]


def test_the_source_helps_where_the_number_does_not(sysfs: Sysfs) -> None:
    nvme(sysfs)
    assert [d.name for d in find_devices(Mount("/", "btrfs", "/dev/nvme0n1", (), "0:33"), sysfs=sysfs.root)] == [
        "nvme0n1"
    ]
    for mount in (
        Mount("/", "nfs4", "server:/x", (), "0:34"),
        Mount("/", "unknown"),
        Mount("/", "ext4", "", (), "8:0"),
    ):
        assert find_devices(mount, sysfs=sysfs.root) == ()


def test_a_disk_that_says_nothing(sysfs: Sysfs) -> None:
    node = sysfs.add("virtio/vda", "254:0")
    assert find_devices(Mount("/", "ext4", "/dev/vda", (), "254:0"), sysfs=sysfs.root) == (
        Device("vda", kind="virtio", sysfs=node),
    )


TABLE = "27 1 {number} / / rw,relatime - {kind} {source} rw,{options}\n"


def name_of(
    sysfs: Sysfs, *, number: str = "259:0", kind: str = "ext4", source: str = "/dev/x", options: str = ""
) -> str:
    table = TABLE.format(number=number, kind=kind, source=source, options=options)
    return fingerprint("/", table=table, sysfs=sysfs.root)


def test_a_fingerprint_depends_on_what_decides_speed(sysfs: Sysfs, monkeypatch: pytest.MonkeyPatch) -> None:
    nvme(sysfs, 0)
    nvme(sysfs, 1)
    same = name_of(sysfs)
    assert len(same) == 16
    assert name_of(sysfs, options="resuid=5,errors=remount-ro") == same
    assert name_of(sysfs, source="/dev/y") == same, "a device with a serial number is known by it"
    different = {
        name_of(sysfs, number="259:1"),
        name_of(sysfs, kind="xfs"),
        name_of(sysfs, options="discard"),
        name_of(sysfs, options="data=journal"),
    }
    with monkeypatch.context() as patch:
        patch.setattr(module.os, "cpu_count", lambda: 999)
        different.add(name_of(sysfs))
    with monkeypatch.context() as patch:
        patch.setattr(module.os, "uname", lambda: SimpleNamespace(release="99.1.5-generic"))
        different.add(name_of(sysfs))
        patch.setattr(module.os, "uname", lambda: SimpleNamespace(release="99.1.7-other"))
        assert name_of(sysfs) in different, "the patch level of the kernel does not count"
    assert len(different - {same}) == 6


def test_a_new_number_is_the_same_hardware(sysfs: Sysfs, tmp_path: Path) -> None:
    nvme(sysfs)
    later = Sysfs(tmp_path / "later")
    later.add(
        "pci/nvme4n1",
        "259:12",
        size="2000\n",
        device__model="FAST DISK 1TB",
        device__serial="S0",
        queue__rotational="0\n",
    )
    assert name_of(later, number="259:12") == name_of(sysfs)


def test_without_a_serial_number_the_file_system_tells(sysfs: Sysfs) -> None:
    sysfs.add("virtio/vda", "254:0", size="2000")
    sysfs.add("virtio/vdb", "254:16", size="2000")
    first = name_of(sysfs, number="254:0", source="/dev/no-such-a")
    assert name_of(sysfs, number="254:0", source="/dev/no-such-a") == first
    assert name_of(sysfs, number="254:16", source="/dev/no-such-b") != first


def test_this_machine(tmp_path: Path) -> None:
    assert fingerprint(tmp_path) == fingerprint(tmp_path / "not" / "there")
    mount = find_mount(tmp_path)
    assert mount.device_number
    for device in find_devices(mount):
        assert device.size_nbytes > 0
        assert device.sysfs is not None
        assert os.path.isdir(device.sysfs)
