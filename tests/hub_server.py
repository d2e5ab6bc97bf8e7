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
import urllib.parse
from dataclasses import dataclass
from typing import NamedTuple

import yaml
from file_server import Handler, LocalServer

TOKEN = "hf_right"
MESSAGES = {
    401: "Invalid credentials in Authorization header",
    403: "You have exceeded your storage quota",
    404: "Not found",
    500: "Internal Error - We're working hard to fix this as soon as possible!",
}


@dataclass
class Fault:
    """The answer to some requests: a status, "cut" in the middle of the body, or "hang" until the server is left."""

    method: str
    path: str  # regular expression
    kind: int | str
    times: int
    met: int = 0


class Commit(NamedTuple):
    message: str
    files: dict[str, bytes]


class HubServer(LocalServer):
    """Holds repositories by name, each a list of commits (the newest last), and all requests as (method, path)."""

    def __init__(self):
        super().__init__(HubHandler)
        self.endpoint = self.url
        self.repositories: dict[str, list[Commit]] = {}
        self.large_files: dict[str, bytes] = {}
        self.requests: list[tuple[str, str, dict]] = []
        self.faults: list[Fault] = []

    def fail(self, method: str, path: str, kind: int | str, times: int = 1) -> Fault:
        self.faults.append(Fault(method, path, kind, times))
        return self.faults[-1]

    def commits(self, repo_id: str) -> list[Commit]:
        return self.repositories.get(repo_id, [])

    def find_files(self, repo_id: str) -> dict[str, bytes]:
        return self.commits(repo_id)[-1].files if self.commits(repo_id) else {}


