"""Checkpoints on the Hugging Face Hub: uploaded whole, as one commit, or tried again later."""

import contextlib
import hashlib
import json
import logging
import os
import re
import sys
import threading
import time
from pathlib import Path

import huggingface_hub

from machine.checkpoint import find_checkpoints
from support.console import UserError
from support.files import read_json, write_file

logger = logging.getLogger("hub")

RETRY_PERIOD = 600.0  # seconds between two tries to upload, unless --upload_interval is shorter
NETWORK_TIMEOUT = 60.0  # seconds without a byte, or an answer, from the Hub


class Publisher:
    """Uploads the newest checkpoint of a folder, not more often than once in an interval, from a thread of its own.

    What goes wrong is one warning for each new reason, and another try. `uploaded.json` notes the last upload, so that
    a restart neither uploads the same again nor begins to count anew.
    """

    def __init__(self, repo_id: str, interval: float, folder: Path):
        require_token()
        self.repo_id, self.interval, self.folder = repo_id, interval, folder
        self.record = folder / "uploaded.json"
        self.thread = self.last_failure = None
        self.uploaded = {}
        with contextlib.suppress(OSError):
            if (record := read_json(self.record)).get("repo_id") == repo_id:
                self.uploaded = record
        # a clock that was set back must not put it off forever
        wait = self.uploaded.get("time", 0) + interval - time.time()
        self.next_upload = time.monotonic() + min(max(wait, 0), interval)
        bound_waiting_for_the_hub()

    def find_new(self) -> Path | None:
        """The newest checkpoint, unless it is on the Hub."""
        newest = find_checkpoints(self.folder)[-1:]
        return newest[0] if newest and read_stamp(newest[0]).get("time") != self.uploaded.get("checkpoint") else None

    def step(self) -> None:
        """Begin an upload that is due."""
        if time.monotonic() < self.next_upload or (self.thread and self.thread.is_alive()):
            return
        if folder := self.find_new():
            self.thread = threading.Thread(target=self.upload, args=(folder,), name="upload", daemon=True)
            self.thread.start()

    def upload(self, folder: Path) -> None:
        """In a thread: upload one checkpoint, or warn and have it tried again."""
        start = time.monotonic()
        try:
            self.publish(folder)
            self.next_upload, self.last_failure = start + self.interval, None
        except Exception as e:  # whatever client, network and server come up with: the run matters more
            wait, reason = min(self.interval, RETRY_PERIOD), explain_failure(e)
            self.next_upload = time.monotonic() + wait
            if reason != self.last_failure:
                logger.warning(f"{folder.name} is not on the Hub: {reason}. Will try every {wait:g} s until it works")
            self.last_failure = reason

    def publish(self, folder: Path) -> None:
        """Upload one checkpoint and note it; raises whatever goes wrong."""
        stamp, start = read_stamp(folder), time.monotonic()
        url = upload_checkpoint(folder, self.repo_id)
        logger.info(f"Uploaded {folder.name} to {url} in {time.monotonic() - start:.1f} s")
        shown = {"epoch": stamp["epoch"], "time": time.time()}
        self.uploaded = {"repo_id": self.repo_id, "checkpoint": stamp["time"], **shown}
        write_file(self.record, json.dumps(self.uploaded))


def read_stamp(folder: Path) -> dict:
    """What a checkpoint's training_state.json says of it; nothing when that is damaged."""
    with contextlib.suppress(OSError):
        return read_json(folder / "training_state.json")
    return {}


def find_token() -> str | None:
    """The Hub's token from the environment, or that of `hf auth login`."""
    return os.environ.get("HF_TOKEN") or os.environ.get("HF_USER_ACCESS_TOKEN") or huggingface_hub.get_token()


def require_token() -> None:
    """If there is no token, ask for one on a terminal as `hf auth login` does; without a terminal, a UserError."""
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


def bound_waiting_for_the_hub() -> None:
    """Have huggingface_hub, which waits forever, give up a connection that is silent."""
    client = huggingface_hub.get_session()
    huggingface_hub.set_client_factory(
        lambda: type(client)(event_hooks=client.event_hooks, follow_redirects=True, timeout=NETWORK_TIMEOUT)
    )
    # it warns of each of its own tries, with addresses that are not for everybody
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    huggingface_hub.utils.disable_progress_bars()


def upload_checkpoint(folder: Path, repo_id: str) -> str:
    """Make all files of a checkpoint of the archive the repository's, in one commit; raises whatever goes wrong.

    :returns: the commit's address
    """
    stamp = read_stamp(folder)
    if "settings" not in stamp:
        raise ValueError(f"{folder} does not belong to an archive: a trainer's checkpoint holds its whole command line")
    # a peer's id leads to its address: a digest tells as well whether two states are of one peer
    stamp["given_by"] = [hashlib.sha256(donor.encode()).hexdigest()[:8] for donor in stamp["given_by"]]
    api = huggingface_hub.HfApi(token=find_token())
    with contextlib.ExitStack() as files:
        operations = []
        for path in sorted(path for path in folder.rglob("*") if path.is_file()):
            # open files, not names: they stay when the checkpoint is removed meanwhile, and they go over plain HTTP.
            # The Hub's other way, Xet, knows no time limit, and would spare nothing: every weight is new each time
            content = files.enter_context(open(path, "rb"))
            if path.name == "training_state.json":
                content = (json.dumps(stamp, indent=2) + "\n").encode()
            operations.append(huggingface_hub.CommitOperationAdd(path.relative_to(folder).as_posix(), content))
        api.create_repo(repo_id, exist_ok=True)
        message = f"epoch {stamp['epoch']}, loss {stamp['loss']:.4f}"
        # not upload_folder: it may commit in several steps, and who downloads in between gets two epochs mixed
        return api.create_commit(repo_id, operations, commit_message=message).commit_url


def explain_failure(error: BaseException) -> str:
    """One line on why an upload failed, with the cure; without the token."""
    # the base of its HTTP client's errors: versions of huggingface_hub differ in it
    client_error = huggingface_hub.errors.HTTPError
    is_of_network = isinstance(error, client_error)
    while getattr(error, "response", None) is None and error.__cause__ is not None:
        error = error.__cause__
        is_of_network = is_of_network or isinstance(error, client_error)
    response = getattr(error, "response", None)
    if response is None:
        if isinstance(error, OSError) and error.filename is not None:
            return f"{error.filename}: {error.strerror}"
        text = re.sub(r"hf_\w+", "hf_***", " ".join(str(error).split())[:300])
        text = f"{type(error).__name__}: {text}"
        if is_of_network:
            return f"no answer from {huggingface_hub.constants.ENDPOINT} ({text}), check the network"
        return text
    cures = {
        401: "the token is refused: set HF_TOKEN to one that may write (huggingface.co/settings/tokens), or run "
        "`hf auth login`",
        403: "the token may not write there, or the quota is used up: see the Hub's settings of both",
        404: "there is no such user or organization, or the token may not see it: check --repo_url",
        413: "it is too large for the quota: free some space there",
        429: "too many requests: raise --upload_interval",
    }
    cure = cures.get(response.status_code, "the Hub has a problem of its own" if response.status_code >= 500 else "")
    # the server's own words alone: the client's name addresses that let anybody upload
    text = " ".join((getattr(error, "server_message", None) or response.reason_phrase).split())[:300]
    return f"HTTP {response.status_code} ({text}){cure and ', '}{cure}"
