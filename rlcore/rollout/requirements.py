"""What an engine needs before anything starts. Loads no torch, so that a flow can ask."""

from importlib.util import find_spec

from rlcore.errors import EngineError


def require_vllm() -> None:
    """Whether vLLM is here, without loading it.

    Raises:
        EngineError: it is not installed.
    """
    if find_spec("vllm") is None:
        raise EngineError(missing_vllm())


def missing_vllm(detail: str = "") -> str:
    """What to say where vLLM cannot be imported."""
    return (
        f"rollout.engine: vllm is not installed here{f' ({detail})' if detail else ''}. On a GPU: pip install "
        "'millrace[vllm]'; on a CPU, in a checkout: make install-vllm; or use rollout=hf."
    )
