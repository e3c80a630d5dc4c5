"""Serves a fake engine in a process of its own: arguments are seconds per token, port, and seconds to drain."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from jaxserve.config import ServerConfig
from jaxserve.server import run_server
from tests.server.fake import FakeEngine

if __name__ == "__main__":
    pace, port, drain = sys.argv[1:]
    engine = FakeEngine(seconds_per_token=float(pace))
    run_server(engine, ServerConfig(port=int(port), shutdown_timeout=float(drain)))
    print(f"shutdowns {engine.shutdowns} running {len(engine.running)} finished {engine.finished}")
