"""Whether the Hugging Face hub can be reached. One request finds out; a library would retry for a minute."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Literal

TIMEOUT_SECONDS = 5.0
_HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")


def why_unreachable(name: str, kind: Literal["model", "dataset"]) -> str:
    """Why the hub cannot be reached, in a few words. "" when it answers, with whatever, or when `name` is a path."""
    return _ask(name, kind) if _HUB_NAME.fullmatch(name) else ""


def is_cached(name: str, kind: Literal["model", "dataset"]) -> bool:
    """Whether some version of the name was downloaded to this machine before."""
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    folder = Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=name, repo_type=kind)
    return any((folder / "snapshots").glob("*/*"))


@cache
def _ask(name: str, kind: str) -> str:
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    try:
        HfApi().repo_info(name, repo_type=kind, timeout=TIMEOUT_SECONDS)
    except HfHubHTTPError:
        return ""  # it answers: no such name, gated, busy. The library that loads it has a better message.
    except Exception as error:  # types of the HTTP client, which is not part of the hub's interface
        return (str(error) or type(error).__name__).splitlines()[0]
    return ""
