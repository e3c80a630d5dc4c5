"""Serves a fake engine in a process of its own: arguments are the fields of the engine and of the server, as JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from jaxserve import logging
from jaxserve.config import ServerConfig
from jaxserve.server import run_server
from tests.server.fake import FakeEngine

if __name__ == "__main__":
    engine = FakeEngine(**json.loads(sys.argv[1]))
    settings = json.loads(sys.argv[2])
    if "log_level" in settings:
        logging.setup(settings["log_level"])
    run_server(engine, ServerConfig(**{k: tuple(v) if isinstance(v, list) else v for k, v in settings.items()}))
    print(f"shutdowns {engine.shutdowns} running {len(engine.running)} finished {engine.finished}")
