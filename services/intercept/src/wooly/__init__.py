"""The Wooly client: PyTorch device, recorder, CUDA facade, CLI."""
