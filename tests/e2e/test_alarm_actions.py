"""Each alarm with each of its actions, from its real cause: events, journal, skipped updates and saved steps."""

from pathlib import Path
from typing import Any, get_args

import pytest

from rlcore.config.run import AlarmConfig
from rlcore.errors import AlarmError, NonFiniteError, UnscoredError
from rlcore.run.watchdog import failure_from
from rlcore.tracking.journal import load_journal, read_journal
from rlcore.trainer.metrics import SKIPPED
from tests.helpers.harmful import HARM
from tests.helpers.running import assert_same
from tests.helpers.sessions import Event, elsewhere, run_to_the_end, session_of, verified_steps
from tests.helpers.small_run import prepare

pytestmark = pytest.mark.slow

STEPS = 2
OVERRIDES = (
    f"trainer.total_steps={STEPS}", "trainer.steps_per_chunk=1", "validation.every_steps=0",
    "validation.samples_per_problem=1", "validation.greedy=false",
    "tracking.enabled=false",
    "alarms.grad_norm=off", "alarms.entropy=off", "alarms.equal_scores=off",
)  # fmt: skip
COLD, SHORT = "rollout.sampling.temperature=1e-6", "warm_start.max_steps=20"
CAUSES: dict[str, tuple[str, ...]] = {
    "non_finite": ("algo.policy_loss=tests.trainer.broken_loss:log_of_advantage",),
    "grad_norm": ("algo.policy_loss=tests.trainer.broken_loss:steep",),
    "entropy": (COLD, SHORT),
    "equal_scores": (COLD, SHORT),
    "kl": ("algo.kl.where=loss", "optim.lr=0.05", "alarms.kl_above=0.5"),
    "length": ("rollout.max_response_tokens=1", SHORT),
}
CASES = [
    (alarm, action)
    for alarm in CAUSES
    for action in get_args(AlarmConfig.model_fields[alarm].annotation)
    if action != "off"
]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("alarms")


def test_every_alarm_has_a_cause_and_every_action_a_case() -> None:
    named = {name for name, field in AlarmConfig.model_fields.items() if "tell" in get_args(field.annotation)}
    assert named | {"non_finite"} == CAUSES.keys()
    assert len(CASES) == 15


def with_marks(alarm: str, action: str) -> Any:
    """Mark every other case as slow. The remaining cases include each cause and each action."""
    actions = ("tell", "skip", "stop")
    is_first = (list(CAUSES).index(alarm) + actions.index(action)) % 2 == 0
    return pytest.param(alarm, action, marks=() if is_first else pytest.mark.lengthy)


@pytest.mark.parametrize(("alarm", "action"), [with_marks(*case) for case in CASES])
def test_what_is_done(root: Path, alarm: str, action: str) -> None:
    kept = [word for word in OVERRIDES if not word.startswith(f"alarms.{alarm}=")]
    run = prepare(root, *kept, *CAUSES[alarm], f"alarms.{alarm}={action}", f"run_id={alarm}-{action}")
    heard: list[Event] = []
    if action == "stop":
        with pytest.raises((AlarmError, NonFiniteError), match=r"alarms\.|not finite") as caught:
            run_to_the_end(run, heard.append)
        assert str(failure_from(caught.value, "", 0).kind) == "numbers"
    else:
        run_to_the_end(run, heard.append)
        assert verified_steps(run)[-1] == STEPS

    reported = [event for event in heard if event["event"] == "alarm"]
    recorded = [event for event in load_journal(run.layout.journal).events if event.name == "alarm"]
    if action == "stop" and alarm == "non_finite":
        assert list(run.layout.failures.glob("step-000001*.safetensors")), "the batch that it came from"
        return
    assert reported
    assert [event.data["text"] for event in recorded] == [event["text"] for event in reported]
    assert {(event["alarm"], event["action"]) for event in reported} == {(alarm, action)}
    skipped = [record.metrics.get(SKIPPED, 0.0) for record in read_journal(run.layout.journal)]
    assert any(skipped) == (action == "skip")
    if action == "stop":
        assert verified_steps(run)[-1] == reported[0]["step"], "the step that raised it is saved"
        resumed = prepare(root, *kept, *CAUSES[alarm], f"alarms.{alarm}=off", f"run_id={alarm}-{action}")
        run_to_the_end(resumed)
        assert verified_steps(resumed)[-1] == STEPS


def test_a_run_resumes_once_its_broken_scorer_is_repaired(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(HARM, str(tmp_path))
    broken = tmp_path / "broken"
    words = (
        "trainer.total_steps=4", "trainer.steps_per_chunk=4", "validation.every_steps=0", "validation.max_problems=8",
        "tracking.enabled=false", "warm_start.enabled=false", "data.scorer=tests.helpers.harmful:fails_while_broken",
    )  # fmt: skip
    calm = prepare(tmp_path / "calm", *words)
    run_to_the_end(calm)

    def breaks(event: Event) -> None:
        if event["event"] == "progress" and event["step"] == 2:
            broken.touch()

    run = elsewhere(calm, tmp_path / "run", *words)
    for _ in range(2):
        with session_of(run, breaks) as session, pytest.raises(UnscoredError) as caught:
            session.train(4)
        for words in (
            "step 3: ", "tests.helpers.harmful:fails_while_broken", "ValueError: the scorer is broken",
            "step 2 is saved", f"--fork {run.layout.run_dir.name}@2",
        ):  # fmt: skip
            assert words in str(caught.value)
        assert verified_steps(run) == [2]
    broken.unlink()
    run_to_the_end(run)
    assert_same(run, calm)

    broken.touch()
    with session_of(run) as session, pytest.raises(UnscoredError, match=r"validation after: .*96"):
        session.validate("last", "after")
    assert not (run.layout.validation / "after.json").exists()
    assert not list(run.layout.answers.glob("*after*"))
    broken.unlink()
    with session_of(run) as session:
        assert session.validate("last", "after")["summary"]
