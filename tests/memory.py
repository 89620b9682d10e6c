"""Memory that torch allocates on the CPU during a call, from the allocator's own record."""

from __future__ import annotations

from collections.abc import Callable

import torch


def peak_bytes(work: Callable[[], object]) -> int:
    """The peak memory of tensors that this thread allocates during `work` [bytes]."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        work()
    held = peak = 0
    assert profile.profiler is not None and profile.profiler.kineto_results is not None
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak
