"""Upload of checkpoints to the Hugging Face Hub, each in one commit, with retries."""

import contextlib
import json
import logging
import os
import re
import sys
import threading
import time
from pathlib import Path

import huggingface_hub

from common.console import UserError
from common.files import read_json, write_file
from training.checkpoint import find_checkpoints

logger = logging.getLogger("hub")

RETRY_PERIOD = 600.0  # seconds between two attempts to upload, unless --upload_interval is shorter
NETWORK_TIMEOUT = 60.0  # seconds to wait for data from the Hub
#: advice by the status code of the Hub's answer
CURES = {
    401: "the token is invalid: set HF_TOKEN to a token that may write, or run `hf auth login`",
    403: "the token may not write there, or the quota is used up: check both in the Hub's settings",
    404: "the user or organization does not exist, or the token may not see it: check --repo_url",
    413: "the checkpoint is too large for the quota: free some space there",
    429: "too many requests: raise --upload_interval",
}


class Publisher:
    """A publisher that uploads the newest checkpoint of a folder in its own thread, at most once per interval.

    A failure is retried, and logged as a warning. `uploaded.json` records the last upload, so that a restart does not
    repeat it and keeps to the interval.
    """

    def __init__(self, repo_id: str, interval: float, folder: Path):
        self.repo_id = repo_id
        self.interval = interval
        self.folder = folder
        self.record = folder / "uploaded.json"
        self.thread = None
        self.uploaded = {}
        with contextlib.suppress(OSError):
            if (record := read_json(self.record)).get("repo_id") == repo_id:
                self.uploaded = record
        # at most the interval, because the clock may have been set back
        wait = self.uploaded.get("time", 0) + interval - time.time()
        self.next_upload = time.monotonic() + min(max(wait, 0), interval)
        # huggingface_hub would wait forever
        client = huggingface_hub.get_session()
        huggingface_hub.set_client_factory(
            lambda: type(client)(event_hooks=client.event_hooks, follow_redirects=True, timeout=NETWORK_TIMEOUT)
        )
        # it would log each attempt, with addresses that are secret
        logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
        huggingface_hub.utils.disable_progress_bars()

    def find_new(self) -> Path | None:
        """Return the newest checkpoint, or None if it is on the Hub."""
        newest = find_checkpoints(self.folder)[-1:]
        return newest[0] if newest and read_stamp(newest[0]).get("time") != self.uploaded.get("checkpoint") else None

    def step(self) -> None:
        """Start an upload that is due."""
        if time.monotonic() < self.next_upload or (self.thread and self.thread.is_alive()):
            return
        if folder := self.find_new():
            self.thread = threading.Thread(target=self.upload, args=(folder,), name="upload", daemon=True)
            self.thread.start()

    def upload(self, folder: Path) -> None:
        """Upload one checkpoint and record it, in a thread; if that fails, warn and schedule a retry."""
        stamp = read_stamp(folder)
        start = time.monotonic()
        try:
            url = upload_checkpoint(folder, self.repo_id)
            self.next_upload = start + self.interval
            logger.info(f"uploaded {folder.name} to {url} in {time.monotonic() - start:.1f} s")
            shown = {"epoch": stamp["epoch"], "time": time.time()}
            self.uploaded = {"repo_id": self.repo_id, "checkpoint": stamp["time"], **shown}
            write_file(self.record, json.dumps(self.uploaded))
        except Exception as e:  # client, network and server raise many types, and none may stop the run
            wait = min(self.interval, RETRY_PERIOD)
            self.next_upload = time.monotonic() + wait
            logger.warning(f"{folder.name} is not on the Hub: {explain_failure(e)}; retrying in {wait:g} s")


def read_stamp(folder: Path) -> dict:
    """Return the content of a checkpoint's training_state.json, or an empty dictionary if it is invalid."""
    with contextlib.suppress(OSError):
        return read_json(folder / "training_state.json")
    return {}


def find_token() -> str | None:
    """Return the Hub's token from the environment or from `hf auth login`."""
    return os.environ.get("HF_TOKEN") or os.environ.get("HF_USER_ACCESS_TOKEN") or huggingface_hub.get_token()


def require_token() -> None:
    """If there is no token, ask for one like `hf auth login`, or raise a UserError without a terminal."""
    if find_token() is not None:
        return
    if not sys.stdin.isatty():
        raise UserError("--repo_url needs a token that may write: set HF_TOKEN, or run `hf auth login` once")
    print("--repo_url needs a token of the Hugging Face Hub that may write.", flush=True)
    errors = huggingface_hub.errors
    try:
        huggingface_hub.login()
    except (errors.HTTPError, errors.DeviceCodeError, OSError, ValueError, EOFError) as e:
        raise UserError(
            f"cannot log in to the Hugging Face Hub ({explain_failure(e)}): try again, or set HF_TOKEN"
        ) from e


def upload_checkpoint(folder: Path, repo_id: str) -> str:
    """Upload all files of an archive's checkpoint in one commit, and return its address. Errors are not caught."""
    stamp = read_stamp(folder)
    api = huggingface_hub.HfApi(token=find_token())
    if "settings" not in stamp:
        raise ValueError(f"{folder} does not belong to an archive: a trainer's checkpoint holds its whole command line")
    with contextlib.ExitStack() as files:
        operations = []
        for path in sorted(path for path in folder.rglob("*") if path.is_file()):
            # Open files remain readable if the checkpoint is removed, and are uploaded by plain HTTP. Xet, which file
            # names would use, has no timeout, and would save nothing because all weights are new each time.
            content = files.enter_context(open(path, "rb"))
            operations.append(huggingface_hub.CommitOperationAdd(path.relative_to(folder).as_posix(), content))
        api.create_repo(repo_id, exist_ok=True)
        message = f"epoch {stamp['epoch']}, loss {stamp['loss']:.4f}"
        # not upload_folder, which may use several commits: a download between them would mix two epochs
        return api.create_commit(repo_id, operations, commit_message=message).commit_url


def explain_failure(error: BaseException) -> str:
    """Return one line with the reason of a failed upload and its fix, without the token."""
    cause = error
    while getattr(cause, "response", None) is None and cause.__cause__ is not None:
        cause = cause.__cause__
    response = getattr(cause, "response", None)
    if response is None:  # no answer, or a file that cannot be read
        return re.sub(r"hf_\w+", "hf_***", f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")
    # only the server's message, because the client's contains addresses with permission to upload
    text = " ".join((getattr(cause, "server_message", None) or response.reason_phrase).split())[:300]
    cure = CURES.get(response.status_code)
    return f"HTTP {response.status_code} ({text})" + (f", {cure}" if cure else "")
