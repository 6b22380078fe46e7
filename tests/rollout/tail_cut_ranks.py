"""Program of each gloo rank of the tail cut's test: `python -m tests.rollout.tail_cut_ranks RANK WORLD_SIZE FILE`.

FILE has the groups of each rank, each with the lengths of its responses. The responses get 16 tokens a round. Each rank
prints its bounds as JSON.
"""

import json
import sys
from pathlib import Path

import torch

from rlcore.rollout.engine import ROUND_TOKENS, TailCut
from rlcore.workers.device import join_ranks

CPU = torch.device("cpu")


def generate(groups: dict[int, list[int]], wanted: int, longest: int, *, world_size: int = 1) -> list[int]:
    """Return the bound after each round, until all ranks have finished. Negative groups must finish."""
    names = [group for group, lengths in groups.items() for _ in lengths]
    cut = TailCut(names, wanted, longest, world_size, CPU)
    places = [(group, sample, length) for group, lengths in groups.items() for sample, length in enumerate(lengths)]
    written, bounds, busy = 0, [cut.bound], True
    while busy:
        written += ROUND_TOKENS
        for group, sample, length in places:
            if length <= written and (group < 0 or length <= bounds[-1]):
                cut.end(group, sample, length)
        mine = any(length > written and (group < 0 or bounds[-1] > written) for group, _, length in places)
        busy = cut.agree(busy=mine)
        bounds.append(cut.bound)
    return bounds


if __name__ == "__main__":
    rank, world_size, file = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    join_ranks(f"file://{file}.met", rank=rank, world_size=world_size, device=CPU)
    given = json.loads(file.read_text())
    own = {int(group): lengths for group, lengths in given["ranks"][rank].items()}
    print(json.dumps(generate(own, given["wanted"], given["longest"], world_size=world_size)))
