"""The code that settings name: its files, when it counts as unchanged, and the copy with which a run works."""

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlcore import user_code
from rlcore.algos.loss_call import resolve_policy_loss
from rlcore.config import RewardConfig, RunConfig
from rlcore.config.compose import load_config
from rlcore.errors import DataError
from rlcore.rollout.scoring import ScoringPool
from rlcore.rollout.scoring_worker import resolve_scorer
from rlcore.user_code import code_for, code_for_run, code_patch, read_code, run_code

FILES = {
    "their_reward.py": "from their_kit import exact\n\ndef score(response, truth):\n    return exact.of(response)\n",
    "their_kit/__init__.py": "",
    "their_kit/exact.py": "from .weights import WEIGHT\ndef of(text):\n    import their_late\n    return WEIGHT\n",
    "their_kit/weights.py": "WEIGHT = 0.25\n",
    "their_kit/unused.py": "",
    "their_late.py": (
        "import json\nimport numpy\nfrom typing import TYPE_CHECKING\nfrom data.rows import Row\n"
        "if not TYPE_CHECKING:\n    import their_hidden\nWORDS = 'their_words.txt'\n"
    ),
    "their_hidden.py": "",
    "their_words.txt": "one two",
    "numpy.txt": "",
}
COUNTED = ["their_hidden.py", "their_kit/__init__.py", "their_kit/exact.py", "their_kit/weights.py", "their_late.py",
           "their_reward.py", "their_words.txt"]  # fmt: skip


def write(folder: Path) -> Path:
    for name, text in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def forget() -> None:
    for name in [name for name in sys.modules if name.startswith("their_")]:
        del sys.modules[name]
    importlib.invalidate_caches()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.syspath_prepend(str(write(tmp_path / "mine")))
    forget()
    yield tmp_path / "mine"
    forget()


def config_of(**more: str) -> RunConfig:
    return load_config(
        ["experiment=debug", "data.scorer=their_reward:score", *(f"{key}={value}" for key, value in more.items())]
    )


