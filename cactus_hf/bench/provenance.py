"""What a figure depends on beyond the options: versions, machine, and the revision of this package."""

from __future__ import annotations

import hashlib
import importlib.metadata
import subprocess
from pathlib import Path
from typing import Any

from ..report import device_name, dtype_name, versions
from .rivals import RIVALS


def git_revision() -> str | None:
    """Revision of the tree this package lies in, with `-dirty` behind it if files were changed; `None` if it is in no
    tree, or in one that does not hold it, as installed packages are.
    """
    folder = Path(__file__).parent
    git = ["git", "-C", str(folder)]
    try:
        subprocess.run([*git, "ls-files", "--error-unmatch", "__init__.py"], capture_output=True, check=True)
        described = subprocess.run(
            [*git, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"],
            capture_output=True,
            check=True,
            text=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return described.stdout.strip()


def of_models(target: Any, draft: Any) -> dict[str, Any]:
    """Facts of the models for each line of JSON."""
    return {
        "parameters": {"target": target.num_parameters(), "draft": draft.num_parameters()},
        "device": device_name(target),
        "dtype": dtype_name(target),
    }


def surroundings(prompts: Any) -> dict[str, Any]:
    """Facts for each line of JSON: threads, versions, revision, and a hash of the prompts' ids."""
    import torch

    return {
        "threads": torch.get_num_threads(),
        "versions": versions() | _rival_versions(),
        "git_revision": git_revision(),
        "prompts_sha256": hashlib.sha256(repr(prompts).encode()).hexdigest(),
    }


def _rival_versions() -> dict[str, str]:
    found = {}
    for name in RIVALS:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            pass
    return found
