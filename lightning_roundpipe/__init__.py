"""Train models far larger than GPU memory from an ordinary LightningModule.

``Trainer(strategy=RoundPipeStrategy())`` keeps weights, gradients and optimizer state in host memory and streams the
layers, round-robin, to GPUs that hold no state.
"""

from lightning.pytorch.strategies import StrategyRegistry

from lightning_roundpipe._version import __version__
from lightning_roundpipe.precision import RoundPipePrecision
from lightning_roundpipe.strategy import RoundPipeStrategy

__all__ = ["RoundPipePrecision", "RoundPipeStrategy", "__version__"]

if "roundpipe" not in StrategyRegistry:
    RoundPipeStrategy.register_strategies(StrategyRegistry)
