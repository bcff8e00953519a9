"""Callbacks that log what the pipeline does, to any logger."""

from lightning_roundpipe.callbacks.bubble_ratio import BubbleRatioMonitor
from lightning_roundpipe.callbacks.memory import MemoryMonitor
from lightning_roundpipe.callbacks.pcie import PCIeMonitor
from lightning_roundpipe.callbacks.pipeline import PipelineMonitor
from lightning_roundpipe.callbacks.speed import SpeedMonitor
from lightning_roundpipe.callbacks.step_monitor import StepMonitor
from lightning_roundpipe.callbacks.timeline import TimelineWriter

__all__ = [
    "BubbleRatioMonitor",
    "MemoryMonitor",
    "PCIeMonitor",
    "PipelineMonitor",
    "SpeedMonitor",
    "StepMonitor",
    "TimelineWriter",
]
