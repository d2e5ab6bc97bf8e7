"""Models, optimizers and codecs that torch, transformers and hivemind lack."""
