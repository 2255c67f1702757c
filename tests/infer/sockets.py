"""Bytes over a socket: requests as they are, and what is no HTTP at all."""

import socket

import numpy as np

CLOSE = b"\r\nconnection: close\r\n\r\n"
GARBAGE = {
    "no http": b"hello\r\n\r\n",
    "tls": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200),
    "http 2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "bad header": b"POST /v1/infer HTTP/1.1\r\nhost: x\r\nbad header\r\n\r\n",
    "two lengths": b"POST / HTTP/1.1\r\ncontent-length: 3\r\nhost: x\r\ncontent-length: 4"
    + 2 * b"\r\n",
    "no host": b"POST /v1/infer HTTP/1.1\r\ncontent-length: 2\r\n\r\n{}",
    "long head": b"GET / HTTP/1.1\r\nhost: x\r\nx: " + b"a" * 100_000 + CLOSE,
    "bad chunk": b"POST /v1/infer HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
    "random": np.random.default_rng(0).bytes(500) + b"\r\n\r\n",
}


def exchange(port, data, timeout_s=5.0):
    """All that the service sends back for some bytes."""
    with socket.create_connection(("127.0.0.1", port), timeout=timeout_s) as connection:
        connection.sendall(data)
        received = b""
        while chunk := connection.recv(65536):
            received += chunk
        return received


def raw(method, path, body, headers):
    """The bytes of a request; what cannot be sent over a socket becomes something near it."""
    lines = [f"{method} {path} HTTP/1.1".encode("utf-8", "replace"), b"host: x"]
    names = {name for name, _ in headers}
    if b"content-length" not in names:
        lines.append(f"content-length: {len(body)}".encode())
    lines += [name + b": " + value for name, value in headers]
    return b"\r\n".join([*lines, b"connection: close", b"", body])
