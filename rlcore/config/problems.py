"""The mistakes in the settings, their messages, and hints such as the nearest key."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from functools import cache
from typing import Any

from rlcore import SOURCE_FOLDER
from rlcore.errors import ConfigError

_MAX_VALUE_CHARS = 60
_PLAIN = re.compile(r"[A-Za-z_/][\w.\-/]*", re.ASCII)
_WORDS_OF_YAML = frozenset({"true", "false", "null", "nan", "inf", "yes", "no", "on", "off"})
# Below this similarity a proposal confuses: "trainer.totl_steps" reaches 0.95, unrelated keys 0.4.
_MIN_SIMILARITY = 0.6
FOREIGN_PAGE = "docs/from-verl-and-trl.md"


@dataclass(frozen=True, slots=True)
class Problem:
    """One mistake in the settings: the key, the rule that is broken, the value, and the remedy."""

    key: str
    rule: str
    got: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.key}: {self.rule}; got {mask_secrets(self.got)}. {self.remedy}".rstrip()


@dataclass
class Findings:
    """The problems found in the settings, and the keys whose values cannot be trusted because of these problems. Rules
    that read such a key are not checked."""

    problems: list[Problem] = field(default_factory=list)
    unreliable: set[str] = field(default_factory=set)
    sources: dict[str, str] = field(default_factory=dict)
    """A mapping from each dotted key to the file that sets its value, and from each group to the file of its chosen
    option."""
    values: Mapping[str, Any] = field(default_factory=dict)
    """The values without the overrides, by dotted key."""

    def add(self, problem: Problem, *unsound: str) -> None:
        """Add a problem unless it was added before. `unsound`: the keys that become unreliable (default: the problem's
        key)."""
        if problem not in self.problems:
            self.problems.append(problem)
        self.unreliable.update(unsound or (problem.key,))


def settings_error(problems: Sequence[Problem]) -> ConfigError:
    """Return an error whose message lists all problems: one line for a single problem, otherwise a numbered list."""
    if len(problems) == 1:
        return ConfigError(str(problems[0]))
    lines = (f"  {number}. {problem}" for number, problem in enumerate(problems, 1))
    return ConfigError("\n".join([f"{len(problems)} problems in the settings:", *lines]))


def format_value(value: Any) -> str:
    """Return a value as text of at most 60 characters, without the passwords in URLs.

    >>> format_value([1, None, True, "x"])
    '[1,null,true,x]'
    """
    text = mask_secrets(plain_text(value))
    return text if len(text) <= _MAX_VALUE_CHARS else text[: _MAX_VALUE_CHARS - 3] + "..."


def mask_secrets(text: str) -> str:
    """Hide the passwords and the queries in all URLs of a text. In http URLs, also hide a user name without a password,
    because it may be a token.

    >>> mask_secrets("postgresql+asyncpg://me:s3cr%40t@db.example:5432/prefect?ssl=require")
    'postgresql+asyncpg://me:***@db.example:5432/prefect'
    """
    hidden = re.sub(r"(\w://[^:@/]*):.*@", r"\1:***@", text)
    hidden = re.sub(r"(https?://)[^:@/\s]+@", r"\1***@", hidden)
    return re.sub(r"(\w://[^\s?]*)\?[^\s']*", r"\1", hidden)


def nearest(wrong: str, candidates: Iterable[str]) -> str | None:
    """Return the candidate that is most similar to a mistyped key, or None if all differ too much. The last part of a
    key counts most.

    >>> nearest("algo.lr", ["algo.lam", "optim.lr"])
    'optim.lr'
    """
    # A SequenceMatcher caches its analysis of the second sequence.
    whole, last = (SequenceMatcher(None, b=text, autojunk=False) for text in (wrong, wrong.rpartition(".")[2]))

    def similarity(candidate: str) -> float:
        whole.set_seq1(candidate)
        last.set_seq1(candidate.rpartition(".")[2])
        alike = whole.ratio()
        return max(0.6 * last.ratio() + 0.4 * alike, 0.8 * alike)

    best = max(sorted(candidates), key=similarity, default="")
    return best if best and similarity(best) > _MIN_SIMILARITY else None


@cache
def _foreign_keys() -> dict[str, str]:
    """Return the Millrace settings that correspond to each key of verl or TRL in the table of `FOREIGN_PAGE`. Return {}
    if the page is missing."""
    page, found = SOURCE_FOLDER / FOREIGN_PAGE, dict[str, str]()
    rows = re.findall(r"^\| (`.*?) \| (.*?) \| (.*?) ?\|$", page.read_text("utf-8") if page.is_file() else "", re.M)
    for keys, settings, note in rows:
        first = ""
        for key in re.findall(r"`([\w.]+)", keys):
            first = f"{first.rpartition('.')[0]}{key}" if key.startswith(".") else key
            found.setdefault(first, ", ".join(filter(None, [settings, note])).replace("`", ""))
    return found


def foreign_key_hint(key: str) -> str:
    """Return a hint with the Millrace settings that correspond to a key of verl or TRL, or '' for any other key. The
    key may lack its leading sections.

    >>> foreign_key_hint("num_generations")
    'From verl or TRL: rollout.samples_per_prompt (docs/from-verl-and-trl.md)'
    """
    known = _foreign_keys()
    longer = next((each for each in known if each.endswith(f".{key}")), "")
    return f"From verl or TRL: {found} ({FOREIGN_PAGE})" if (found := known.get(key) or known.get(longer)) else ""


def did_you_mean(wrong: str, candidates: Iterable[str]) -> str:
    """Return `Did you mean ...? ` with the nearest candidate, or '' if no candidate is similar."""
    found = nearest(wrong, candidates)
    return f"Did you mean {found}? " if found else ""


def plain_text(value: Any, text: Callable[[str], str] = lambda text: text or "''") -> str:
    """Return a value as readable text. `text`: a function that formats each string in the value.

    >>> plain_text(None), plain_text(True), plain_text(["+", "-"]), plain_text(0.0003), plain_text("")
    ('null', 'true', '[+,-]', '0.0003', "''")
    """
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, list | tuple):
        return f"[{','.join(plain_text(inner, text) for inner in value)}]"
    if isinstance(value, dict):
        return f"{{{','.join(f'{name}:{plain_text(inner, text)}' for name, inner in value.items())}}}"
    return text(value) if isinstance(value, str) else str(value)


def override_value(value: Any) -> str:
    """Return a value in the syntax of a Hydra override. Strings are quoted, except paths and words that cannot be
    mistaken for another type.

    >>> override_value(["+", 3e-4]), override_value("off"), override_value("/data"), override_value("/my data")
    ("['+',0.0003]", "'off'", '/data', "'/my data'")
    """
    return plain_text(value, _quote)


def _quote(text: str) -> str:
    if _PLAIN.fullmatch(text) and text.lower() not in _WORDS_OF_YAML:
        return text
    return "'" + re.sub(r"(\\*)('|$)", lambda found: found[1] * 2 + ("\\'" if found[2] else ""), text) + "'"
