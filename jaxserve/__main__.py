"""``python -m jaxserve`` is the ``jaxserve`` command."""

from __future__ import annotations

import sys

from jaxserve.cli import main

__all__: list[str] = []

sys.exit(main())
