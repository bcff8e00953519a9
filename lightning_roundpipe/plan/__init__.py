"""What runs where and when: plain numbers in, plans, schedules and predictions out.

Nothing here imports ``torch.cuda`` or ``lightning``; the runtime imports this package, never the other way round.
"""
