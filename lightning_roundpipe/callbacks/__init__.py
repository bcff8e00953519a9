"""Callbacks that log what the pipeline does, to any logger."""

from lightning_roundpipe.callbacks.bubble_ratio import BubbleRatioMonitor

__all__ = ["BubbleRatioMonitor"]
