"""Say what a stage did: in the flow run's log, and to whoever watches."""

from collections.abc import Iterable

from prefect.logging import get_run_logger
from prefect.runtime import flow_run

from flows.shown.progress import display


def tell(text: str) -> None:
    """A line in both places."""
    get_run_logger().info("%s", text)
    display().line(text)


def tell_idle(lines: Iterable[str]) -> None:
    """Settings without effect; in the log of the outermost flow run alone. A command has shown them before."""
    if flow_run.parent_flow_run_id is None:
        for line in lines:
            get_run_logger().warning("%s", line)


def tell_command(command: str) -> None:
    """How to do the same without Prefect; in the log alone."""
    get_run_logger().info("The same without Prefect: %s", command)
