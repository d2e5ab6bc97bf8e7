"""Models, optimizers and codecs that are not in torch, transformers or hivemind."""
