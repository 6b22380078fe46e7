"""Messages about mistakes in settings."""

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from rlcore.config.base import sections_of
from rlcore.config.compose import compose, load_config
from rlcore.config.data import TASKS
from rlcore.config.problems import did_you_mean, format_value, nearest, override_value
from rlcore.config.run import all_keys, free_mappings, is_key, section_names
from rlcore.errors import ConfigError

KEYS = sorted(all_keys())


def test_nearest_finds_key_without_one_letter():
    """The nearest key is the intended key, or one with the same last part."""
    for key, at in [(name, at) for name in KEYS[::4] for at in range(0, len(name), 5)]:
        wrong = key[:at] + key[at + 1 :]
        found = nearest(wrong, KEYS)
        assert wrong in KEYS or found is not None, wrong
        # beta1 or beta2, if the digit is what is missing.
        assert found == key or found.rpartition(".")[2].strip("12") == key.rpartition(".")[2].strip("12"), wrong


def test_nearest_prefers_first_of_equals():
    assert nearest("zzz.qqq", KEYS) is None
    assert did_you_mean("zzz", ["abc"]) == ""
    assert nearest("a.nume", ["a.nums", "a.numb", "a.numz"]) == "a.numb"
    assert nearest("abcde", ["abcxy"]) is None, "just 0.6 alike, which is not enough"
    assert nearest("abcd", ["abcx"]) == "abcx"
    assert nearest("warm_startlr", ["warm_start.lr"]) == "warm_start.lr", "a dot was left out"


@pytest.mark.parametrize(("value", "text"), [
    (None, "null"), (True, "true"), (1e-6, "1e-06"), ("", "''"), ("off", "off"), ({"a": [1, None]}, "{a:[1,null]}"),
])  # fmt: skip
def test_format_value(value, text):
    assert format_value(value) == text
    assert (format_value("x" * 61), format_value("x" * 60)) == ("x" * 57 + "...", "x" * 60)


@pytest.mark.parametrize(
    "written", ["reward.judge.url=%s", "reward.judge.urll=%s", "tracking.uri=[%s]", "data.source=%s"]
)
def test_messages_contain_no_password(written):
    named = "http://me:SECRET@host:80/v1", f"http://{'me' * 20}:SECRET@host"
    for address in (*named, "http://host/v1?key=SECRET", "https://SECRET@host"):
        with pytest.raises(ConfigError, match=r"(?s)\A((?!SECRET).)*got ((?!SECRET).)*\Z"):
            load_config(["experiment=debug", written % address])
    (idle,) = compose(["experiment=debug", "tracking.enabled=false", f"tracking.uri={named[0]}"]).unused_settings()
    assert "SECRET" not in idle


def test_keys_sections_and_descriptions():
    assert [is_key(name) for name in ("algo.kl.coef", "tags.anything", "algo.kl", "algo.kl.nothing")] == [1, 1, 0, 0]
    options = {f"{name}_options" for name in ("algo.policy_loss", "algo.advantage", "data.taskset", "data.validation")}
    free = {"tags", "algo.teacher.by_source", "data.chat_template_kwargs", "reward.weights"}
    assert free_mappings() == free | options
    assert {"algo", "algo.kl", "critic.optim", "model.lora"} <= section_names()
    assert "seed" not in section_names()
    assert len(all_keys()["data.scorer"]) == len(TASKS)
    assert sections_of(int | None) == ()
    fields = [(name, field) for name in KEYS for field in all_keys()[name]]
    assert [name for name, field in fields if not (field.description or "").endswith((".", ")"))] == []


@pytest.mark.parametrize(
    "value", ["off", "it's", "a\\'b", "a\\\\'b", "ends\\", "a\\b", "", ["+", "it's\\"], {"k": "\\'"}]
)
def test_override_value_round_trips_through_hydra(value):
    assert OverridesParser.create().parse_override(f"key={override_value(value)}").value() == value
