"""Run nginx twice: as the model server, with canned replies, and as the floor, passing on."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.proxy import wire
from benchmarks.proxy.machine import running, wait_for
from benchmarks.proxy.probe import answers

LARGE_TOKENS = 1240
TOKENS = 20
KINDS = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")


def model_server(port: int, folder: Path) -> str:
    """Answer a small body with the 100 KB reply, any other with the 2.9 KB one."""
    (folder / "large.json").write_text(wire.reply(LARGE_TOKENS))
    small = f"^\\d{{1,{len(str(wire.SMALL_BODY)) - 1}}}$"
    return f"""server {{ listen 127.0.0.1:{port}; default_type application/json;
 location = /v1/models {{ return 200 '{wire.MODELS}'; }}
 location = /version {{ return 200 '{wire.VERSION}'; }}
 location = /large.json {{ root {folder}; error_page 405 =200 $uri; }}
 location / {{ if ($content_length ~ "{small}") {{ rewrite ^ /large.json last; }}
  return 200 '{wire.reply(TOKENS)}'; }} }}"""


def passing_on(port: int, upstream: int) -> str:
    """Configure a reverse proxy that does nothing else, and does not hold streams back."""
    return f"""upstream model {{ server 127.0.0.1:{upstream}; keepalive 1100; }}
server {{ listen 127.0.0.1:{port}; location / {{ proxy_pass http://model; proxy_buffering off;
 proxy_http_version 1.1; proxy_set_header Connection ""; }} }}"""


@contextmanager
def nginx(folder: Path, port: int, server: str, core: int) -> Iterator[int]:
    """Run nginx on one core, with one worker, and yield its process id."""
    folder.mkdir(parents=True, exist_ok=True)
    config, log = folder / "nginx.conf", folder / "nginx.log"
    config.write_text(_whole(folder, server))
    command = ["nginx", "-p", str(folder), "-e", str(log), "-c", str(config)]
    with running(command, core, log) as process:
        wait_for(lambda: answers(f"http://127.0.0.1:{port}/v1/models"), process, log)
        yield process.pid


def _whole(folder: Path, server: str) -> str:
    # Its worker is to read the folder as we do.
    user = "user root;" if os.geteuid() == 0 else ""
    places = " ".join(f"{kind}_temp_path {folder}/{kind};" for kind in KINDS)
    return f"""{user} worker_processes 1; daemon off; pid {folder}/nginx.pid;
worker_rlimit_nofile 16384;
events {{ worker_connections 8192; }}
http {{ access_log off; keepalive_requests 100000000; keepalive_timeout 600;
 client_body_buffer_size 64k; {places}
{server} }}
"""
