"""Draws docs/watch.svg: ``python -m tools.watch_picture``.

Serves a small model on the CPU to conversations that are more than device and host memory hold, and
saves the last page that ``simple-offload watch`` shows meanwhile.
"""

import asyncio
import io
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import takewhile
from tempfile import TemporaryDirectory

from rich.console import Console

from examples.serve_bench.__main__ import parse
from examples.serve_bench.client import Start
from examples.serve_bench.play import play_over_http
from simple_offload.cli.screen import page
from simple_offload.cli.watch import follow
from tools.set_up import ROOT

PICTURE = ROOT / "docs" / "watch.svg"
CLIENTS, ACTIVE = 1, 5
HOST_BYTES = 64 << 20
PORT = 8000
SECONDS = 5.0
"""Between two pages."""
COLUMNS = 98


def main() -> None:
    """Raises RunFailed if the server does not start, or if PORT is in use."""
    with TemporaryDirectory() as folder:
        bench, _ = parse(["--contenders", "ours", "--port", str(PORT), "--output", folder])
        bench.plan = replace(bench.plan, clients=CLIENTS, active=ACTIVE, host_bytes=HOST_BYTES)
        with bench.serve(print) as (server, _), ThreadPoolExecutor(1) as clients:
            work = play_over_http(server, bench.plan, Start(), print)
            played = clients.submit(asyncio.run, work)
            views = follow(f"http://localhost:{PORT}/metrics", SECONDS)
            *_, last = takewhile(lambda _: not played.done(), views)
            played.result()
    console = Console(record=True, force_terminal=True, width=COLUMNS, file=io.StringIO())
    console.print(page(last))
    console.save_svg(
        str(PICTURE), title=f"simple-offload watch localhost:{PORT}", unique_id="watch"
    )


if __name__ == "__main__":
    main()
