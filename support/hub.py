"""transformers and the Hugging Face Hub: one line where they fail, and nothing that nobody asked for."""

import contextlib
import functools
import os
import urllib.error
import urllib.request

from support.console import UserError


@contextlib.contextmanager
def hub(what: str, alternative: str):
    """Load something from the Hugging Face Hub or its cache; without a connection, one line instead of a minute of
    retries and a traceback."""
    from huggingface_hub import constants

    before = constants.HF_HUB_OFFLINE, os.environ.get("HF_HUB_OFFLINE", "0")
    if not before[0] and not is_reachable(constants.ENDPOINT):
        constants.HF_HUB_OFFLINE, os.environ["HF_HUB_OFFLINE"] = True, "1"  # the cache may have it
    try:
        yield
    except (OSError, ValueError) as e:
        reason = "no connection" if constants.HF_HUB_OFFLINE else str(e).split("\n")[0]
        raise UserError(
            f"cannot load {what} from the Hugging Face Hub ({reason}): fix that, or use {alternative}"
        ) from e
    finally:
        # who uploads later finds out for itself
        constants.HF_HUB_OFFLINE, os.environ["HF_HUB_OFFLINE"] = before


@functools.cache
def is_reachable(url: str) -> bool:
    """Whether a server answers. Asked once: where there is no connection, it may take seconds each time."""
    try:
        urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=10).close()
    except urllib.error.HTTPError:
        pass  # it answered
    except OSError:
        return False
    return True


@contextlib.contextmanager
def calm_transformers():
    """Without its progress bars and its table of weights that were not found."""
    from transformers.utils import logging as log

    verbosity = log.get_verbosity()
    log.set_verbosity_error()
    log.disable_progress_bar()
    try:
        yield
    finally:
        log.set_verbosity(verbosity)
