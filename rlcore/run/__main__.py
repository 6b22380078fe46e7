"""The start of the trainer process, `python -m rlcore.run`. See `rlcore.run.process`."""

import sys
from typing import Any


def skip_unused_imports() -> None:
    """Make transformers skip its imports of scikit-learn and SciPy, which take a fifth of the trainer's start. It needs
    them only for assisted generation and for object detection. Other code can still import both packages."""
    modules: dict[str, Any] = sys.modules
    hidden = [name for name in ("sklearn", "scipy") if name not in modules]
    modules.update(dict.fromkeys(hidden))  # import statements treat None as a missing package
    from transformers.utils.import_utils import is_scipy_available, is_sklearn_available

    is_scipy_available(), is_sklearn_available()  # both keep their first result
    for name in hidden:
        del modules[name]


if __name__ == "__main__":
    skip_unused_imports()

    from rlcore.run.process import main

    main()
