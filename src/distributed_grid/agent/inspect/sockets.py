"""What a process's sockets are and where they lead, from its network tables and the kernel's socket diagnosis."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import struct
from dataclasses import dataclass
from pathlib import Path

_TCP_STATES = {
    1: "ESTABLISHED", 2: "SYN_SENT", 3: "SYN_RECV", 4: "FIN_WAIT1", 5: "FIN_WAIT2", 6: "TIME_WAIT", 7: "CLOSE",
    8: "CLOSE_WAIT", 9: "LAST_ACK", 10: "LISTEN", 11: "CLOSING",
}  # fmt: skip
_NETLINK_SOCK_DIAG = 4
_SOCK_DIAG_BY_FAMILY = 20
_DUMP = 0x301  # NLM_F_REQUEST | NLM_F_DUMP
_SHOW_PEER = 4
_ATTRIBUTE_PEER = 2


@dataclass(frozen=True, slots=True)
class SocketInfo:
    kind: str  # inet, unix, netlink, packet, raw
    protocol: str = ""  # tcp, tcp6, udp, udp6, raw, stream, dgram, seqpacket
    state: str = ""
    local: str = ""
    remote: str = ""
    peer_inode: int | None = None  # unix; None: not known; 0: nobody


def read_sockets(pid: int) -> dict[int, SocketInfo]:
    """By inode, all sockets of the network namespace that the process lives in."""
    base = Path(f"/proc/{pid}/net")
    found: dict[int, SocketInfo] = {}
    for table in ("tcp", "tcp6", "udp", "udp6", "udplite", "udplite6", "raw", "raw6", "icmp", "icmp6"):
        for words in _rows(base / table):
            _inet(words, table, found)
    for words in _rows(base / "netlink"):
        found[int(words[9])] = SocketInfo("netlink")
    for words in _rows(base / "packet"):
        found[int(words[8])] = SocketInfo("packet")
    peers = _unix_peers() if _same_network(pid) else {}
    for words in _rows(base / "unix"):
        inode, path = int(words[6]), words[7] if len(words) > 7 else ""
        kind = {1: "stream", 2: "dgram", 5: "seqpacket"}.get(int(words[4], 16), "other")
        listens = int(words[3], 16) & 0x10000
        state = "LISTEN" if listens else {1: "CLOSE", 3: "ESTABLISHED"}.get(int(words[5], 16), "OTHER")
        found[inode] = SocketInfo("unix", kind, state, path, peer_inode=peers.get(inode, 0) if peers else None)
    return found


def _rows(path: Path) -> list[list[str]]:
    try:
        return [line.split() for line in path.read_text(errors="replace").splitlines()[1:]]
    except OSError:
        return []


def _inet(words: list[str], table: str, found: dict[int, SocketInfo]) -> None:
    number = int(words[3], 16)
    kind = "raw" if table.startswith(("raw", "icmp")) else "inet"
    if table.startswith("tcp"):
        state = _TCP_STATES.get(number, str(number))
    else:
        state = "ESTABLISHED" if number == 1 else "CLOSE"
    found[int(words[9])] = SocketInfo(kind, table, state, _address(words[1]), _address(words[2]))


def _address(text: str) -> str:
    """`0100007F:1F90` -> `127.0.0.1:8080`; each word of the address is in the machine's own byte order."""
    host, _, port = text.partition(":")
    raw = b"".join(struct.pack("=I", int(host[at : at + 8], 16)) for at in range(0, len(host), 8))
    address = ipaddress.ip_address(raw)
    mapped = getattr(address, "ipv4_mapped", None)
    name = str(mapped or address)
    return f"[{name}]:{int(port, 16)}" if ":" in name else f"{name}:{int(port, 16)}"


def _same_network(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return os.readlink(f"/proc/{pid}/ns/net") == os.readlink("/proc/self/ns/net")  # noqa: PTH115
    return False


def _unix_peers() -> dict[int, int]:
    """Inode -> inode of the other end, of every unix socket in our network namespace."""
    request = struct.pack("=BBHIIIII", socket.AF_UNIX, 0, 0, 0xFFFFFFFF, 0, _SHOW_PEER, 0, 0)
    header = struct.pack("=IHHII", 16 + len(request), _SOCK_DIAG_BY_FAMILY, _DUMP, 1, 0)
    peers: dict[int, int] = {}
    try:
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, _NETLINK_SOCK_DIAG) as link:
            link.settimeout(5.0)
            link.send(header + request)
            while _take_peers(link.recv(1 << 18), peers):
                pass
    except OSError:
        return {}  # not in this kernel, or not for us
    return peers


def _take_peers(data: bytes, peers: dict[int, int]) -> bool:
    """False at the end of the answer."""
    at = 0
    while at + 16 <= len(data):
        length, kind = struct.unpack_from("=IH", data, at)
        if kind != _SOCK_DIAG_BY_FAMILY or length < 32:
            return False  # NLMSG_DONE, or an error
        (inode,) = struct.unpack_from("=I", data, at + 20)
        peers[inode] = 0
        part, end = at + 32, at + length
        while part + 4 <= end:
            size, attribute = struct.unpack_from("=HH", data, part)
            if attribute == _ATTRIBUTE_PEER and size >= 8:
                (peers[inode],) = struct.unpack_from("=I", data, part + 4)
            part += max(4, (size + 3) & ~3)
        at += (length + 3) & ~3
    return True
