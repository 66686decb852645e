"""Unpack a model to safetensors files: `python -m pawl.stack.unpack GGUF FOLDER`."""

import shutil
import sys
from pathlib import Path


def unpack(gguf: Path, folder: Path) -> None:
    """Write a GGUF file's model (in bf16), tokenizer and chat template; `folder` is replaced."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.utils import logging

    logging.disable_progress_bar()
    shutil.rmtree(folder, ignore_errors=True)
    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    model = AutoModelForCausalLM.from_pretrained(
        **source,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(dequantize=True),
    )
    model.save_pretrained(str(folder))
    AutoTokenizer.from_pretrained(**source).save_pretrained(str(folder))


if __name__ == "__main__":
    unpack(Path(sys.argv[1]), Path(sys.argv[2]))
