"""`millrace sweep`: mistakes and dry runs."""

import json

import pytest

from tests.flows.conftest import Finished, in_this_process


def test_dry_run_shows_every_run_and_writes_nothing(artifacts_root, capsys):
    def dry(*words: str) -> Finished:
        done = in_this_process(capsys, *words, f"paths.root={artifacts_root}", "--dry-run")
        assert done.code == 0, done.err
        assert list(artifacts_root.iterdir()) == []
        return done

    done = dry("sweep", "debug_grid", "reward.deadline_s=3", "algo.kl.coef=0.001", "--json")
    unused = [line.split()[1].partition("=")[0] for line in done.err.splitlines()]
    assert unused == ["algo.kl.coef", "reward.deadline_s"]
    plan = json.loads(done.out)
    assert len(plan["runs"]) == len({run["run_id"] for run in plan["runs"]}) == 8
    search = dry("sweep", "countdown_optuna").out
    assert "20 points drawn by Optuna, 1 seed(s) each; compared at step 20, " in search
    several = ("seed=1,2,3", "optim.lr=3e-4,1e-3", "tags.note='a,b'")
    runs = json.loads(dry("run", "-m", "experiment=debug", *several, "--json").out)["runs"]
    points = ["optim.lr=0.0003", "optim.lr=0.001"]
    assert [(run["settings"], run["seed"]) for run in runs] == [(point, seed) for point in points for seed in (1, 2, 3)]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("sweep debug_grid optim.lrr=1", "Did you mean optim.lr?"),
        ("run -m seed=1", "--multirun: needs a setting with several values"),
        ("run -m optim.lr=fast,slow", "optim.lr: must be a valid number"),
        ("run -m experiment=debug,countdown_demo", "experiment: cannot be swept"),
        ("run -m seed=1,2 --info", "--info: is for one run"),
    ],
)
def test_mistake_leaves_no_file(artifacts_root, capsys, words, message):
    done = in_this_process(capsys, *words.split(), f"paths.root={artifacts_root}")
    assert (done.code, message in done.err, list(artifacts_root.iterdir())) == (2, True, []), done