class HubHandler(Handler):
    def handle_request(self) -> None:
        hub, path = self.server, urllib.parse.unquote(urllib.parse.urlsplit(self.path).path)
        hub.requests.append((self.command, path, dict(self.headers)))
        length = int(self.headers.get("Content-Length", 0))
        faults = [it for it in hub.faults if it.met < it.times and it.method == self.command]
        fault = next((it for it in faults if re.search(it.path, path)), Fault("", "", 0, 0))
        fault.met += 1
        if fault.kind == "cut":
            self.rfile.read(length // 2)
            # with a reset, as a router that has forgotten the connection
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.connection.close()
            self.close_connection = True
        elif fault.kind == "hang":
            hub.left.wait()
        else:
            self.body = self.rfile.read(length)
            status, *answer = self.choose_answer(path) if fault.kind == 0 else (fault.kind,)
            self.answer(status, *(answer or [{"error": MESSAGES[status]}]))

    do_GET = do_HEAD = do_POST = do_PUT = handle_request

    def choose_answer(self, path: str) -> tuple:
        """Return the status, and unless it is an error the content and maybe headers."""
        # addresses that contain a digest need no token, like the signed ones of the Hub's storage
        is_open = self.command in ("GET", "HEAD") or path.startswith("/large/")
        if (not is_open or "whoami" in path) and self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return (401,)
        for method, pattern, act in ROUTES:
            if method == self.command.replace("HEAD", "GET") and (match := re.fullmatch(pattern, path)):
                return act(self, self.server, *match.groups())
        return (404,)

    def answer(self, status: int, value: object, headers: dict | None = None) -> None:
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

    def describe_user(self, hub: HubServer) -> tuple:
        return 200, {"name": "me", "auth": {"accessToken": {"displayName": "mine", "role": "write"}}}

    def create(self, hub: HubServer) -> tuple:
        wanted = json.loads(self.body)
        repo_id = f"{wanted['organization']}/{wanted['name']}"
        status = 409 if repo_id in hub.repositories else 200
        hub.repositories.setdefault(repo_id, [])
        return status, {"url": f"{hub.endpoint}/{repo_id}"}

    def validate(self, hub: HubServer) -> tuple:
        header = re.match(r"---\n(.*?)\n---\n", json.loads(self.body)["content"], re.DOTALL)
        try:
            metadata = yaml.safe_load(header[1]) if header else None
        except yaml.YAMLError as e:
            return 400, {"errors": [{"message": str(e)}], "warnings": []}
        warnings = [] if metadata else [{"message": "empty or missing yaml metadata in repo card"}]
        return 200, {"errors": [], "warnings": warnings}

    def preupload(self, hub: HubServer, repo_id: str) -> tuple:
        if repo_id not in hub.repositories:
            return (404,)
        files = []
        for file in json.loads(self.body)["files"]:
            is_binary, oid = b"\0" in base64.b64decode(file["sample"]) or file["size"] > 10e6, None
            if (known := hub.find_files(repo_id).get(file["path"])) is not None:
                blob = b"blob %d\0" % len(known) + known
                oid = hashlib.sha256(known).hexdigest() if is_binary else hashlib.sha1(blob).hexdigest()
            mode = "lfs" if is_binary else "regular"
            files.append({"path": file["path"], "uploadMode": mode, "shouldIgnore": False, "oid": oid})
        return 200, {"files": files}

    def large_file_actions(self, hub: HubServer, _) -> tuple:
        objects = json.loads(self.body)["objects"]
        for item in objects:
            if item["oid"] not in hub.large_files:
                item["actions"] = {"upload": {"href": f"{hub.endpoint}/large/{item['oid']}"}}
        return 200, {"transfer": "basic", "objects": objects}

    def put_large_file(self, hub: HubServer, oid: str) -> tuple:
        if hashlib.sha256(self.body).hexdigest() != oid:
            return 400, {"error": "the content is not of this digest"}
        hub.large_files[oid] = self.body
        return 200, {}

    def commit(self, hub: HubServer, repo_id: str) -> tuple:
        header, *operations = [json.loads(line) for line in self.body.splitlines()]
        files = dict(hub.find_files(repo_id))
        for operation in operations:
            value, large = operation["value"], operation["key"] == "lfsFile"
            files[value["path"]] = hub.large_files[value["oid"]] if large else base64.b64decode(value["content"])
        hub.repositories[repo_id].append(Commit(header["value"]["summary"], files))
        oid = f"{len(hub.commits(repo_id)):040x}"
        return 200, {"commitUrl": f"{hub.endpoint}/{repo_id}/commit/{oid}", "commitOid": oid}

    def describe(self, hub: HubServer, repo_id: str) -> tuple:
        if not (commits := hub.commits(repo_id)):
            return (404,)
        files, sha = [{"rfilename": name} for name in commits[-1].files], f"{len(commits):040x}"
        return 200, {"id": repo_id, "sha": sha, "siblings": files, "tags": [], "pipeline_tag": "fill-mask"}

    def list_files(self, hub: HubServer, repo_id: str) -> tuple:
        files = hub.find_files(repo_id).items()
        return 200, [{"type": "file", "path": name, "size": len(data), "oid": digest(data)} for name, data in files]

    def get_file(self, hub: HubServer, repo_id: str, name: str) -> tuple:
        if (content := hub.find_files(repo_id).get(name)) is None:
            return (404,)
        commit = f"{len(hub.commits(repo_id)):040x}"
        return 200, content, {"ETag": f'"{digest(content)}"', "X-Repo-Commit": commit}


def digest(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()


REPO = r"([^/]+/[^/]+)"
ROUTES = [
    ("GET", "/api/whoami-v2", HubHandler.describe_user),
    ("POST", "/api/repos/create", HubHandler.create),
    ("POST", "/api/validate-yaml", HubHandler.validate),
    ("POST", f"/api/models/{REPO}/preupload/main", HubHandler.preupload),
    ("POST", rf"/{REPO}\.git/info/lfs/objects/batch", HubHandler.large_file_actions),
    ("PUT", "/large/([0-9a-f]{64})", HubHandler.put_large_file),
    ("POST", f"/api/models/{REPO}/commit/main", HubHandler.commit),
    ("GET", f"/api/(?:models|datasets)/{REPO}(?:/revision/.+)?", HubHandler.describe),
    ("GET", f"/api/(?:models|datasets)/{REPO}/tree/[^/]+", HubHandler.list_files),
    ("GET", f"/(?:datasets/)?{REPO}/resolve/[^/]+/(.+)", HubHandler.get_file),
]
