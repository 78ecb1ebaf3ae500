"""How hypothesis runs: exactly, and however slow the machine is at the moment."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

settings.register_profile("lockd", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("lockd")
