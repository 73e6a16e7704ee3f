"""Adapters to other trainers. Each module imports its framework, so import only the one that you use:

- :mod:`stabilitylab.integrations.transformers`: ``HuggingFaceCallback`` for the Trainer of Hugging Face
- :mod:`stabilitylab.integrations.lightning`: ``LightningCallback`` for Lightning
- :mod:`stabilitylab.integrations.accelerate`: ``watch`` for a loop with an Accelerator

A plain PyTorch loop needs none of them: use ``stabilitylab.watch``.
"""
