"""Access to transformers and the Hugging Face Hub with one-line errors and without their progress bars."""

import contextlib
import functools
import os
import re

from common.console import UserError, first_line


@contextlib.contextmanager
def hub(what: str, alternative: str):
    """Turn errors of a load from the Hub into a UserError; without a connection, use the cache and do not retry."""
    from huggingface_hub import constants

    was_offline = constants.HF_HUB_OFFLINE  # transformers and datasets read it too
    if not was_offline and not is_reachable(constants.ENDPOINT):
        constants.HF_HUB_OFFLINE = True
    try:
        yield
    except (OSError, ValueError) as e:
        reason = "no connection" if constants.HF_HUB_OFFLINE else first_line(e)
        raise UserError(
            f"cannot load {what} from the Hugging Face Hub ({reason}): fix that, or use {alternative}"
        ) from e
    finally:
        # a later upload checks the connection itself
        constants.HF_HUB_OFFLINE = was_offline


@functools.cache
def is_reachable(url: str) -> bool:
    """Return whether a server answers; cached, because without a connection the request may take seconds."""
    import httpx2  # a slow import

    try:
        httpx2.head(url, timeout=10)
    except (httpx2.HTTPError, httpx2.InvalidURL, OSError, ValueError, ImportError):
        return False  # no server, a wrong answer, or an invalid HF_ENDPOINT or proxy
    return True


@contextlib.contextmanager
def calm_transformers():
    """Silence the progress bars of transformers, and its table of missing weights."""
    from transformers.utils import logging as log

    verbosity = log.get_verbosity()
    log.set_verbosity_error()
    log.disable_progress_bar()
    try:
        yield
    finally:
        log.set_verbosity(verbosity)


def make_repo_id(text: str) -> str:
    """Return `ORG/NAME` for this text, a repository's address, or NAME of the organization HF_ORGANIZATION_NAME."""
    # git guides use https://USER:TOKEN@huggingface.co/...; the token is dropped here
    repo_id = re.sub(r"^\w+://[^/]*/", "", text).strip("/").removesuffix(".git")
    organization = os.environ.get("HF_ORGANIZATION_NAME")
    if "/" not in repo_id and organization:
        repo_id = f"{organization}/{repo_id}"
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", repo_id, re.ASCII):
        raise UserError(f"--repo_url {repo_id} is not a repository: give ORG/NAME, or NAME and HF_ORGANIZATION_NAME")
    return repo_id
