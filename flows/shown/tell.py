"""Say what a stage did: in the flow run's log, and to whoever watches."""

from prefect.logging import get_run_logger

from flows.shown.progress import display


def tell(text: str) -> None:
    """A line in both places."""
    get_run_logger().info("%s", text)
    display().line(text)


def tell_command(command: str) -> None:
    """How to do the same without Prefect; in the log alone."""
    get_run_logger().info("The same without Prefect: %s", command)
