"""What enters the next step. Host side, pure Python.

``scheduler`` plans steps and books their results, ``step`` writes one plan down, ``queue`` holds requests in the order
of service, ``admission`` says what lets a waiting request start, ``preemption`` picks who gives way for memory, and
``ends`` knows what can be served and which token is the last.
"""

from __future__ import annotations

from jaxserve.scheduler.admission import AdmissionRule, Patience, StaticBatching
from jaxserve.scheduler.queue import RequestQueue, fcfs, priority
from jaxserve.scheduler.scheduler import Scheduler

__all__ = ["AdmissionRule", "Patience", "RequestQueue", "Scheduler", "StaticBatching", "fcfs", "priority"]
