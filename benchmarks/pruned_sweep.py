"""A sweep of 24 points with pruning against the same without: the same winner, and which share of the training?

    python benchmarks/pruned_sweep.py --root /tmp/pruned --out docs/results/pruned_sweep.json

The small countdown run of `experiment=debug`, six learning rates by two losses by two numbers of answers, for each of
three seeds: once without pruning and once with `pruning: {every_steps: N}` (paired intervals), each in a root of its own
where nothing is done yet but data and the model of step 0. Counts training steps, and processor seconds of the trainers
(user and system time of all their threads, from the journals' process times), so other work on the machine does not
matter. Exit code 0 if every seed has the same winner and at most 0.6 of the processor seconds.
"""
