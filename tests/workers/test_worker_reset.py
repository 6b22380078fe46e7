"""Models of step 0 again, in a worker that lives on."""

import weakref
from pathlib import Path
from typing import Any

import pytest

from rlcore.runtime.local import LocalGroup
from rlcore.workers import worker as module
from rlcore.workers.worker import Worker
from tests.helpers.small_run import prepare


def test_the_old_models_are_gone_before_new_ones_are_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = prepare(tmp_path)
    group = LocalGroup(run.config, str(run.model_directory))
    old = [weakref.ref(group.each(lambda worker: worker.actor.model)[0])]
    first = {name: tensor.clone() for name, tensor in old[0]().state_dict().items()}  # type: ignore[union-attr]
    alive: list[bool] = []
    sleeps: list[int] = []
    (engine,) = group.each(lambda worker: worker.engine)
    monkeypatch.setattr(engine, "sleep", lambda: sleeps.append(len(alive)))

    class Watched(module.Actor):
        def __init__(self, *args: Any) -> None:
            alive.append(old[0]() is not None)
            super().__init__(*args)

    monkeypatch.setattr(module, "Actor", Watched)
    group.each(Worker.reset)
    assert alive == [False]
    assert sleeps == [0], "an engine that is awake holds the memory that they need"
    again = group.each(lambda worker: worker.actor.model)[0].state_dict()
    assert all((again[name] == tensor).all() for name, tensor in first.items())
    group.close()
