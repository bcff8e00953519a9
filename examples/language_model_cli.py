"""The recipes of `train_language_model.py` under LightningCLI: model, data, trainer and strategy come from a file.

python examples/language_model_cli.py fit --config examples/configs/lora_llama.yaml
python examples/language_model_cli.py fit --config examples/configs/full_qwen3.yaml \
        --model.pretrained Qwen/Qwen3-8B --data.tokenizer Qwen/Qwen3-8B --trainer.accelerator gpu --trainer.devices 2
"""

from lightning.pytorch.cli import LightningCLI

from language_model import LanguageModel, Text


def main() -> LightningCLI:
    """Runs the subcommand that the command line asks for."""
    return LightningCLI(LanguageModel, Text)


if __name__ == "__main__":
    main()
