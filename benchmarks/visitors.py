"""Measure the load of a status page: slow visitors, which send a byte a second, and open pages.

    python benchmarks/visitors.py --port 8080 --pid PID_OF_THE_MONITOR --slow 500 --pages 200

The run must be on this machine; each visitor has its own address in 127.0.0.0/8, as on Linux. It prints the answers and
their times, the CPU time of the monitor with and without visitors, and the length of an epoch in both cases.
"""

import argparse
import asyncio
import contextlib
import json
import statistics
import time
from collections import Counter

import psutil

PERIOD = 5.0  # seconds between two requests of an open page, as in monitoring/page.html


async def visit(number: int, port: int):
    source = (f"127.{1 + number // 60_000}.{number // 250 % 250}.{1 + number % 250}", 0)
    return await asyncio.open_connection("127.0.0.1", port, local_addr=source)


async def hold(number: int, port: int, counts: Counter) -> None:
    """Send a byte a second until the server hangs up, then connect again."""
    while True:
        with contextlib.suppress(OSError):
            reader, writer = await visit(number, port)
            counts["slow"] += 1
            with contextlib.closing(writer):
                while not reader.at_eof():
                    writer.write(b"G")
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(reader.read(1), 1.0)
        await asyncio.sleep(1.0)


async def ask(number: int, port: int, path: str, counts: Counter, seconds: list[float]) -> bytes:
    start = time.monotonic()
    reader, writer = await visit(number, port)
    with contextlib.closing(writer):
        writer.write(f"GET {path} HTTP/1.1\r\nHost: a\r\nAccept: text/html\r\nConnection: close\r\n\r\n".encode())
        answer = await reader.read()
    counts["visits"] += 1
    counts["bytes"] += len(answer)
    seconds.append(time.monotonic() - start)
    return answer.partition(b"\r\n\r\n")[2]


async def show_page(number: int, port: int, counts: Counter, seconds: list[float]) -> None:
    """Send the requests of page.html."""
    await asyncio.sleep(PERIOD * (number % 100) / 100)
    epoch, path = -1, "/"
    while True:
        try:
            if path == "/":
                await ask(number, port, path, counts, seconds)
            path = "/status.json"
            status = json.loads(await ask(number, port, path, counts, seconds))
            if status["epoch"] != epoch:
                await ask(number, port, f"/history.json?since={epoch}", counts, seconds)
                epoch = status["epoch"]
        except (OSError, ValueError):
            counts["failed"] += 1
        await asyncio.sleep(PERIOD)


async def measure(args: argparse.Namespace, slow: int, pages: int) -> None:
    monitor, counts, seconds = psutil.Process(args.pid), Counter(), []
    tasks = [asyncio.create_task(hold(number, args.port, counts)) for number in range(slow)]
    tasks += [asyncio.create_task(show_page(slow + number, args.port, counts, seconds)) for number in range(pages)]
    await asyncio.sleep(PERIOD)
    counts.clear(), seconds.clear()
    before = json.loads(await ask(99_999, args.port, "/status.json", Counter(), []))
    cpu, start = sum(monitor.cpu_times()[:2]), time.monotonic()
    await asyncio.sleep(args.seconds)
    cpu, took = sum(monitor.cpu_times()[:2]) - cpu, time.monotonic() - start
    after = json.loads(await ask(99_999, args.port, "/status.json", Counter(), []))
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    epochs = (after["epoch"] or 0) - (before["epoch"] or 0)
    visits = max(1, counts["visits"])
    print(
        f"{slow} slow visitors, {pages} pages: the monitor's CPU time {cpu / took:.1%} of a core; "
        f"{counts['visits']} visits in {took:.0f} s, {counts['failed']} failed, "
        f"{counts['bytes'] / visits:,.0f} bytes each, "
        f"median {1000 * statistics.median(seconds or [0]):.1f} ms; {counts['slow']} slow connections; "
        f"{epochs} epochs, {(after['time'] - before['time']) / max(1, epochs):.2f} s each",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, required=True, help="--status_port of the monitor")
    parser.add_argument("--pid", type=int, required=True, help="process id of the monitor")
    parser.add_argument("--slow", type=int, default=500, help="visitors that send a byte a second")
    parser.add_argument("--pages", type=int, default=200, help="open pages")
    parser.add_argument("--seconds", type=float, default=30.0, help="time of each measurement")
    args = parser.parse_args()
    for slow, pages in ((0, 0), (0, args.pages), (args.slow, args.pages), (0, 0)):
        asyncio.run(measure(args, slow, pages))


if __name__ == "__main__":
    main()
