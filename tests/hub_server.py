"""The part of the Hugging Face Hub's HTTP protocol that uploads of a model and downloads use, on loopback.

It speaks to huggingface_hub as the Hub does without Xet: log in, create a repository, validate a card, choose how to
send each file (preupload), large files through Git LFS, one commit in lines of JSON; then from_pretrained("ORG/NAME").
"""

import base64
import hashlib
import json
import re
import socket
import struct
import threading
import urllib.parse
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import yaml

TOKEN = "hf_right"
MESSAGES = {
    401: "Invalid credentials in Authorization header",
    403: "You have exceeded your storage quota",
    404: "Repository not found",
    500: "Internal Error - We're working hard to fix this as soon as possible!",
}


@dataclass
class Fault:
    """The answer to some requests: a status, "cut" in the middle of the body, or "hang" until `HubServer.release`."""

    method: str
    path: str  # regular expression
    kind: int | str
    times: int
    met: int = 0


@dataclass
class Commit:
    message: str
    files: dict[str, bytes]


@dataclass
class HubServer:
    """Holds repositories by name, each a list of commits (the newest last), and all requests as (method, path)."""

    repositories: dict[str, list[Commit]] = field(default_factory=dict)
    large_files: dict[str, bytes] = field(default_factory=dict)
    requests: list[tuple[str, str, dict]] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    release: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self):
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (Handler,), {"hub": self}))
        self.endpoint = f"http://127.0.0.1:{self.server.server_port}"

    def __enter__(self) -> "HubServer":
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_) -> None:
        self.release.set()
        self.server.shutdown()
        self.server.server_close()

    def fail(self, method: str, path: str, kind: int | str, times: int = 1) -> Fault:
        self.faults.append(Fault(method, path, kind, times))
        return self.faults[-1]

    def commits(self, repo_id: str) -> list[Commit]:
        return self.repositories.get(repo_id, [])


