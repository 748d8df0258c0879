"""Test TLS between machines: the certificate of a run, and the variable that turns TLS off."""

from __future__ import annotations

import ssl

import pytest

from helmsman._wire.tls import client_context, fingerprint_of, server_tls, uses_tls


def shake_hands(server: ssl.SSLContext, client: ssl.SSLContext) -> ssl.SSLObject:
    """Shake hands in memory; returns the client's end."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    near = client.wrap_bio(to_client, to_server)
    far = server.wrap_bio(to_server, to_client, server_side=True)
    for end in (near, far, near):
        try:
            end.do_handshake()
        except ssl.SSLWantReadError:
            continue
    far.do_handshake()
    return near


def test_server_tls_version_and_fingerprint() -> None:
    tls = server_tls()
    connection = shake_hands(tls.context, client_context())
    assert connection.version() == "TLSv1.3"
    assert fingerprint_of(connection.getpeercert(binary_form=True)) == tls.fingerprint


def test_server_tls_certificate_verifies() -> None:
    """Strict clients accept the certificate's signature and fields; each call makes a new key."""
    for _ in range(10):
        tls = server_tls()
        connection = shake_hands(tls.context, client_context())
        certificate = connection.getpeercert(binary_form=True)
        assert certificate is not None
        strict = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        strict.check_hostname = False
        strict.load_verify_locations(cadata=certificate)
        shake_hands(tls.context, strict)
        with pytest.raises(ssl.SSLCertVerificationError):
            shake_hands(server_tls().context, strict)


def test_server_tls_refuses_older_versions() -> None:
    old = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    old.check_hostname = False
    old.verify_mode = ssl.CERT_NONE
    old.maximum_version = ssl.TLSVersion.TLSv1_2
    with pytest.raises(ssl.SSLError):
        shake_hands(server_tls().context, old)


@pytest.mark.parametrize(
    ("environ", "expected"),
    [({}, True), ({"HELMSMAN_TLS": "1"}, True), ({"HELMSMAN_TLS": "0"}, False)],
)
def test_uses_tls(environ: dict[str, str], expected: bool) -> None:
    assert uses_tls(environ) is expected


def test_uses_tls_invalid_value() -> None:
    with pytest.raises(ValueError, match="HELMSMAN_TLS is 'off', expected 1 .* or 0"):
        uses_tls({"HELMSMAN_TLS": "off"})
