"""``python -m pods_rl``: the same as ``pods``."""

from .cli import main

if __name__ == "__main__":
    main()
