"""Sends hostile requests beside valid ones to a real server; exit 1 unless each is answered rightly or with a 4xx.

Each task has a small model on a server of its own, on free ports of the loopback interface. Of four requests that share
a batch, three are hostile: valid ones that were changed in one place or several, JSON that no library writes, pictures
and recordings that are huge, thin or damaged, headers that claim what is not there. Checked are: the status (no 5xx but
those that the docs name), valid JSON, the valid neighbor's answer (that of a quiet run), the time, the worker's peak of
memory, its memory afterwards (within 5 %), and that it lives.

    python scripts/fuzz_requests.py --seed 1 --requests 300
    python scripts/fuzz_requests.py --seed 7 --requests 2000 --task tensor,image_classifier
    python scripts/fuzz_requests.py --seed 7 --requests 100 --task tensor --host kserve --json
    python scripts/fuzz_requests.py --seed 7 --first 1234 --requests 1 --task text_classifier
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parent))
from request_fuzzing.campaign import Campaign
from request_fuzzing.hosts import HOSTS, HostMissingError
from request_fuzzing.subjects import SUBJECTS

console = Console(stderr=True)


def main(
    seed: Annotated[int, typer.Option(help="Request n of a seed is the same everywhere.")] = 1,
    requests: Annotated[int, typer.Option(help="How many hostile requests, over all tasks.")] = 300,
    first: Annotated[int, typer.Option(help="Number of the first request of each task.")] = 0,
    task: Annotated[str, typer.Option(help=f"Any of {', '.join(SUBJECTS)}, by comma; all by default.")] = "",
    host: Annotated[str, typer.Option(help=f"One of {', '.join(HOSTS)}.")] = "torchserve",
    seconds: Annotated[float, typer.Option(help="Send no further request after this time; 0 is no limit.")] = 0.0,
    limit: Annotated[float, typer.Option(help="Seconds for one request; what takes longer is a failure.")] = 20.0,
    peak: Annotated[float, typer.Option(help="Megabytes that four requests together may take for a moment.")] = 1500.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print what was found as JSON.")] = False,
) -> None:
    """Sends hostile requests beside valid ones to a real server.

    Examples: fuzz_requests.py --seed 1 --requests 300; fuzz_requests.py --seed 7 --requests 2000 --task tensor;
    fuzz_requests.py --seed 7 --requests 100 --task tensor --host kserve --json
    """
    tasks = [name for name in task.split(",") if name] or list(SUBJECTS)
    if unknown := [name for name in tasks if name not in SUBJECTS]:
        raise typer.BadParameter(f"{unknown[0]!r} is none of {', '.join(SUBJECTS)}", param_hint="--task")
    if host not in HOSTS:
        raise typer.BadParameter(f"{host!r} is none of {', '.join(HOSTS)}", param_hint="--host")
    campaign = Campaign(seed, host, HOSTS[host], limit, peak, seconds, console)
    try:
        campaign.run(tasks, first, requests)
    except HostMissingError as error:
        raise typer.BadParameter(str(error), param_hint="--host") from None
    _print(campaign)
    if as_json:
        typer.echo(json.dumps(campaign.to_dict()))
    raise typer.Exit(1 if campaign.failures else 0)


def _print(campaign: Campaign) -> None:
    table = Table("status", "hostile requests")
    for status, count in sorted(campaign.statuses.items()):
        table.add_row(status, str(count))
    console.print(table)
    console.print(
        f"{campaign.requests} hostile requests on {campaign.host}, {len(campaign.failures)} failures; the slowest took "
        f"{campaign.slowest:.1f} s, the largest peak was {campaign.largest:.0f} MB"
    )


if __name__ == "__main__":
    typer.run(main)
