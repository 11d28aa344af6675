"""A bucket on a server of moto's, on loopback."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import fsspec
import pytest


def environment_of(address: str) -> dict[str, str]:
    """Return what a client needs to reach a server at an address."""
    words = {"ACCESS_KEY_ID": "x", "SECRET_ACCESS_KEY": "y", "DEFAULT_REGION": "us-east-1", "ENDPOINT_URL": address}
    return {f"AWS_{key}": value for key, value in words.items()}


@contextmanager
def bucket() -> Iterator[dict[str, str]]:
    """Set the environment of a server that has s3://bucket, and yield it; skip where s3fs or moto are absent."""
    pytest.importorskip("s3fs", reason="extra remote: s3fs")
    moto = pytest.importorskip("moto.server", reason="moto: a stand-in for S3")
    server = moto.ThreadedMotoServer(port=0)
    server.start()
    host, port = server.get_host_and_port()
    environment = environment_of(f"http://{host}:{port}")
    with pytest.MonkeyPatch.context() as patched:
        for key, value in environment.items():
            patched.setenv(key, value)
        fsspec.get_filesystem_class("s3").clear_instance_cache()  # of another server
        fsspec.filesystem("s3").makedirs("bucket", exist_ok=True)  # servers of one process share what they hold
        yield environment
    server.stop()
