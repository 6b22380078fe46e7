"""Tools: calls, results and errors in turns, and chat templates that show tools."""

import json
import sys

import pyarrow.parquet as pq
import pytest
from transformers import AutoTokenizer

from data.arithmetic import calculate
from data.filter import filter_dataset
from data.tasks import build_dataset
from rlcore.config import CountdownData
from rlcore.errors import ConfigError
from rlcore.rollout.environment import TurnTokens
from rlcore.rollout.tools import Tools, parse_calls, tool_schemas
from tests.data.conftest import saved, settings_in

CALCULATOR = "data.arithmetic:calculate"
CHAT = CountdownData(train_size=40, validation_size=8, template="chat")
SHOWN = "{%- if tools %}{{ '<|im_start|>system\\n' }}{{ tools | tojson }}{{ '<|im_end|>\\n' }}{%- endif %}"
TURNS = (
    "{%- for m in messages %}{%- if m.role == 'tool' %}{{ '<|im_start|>ROLE\\n' + (RESULT) + '<|im_end|>\\n' }}"
    "{%- else %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{%- endif %}"
)
RESULT = "'<tool_response>\\n' + m.content + '\\n</tool_response>'"
TEMPLATES = {"qwen": SHOWN + TURNS.replace("ROLE", "user").replace("RESULT", RESULT)}
TEMPLATES["llama"] = SHOWN + TURNS.replace("ROLE", "ipython").replace("RESULT", "m.content | tojson")


def tagged(name, **arguments):
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def looks_up(word: str) -> int:
    """Find a word.

    Args:
        word: Any word.
    """
    return {"one": 1}[word]


async def waits(seconds: float) -> str:
    """Wait.

    Args:
        seconds: How long.
    """
    return f"waited {seconds}"


def leaves() -> str:
    """End the process, as a command-line tool does."""
    sys.exit("usage: leaves")


def undescribed(word):
    return word


def test_replies_have_results_and_errors_of_calls():
    named = [CALCULATOR, *(f"{__name__}:{name}" for name in ("looks_up", "waits", "leaves"))]
    tools = Tools(named, "data.countdown:score")
    tools.reset({"target": 14, "numbers": [2, 3, 4], "seed": 5})
    for text, reply in (
        (f"So {tagged('calculate', expression='(2 + 3) * 4')} and {tagged('waits', seconds=0)}", "20\nwaited 0"),
        (json.dumps({"name": "calculate", "parameters": {"expression": "2 + 3 * 4"}}), "14"),
        (tagged("calculator", expression="1"), "error: there is no tool 'calculator', only calculate, looks_up, waits"),
        (tagged("calculate", text="1"), "error: TypeError: missing a required argument: 'expression'"),
        (tagged("calculate", expression="2 ** 3"), "error: ValueError: an expression is whole numbers"),
        (tagged("looks_up", word="two"), "error: KeyError: 'two'"),
        (tagged("leaves"), "error: SystemExit: usage: leaves"),
        ("<tool_call>{'name'}</tool_call>", "error: the call is not JSON (JSONDecodeError"),
        (f"<tool_call>{'[' * 100_000}</tool_call>", "error: the call is not JSON (RecursionError"),
        ('<tool_call>{"name": "calculate", "arguments": [1]}</tool_call>', 'error: a call is JSON with "name" and'),
        ("<tool_call>", "error: the call has no </tool_call>"),
    ):
        turn = tools.step(text)
        assert turn.reply.startswith(reply)
        assert (turn.done, turn.reward) == (False, 0.0)
    assert len(parse_calls("<tool_call>" * 100_000)) == 100_000, "in linear time"
    last = tools.step("<answer> 2 + 3 * 4 </answer>")
    assert (last.done, last.reward) == (True, 1.0)
    assert last.parts == {"correct": 1.0, "format": 1.0, "tool_calls": 12, "tool_errors": 9}


@pytest.mark.parametrize("name", TEMPLATES)
def test_prompts_and_turns_are_rendered_with_tools(name, trained_bpe, tmp_path, artifacts_root):
    folder = saved(trained_bpe, tmp_path / "tokenizer", chat_template=TEMPLATES[name])
    dataset = build_dataset(CHAT, seed=1, root=artifacts_root)
    given = ({"episode": {"tools": tools}, "filter": {"max_prompt_tokens": 2_000}} for tools in ((), (CALCULATOR,)))
    plain, shown = (filter_dataset(dataset.directory, folder, settings_in(artifacts_root, **more)) for more in given)
    assert plain.directory != shown.directory
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for row in pq.read_table(shown.directory / "validation.parquet").to_pylist():
        conversation, ids = [*row["prompt"]], [*row["prompt_ids"]]
        turns = TurnTokens(tokenizer, chat=True, max_reply_tokens=50, role="tool")
        for turn, reply in ((tagged("calculate", expression="1 + 2"), "3"), ("Let me see", "error: no"), ("So", "12")):
            ids += [*tokenizer.encode(turn), tokenizer.eos_token_id]
            ids += turns.reply_tokens(ids[-1], reply)[1]
            conversation += [{"role": "assistant", "content": turn}, {"role": "tool", "content": reply}]
        options = {"tools": [calculate], "tokenize": False, "add_generation_prompt": True}
        rendered = tokenizer.apply_chat_template(conversation, **options)
        assert tokenizer.decode(ids) == rendered
        assert "Whole numbers with + - * / and parentheses, such as" in rendered


@pytest.mark.parametrize("name", ["data.arithmetic:calculates", f"{__name__}:undescribed"])
def test_unusable_tools_are_refused(name):
    with pytest.raises(ConfigError, match=r"episode\.tools: must name functions .* got '"):
        tool_schemas([name])