class Handler(BaseHTTPRequestHandler):
    hub: HubServer
    protocol_version = "HTTP/1.1"

    def log_message(self, *_) -> None:
        pass

    def handle_request(self) -> None:
        hub, self.body = self.hub, b""
        path = urllib.parse.unquote(urllib.parse.urlsplit(self.path).path)
        hub.requests.append((self.command, path, dict(self.headers)))
        length = int(self.headers.get("Content-Length", 0))
        for fault in hub.faults:
            if fault.met < fault.times and fault.method == self.command and re.search(fault.path, path):
                fault.met += 1
                if fault.kind == "cut":
                    self.rfile.read(length // 2)
                    # with a reset, as a router that has forgotten the connection
                    self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    self.connection.close()
                    self.close_connection = True
                    return None
                if fault.kind == "hang":
                    hub.release.wait()
                    return None
                self.body = self.rfile.read(length)
                return self.answer(fault.kind, {"error": MESSAGES[fault.kind]})
        self.body = self.rfile.read(length)
        # addresses that contain a digest need no token, like the signed ones of the Hub's storage
        is_open = self.command in ("GET", "HEAD") or path.startswith("/large/")
        if not is_open and self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self.answer(401, {"error": MESSAGES[401]})
        for method, pattern, act in ROUTES:
            if method == self.command.replace("HEAD", "GET") and (match := re.fullmatch(pattern, path)):
                return act(self, *match.groups())
        return self.answer(404, {"error": "Not found"})

    do_GET = do_HEAD = do_POST = do_PUT = handle_request

    def answer(self, status: int, value: object = None, headers: dict | None = None) -> None:
        content = value if isinstance(value, bytes) else json.dumps(value).encode()
        self.send_response(status)
        if status == 401:
            self.send_header("X-Error-Message", MESSAGES[401])
        if status == 404:
            self.send_header("X-Error-Code", "EntryNotFound")
        for name, text in {"Content-Length": len(content), **(headers or {})}.items():
            self.send_header(name, str(text))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def describe_user(self) -> None:
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self.answer(401, {"error": MESSAGES[401]})
        return self.answer(200, {"name": "me", "auth": {"accessToken": {"displayName": "mine", "role": "write"}}})

    def create(self) -> None:
        wanted = json.loads(self.body)
        repo_id = f"{wanted['organization']}/{wanted['name']}"
        url = f"{self.hub.endpoint}/{repo_id}"
        if repo_id in self.hub.repositories:
            return self.answer(409, {"error": "You already created this model repo", "url": url})
        self.hub.repositories[repo_id] = []
        return self.answer(200, {"url": url})

    def validate(self) -> None:
        content = json.loads(self.body)["content"]
        header = re.match(r"---\n(.*?)\n---\n", content, re.DOTALL)
        try:
            metadata = yaml.safe_load(header[1]) if header else None
        except yaml.YAMLError as e:
            return self.answer(400, {"errors": [{"message": str(e)}], "warnings": []})
        warnings = [] if metadata else [{"message": "empty or missing yaml metadata in repo card"}]
        return self.answer(200, {"errors": [], "warnings": warnings})

    def preupload(self, repo_id: str) -> None:
        if repo_id not in self.hub.repositories:
            return self.answer(404, {"error": "Repository not found"})
        commits, files = self.hub.commits(repo_id), []
        for file in json.loads(self.body)["files"]:
            is_binary = b"\0" in base64.b64decode(file["sample"]) or file["size"] > 10e6
            known = commits[-1].files.get(file["path"]) if commits else None
            oid = None
            if known is not None:
                blob = b"blob %d\0" % len(known) + known
                oid = hashlib.sha256(known).hexdigest() if is_binary else hashlib.sha1(blob).hexdigest()
            mode = "lfs" if is_binary else "regular"
            files.append({"path": file["path"], "uploadMode": mode, "shouldIgnore": False, "oid": oid})
        return self.answer(200, {"files": files})

    def large_file_actions(self, _) -> None:
        objects = []
        for item in json.loads(self.body)["objects"]:
            if item["oid"] not in self.hub.large_files:
                item["actions"] = {"upload": {"href": f"{self.hub.endpoint}/large/{item['oid']}"}}
            objects.append(item)
        return self.answer(200, {"transfer": "basic", "objects": objects})

    def put_large_file(self, oid: str) -> None:
        if hashlib.sha256(self.body).hexdigest() != oid:
            return self.answer(400, {"error": "the content is not of this digest"})
        self.hub.large_files[oid] = self.body
        return self.answer(200, {})

    def commit(self, repo_id: str) -> None:
        header, *operations = [json.loads(line) for line in self.body.splitlines()]
        commits = self.hub.commits(repo_id)
        files = dict(commits[-1].files) if commits else {}
        for operation in operations:
            value = operation["value"]
            large = operation["key"] == "lfsFile"
            files[value["path"]] = self.hub.large_files[value["oid"]] if large else base64.b64decode(value["content"])
        commits.append(Commit(header["value"]["summary"], files))
        oid = f"{len(commits):040x}"
        return self.answer(200, {"commitUrl": f"{self.hub.endpoint}/{repo_id}/commit/{oid}", "commitOid": oid})

    def describe(self, repo_id: str) -> None:
        if not self.hub.commits(repo_id):
            return self.answer(404, {"error": "Repository not found"})
        sha = f"{len(self.hub.commits(repo_id)):040x}"
        files = [{"rfilename": name} for name in self.hub.commits(repo_id)[-1].files]
        return self.answer(200, {"id": repo_id, "sha": sha, "siblings": files, "tags": [], "pipeline_tag": "fill-mask"})

    def list_files(self, repo_id: str) -> None:
        files = self.hub.commits(repo_id)[-1].files.items()
        entries = [{"type": "file", "path": name, "size": len(data), "oid": digest(data)} for name, data in files]
        return self.answer(200, entries)

    def get_file(self, repo_id: str, name: str) -> None:
        commits = self.hub.commits(repo_id)
        content = commits[-1].files.get(name) if commits else None
        if content is None:
            return self.answer(404, {"error": "Entry not found"})
        return self.answer(200, content, {"ETag": f'"{digest(content)}"', "X-Repo-Commit": f"{len(commits):040x}"})


def digest(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()


REPO = r"([^/]+/[^/]+)"
ROUTES = [
    ("GET", "/api/whoami-v2", Handler.describe_user),
    ("POST", "/api/repos/create", Handler.create),
    ("POST", "/api/validate-yaml", Handler.validate),
    ("POST", f"/api/models/{REPO}/preupload/main", Handler.preupload),
    ("POST", rf"/{REPO}\.git/info/lfs/objects/batch", Handler.large_file_actions),
    ("PUT", "/large/([0-9a-f]{64})", Handler.put_large_file),
    ("POST", f"/api/models/{REPO}/commit/main", Handler.commit),
    ("GET", f"/api/(?:models|datasets)/{REPO}(?:/revision/.+)?", Handler.describe),
    ("GET", f"/api/(?:models|datasets)/{REPO}/tree/[^/]+", Handler.list_files),
    ("GET", f"/(?:datasets/)?{REPO}/resolve/[^/]+/(.+)", Handler.get_file),
]
