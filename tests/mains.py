"""The scripts' main() in the process of the tests, if a process of its own would show no more."""

import contextlib
import logging
import signal
import sys
from collections.abc import Iterable, Iterator
from types import ModuleType
from unittest import mock

import pytest
import transformers

from arguments import parse_arguments
from common.console import UserError


def parse(groups: Iterable[type], *words: object, **options) -> tuple:
    with mock.patch.object(sys, "argv", list(map(str, words))):
        return parse_arguments(*groups, **options)


def run_main(module: ModuleType, *flags: object) -> None:
    """Run a script's main() in this process, and restore the process."""
    root, numbers, words = logging.getLogger(), (signal.SIGINT, signal.SIGTERM), [f"./{module.__name__}.py", *flags]
    handlers, level = list(root.handlers), root.level
    verbosity, old_handlers = transformers.utils.logging.get_verbosity(), list(map(signal.getsignal, numbers))
    try:
        with mock.patch.object(sys, "argv", list(map(str, words))):
            groups = getattr(module, "GROUPS", ())
            module.main(*(parse_arguments(*groups) if groups else ()))
    finally:
        root.handlers = handlers
        root.setLevel(level)
        transformers.utils.logging.set_verbosity(verbosity)
        for number, handler in zip(numbers, old_handlers, strict=True):
            signal.signal(number, handler)


@contextlib.contextmanager
def expect_user_error(*words: str) -> Iterator[None]:
    """Expect a UserError, whose text is always one line, with each of these words in it."""
    with pytest.raises(UserError) as error:
        yield
    assert all(word in str(error.value) for word in words), error.value


def refuse(module: ModuleType, *flags: object) -> str:
    """Run a script's main() in this process, and return the text of its UserError."""
    with pytest.raises(UserError) as error:
        run_main(module, *flags)
    return str(error.value)
