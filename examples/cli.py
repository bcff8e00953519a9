"""The digit classifier under LightningCLI: the strategy and all its arguments come from a file.

What the command line says goes before what the file says:

    python examples/cli.py fit --config examples/cli_config.yaml
    python examples/cli.py fit --config examples/cli_config.yaml --trainer.strategy.init_args.num_microbatches 8
    python examples/cli.py fit --config examples/cli_config.yaml --trainer.strategy auto --trainer.devices 1
"""

from lightning.pytorch.cli import LightningCLI

from vit_digits import DigitClassifier, Digits


def main() -> LightningCLI:
    """Runs the subcommand that the command line asks for."""
    return LightningCLI(DigitClassifier, Digits)


if __name__ == "__main__":
    main()
