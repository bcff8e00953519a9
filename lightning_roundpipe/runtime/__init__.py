"""Runs a schedule: threads, tickets, workers, host memory, recomputation. Knows torch, not Lightning."""
