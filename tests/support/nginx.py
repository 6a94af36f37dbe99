"""A real nginx, as people put one in front of their servers."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp

from tests.support.server import free_port

INSTALL = "apt-get update && apt-get install -y --no-install-recommends nginx-light"

CONFIGURATION = """
daemon off;
worker_processes 1;
pid {folder}/nginx.pid;
error_log {folder}/error.log info;
events {{ worker_connections 1024; }}
http {{
    access_log off;
    upstream replicas {{
        {servers}
    }}
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
    server {{
        listen 127.0.0.1:{port};
        location / {{
            proxy_pass http://replicas;
            proxy_next_upstream error timeout http_503;
            proxy_http_version 1.1;
            proxy_set_header Upgrade $http_upgrade;
            proxy_set_header Connection upgrade;
            proxy_set_header Host $http_host;
            proxy_read_timeout {cut_ms}ms;
        }}
    }}
}}
"""


@asynccontextmanager
async def nginx(folder: Path, *upstreams: str, cut_s: float = 60.0) -> AsyncIterator[str]:
    """A real nginx in front of these servers, which cuts what is silent for ``cut_s``; its ``ws://`` address.

    Fails with the command that installs it.
    """
    program = shutil.which("nginx", path="/usr/sbin:/usr/local/sbin:/usr/bin:/usr/local/bin")
    if program is None:
        raise AssertionError(f"These tests need nginx. Install it, as root: {INSTALL}")
    folder.mkdir()
    port = free_port()
    configuration = folder / "nginx.conf"
    servers = " ".join(f"server {urlsplit(upstream).netloc} max_fails=0;" for upstream in upstreams)
    configuration.write_text(
        CONFIGURATION.format(folder=folder, port=port, servers=servers, cut_ms=round(cut_s * 1000))
    )
    process = await asyncio.create_subprocess_exec(
        *(program, "-p", str(folder), "-c", str(configuration)),
        stdin=asyncio.subprocess.DEVNULL,
    )
    try:
        async with asyncio.timeout(10), aiohttp.ClientSession() as http:
            while True:
                assert process.returncode is None, (folder / "error.log").read_text()
                try:
                    async with http.get(f"http://127.0.0.1:{port}/readyz") as answer:
                        assert answer.status == 200
                        break
                except aiohttp.ClientConnectionError:
                    await asyncio.sleep(0.02)
        yield f"ws://127.0.0.1:{port}/v1/realtime"
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()
