"""Encryption of a memory server's connections, where the cluster asks for it.

The certificate is the server's own, made when it starts and signed by nobody. What makes it trusted is the challenge
that follows (see `protocol.prove`): both ends prove their key over the very certificate that they see.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import os
import select
import socket
import ssl
from collections.abc import Iterable, Iterator
from typing import Any

from distributed_grid.agent.memory.errors import ServerLost


class TlsSocket(ssl.SSLSocket):
    """With the calls of a plain socket that the protocol uses and `ssl` does not have."""

    def recv_into(self, buffer: Any, nbytes: int | None = None, flags: int = 0) -> int:
        if flags & socket.MSG_DONTWAIT and not self.pending() and not self._is_readable():
            raise BlockingIOError
        with _limited():
            return super().recv_into(buffer, nbytes or len(buffer))

    def recv(self, buflen: int = 1024, flags: int = 0) -> bytes:
        """Without flags as ever; to peek looks at the bytes on the line, for an idle one must have none."""
        if not flags:
            with _limited():
                return super().recv(buflen)
        if not self._is_readable():
            raise BlockingIOError
        return socket.socket.recv(self, buflen, flags)

    def recvmsg_into(self, buffers: Iterable[Any], *rest: Any) -> Any:  # type: ignore[override]
        got = 0
        for buffer in buffers:
            view, at = memoryview(buffer), 0
            while at < len(view):
                count = self.recv_into(view[at:])
                if not count:
                    return got + at, [], 0, None
                at += count
            got += at
        return got, [], 0, None

    def sendmsg(self, buffers: Iterable[Any], *rest: Any) -> int:  # type: ignore[override]
        parts = list(buffers)
        if sum(map(len, parts)) <= 16 * 1024:
            parts = [b"".join(parts)]
        with _limited():
            for part in parts:
                self.sendall(part)
        return sum(map(len, parts))

    def shutdown(self, how: int) -> None:
        """From another thread too: ssl's own would have that one go on with what is still encrypted."""
        socket.socket.shutdown(self, how)

    def _is_readable(self) -> bool:
        poll = select.poll()
        poll.register(self.fileno(), select.POLLIN)
        return bool(poll.poll(0))


@contextlib.contextmanager
def _limited() -> Iterator[None]:
    """A time limit shows as on the plain sockets."""
    try:
        yield
    except TimeoutError:
        raise BlockingIOError from None


class ServerTls:
    """A server's certificate."""

    def __init__(self) -> None:
        key, certificate, self.fingerprint = _make_certificate()
        self._context = _context(ssl.PROTOCOL_TLS_SERVER)
        self._context.num_tickets = 0  # nothing must lie on an idle line
        fd = os.memfd_create("grid-certificate", os.MFD_CLOEXEC)  # ssl reads files only; this one is on no disk
        try:
            os.write(fd, key + certificate)
            self._context.load_cert_chain(f"/proc/self/fd/{fd}")
        finally:
            os.close(fd)

    def wrap(self, sock: socket.socket, limit_s: float) -> socket.socket:
        sock.settimeout(limit_s)
        return self._context.wrap_socket(sock, server_side=True)


def join(sock: socket.socket, limit_s: float) -> tuple[socket.socket, bytes]:
    """The client's side: the encrypted socket and the fingerprint of the certificate that the other end showed."""
    context = _context(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    sock.settimeout(limit_s)
    try:
        made = context.wrap_socket(sock)
    except OSError as error:
        raise ServerLost("the connection can't be encrypted", cause=error.strerror or str(error)) from None
    return made, hashlib.sha256(made.getpeercert(binary_form=True) or b"").digest()


def _context(side: int) -> ssl.SSLContext:
    context = ssl.SSLContext(side)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.sslsocket_class = TlsSocket
    return context


def _make_certificate() -> tuple[bytes, bytes, bytes]:
    """(key, certificate, fingerprint), the first two as PEM."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "grid memory server")])
    begins = datetime.datetime(2020, 1, 1)  # clocks differ, and nobody looks
    made = (
        x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
        .serial_number(x509.random_serial_number()).not_valid_before(begins)
        .not_valid_after(begins.replace(year=2200)).sign(key, hashes.SHA256())
    )  # fmt: skip
    pem = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return pem, made.public_bytes(serialization.Encoding.PEM), made.fingerprint(hashes.SHA256())
