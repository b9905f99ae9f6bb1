"""A hub in this process: an HTTP server that stands in for the API of huggingface.co.

It replaces whoami, the creation of a repository, the check of a card's metadata, the question of where each file is
stored (always in the commit itself, not in LFS or Xet storage), and commits, which it keeps.
"""

from __future__ import annotations

import base64
import json
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from pods_rl.recipe.available import check_pushable

TOKEN = "hf_fake"


class Hub(ThreadingHTTPServer):
    """`created`: bodies of create requests; `commits`: (repository and revision, files by name); `fails`: a status."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.created: list[dict] = []
        self.commits: list[tuple[str, dict[str, bytes]]] = []
        self.fails: int | None = None
        self.problems: list[str] = []  # requests that are not known here

    def handle_error(self, request: object, client_address: object) -> None:
        self.problems.append(repr(sys.exc_info()[1]))

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: Hub

    def do_GET(self) -> None:
        if self.path == "/api/whoami-v2":
            self._answer({"name": "me", "type": "user"})
        else:  # the client asks for things of its own
            self._answer({"error": "not found"}, 404)

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        assert self.headers["Authorization"] == f"Bearer {TOKEN}"
        hub, parts = self.server, self.path.strip("/").split("/")
        if hub.fails and parts[-2] == "commit":
            self._answer({"error": "the disk of the hub is full"}, hub.fails)
        elif self.path == "/api/repos/create":
            asked = json.loads(body)
            hub.created.append(asked)
            owner = asked.get("organization") or "me"
            self._answer({"url": f"{hub.address}/{owner}/{asked['name']}"})
        elif self.path == "/api/validate-yaml":
            self._answer({"errors": [], "warnings": []})
        elif parts[-2] == "preupload":
            names = [file["path"] for file in json.loads(body)["files"]]
            files = [{"path": name, "uploadMode": "regular", "shouldIgnore": False} for name in names]
            self._answer({"files": files})
        else:
            assert parts[-2] == "commit", self.path
            lines = [json.loads(line) for line in body.splitlines()]
            values = [line["value"] for line in lines if line["key"] == "file"]
            place = "/".join([*parts[2:4], parts[-1]])
            hub.commits.append((place, {one["path"]: base64.b64decode(one["content"]) for one in values}))
            self._answer(
                {
                    "commitUrl": f"{hub.address}/{'/'.join(parts[2:4])}/commit/{'1' * 40}",
                    "commitOid": "1" * 40,
                    "success": True,
                }
            )

    def _answer(self, content: dict, status: int = 200) -> None:
        text = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def fake_hub(patch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub that `huggingface_hub` talks to, with a token."""
    from huggingface_hub import constants

    hub = Hub()
    thread = threading.Thread(target=hub.serve_forever, daemon=True)
    thread.start()
    patch.setattr(constants, "ENDPOINT", hub.address)
    patch.setattr(constants, "HF_HUB_OFFLINE", False)
    patch.setenv("HF_TOKEN", TOKEN)
    check_pushable.cache_clear()
    try:
        yield hub
    finally:
        hub.shutdown()
        hub.server_close()
        thread.join()
        check_pushable.cache_clear()
