"""What MLflow's failures mean, in words that say what to do."""

from rlcore.errors import TrackingError


def explain(error: BaseException, uri: str) -> str:
    """One line on why MLflow did not take something, and the remedy."""
    if isinstance(error, TrackingError):
        return str(error)
    text = " ".join(str(error).split())
    where = f"tracking.uri {uri}"
    if "out-of-date database schema" in text or "Can't locate revision" in text:
        return (
            f"{where}: the store was made by another MLflow version ({text[:200]}). If the store is older, back it up "
            f"and run `mlflow db upgrade {uri}`; if newer, use the MLflow that made it, or set another tracking.uri"
        )
    if "must be in the 'active' state" in text:
        return (
            f"{where}: the run or its experiment was deleted there ({text[:200]}). Restore it (`mlflow runs restore`, "
            "`mlflow experiments restore`), or set another tracking.experiment"
        )
    if "database is locked" in text:
        return f"{where}: the database is locked by another process for longer than 20 s"
    if any(word in text for word in ("Max retries exceeded", "Connection refused", "Connection aborted", "timed out")):
        return f"{where}: the server cannot be reached or does not answer ({type(error).__name__})"
    if "error code 401" in text:
        return (
            f"{where}: the server asks for a login, which is another one or none. Set MLFLOW_TRACKING_USERNAME and "
            "MLFLOW_TRACKING_PASSWORD; that of `millrace up` is in stack-secret under its root"
        )
    return f"{where}: {type(error).__name__}: {text[:300]}"
