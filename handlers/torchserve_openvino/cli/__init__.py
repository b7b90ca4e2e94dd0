"""The command `torchserve-openvino`. Nothing here imports torch or OpenVINO until a command needs it."""

import sys

import typer

from torchserve_openvino.cli.cache import cache
from torchserve_openvino.cli.check import check
from torchserve_openvino.cli.console import outlive_deaths
from torchserve_openvino.cli.doctor import doctor
from torchserve_openvino.cli.frontend import frontend
from torchserve_openvino.cli.handler_path import handler_path
from torchserve_openvino.cli.init import init
from torchserve_openvino.cli.measuring.bench import bench
from torchserve_openvino.cli.measuring.tune import tune
from torchserve_openvino.cli.package import package
from torchserve_openvino.cli.ray import ray
from torchserve_openvino.cli.report import report
from torchserve_openvino.cli.selftest import selftest
from torchserve_openvino.cli.serve import serve
from torchserve_openvino.cli.tasks import tasks
from torchserve_openvino.cli.why import ready, why
from torchserve_openvino.report.quiet import quiet_libraries

app = typer.Typer(
    name="torchserve-openvino",
    help="Serve PyTorch models on OpenVINO: set up, check, package, diagnose, read reports, manage the cache.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(cache, name="cache")
app.add_typer(ray, name="ray")
app.command("bench")(bench)
app.command("check")(check)
app.command("doctor")(doctor)
app.command("frontend")(frontend)
app.command("handler-path")(handler_path)
app.command("init")(init)
app.command("package")(package)
app.command("ready")(ready)
app.command("report")(report)
app.command("selftest")(selftest)
app.command("serve")(serve)
app.command("tasks")(tasks)
app.command("tune")(tune)
app.command("why")(why)


def main() -> None:
    """Entry point of the console script."""
    if sys.argv[1:2] == ["doctor"] and not {"-h", "--help"} & set(sys.argv):
        outlive_deaths()
    quiet_libraries()
    app()


__all__ = ["app", "main"]
