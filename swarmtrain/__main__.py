"""`python -m swarmtrain`: the same as the `swarmtrain` command."""

from __future__ import annotations

from swarmtrain.cli import main

if __name__ == "__main__":
    main()
