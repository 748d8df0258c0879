"""TLS 1.3 for connections between machines: switch, contexts, and self-signed certificates.

Neither end verifies the certificate's signature or names. Each end mixes the certificate's
fingerprint into its HMAC (auth.py), so a relay that terminates TLS with its own certificate fails
the authentication.
"""

from __future__ import annotations

import datetime
import functools
import hashlib
import ssl
import tempfile
from collections.abc import Mapping
from typing import NamedTuple

from helmsman.api.extras import needed_by

TLS_VARIABLE = "HELMSMAN_TLS"
"""Environment variable: '1' (default): TLS between machines; '0', for trusted networks: none.

Connections are authenticated in both cases.
"""

_VALID_FROM, _VALID_UNTIL = datetime.datetime(2000, 1, 1), datetime.datetime(9999, 12, 31)
"""Always valid, so that wrong clocks of the machines do not matter."""


class ServerTls(NamedTuple):
    context: ssl.SSLContext
    fingerprint: bytes
    """SHA-256 of the certificate (DER)."""


def uses_tls(environ: Mapping[str, str]) -> bool:
    """Return whether connections between machines use TLS.

    Raises:
        ValueError: The variable is neither 0 nor 1.
    """
    value = environ.get(TLS_VARIABLE, "1")
    if value not in ("0", "1"):
        raise ValueError(
            f"{TLS_VARIABLE} is {value!r}, expected 1 (TLS between machines, the default) or 0 "
            "(none)"
        )
    return value == "1"


def server_tls() -> ServerTls:
    """Return a context with a new key and certificate.

    Raises:
        BackendNotInstalledError: The package cryptography is missing.
        OSError: The key cannot be written to a temporary file.
    """
    pem, certificate = make_certificate()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.num_tickets = 0  # sessions are never resumed
    with tempfile.NamedTemporaryFile(prefix="helmsman-") as file:
        # The file has mode 0600; the ssl module reads keys from files only.
        file.write(pem)
        file.flush()
        context.load_cert_chain(file.name)
    return ServerTls(context, fingerprint_of(certificate))


@functools.cache
def client_context() -> ssl.SSLContext:
    """Return the context of connecting ends.

    It accepts any certificate: the HMAC that follows covers the certificate's fingerprint.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def fingerprint_of(certificate: bytes | None) -> bytes:
    return hashlib.sha256(certificate or b"").digest()


def make_certificate() -> tuple[bytes, bytes]:
    """Return a new P-256 key with its self-signed certificate (PEM), and the certificate (DER)."""
    with needed_by(f"TLS between machines ({TLS_VARIABLE}=0 switches it off)", "cryptography"):
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "helmsman")])
    certificate = (
        x509.CertificateBuilder(issuer_name=name, subject_name=name, public_key=key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(_VALID_FROM)
        .not_valid_after(_VALID_UNTIL)
        .sign(key, hashes.SHA256())
    )
    encoding, private = serialization.Encoding, serialization.PrivateFormat.PKCS8
    pem = key.private_bytes(
        encoding.PEM, private, serialization.NoEncryption()
    ) + certificate.public_bytes(encoding.PEM)
    return pem, certificate.public_bytes(encoding.DER)
