"""What enters the next step. Host side, pure Python.

``scheduler`` plans steps and books their results, ``step`` writes one plan down, ``queue`` holds requests in the order
of service, ``admission`` says what lets a waiting request start and ``adapters`` which adapter has which slot,
``preemption`` picks who gives way for memory, ``ends`` knows what can be served and which token is the last, and
``speculation`` and ``adaptive`` how many drafts are verified.
"""

from __future__ import annotations

from jaxserve.scheduler.adapters import AdapterSlots, AdapterSource
from jaxserve.scheduler.adaptive import AdaptiveSpeculation
from jaxserve.scheduler.admission import AdmissionRule, Patience, StaticBatching
from jaxserve.scheduler.queue import RequestQueue, fcfs, priority
from jaxserve.scheduler.scheduler import Scheduler
from jaxserve.scheduler.speculation import FixedSpeculation, NoSpeculation, Speculation

__all__ = [
    "AdapterSlots",
    "AdapterSource",
    "AdaptiveSpeculation",
    "AdmissionRule",
    "FixedSpeculation",
    "NoSpeculation",
    "Patience",
    "RequestQueue",
    "Scheduler",
    "Speculation",
    "StaticBatching",
    "fcfs",
    "priority",
]
