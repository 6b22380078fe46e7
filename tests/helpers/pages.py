"""Blocks of the pages of the documentation."""

import re

BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)  # language and text of a block
