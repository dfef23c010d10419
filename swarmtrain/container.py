"""Whether a file outlives this container: what lies in a container's own layer is lost with it."""

from __future__ import annotations

from pathlib import Path

# What Docker and Podman put into the root of every container.
_MARKERS = ("/.dockerenv", "/run/.containerenv")


def is_in_container(root: Path = Path("/")) -> bool:
    """Returns whether this process runs in a container of Docker or Podman."""
    return any((root / marker.lstrip("/")).exists() for marker in _MARKERS)


def is_temporary(path: Path, *, in_container: bool | None = None, root: Path = Path("/")) -> bool:
    """Returns whether `path` lies in the layer of a container, on no volume: on the same device as the root."""
    if not (is_in_container(root) if in_container is None else in_container):
        return False
    try:
        return path.stat().st_dev == root.stat().st_dev
    except OSError:
        return False
