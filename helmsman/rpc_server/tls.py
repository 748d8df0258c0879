"""TLS 1.3 for connections between machines: the switch, the contexts, and a self-signed certificate for each listener.

Nobody verifies the certificate's signature or names. Each end mixes the certificate's fingerprint into its HMAC (auth.py), so a
relay that terminates TLS with a certificate of its own fails the proof.

The certificate is made here because plain Ray does not install ``cryptography``, and Python's ssl cannot generate a key. That
takes one multiplication on the curve P-256. OpenSSL checks it each time: load_cert_chain derives the public key from the
private one by itself, and refuses a certificate with another. All secrets of a connection are OpenSSL's alone.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import secrets
import ssl
import tempfile
from collections.abc import Mapping
from typing import NamedTuple

TLS_VARIABLE = "HELMSMAN_TLS"
"""'0' switches TLS off, for trusted networks; connections are still authenticated. '1' is the default."""

# The curve P-256 (FIPS 186-5, SEC 2): y^2 = x^3 - 3x + b modulo _P, with a generator of the prime order _N.
_P = 2**256 - 2**224 + 2**192 + 2**96 - 1
_N = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551
_G = (
    0x6B17D1F2E12C4247F8BCE6E563A440F277037D812DEB33A0F4A13945D898C296,
    0x4FE342E2FE1A7F9B8EE7EB4A7C0F9E162BCE33576B315ECECBB6406837BF51F5,
)

_INTEGER, _BIT_STRING, _OCTET_STRING, _OID, _UTF8, _SEQUENCE, _SET = 0x02, 0x03, 0x04, 0x06, 0x0C, 0x30, 0x31
_UTC_TIME, _GENERALIZED_TIME, _EXPLICIT_0 = 0x17, 0x18, 0xA0
_COMMON_NAME = bytes.fromhex("550403")
_EC_PUBLIC_KEY = bytes.fromhex("2a8648ce3d0201")
_PRIME256V1 = bytes.fromhex("2a8648ce3d030107")
_ECDSA_WITH_SHA256 = bytes.fromhex("2a8648ce3d040302")


class ServerTls(NamedTuple):
    """The listening end of TLS."""

    context: ssl.SSLContext
    fingerprint: bytes
    """SHA-256 of the certificate (DER)."""


def uses_tls(environ: Mapping[str, str]) -> bool:
    """Whether connections between machines use TLS. Raises ValueError when the variable is neither 0 nor 1."""
    value = environ.get(TLS_VARIABLE, "1")
    if value not in ("0", "1"):
        raise ValueError(f"{TLS_VARIABLE} is {value!r}, expected 1 (TLS between machines, the default) or 0 (none)")
    return value == "1"


def server_tls() -> ServerTls:
    """A context with a new key and certificate. Takes about 20 ms. Raises OSError."""
    key, certificate = make_certificate()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.num_tickets = 0  # a session is never resumed
    with tempfile.NamedTemporaryFile("w", prefix="helmsman-") as file:  # mode 0600; the ssl module reads keys from files only
        file.write(key + ssl.DER_cert_to_PEM_cert(certificate))
        file.flush()
        context.load_cert_chain(file.name)
    return ServerTls(context, fingerprint_of(certificate))


@functools.cache
def client_context() -> ssl.SSLContext:
    """The context of connecting ends. It accepts any certificate: the HMAC that follows covers its fingerprint."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def fingerprint_of(certificate: bytes | None) -> bytes:
    """SHA-256 of a certificate (DER)."""
    return hashlib.sha256(certificate or b"").digest()


def make_certificate() -> tuple[str, bytes]:
    """A new P-256 key (PEM) and a certificate for it (DER), signed by itself and without an end."""
    private = secrets.randbelow(_N - 1) + 1
    algorithm = _der(_SEQUENCE, _der(_OID, _ECDSA_WITH_SHA256))
    name = _der(_SEQUENCE, _der(_SET, _der(_SEQUENCE, _der(_OID, _COMMON_NAME), _der(_UTF8, b"helmsman"))))
    x, y = _multiply(private)
    public = _der(
        _SEQUENCE,
        _der(_SEQUENCE, _der(_OID, _EC_PUBLIC_KEY), _der(_OID, _PRIME256V1)),
        _der(_BIT_STRING, b"\0\4", x.to_bytes(32, "big"), y.to_bytes(32, "big")),
    )
    body = _der(
        _SEQUENCE,
        _der(_EXPLICIT_0, _integer(2)),  # X.509 version 3
        _integer(secrets.randbits(64)),
        algorithm,
        name,
        _der(_SEQUENCE, _der(_UTC_TIME, b"000101000000Z"), _der(_GENERALIZED_TIME, b"99991231235959Z")),
        name,
        public,
    )
    certificate = _der(_SEQUENCE, body, algorithm, _der(_BIT_STRING, b"\0", _signature(private, body)))
    key = _der(
        _SEQUENCE, _integer(1), _der(_OCTET_STRING, private.to_bytes(32, "big")), _der(_EXPLICIT_0, _der(_OID, _PRIME256V1))
    )
    lines = base64.encodebytes(key).decode()
    return f"-----BEGIN EC PRIVATE KEY-----\n{lines}-----END EC PRIVATE KEY-----\n", certificate


def _signature(private: int, message: bytes) -> bytes:
    """ECDSA with SHA-256."""
    digest = int.from_bytes(hashlib.sha256(message).digest(), "big")
    once = secrets.randbelow(_N - 1) + 1
    r = _multiply(once)[0] % _N
    s = pow(once, -1, _N) * (digest + r * private) % _N
    return _der(_SEQUENCE, _integer(r), _integer(s))


def _multiply(factor: int) -> tuple[int, int]:
    """The generator times a factor from 1 to _N - 1."""
    total: tuple[int, int] | None = None
    power = _G
    while factor:
        if factor & 1:
            total = power if total is None else _add(total, power)
        power = _add(power, power)
        factor >>= 1
    assert total is not None
    return total


def _add(left: tuple[int, int], right: tuple[int, int]) -> tuple[int, int]:
    """The sum of two points, of which neither is the other's inverse."""
    (x1, y1), (x2, y2) = left, right
    slope = (3 * x1 * x1 - 3) * pow(2 * y1, -1, _P) if left == right else (y2 - y1) * pow(x2 - x1, -1, _P)
    x = (slope * slope - x1 - x2) % _P
    return x, (slope * (x1 - x) - y1) % _P


def _der(tag: int, *parts: bytes) -> bytes:
    """An ASN.1 value in DER."""
    content = b"".join(parts)
    size = len(content)
    if size < 128:
        return bytes([tag, size]) + content
    length = size.to_bytes((size.bit_length() + 7) // 8, "big")
    return bytes([tag, 128 + len(length)]) + length + content


def _integer(value: int) -> bytes:
    return _der(_INTEGER, value.to_bytes(value.bit_length() // 8 + 1, "big"))