def test_fingerprint_counts_imports_and_named_data(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Installed packages and Millrace do not count."""
    assert [source.name for source in code_for("their_reward:score")] == COUNTED
    assert "their_reward" not in sys.modules, "nothing is executed"
    here = code_for_run(config_of())
    before = here.fingerprint
    for name in FILES:
        text = (folder / name).read_text()
        (folder / name).write_text(f"{text}# changed\n")
        assert (code_for_run(config_of()).fingerprint != before) == (name in COUNTED), name
        (folder / name).write_text(text)
    forget()
    monkeypatch.syspath_prepend(str(write(tmp_path / "another machine")))
    elsewhere = code_for_run(config_of())
    assert {source.path for source in elsewhere.sources.values()}.isdisjoint(
        source.path for source in here.sources.values()
    )
    assert elsewhere.fingerprint == before


def test_code_of_run_has_every_named_function(folder: Path) -> None:
    (folder / "their_loss.py").write_text("from rlcore.algos.losses import ppo_clip as loss\n")
    (folder / "their_advantages.py").write_text("from rlcore.algos.advantages import pass_at_k as mine\n")
    named = {
        "data.scorer": "their_reward:score",
        "data.build": "their_late:build",
        "algo.policy_loss": "their_loss:loss",
        "algo.advantage": "their_advantages:mine",
        "reward.judge.rules": "their_late:score",
    }
    own = [f"{key}={function}" for key, function in named.items()]
    config = load_config(["experiment=debug", "data=custom", *own])
    assert [*code_for_run(config).by_function] == [*named.values()]
    parts = 'data.parts=[{data:{task:countdown}},{data:{task:custom,scorer:"their_reward:score"}}]'
    mixture = load_config(["data=mixture", "model.path=some/model", parts])
    assert {"data.countdown:score", "their_reward:score"} < set(code_for_run(mixture).by_function)


def test_code_of_packages_and_of_missing_modules() -> None:
    names = {source.name for source in code_for("data.countdown:score")}
    assert {"data/countdown.py", "data/arithmetic.py"} < names
    assert all(name.startswith("data/") for name in names)
    # Otherwise a run with tools could not resume after a change of the settings' docstrings.
    names = {source.name for source in code_for("rlcore.rollout.tools:Tools")}
    assert names == {"rlcore/__init__.py", "rlcore/rollout/__init__.py", "rlcore/rollout/tools.py"}
    for function in ("their_nothing:score", "math:floor", "json:loads", "their_reward.inside:score"):
        assert code_for(function) == ()


def test_run_imports_its_copy_after_edit(folder: Path, tmp_path: Path) -> None:
    (folder / "their_loss.py").write_text("def loss():\n    return 'kept'\n")
    loss = {"algo.policy_loss": "their_loss:loss"}
    kept = code_for_run(config_of(**loss))
    assert read_code(tmp_path / "code") is None
    kept.save(tmp_path / "code")
    kept.save(tmp_path / "code")
    assert read_code(tmp_path / "code") == kept
    assert resolve_policy_loss("their_loss:loss")() == "kept"
    (folder / "their_kit/weights.py").write_text("WEIGHT = 0.75\n")
    (folder / "their_loss.py").write_text("def loss():\n    return 'edited'\n")
    with run_code(tmp_path / "code"):
        assert code_for_run(config_of(**loss)) == kept
        assert resolve_policy_loss("their_loss:loss")() == "kept"
        assert str(tmp_path / "code") in str(sys.modules["their_loss"].__file__)
        for num_processes in (0, 1):
            with ScoringPool("their_reward:score", RewardConfig(num_processes=num_processes)) as pool:
                assert [score.total for score in pool.score(["x"], ["{}"])] == [0.25]
    forget()
    assert code_for_run(config_of(**loss)).fingerprint != kept.fingerprint
    with ScoringPool("their_reward:score", RewardConfig(num_processes=1)) as pool:
        assert [score.total for score in pool.score(["x"], ["{}"])] == [0.75]
    (tmp_path / "code" / "their_late.py").write_text("import os\n")
    with pytest.raises(DataError, match=r"their_late\.py"):
        read_code(tmp_path / "code")


@pytest.mark.parametrize("package", ["their_kit", "their_plain"])
def test_module_of_another_run_is_reimported(folder: Path, tmp_path: Path, package: str) -> None:
    """One trainer serves several runs. A namespace package (their_plain) stays imported, with the old module in it."""
    (folder / "their_plain").mkdir()
    reward = f"from {package} import weights\n\ndef score(response, truth):\n    return weights.WEIGHT\n"
    (folder / package / "reward.py").write_text(reward)
    for weight in ("0.25", "0.5"):
        (folder / package / "weights.py").write_text(f"WEIGHT = {weight}\n")
        importlib.invalidate_caches()
        code_for_run(load_config(["experiment=debug", f"data.scorer={package}.reward:score"])).save(tmp_path / weight)
    for weight in ("0.25", "0.5", "0.25"):
        with run_code(tmp_path / weight):
            assert resolve_scorer(f"{package}.reward:score")("x", {}) == float(weight)


def test_source_and_data_are_read_from_the_copy(folder: Path, tmp_path: Path) -> None:
    loss = "import inspect\nfrom importlib.resources import files\n\n\ndef loss():\n    return 'kept'\n"
    read = "\n\nTEXT = inspect.getsource(loss)\nDATA = (files(__package__) / 'data.txt').read_text()\n"
    read += "from importlib import import_module\nLATE = import_module('their_' + 'loss.late').__file__\n"
    (folder / "their_loss").mkdir()
    (folder / "their_loss/late.py").touch()
    (folder / "their_loss/__init__.py").write_text(loss + read)
    (folder / "their_loss/data.txt").write_text("next to it")
    own = {"algo.policy_loss": "their_loss:loss"}
    code_for_run(config_of(**own)).save(tmp_path / "code")
    (folder / "their_loss/data.txt").write_text("edited")
    (folder / "their_loss/__init__.py").write_text(f"# a line more\n{loss}{read}".replace("kept", "edited"))
    with run_code(tmp_path / "code"):
        resolve_policy_loss("their_loss:loss")
        module = sys.modules["their_loss"]
        assert (module.TEXT, module.DATA) == ("def loss():\n    return 'kept'\n", "next to it")
        assert str(tmp_path / "code/their_loss/late.py") == module.LATE, "a computed import"


def test_code_patch_is_limited(folder: Path) -> None:
    before = code_for_run(config_of())
    (folder / "their_late.py").unlink()
    (folder / "their_kit/weights.py").write_text("WEIGHT = 1\n" + "\n" * 100)
    message = code_patch(before, code_for_run(config_of())).splitlines()
    assert message[:2] == ["--- their_kit/weights.py (the run's)", "+++ their_kit/weights.py (now)"]
    assert "-WEIGHT = 0.25" in message
    assert len(message) == user_code.MAX_PATCH_LINES + 1
    assert message[-1].startswith("... and ")
