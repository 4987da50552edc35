"""Run `crf` as `python -m composer_replication`."""

from __future__ import annotations

import sys

if __name__ == "__main__":  # worker processes import this module too, under another name
    from composer_replication.cli.main import main

    sys.exit(main())
