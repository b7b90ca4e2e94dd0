"""`torchserve-openvino report MODEL_OR_URL`."""

from typing import Annotated

import typer

from torchserve_openvino.cli.console import fail, print_json, stdout
from torchserve_openvino.cli.reports.tables import DEFAULT_MANAGEMENT, Management, Token


def report(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL_OR_URL",
            help="A model's name or NAME/VERSION, its URL at the management API, or a saved report.",
            show_default=False,
        ),
    ],
    management: Management = DEFAULT_MANAGEMENT,
    token: Token = None,
    timeout: Annotated[
        float, typer.Option(help="Seconds to wait for a worker that has saved no report on this machine.", min=0.1)
    ] = 10.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Print the compile report of a served model: what ran on OpenVINO, what fell back and why.

    While a worker is busy, loads or has ended, its last report is shown: workers
    on this machine save it.

    Exit code 1 if the model is not served, or served by another handler.

    Examples:

        torchserve-openvino report efficientnet

        torchserve-openvino report efficientnet --url http://127.0.0.1:9000

        torchserve-openvino report efficientnet --json > report.json

        torchserve-openvino report report.json
    """
    from torchserve_openvino.cli.reports.source import ReportNotFoundError, answering, fetch_or_saved

    try:
        fetched = fetch_or_saved(model, management=answering(management), token=token, timeout=timeout)
    except ReportNotFoundError as error:
        fail(str(error))
    if as_json:
        print_json(fetched.report)
    else:
        from torchserve_openvino.cli.reports.tables import print_report

        console = stdout()
        if fetched.note:
            console.print(fetched.note)
        if "summary" in fetched.report:
            print_report(fetched.report, fetched.title, console)
        else:
            console.print("Nothing was compiled.")
    if not fetched.served:
        raise typer.Exit(1)
